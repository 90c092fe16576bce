// Package bench measures deployments from outside, as a user of each engine
// would see them: the comparison with other engines (pull) and the
// experiments of the Docker-pi paper (docker-pi).
//
// Every measurement starts an engine on empty directories in the testbed's
// node, empties the page cache, warms the registry's copy of the image, and
// then gives one instruction. Time runs from the start of the engine's client
// until it ends (pull), or until the harness itself, asking every few
// milliseconds from the node, has its first answer from the application
// (answer). CPU time and memory are those of all the engine's processes, its
// client and its helpers included, by cgroup. Engines take turns within a
// round, so that what else the machine does hits all alike. Samples are kept
// raw; medians and ratios are derived from them.
package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/testkit/testbed"
)

// engine is a container engine as its user has it. A session lasts from start
// to stop and begins with nothing on disk.
type engine interface {
	name() string
	// missing says why the engine cannot run here, "" if it can.
	missing() string
	// inflater names what inflates layers, for the report.
	inflater() string
	start(ctx context.Context, s *session) error
	// pull returns when the image is there.
	pull(ctx context.Context, s *session, ref string) error
	// run starts a container on the node's network, pulling the image if it is absent.
	run(ctx context.Context, s *session, ref, name string) error
	// remove ends a container and removes it.
	remove(ctx context.Context, s *session, name string) error
}

// session is one life of an engine in the testbed.
type session struct {
	bed   *testbed.Bed
	group *testbed.Group
	dir   string
	log   *os.File // the engine's own output
	said  []byte   // what dew said of the last run, JSON; of dewd only
}

// open starts e on empty directories.
func open(ctx context.Context, bed *testbed.Bed, e engine) (*session, error) {
	dir, err := bed.Dir(e.name())
	if err != nil {
		return nil, err
	}
	s := &session{bed: bed, dir: dir}
	if err := s.volatile("state", "exec"); err != nil {
		return nil, err
	}
	if s.log, err = os.Create(filepath.Join(dir, "log")); err != nil {
		return nil, err
	}
	if s.group, err = testbed.NewGroup(e.name()); err != nil {
		return nil, err
	}
	if err := e.start(ctx, s); err != nil {
		raw, _ := os.ReadFile(s.log.Name())
		return nil, errors.Join(fmt.Errorf("start %s: %w: %s", e.name(), err, raw[max(0, len(raw)-800):]),
			s.close(e))
	}
	return s, nil
}

func (s *session) close(e engine) error {
	s.log.Close()
	return errors.Join(s.group.Close(), s.bed.Clean(e.name()))
}

// daemon starts the engine's long-lived program and waits until ready says nil.
func (s *session) daemon(ctx context.Context, cmd *exec.Cmd, ready func(context.Context) error) error {
	cmd.Stdout, cmd.Stderr = s.log, s.log
	if err := s.group.Start(cmd); err != nil {
		return err
	}
	return s.bed.Wait(ctx, 20*time.Second, ready)
}

// client runs one of the engine's commands to its end.
func (s *session) client(ctx context.Context, name string, args ...string) ([]byte, error) {
	return s.group.Run(s.bed.Command(ctx, name, args...))
}

// volatile makes directories for what engines keep in /run, in memory as /run is: on ext4 whoever makes
// a file pays for those that were removed shortly before (find_inode_bit looks at each).
func (s *session) volatile(names ...string) error {
	for _, name := range names {
		dir := s.path(name)
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return err
		}
		if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=711"); err != nil {
			return &os.PathError{Op: "mount", Path: dir, Err: err}
		}
	}
	return nil
}

func (s *session) path(name string) string { return filepath.Join(s.dir, name) }

// inflaterInPath is what containerd 2 and Docker look for: igzip before unpigz.
func inflaterInPath(names ...string) string {
	for _, n := range names {
		if _, err := exec.LookPath(n); err == nil {
			return n
		}
	}
	return "Go compress/gzip"
}

// --- containerd ----------------------------------------------------------------

// containerd is containerd 2 with one of its snapshotters, driven by ctr.
type containerd struct {
	tools       string // directory of containerd, ctr and the shim
	snapshotter string
	mkfs        string // directory of an mkfs.erofs of 1.8 or newer; erofs only
}

func (c containerd) name() string     { return "containerd-" + c.snapshotter }
func (c containerd) inflater() string { return inflaterInPath("igzip", "unpigz") }

