package engine

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/engine/account"
	"dewpoint/internal/engine/cgroup"
	"dewpoint/internal/engine/confine"
	"dewpoint/internal/engine/limits"
	"dewpoint/internal/engine/mounts"
	"dewpoint/internal/engine/network"
	"dewpoint/internal/engine/state"
	"dewpoint/internal/engine/stdio"
	"dewpoint/internal/image"
	"dewpoint/internal/spec"
)

// Spec is the order for one container. The zero value of a field is its default.
type Spec struct {
	Name       string
	Image      *image.Image // registered
	Entrypoint []string     // replaces the image's, and its command too
	Cmd        []string
	Env        []string // KEY=VALUE; KEY alone removes the image's
	Net        string   // host (default), bridge, none
	Ports      []network.Port
	Volumes    []Volume
	Memory     int64   // bytes, 0 is unlimited
	CPUs       float64 // 0 is unlimited
	Labels     map[string]string
	Mounts     []specs.Mount // besides those of every container, and volumes
	Own        *Own          // nil is none
	Dumpable   bool          // refuse what CRIU cannot dump: io_uring and multipath TCP
	Restore    *Restore      // nil boots
	spec.Options
}

// Own is a directory of the container's own: OwnDir on the host, made with the container and removed with it.
type Own struct {
	Target string // where it is in the container
	// From is a directory whose files it has from the beginning, as links where that can be; it must not
	// change. "" leaves it empty. With From the container may only read it.
	From string
}

// Volume binds a directory or file of the host into the container, or a named volume. A source that does not
// exist becomes a directory.
type Volume = spec.Volume

// The networks of a container.
const (
	NetHost   = state.NetHost
	NetBridge = state.NetBridge
	NetNone   = state.NetNone
)

func (s *Spec) validate() error {
	if err := ValidName(s.Name); err != nil {
		return err
	}
	if s.Image == nil {
		return errors.New("container has no image")
	}
	switch s.Net {
	case "":
		s.Net = NetHost
	case NetHost, NetNone, NetBridge:
	default:
		return fmt.Errorf("network %q: want host, bridge or none", s.Net)
	}
	if len(s.Ports) > 0 && s.Net != NetBridge {
		return fmt.Errorf("ports are published with the bridge network only, not with %q", s.Net)
	}
	if s.Memory < 0 || s.CPUs < 0 || s.CPUs > 4096 || math.IsNaN(s.CPUs) {
		return fmt.Errorf("limits: memory %d, cpus %g", s.Memory, s.CPUs)
	}
	for _, v := range s.Volumes {
		if v.Named() && !spec.ValidVolume(v.Source) || !path.IsAbs(v.Target) || path.Clean(v.Target) == "/" {
			return fmt.Errorf("volume %s:%s: want an absolute path or a name, and a target that is not /", v.Source,
				v.Target)
		}
	}
	if _, err := confine.Allowed(&s.Options); err != nil {
		return fmt.Errorf("%w: %w", ErrOption, err)
	}
	_, err := s.Args()
	return err
}

// Args is what the container runs. It follows Docker: a given entrypoint replaces the image's and drops the
// image's command, a given command replaces the image's. An error says that there is none.
func (s *Spec) Args() ([]string, error) {
	entry, cmd := s.Image.Spec.Config.Entrypoint, s.Image.Spec.Config.Cmd
	if s.Entrypoint != nil {
		entry, cmd = s.Entrypoint, nil
		if len(entry) == 1 && entry[0] == "" {
			entry = nil
		}
	}
	if len(s.Cmd) > 0 {
		cmd = s.Cmd
	}
	args := slices.Concat(entry, cmd)
	if len(args) == 0 {
		return nil, errors.New("no command: the image has neither entrypoint nor command; name one after the image")
	}
	return args, nil
}

const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// env is PATH, HOSTNAME and a terminal's TERM, then the image's, then the order's; later wins.
func (s *Spec) env(hostname string) []string {
	var out []string
	at := make(map[string]int)
	own := []string{defaultPath, "HOSTNAME=" + hostname}
	if s.TTY {
		own = append(own, "TERM=xterm")
	}
	for _, kv := range slices.Concat(own, s.Image.Spec.Config.Env, s.Env) {
		k, _, set := strings.Cut(kv, "=")
		i, have := at[k]
		switch {
		case have && set:
			out[i] = kv
		case have:
			out[i] = ""
		case set:
			at[k] = len(out)
			out = append(out, kv)
		}
	}
	return slices.DeleteFunc(out, func(s string) bool { return s == "" })
}

