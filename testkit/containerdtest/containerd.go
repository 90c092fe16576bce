// Package containerdtest runs containerds of a test's own, with the
// snapshotter plugged in, and ctr against them.
package containerdtest

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Version is a containerd that tests run against.
type Version string

// Debian's package, and those that are built from their modules; V17 and V20 by "scripts/install hosts".
const (
	V16 Version = "1.6"
	V17 Version = "1.7"
	V20 Version = "2.0"
	V24 Version = "2.4"
)

// Dir is where the programs of a version lie: the directory that
// DEWPOINT_TOOLS names (default /var/cache/dewpoint/tools) has those that
// scripts build.
func (v Version) Dir() string {
	return map[Version]string{V16: "/usr/bin", V17: filepath.Join(tools(), "containerd-1.7.35"),
		V20: filepath.Join(tools(), "containerd-2.0.14"), V24: filepath.Join(tools(), "containerd-2.4.2")}[v]
}

// Two reports whether it is a containerd 2.
func (v Version) Two() bool { return v == V20 || v == V24 }

func tools() string {
	if dir := os.Getenv("DEWPOINT_TOOLS"); dir != "" {
		return dir
	}
	return "/var/cache/dewpoint/tools"
}

// Containerd is a running one. Its methods fail the test on errors.
type Containerd struct {
	Address string // its socket
	Version Version
	t       testing.TB
	dir     string
	cri     *CRI
	cmd     *exec.Cmd
}

// CRI is what a containerd with the interface for Kubernetes is told. Pods
// have the host's network: there are no CNI plugins.
type CRI struct {
	Sandbox string // reference of the pods' own image
	// Transfer lets version 2.4 pull by its transfer service, which is told of
	// snapshot annotations by the proxy plugin, and not by CRI's own client.
	Transfer bool
	// Snapshotter is where images go that CRI pulls; "" is dewpoint. Version 2.4 alone.
	Snapshotter string
	Hosts       string // the directory of hosts.toml files; "" is none. Version 2.4 alone.
	CNI         string // the directory of CNI's plugins and configurations; "" is an empty one
}

// Start starts containerd in dir, with the snapshotter "dewpoint" (and, where
// containerd has those, its diff plugin) at socket, and waits until it
// answers. It is stopped when the test ends.
func Start(t testing.TB, v Version, dir, socket string) *Containerd {
	t.Helper()
	return StartCRI(t, v, dir, socket, nil)
}

// StartCRI is Start with CRI served at the same address, unless cri is nil. All
// that it pulls and runs is in the snapshotter "dewpoint".
func StartCRI(t testing.TB, v Version, dir, socket string, cri *CRI) *Containerd {
	t.Helper()
	program := filepath.Join(v.Dir(), "containerd")
	if _, err := os.Stat(program); err != nil {
		t.Fatalf("containerd %s is missing: %v (scripts/ install it; DEWPOINT_TOOLS names another place)", v, err)
	}
	c := &Containerd{Address: filepath.Join(dir, "c.sock"), Version: v, t: t, dir: dir, cri: cri}
	if err := os.WriteFile(c.file(), []byte(c.config(socket)), 0o600); err != nil {
		t.Fatal(err)
	}
	return c.begin()
}

// StartAs starts containerd by the file config.toml that dir has, which names dir/c.sock as its address.
func StartAs(t testing.TB, v Version, dir string) *Containerd {
	t.Helper()
	return (&Containerd{Address: filepath.Join(dir, "c.sock"), Version: v, t: t, dir: dir}).begin()
}

func (c *Containerd) begin() *Containerd {
	c.t.Helper()
	c.t.Cleanup(c.Stop)
	c.Up()
	return c
}

func (c *Containerd) file() string { return filepath.Join(c.dir, "config.toml") }