func (c containerd) missing() string {
	if _, err := os.Stat(filepath.Join(c.tools, "containerd")); err != nil {
		return "containerd 2 is not built: scripts/install bench"
	}
	if c.snapshotter == "erofs" && c.mkfs == "" {
		return "no mkfs.erofs of 1.8 or newer: scripts/install bench"
	}
	return ""
}

const containerdConfig = `version = 3
root = "%[1]s/root"
state = "%[1]s/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime",
  "io.containerd.nri.v1.nri", "io.containerd.podsandbox.controller.v1.podsandbox"]
[grpc]
address = "%[1]s/sock"
[plugins."io.containerd.service.v1.diff-service"]
default = [%[2]s]
[plugins."io.containerd.differ.v1.erofs"]
mkfs_options = ["-T0", "--mkfs-time", "--sort=none"]
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
platform = "linux/%[3]s"
snapshotter = "%[4]s"
differ = "%[5]s"
`

func (c containerd) start(ctx context.Context, s *session) error {
	differ, differs := "walking", `"walking"`
	if c.snapshotter == "erofs" {
		differ, differs = "erofs", `"erofs", "walking"`
	}
	config := fmt.Sprintf(containerdConfig, s.dir, differs, runtime.GOARCH, c.snapshotter, differ)
	if err := os.WriteFile(s.path("config.toml"), []byte(config), 0o644); err != nil {
		return err
	}
	cmd := s.bed.Command(ctx, filepath.Join(c.tools, "containerd"), "--config", s.path("config.toml"),
		"--log-level", "warn")
	cmd.Env = append(os.Environ(), "PATH="+c.tools+":"+c.mkfs+":"+os.Getenv("PATH"))
	return s.daemon(ctx, cmd, func(ctx context.Context) error {
		_, err := c.ctr(ctx, s, "--connect-timeout", "1s", "version")
		return err
	})
}

func (c containerd) ctr(ctx context.Context, s *session, args ...string) ([]byte, error) {
	return s.client(ctx, filepath.Join(c.tools, "ctr"),
		append([]string{"--address", s.path("sock")}, args...)...)
}

func (c containerd) pull(ctx context.Context, s *session, ref string) error {
	_, err := c.ctr(ctx, s, "images", "pull", "--plain-http", "--snapshotter", c.snapshotter, ref)
	return err
}

func (c containerd) run(ctx context.Context, s *session, ref, name string) error {
	if err := c.pull(ctx, s, ref); err != nil {
		return err
	}
	_, err := c.ctr(ctx, s, "run", "--detach", "--null-io", "--net-host", "--snapshotter", c.snapshotter, ref,
		name)
	return err
}

func (c containerd) remove(ctx context.Context, s *session, name string) error {
	_, err := c.ctr(ctx, s, "task", "delete", "--force", name)
	_, err2 := c.ctr(ctx, s, "container", "delete", name)
	return errors.Join(err, err2)
}

// --- Docker --------------------------------------------------------------------

// docker is Debian's dockerd with the containerd that it starts itself.
type docker struct {
	variant   string   // appended to the name
	downloads int      // max-concurrent-downloads; 0 is Docker's own, three
	env       []string // of the daemon
	bridge    bool     // containers have addresses of their own
}

func (d docker) name() string { return "docker" + d.variant }

func (d docker) inflater() string {
	for _, e := range d.env {
		if e == noPigz {
			return "Go compress/gzip"
		}
	}
	return inflaterInPath("unpigz")
}

const (
	noPigz    = "MOBY_DISABLE_PIGZ=1"
	dockerCLI = "/usr/bin/docker" // Debian's; another may come first in PATH
	dockerd   = "/usr/sbin/dockerd"
)

func (d docker) missing() string {
	if _, err := os.Stat(dockerd); err != nil {
		return "Debian's docker.io is not installed: scripts/install bench"
	}
	return ""
}

func (d docker) start(ctx context.Context, s *session) error {
	args := []string{"--data-root", s.path("root"), "--exec-root", s.path("exec"), "--pidfile", s.path("pid"),
		"--host", "unix://" + s.path("sock"), "--iptables=false", "--ip-forward=false", "--storage-driver=overlay2",
		"--insecure-registry", testbed.Address, "--insecure-registry", testbed.FarAddress, "--log-level=error"}
	if !d.bridge {
		args = append(args, "--bridge=none")
	}
	if d.downloads > 0 {
		args = append(args, fmt.Sprintf("--max-concurrent-downloads=%d", d.downloads))
	}
	cmd := s.bed.Command(ctx, dockerd, args...)
	cmd.Env = append(os.Environ(), d.env...)
	return s.daemon(ctx, cmd, func(ctx context.Context) error {
		_, err := d.docker(ctx, s, "version")
		return err
	})
}

