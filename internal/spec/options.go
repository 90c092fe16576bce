package spec

import (
	"fmt"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strings"
)

// Options are what a container is given beside its image, command, network, volumes and limits. The zero
// value of a field is its default.
type Options struct {
	User       string   `json:",omitempty"` // USER[:GROUP], of the image's passwd and group, or numbers
	WorkingDir string   `json:",omitempty"`
	Hostname   string   `json:",omitempty"` // the container's name, or the host's on its network
	DNS        []string `json:",omitempty"` // addresses of name servers, in place of the host's
	DNSSearch  []string `json:",omitempty"` // domains, in place of the host's
	DNSOptions []string `json:",omitempty"` // in place of the host's
	Hosts      []string `json:",omitempty"` // NAME:ADDRESS, for /etc/hosts
	ReadOnly   bool     `json:",omitempty"` // the root file system
	Tmpfs      []Tmpfs  `json:",omitempty"`
	ShmSize    int64    `json:",omitempty"` // bytes of /dev/shm; 0 is 64 MiB
	Ulimits    []Ulimit `json:",omitempty"`
	// Sysctls are those of the container's own namespaces.
	Sysctls map[string]string `json:",omitempty"`
	// CapAdd and CapDrop change Docker's set of capabilities: names with or without CAP_, or ALL.
	CapAdd          []string `json:",omitempty"`
	CapDrop         []string `json:",omitempty"`
	Privileged      bool     `json:",omitempty"` // all capabilities and devices, nothing hidden or filtered
	Devices         []Device `json:",omitempty"`
	NoNewPrivileges bool     `json:",omitempty"`
	Init            bool     `json:",omitempty"` // the node's init is the first process
	PullPolicy      string   `json:",omitempty"` // always, missing, never; "" is missing
	PidsLimit       int64    `json:",omitempty"` // processes and threads; 0 is unlimited
	TTY             bool     `json:",omitempty"` // a terminal: all output is its
	Stdin           bool     `json:",omitempty"` // standard input stays open for those who attach; else it is empty
}

// Tmpfs is a file system in memory.
type Tmpfs struct {
	Target  string
	Options []string `json:",omitempty"` // as mount(8) has them, over noexec, nosuid and nodev
}

// Ulimit is a limit of the first process, which its children inherit. -1 is unlimited.
type Ulimit struct {
	Name       string // as in ulimit(3) and Docker: nofile, nproc, …
	Soft, Hard int64
}

// Device is a device node of the host.
type Device struct {
	Source      string // path on the host
	Target      string // path in the container; "" is Source
	Permissions string // of rwm; "" is all
}

// ulimits are the names of Ulimit.
var ulimits = []string{"as", "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue", "nice", "nofile",
	"nproc", "rss", "rtprio", "rttime", "sigpending", "stack"}

