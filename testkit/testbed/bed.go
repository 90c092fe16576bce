// Package testbed is the ground on which engines are compared: two network
// namespaces joined by one cable, a registry in one, an engine in the other.
//
// The registry is a process of its own whose blobs are hot, so that it costs
// every engine the same little; the cable can be narrowed on the registry's
// side (tc's token bucket). Engines run as groups: every process that one
// starts is counted and, in the end, found and killed by its cgroup, and
// mounts and directories go with it. Nothing outside the two namespaces and the
// bed's directory is touched. It needs root, cgroup v2 (mounted anywhere, as it
// is beside v1) and iproute2.
package testbed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"dewpoint/testkit/demo"

	"golang.org/x/sys/unix"
)

// Address is where the registry listens, seen from the node.
const Address = "10.77.255.1:5000"

// Config says what a bed is made of.
type Config struct {
	Images string   // the OCI layout that the registry serves
	Dir    string   // where engines keep their files; it is emptied
	Self   []string // this program up to its command, so that "registry" can run as another process
	Log    *slog.Logger
}

// Bed is one testbed. Its methods are for one goroutine, but Get, Dial and
// Received may run beside the others.
type Bed struct {
	cfg            Config
	node, registry string // network namespaces
	server         *Group
	relay          *Relay
	lock           *os.File // of the scratch directory
}

// New builds the bed and starts its registry. Close takes it down again; what
// a killed process left behind is taken down first.
func New(ctx context.Context, cfg Config) (*Bed, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("the benchmark needs root: network namespaces and mounts are real")
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	RemoveStale(cfg.Log)
	b := &Bed{cfg: cfg, node: fmt.Sprintf("dwp%dn", os.Getpid()), registry: fmt.Sprintf("dwp%dr", os.Getpid())}
	var err error
	if b.lock, err = takeLock(cfg.Dir + ".lock"); err != nil {
		return nil, err
	}
	if err := errors.Join(Clean(cfg.Dir), os.MkdirAll(cfg.Dir, 0o755), Clean(b.pushed())); err != nil {
		return nil, err
	}
	if err := b.connect(ctx); err != nil {
		b.Close()
		return nil, err
	}
	if err := errors.Join(b.serve(ctx), b.far()); err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

// takeLock keeps a second benchmark from emptying the scratch directory of one
// that runs. The lock ends with the process.
func takeLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("another benchmark uses %s: wait for it, or give another -dir",
			strings.TrimSuffix(path, ".lock"))
	}
	return f, nil
}

func (b *Bed) connect(ctx context.Context) error {
	for _, line := range []string{
		"netns add " + b.node,
		"netns add " + b.registry,
		"-n " + b.node + " link add eth0 type veth peer name eth0 netns " + b.registry,
		"-n " + b.node + " addr add 10.77.255.2/24 dev eth0",
		"-n " + b.registry + " addr add 10.77.255.1/24 dev eth0",
		"-n " + b.node + " link set lo up",
		"-n " + b.registry + " link set lo up",
		"-n " + b.node + " link set eth0 up",
		"-n " + b.registry + " link set eth0 up",
	} {
		if err := Run(ctx, "ip", strings.Fields(line)...); err != nil {
			return err
		}
	}
	return nil
}

// pushed is where the registry keeps what is pushed to it, until Close.
func (b *Bed) pushed() string { return b.cfg.Dir + ".pushed" }

func (b *Bed) serve(ctx context.Context) error {
	var err error
	if b.server, err = NewGroup("registry"); err != nil {
		return err
	}
	args := append(slices.Clone(b.cfg.Self[1:]), "registry", "-dir", b.cfg.Images, "-listen", Address, "-pushed",
		b.pushed())
	cmd := Enter(ctx, b.registry, b.cfg.Self[0], args...)
	cmd.Stderr = os.Stderr
	if err := b.server.Start(cmd); err != nil {
		return fmt.Errorf("registry: %w", err)
	}
	return b.Wait(ctx, 10*time.Second, func(ctx context.Context) error {
		return b.Get(ctx, "http://"+Address+"/v2/")
	})
}

// Reload starts the registry again, so that it knows what the layout has now.
// It forgets the manifests that were pushed.
func (b *Bed) Reload(ctx context.Context) error {
	if err := b.server.Close(); err != nil {
		return err
	}
	return b.serve(ctx)
}

// Close stops the registry and removes the namespaces and the directory.
func (b *Bed) Close() error {
	var errs []error
	if b.relay != nil {
		errs = append(errs, b.relay.Close())
	}
	if b.server != nil {
		errs = append(errs, b.server.Close())
	}
	for _, ns := range []string{b.node, b.registry} {
		if _, err := os.Stat("/run/netns/" + ns); err == nil {
			errs = append(errs, Run(context.Background(), "ip", "netns", "del", ns))
		}
	}
	errs = append(errs, Clean(b.cfg.Dir), Clean(b.pushed()))
	os.Remove(b.lock.Name())
	return errors.Join(append(errs, b.lock.Close())...)
}