func (d docker) docker(ctx context.Context, s *session, args ...string) ([]byte, error) {
	return s.client(ctx, dockerCLI, append([]string{"--host", "unix://" + s.path("sock")}, args...)...)
}

func (d docker) pull(ctx context.Context, s *session, ref string) error {
	_, err := d.docker(ctx, s, "pull", "--quiet", ref)
	return err
}

func (d docker) run(ctx context.Context, s *session, ref, name string) error {
	_, err := d.docker(ctx, s, "run", "--detach", "--net=host", "--name", name, ref)
	return err
}

func (d docker) remove(ctx context.Context, s *session, name string) error {
	_, err := d.docker(ctx, s, "rm", "--force", name)
	return err
}

// --- Dewpoint --------------------------------------------------------------------

// dewd is this project's daemon with a containerd of its own.
type dewd struct {
	bin     string   // directory of dewd and dew
	tools   string   // directory of containerd 2, put into PATH
	variant string   // appended to the name
	flags   []string // of dew pull and dew run
	config  string   // more of dewd's configuration, TOML; DIR/ in it is the session's directory
	args    []string // of dewd
	bare    bool     // images come from the repositories that have no packs
}

func (d dewd) name() string     { return "dewd" + d.variant }
func (d dewd) inflater() string { return "its own" }

func (d dewd) missing() string {
	for _, p := range []string{"dewd", "dew"} {
		if _, err := os.Stat(filepath.Join(d.bin, p)); err != nil {
			return p + " is not built: make build"
		}
	}
	return ""
}

func (d dewd) start(ctx context.Context, s *session) error {
	config := fmt.Sprintf("[registry.%q]\nplain_http = true\n[registry.%q]\nplain_http = true\n%s",
		testbed.Address, testbed.FarAddress, strings.ReplaceAll(d.config, "DIR/", s.dir+"/"))
	if err := os.WriteFile(s.path("config.toml"), []byte(config), 0o644); err != nil {
		return err
	}
	cmd := s.bed.Command(ctx, filepath.Join(d.bin, "dewd"), append([]string{"--config", s.path("config.toml"),
		"--root", s.path("root"), "--state", s.path("state"), "--containerd", "private"}, d.args...)...)
	cmd.Env = append(os.Environ(), "PATH="+d.tools+":"+os.Getenv("PATH"))
	return s.daemon(ctx, cmd, func(ctx context.Context) error {
		_, err := d.dew(ctx, s, "version")
		return err
	})
}

func (d dewd) dew(ctx context.Context, s *session, command string, args ...string) ([]byte, error) {
	args = append([]string{"-H", "unix://" + s.path("state/dewd.sock"), "--json", command}, args...)
	return s.client(ctx, filepath.Join(d.bin, "dew"), args...)
}

func (d dewd) pull(ctx context.Context, s *session, ref string) error {
	_, err := d.dew(ctx, s, "pull", append(d.flags[:len(d.flags):len(d.flags)], ref)...)
	return err
}

func (d dewd) run(ctx context.Context, s *session, ref, name string) error {
	said, err := d.dew(ctx, s, "run", append(d.flags[:len(d.flags):len(d.flags)],
		"-d", "--net", "host", "--ready", "none", "--name", name, ref)...)
	s.said = said
	return err
}

func (d dewd) remove(ctx context.Context, s *session, name string) error {
	_, err := d.dew(ctx, s, "rm", "-f", name)
	return err
}

// newerMkfs finds the directory of an mkfs.erofs of 1.8 or newer, "" if there is none.
func newerMkfs(tools string) string {
	dirs := append([]string{filepath.Join(tools, "erofs-utils", "bin")},
		filepath.SplitList(os.Getenv("PATH"))...)
	for _, dir := range dirs {
		out, _ := exec.Command(filepath.Join(dir, "mkfs.erofs"), "--version").Output()
		first, _, _ := strings.Cut(string(out), "\n")
		f := strings.Fields(first)
		var major, minor int
		if len(f) == 0 {
			continue
		}
		if n, _ := fmt.Sscanf(f[len(f)-1], "%d.%d", &major, &minor); n == 2 && (major > 1 || minor >= 8) {
			return dir
		}
	}
	return ""
}