var (
	hostName    = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$`)
	capability  = regexp.MustCompile(`^[A-Z_]+$`)
	tmpfsOption = regexp.MustCompile(
		`^(rw|ro|exec|noexec|suid|nosuid|dev|nodev|size=\d+[kKmMgG%]?|mode=[0-7]{1,5}|[ug]id=\d+|nr_(inodes|blocks)=\d+[kKmMgG]?)$`)
	permissions = regexp.MustCompile(`^[rwm]{0,3}$`)
	oneWord     = regexp.MustCompile(`^[!-~]+$`)
)

// validate says what is wrong with the options by themselves, in one line; host says that the container is
// on the host's network.
func (o *Options) validate(host bool) error {
	switch {
	case strings.ContainsAny(o.User, "\x00\n"):
		return fmt.Errorf("--user %q: want USER[:GROUP]", o.User)
	case o.WorkingDir != "" && !path.IsAbs(o.WorkingDir):
		return fmt.Errorf("--workdir %s: the path has to be absolute", o.WorkingDir)
	case o.Hostname != "" && (len(o.Hostname) > 63 || !hostName.MatchString(o.Hostname)):
		return fmt.Errorf("--hostname %q: want at most 63 letters, digits, dots and hyphens", o.Hostname)
	case o.ShmSize < 0:
		return fmt.Errorf("--shm-size %d is below zero", o.ShmSize)
	case o.PidsLimit < 0:
		return fmt.Errorf("--pids-limit %d is below zero", o.PidsLimit)
	}
	if err := o.validateNames(); err != nil {
		return err
	}
	if err := o.validateKernel(host); err != nil {
		return err
	}
	for _, t := range o.Tmpfs {
		if !path.IsAbs(t.Target) || path.Clean(t.Target) == "/" {
			return fmt.Errorf("--tmpfs %s: the path has to be absolute, and not /", t.Target)
		}
		for _, m := range t.Options {
			if !tmpfsOption.MatchString(m) {
				return fmt.Errorf("--tmpfs %s: %q is not an option of it, such as size=64m, mode=1777 or exec",
					t.Target, m)
			}
		}
	}
	return choices(choice{"pull", o.PullPolicy, []string{"always", "missing", "never"}})
}

func (o *Options) validateNames() error {
	for _, d := range o.DNS {
		if a, err := netip.ParseAddr(d); err != nil || a.Zone() != "" {
			return fmt.Errorf("--dns %q is not an address", d)
		}
	}
	for _, s := range slices.Concat(o.DNSSearch, o.DNSOptions) {
		if !oneWord.MatchString(s) {
			return fmt.Errorf("--dns-search and --dns-option: %q is not one word", s)
		}
	}
	for _, h := range o.Hosts {
		name, addr, _ := strings.Cut(h, ":")
		if _, err := netip.ParseAddr(addr); err != nil || !hostName.MatchString(name) {
			return fmt.Errorf("--add-host %q: want NAME:ADDRESS", h)
		}
	}
	return nil
}

// validateKernel is about what the kernel allows the container.
func (o *Options) validateKernel(host bool) error {
	for _, u := range o.Ulimits {
		switch {
		case !slices.Contains(ulimits, u.Name):
			return fmt.Errorf("--ulimit %s: want one of %s", u.Name, strings.Join(ulimits, " "))
		case u.Soft < -1 || u.Hard < -1 || u.Hard >= 0 && (u.Soft == -1 || u.Soft > u.Hard):
			return fmt.Errorf("--ulimit %s=%d:%d: the soft limit is above the hard one, or one is no limit", u.Name,
				u.Soft, u.Hard)
		}
	}
	for k, v := range o.Sysctls {
		if err := sysctl(k, v, host); err != nil {
			return err
		}
	}
	for _, c := range slices.Concat(o.CapAdd, o.CapDrop) {
		if !capability.MatchString(strings.ToUpper(c)) {
			return fmt.Errorf("%q is not the name of a capability, such as NET_ADMIN, or ALL", c)
		}
	}
	for _, d := range o.Devices {
		if !path.IsAbs(d.Source) || d.Target != "" && (!path.IsAbs(d.Target) || path.Clean(d.Target) == "/") {
			return fmt.Errorf("--device %s:%s: both paths have to be absolute", d.Source, d.Target)
		}
		if !permissions.MatchString(d.Permissions) {
			return fmt.Errorf("--device %s: permissions are of r, w and m, not %q", d.Source, d.Permissions)
		}
	}
	return nil
}

// ipcSysctls are those that each IPC namespace has of its own; net. and fs.mqueue. are so too.
var ipcSysctls = []string{"kernel.msgmax", "kernel.msgmnb", "kernel.msgmni", "kernel.sem", "kernel.shmall",
	"kernel.shmmax", "kernel.shmmni", "kernel.shm_rmid_forced"}

func sysctl(name, value string, host bool) error {
	switch {
	case strings.ContainsAny(name, "/\x00\n ") || strings.ContainsAny(value, "\x00\n"):
		return fmt.Errorf("--sysctl %q=%q: want NAME=VALUE, with dots in NAME", name, value)
	case strings.HasPrefix(name, "net.") && host:
		return fmt.Errorf("--sysctl %s would change the host's network: say --net bridge or none", name)
	case strings.HasPrefix(name, "net."), strings.HasPrefix(name, "fs.mqueue."),
		slices.Contains(ipcSysctls, name):
		return nil
	}
	return fmt.Errorf("--sysctl %s is of the whole node, not of a container: set it on the node; a container has net., fs.mqueue. and %s",
		name, strings.Join(ipcSysctls, " "))
}

// unsaved is an option that no checkpoint keeps; "" if there is none.
func (o *Options) unsaved() string {
	switch {
	case o.ReadOnly:
		return "read-only"
	case o.Privileged:
		return "privileged"
	case len(o.Devices) > 0:
		return "device"
	case len(o.Sysctls) > 0:
		return "sysctl"
	case o.TTY:
		return "tty"
	case o.Stdin:
		return "interactive"
	}
	return ""
}

// maxPorts are what a label of containerd's can hold.
const maxPorts = 120

func (p Port) validate() error {
	if p.HostIP == "" {
		return nil
	}
	switch a, err := netip.ParseAddr(p.HostIP); {
	case err != nil:
		return fmt.Errorf("port %d: %q is not an address of the host", p.Host, p.HostIP)
	case !a.Is4():
		return fmt.Errorf("port %d: ports are published on IPv4 addresses only, not on %s", p.Host, a)
	}
	return nil
}