// ociSpec is the OCI runtime specification of the container. It mentions the
// files and the namespace of the container's network, which may come later.
func (c *Config) ociSpec(s *Spec, u account.User) (*specs.Spec, error) {
	args, err := s.Args()
	if err != nil {
		return nil, err
	}
	hostname, err := s.hostname()
	if err != nil {
		return nil, err
	}
	capabilities, err := confine.Allowed(&s.Options)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrOption, err)
	}
	nodes, access, err := confine.Devices(&s.Options)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrOption, err)
	}
	all := c.mounts(s)
	if s.Init {
		if all, args, err = mounts.UnderInit(all, args); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrOption, err)
		}
	}
	o := &specs.Spec{
		Version:  "1.0.2",
		Process:  s.process(args, hostname, u, capabilities),
		Root:     &specs.Root{Path: "rootfs", Readonly: s.ReadOnly},
		Hostname: hostname,
		Mounts:   all,
		// The file is written when CRIU is to work on the container.
		Annotations: map[string]string{criuConfig: c.criuFile(s.Name)},
		Linux: &specs.Linux{
			CgroupsPath: c.places().Cgroup(s.Name),
			Namespaces:  c.namespaces(s),
			Resources:   limits.Limits{Memory: s.Memory, CPUs: s.CPUs, Pids: s.PidsLimit}.Resources(),
			Devices:     nodes,
			Sysctl:      s.Sysctls,
			Seccomp:     confine.Filter(c.Unconfined || s.Privileged, s.Dumpable && !s.Privileged, capabilities),
		},
	}
	o.Linux.Resources.Devices = append(o.Linux.Resources.Devices, access...)
	if !s.Privileged {
		o.Linux.MaskedPaths, o.Linux.ReadonlyPaths = confine.MaskedPaths, confine.ReadonlyPaths
	}
	return o, nil
}

// hostname is the one that was asked for, else the container's name, or the host's on its network.
func (s *Spec) hostname() (string, error) {
	switch {
	case s.Hostname != "":
		return s.Hostname, nil
	case s.Net == NetHost:
		return os.Hostname()
	}
	return s.Name, nil
}

func (s *Spec) process(args []string, hostname string, u account.User, capabilities []string) *specs.Process {
	cwd := s.WorkingDir
	if cwd == "" {
		cwd = s.Image.Spec.Config.WorkingDir
	}
	return &specs.Process{
		Terminal: s.TTY,
		Args:     args,
		Env:      s.env(hostname),
		Cwd:      path.Join("/", cwd),
		User:     specs.User{UID: u.UID, GID: u.GID, AdditionalGids: u.Groups},
		Capabilities: &specs.LinuxCapabilities{
			Bounding: capabilities, Permitted: capabilities, Effective: capabilities,
		},
		Rlimits:         confine.Rlimits(&s.Options),
		NoNewPrivileges: s.NoNewPrivileges,
	}
}

func (c *Config) namespaces(s *Spec) []specs.LinuxNamespace {
	n := []specs.LinuxNamespace{
		{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
		{Type: specs.MountNamespace},
	}
	if s.Net != NetHost {
		n = append(n, specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: c.netns(s.Name)})
	}
	if cgroup.Unified() {
		n = append(n, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	}
	return n
}

func (c *Config) mounts(s *Spec) []specs.Mount {
	m := mounts.Of(&s.Options)
	f := network.FilesIn(c.dir(s.Name))
	bind := []string{"rbind", "rprivate"}
	m = append(m,
		specs.Mount{Destination: "/etc/hostname", Type: "bind", Source: f.Hostname, Options: bind},
		specs.Mount{Destination: "/etc/hosts", Type: "bind", Source: f.Hosts, Options: bind},
		specs.Mount{Destination: "/etc/resolv.conf", Type: "bind", Source: f.Resolv, Options: bind})
	m = append(m, s.Mounts...)
	if s.Own != nil {
		mode := "rw"
		if s.Own.From != "" {
			mode = "ro"
		}
		m = append(m, specs.Mount{Destination: s.Own.Target, Type: "bind", Source: c.ownDir(s.Name),
			Options: []string{"rbind", "rprivate", mode}})
	}
	for _, v := range s.Volumes {
		mode := "rw"
		if v.ReadOnly {
			mode = "ro"
		}
		source := v.Source
		if v.Named() {
			source = filepath.Join(c.volumesDir(), v.Source)
		}
		m = mounts.Over(m, specs.Mount{Destination: path.Clean(v.Target), Type: "bind", Source: source,
			Options: []string{"rbind", "rprivate", mode}})
	}
	return mounts.ByDepth(mounts.Over(m, mounts.Tmpfs(&s.Options)...))
}

// naming is what the container's files of names say.
func (s *Spec) naming() network.Names {
	return network.Names{Hostname: s.Hostname, DNS: s.DNS, Search: s.DNSSearch, Options: s.DNSOptions,
		Hosts: s.Hosts}
}

// LabelUser is Spec.User on containers that have one of their own.
const LabelUser = "dewpoint.user"

// Labels of our containers' records.
const (
	labelStop    = "dewpoint.stop-signal"
	labelVolumes = "dewpoint.volumes" // names, with blanks between
)

func (s *Spec) labels() map[string]string {
	l := maps.Clone(s.Labels)
	if l == nil {
		l = make(map[string]string)
	}
	l[state.LabelNet] = s.Net
	l[state.LabelDigest] = s.Image.Target.Digest.String()
	if s.User != "" {
		l[LabelUser] = s.User
	}
	if s.TTY || s.Stdin {
		l[stdio.Label] = stdio.Has{TTY: s.TTY, Stdin: s.Stdin}.String()
	}
	if names := s.named(); len(names) > 0 {
		l[labelVolumes] = strings.Join(names, " ")
	}
	if len(s.Ports) > 0 {
		l[state.LabelPorts] = state.FormatPorts(s.Ports)
	}
	if sig := s.Image.Spec.Config.StopSignal; sig != "" {
		l[labelStop] = sig
	}
	return l
}