// Up starts containerd again after Stop.
func (c *Containerd) Up() {
	c.t.Helper()
	log, err := os.OpenFile(filepath.Join(c.dir, "containerd.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		c.t.Fatal(err)
	}
	defer log.Close()
	c.cmd = exec.Command(filepath.Join(c.Version.Dir(), "containerd"), "--config", c.file())
	c.cmd.Stdout, c.cmd.Stderr, c.cmd.Env = log, log, c.environ()
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // Pdeathsig is the thread's
	if err := c.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.wait()
}

func (c *Containerd) environ() []string {
	return append(os.Environ(), "PATH="+c.Version.Dir()+":"+os.Getenv("PATH"))
}

func (c *Containerd) config(socket string) string {
	var b strings.Builder
	format := 2
	disabled := []string{"io.containerd.snapshotter.v1.devmapper", "io.containerd.internal.v1.opt"}
	if c.cri == nil {
		disabled = append(disabled, "io.containerd.grpc.v1.cri")
	}
	if c.Version.Two() {
		format = 3
		disabled = append(disabled, "io.containerd.nri.v1.nri")
	}
	if c.Version.Two() && c.cri == nil {
		disabled = append(disabled, "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime")
	}
	fmt.Fprintf(&b, "version = %d\nroot = %q\nstate = %q\n", format, filepath.Join(c.dir, "root"),
		filepath.Join(c.dir, "state"))
	fmt.Fprintf(&b, "disabled_plugins = [\"%s\"]\n[grpc]\n  address = %q\n", strings.Join(disabled, `", "`),
		c.Address)
	fmt.Fprintf(&b, "[proxy_plugins.dewpoint]\n  type = \"snapshot\"\n  address = %q\n", socket)
	if c.Version.Two() {
		b.WriteString(exports20)
	}
	if c.Version != V16 {
		fmt.Fprintf(&b, proxies17, socket, runtime.GOARCH, runtime.GOARCH)
	}
	if c.cri == nil {
		return b.String()
	}
	cni := cmp.Or(c.cri.CNI, filepath.Join(c.dir, "cni"))
	if c.Version.Two() {
		fmt.Fprintf(&b, cri24, cmp.Or(c.cri.Snapshotter, "dewpoint"), c.cri.Transfer, c.cri.Sandbox, cni, cni)
		if c.cri.Hosts != "" {
			fmt.Fprintf(&b, "[plugins.\"io.containerd.cri.v1.images\".registry]\n  config_path = %q\n", c.cri.Hosts)
		}
	} else {
		fmt.Fprintf(&b, cri16, c.cri.Sandbox, cni, cni)
	}
	return b.String()
}

// Root in a test may lack CAP_SYS_RESOURCE, which negative OOM scores need.
const (
	cri16 = `[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  restrict_oom_score_adj = true
  disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "dewpoint"
  disable_snapshot_annotations = false
  default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = %q
  conf_dir = %q
`
	cri24 = `[plugins."io.containerd.cri.v1.images"]
  snapshotter = %q
  disable_snapshot_annotations = %t
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = %q
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  disable_apparmor = true
[plugins."io.containerd.cri.v1.runtime".containerd]
  default_runtime_name = "runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = [%q]
  conf_dir = %q
`
)

// exports20 goes on in the table proxy_plugins.dewpoint.
const exports20 = `  capabilities = ["remap-ids"]
  [proxy_plugins.dewpoint.exports]
    enable_remote_snapshot_annotations = "true"
`

const proxies17 = `[proxy_plugins.dewpoint-diff]
  type = "diff"
  address = %q
[plugins."io.containerd.service.v1.diff-service"]
  default = ["dewpoint-diff", "walking"]
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "linux/%s"
  snapshotter = "dewpoint"
  differ = "dewpoint-diff"
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "linux/%s"
  snapshotter = "overlayfs"
  differ = "walking"
`

func (c *Containerd) wait() {
	c.t.Helper()
	for range 400 {
		if conn, err := net.Dial("unix", c.Address); err == nil {
			conn.Close()
			return
		}
		time.Sleep(25 * time.Millisecond)
	}
	c.t.Fatalf("containerd does not answer:\n%s", c.Log())
}

// Stop ends containerd; containers go on.
func (c *Containerd) Stop() {
	if c.cmd == nil {
		return
	}
	c.cmd.Process.Signal(syscall.SIGTERM)
	kill := time.AfterFunc(10*time.Second, func() { c.cmd.Process.Kill() })
	defer kill.Stop()
	c.cmd.Wait()
	c.cmd = nil
	if c.t.Failed() {
		c.t.Logf("containerd's log:\n%s", c.Log())
	}
}

// Log returns the end of containerd's log.
func (c *Containerd) Log() string {
	text, _ := os.ReadFile(filepath.Join(c.dir, "containerd.log"))
	return string(text[max(0, len(text)-8000):])
}

// Try runs ctr and returns what it printed.
func (c *Containerd) Try(ctx context.Context, args ...string) (string, error) {
	return c.run(ctx, filepath.Join(c.Version.Dir(), "ctr"),
		append([]string{"--address", c.Address}, args...)...)
}

// Nerdctl runs nerdctl with the snapshotter, in containerd's namespace
// "default", and returns what it printed. It must succeed.
func (c *Containerd) Nerdctl(args ...string) string {
	c.t.Helper()
	program := filepath.Join(tools(), "nerdctl-2.3.5", "nerdctl")
	all := []string{
		"--address", c.Address, "--snapshotter", "dewpoint", "--namespace", "default",
		"--data-root", filepath.Join(c.dir, "nerdctl"), "--cni-netconfpath", filepath.Join(c.dir, "cni"),
	}
	out, err := c.run(c.t.Context(), program, append(all, args...)...)
	if err != nil {
		c.t.Fatalf("nerdctl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

func (c *Containerd) run(ctx context.Context, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = c.environ()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// Ctr is Try that must succeed.
func (c *Containerd) Ctr(args ...string) string {
	c.t.Helper()
	out, err := c.Try(c.t.Context(), args...)
	if err != nil {
		c.t.Fatalf("ctr %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// Tool is a program that scripts/install has built into a directory of its own.
func Tool(dir, name string) string { return filepath.Join(tools(), dir, name) }