// Rate narrows the link towards the node to so many Mbit/s; 0 is the whole link.
func (b *Bed) Rate(ctx context.Context, mbit float64) error {
	if mbit == 0 {
		Run(ctx, "tc", "-n", b.registry, "qdisc", "del", "dev", "eth0", "root") // fails when there is none
		return nil
	}
	return Run(ctx, "tc", "-n", b.registry, "qdisc", "replace", "dev", "eth0", "root",
		"tbf", "rate", fmt.Sprintf("%gmbit", mbit), "burst", "64kb", "latency", "100ms")
}

// Dir is a fresh directory for an engine.
func (b *Bed) Dir(name string) (string, error) {
	dir := filepath.Join(b.cfg.Dir, name)
	return dir, errors.Join(Clean(dir), os.MkdirAll(dir, 0o711))
}

// Clean unmounts and removes an engine's directory.
func (b *Bed) Clean(name string) error { return Clean(filepath.Join(b.cfg.Dir, name)) }

// Command runs in the node's network namespace.
func (b *Bed) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return Enter(ctx, b.node, name, args...)
}

// Self runs this program in the node's network namespace.
func (b *Bed) Self(ctx context.Context, args ...string) *exec.Cmd {
	return Enter(ctx, b.node, b.cfg.Self[0], append(slices.Clone(b.cfg.Self[1:]), args...)...)
}

// Program is this program up to its command.
func (b *Bed) Program() []string { return slices.Clone(b.cfg.Self) }

// Enter is a command in a network namespace. It keeps /sys as it is, unlike "ip netns exec", whose remount
// hides the cgroups.
func Enter(ctx context.Context, ns, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"--net=/run/netns/" + ns, name}, args...)...)
}

// EnterProcess is a command in the network and mount namespaces of a process.
func EnterProcess(ctx context.Context, pid int, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter",
		append([]string{"--target=" + strconv.Itoa(pid), "--net", "--mount", name}, args...)...)
}

// Dial connects from the node.
func (b *Bed) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return Within(b.node, func() (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, network, address)
	})
}

// Get succeeds when a URL, asked from the node, answers 200.
func (b *Bed) Get(ctx context.Context, url string) error {
	client := http.Client{Transport: &http.Transport{DialContext: b.Dial, DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	_, err = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<20))
	return err
}

// Wait asks until the answer is nil, every few milliseconds, at most for limit.
func (b *Bed) Wait(ctx context.Context, limit time.Duration, ask func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		one, stop := context.WithTimeout(ctx, 2*time.Second)
		err := ask(one)
		stop()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no answer in %s: %w", limit, err)
		case <-time.After(3 * time.Millisecond):
		}
	}
}

// Received counts the bytes that have reached the node over the link, frames and all.
func (b *Bed) Received() (int64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/dev", b.server.main.Process.Pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(raw)) {
		if name, rest, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "eth0" {
			return strconv.ParseInt(strings.Fields(rest)[8], 10, 64) // what the registry's end has sent
		}
	}
	return 0, errors.New("the link is gone")
}

// Disk counts the bytes read from and written to the device under the bed's directory.
func (b *Bed) Disk() (read, written int64) {
	var st unix.Stat_t
	if unix.Stat(b.cfg.Dir, &st) != nil {
		return 0, 0
	}
	raw, _ := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/stat", unix.Major(st.Dev), unix.Minor(st.Dev)))
	f := strings.Fields(string(raw))
	if len(f) < 7 { // a file system without a device of its own
		return 0, 0
	}
	read, _ = strconv.ParseInt(f[2], 10, 64)
	written, _ = strconv.ParseInt(f[6], 10, 64)
	return read * 512, written * 512
}

// Cool empties the page cache and warms the image's blobs again, and all that
// was pushed: a cold node beside a hot registry.
func (b *Bed) Cool(image string) error {
	unix.Sync()
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
		return err
	}
	m, err := demo.Manifest(b.cfg.Images, image)
	if err != nil {
		return err
	}
	var paths []string
	for _, d := range append(m.Layers, m.Config) {
		paths = append(paths, demo.Blob(b.cfg.Images, d.Digest))
	}
	pushed, _ := filepath.Glob(filepath.Join(b.pushed(), "blobs", "sha256", "*"))
	for _, path := range append(paths, pushed...) {
		if err := read(path); err != nil {
			return err
		}
	}
	return nil
}

func read(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(struct{ io.Writer }{io.Discard}, f)
	return err
}

// Clean unmounts what is mounted below a directory, last first, and removes it.
func Clean(dir string) error {
	if dir == "" || dir == "/" {
		return fmt.Errorf("clean %q: refused", dir)
	}
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		if f := strings.Fields(lines[i]); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			unix.Unmount(f[4], unix.MNT_DETACH)
		}
	}
	return os.RemoveAll(dir)
}

// RemoveStale deletes the namespaces of beds whose process is gone, after it
// has killed what still runs in their groups.
func RemoveStale(log *slog.Logger) {
	killStale(log)
	entries, err := os.ReadDir("/run/netns")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Warn("list network namespaces", "err", err)
	}
	for _, e := range entries {
		var pid int
		var end rune
		if n, _ := fmt.Sscanf(e.Name(), "dwp%d%c", &pid, &end); n == 2 && unix.Kill(pid, 0) == unix.ESRCH {
			log.Info("remove stale network namespace", "name", e.Name())
			Run(context.Background(), "ip", "netns", "del", e.Name())
		}
	}
}

// Run runs a command; its error carries what it said.
func Run(ctx context.Context, name string, args ...string) error {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
