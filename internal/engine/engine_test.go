package engine

import (
	"bytes"
	"cmp"
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	leasesapi "github.com/containerd/containerd/api/services/leases/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"dewpoint/internal/engine/network"
	"dewpoint/internal/engine/tool"
	"dewpoint/internal/image"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/shimtest"
)

var (
	probe       string // the static program of the test image
	shimProgram string // what lets containers share shims
)

func TestMain(m *testing.M) {
	testkit.RequireRoot(m, "they run containers")
	dir, err := os.MkdirTemp("", "probe")
	if err != nil {
		panic(err)
	}
	probe = filepath.Join(dir, "probe")
	if shimProgram, err = shimtest.Build(dir, "../.."); err != nil {
		panic(err)
	}
	cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", dir+"/", "./testdata/probe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build probe: %v\n%s", err, out)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(dir)
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// containerds are the programs every test runs with: the system's, and the
// 2.x in the directory that DEWPOINT_TOOLS names.
func containerds(t testing.TB) map[string]string {
	t.Helper()
	two := filepath.Join(tools(), "containerd-2.4.2", "containerd")
	out := map[string]string{"system": "/usr/bin/containerd", "2.x": two}
	for name, p := range out {
		if !tool.Executable(p) {
			t.Fatalf("containerd %s is not at %s: run the scripts that install what the tests need, or set DEWPOINT_TOOLS", name, p)
		}
	}
	return out
}

func tools() string { return cmp.Or(os.Getenv("DEWPOINT_TOOLS"), "/var/cache/dewpoint/tools") }

func eachContainerd(t *testing.T, f func(t *testing.T, b *bed)) {
	for name, prog := range containerds(t) {
		t.Run(name, func(t *testing.T) { f(t, newBed(t, prog)) })
	}
}

// bed is an engine on directories of its own, with one image.
type bed struct {
	*Engine
	t   testing.TB
	img *image.Image
}

// newBed has crun make containers under the system's containerd, and runc under
// 2.x: package criu's tests do it the other way round.
func newBed(t testing.TB, prog string) *bed {
	t.Helper()
	if prog == containerds(t)["system"] {
		return newBedOf(t, prog, RuntimeCrun)
	}
	return newBedOf(t, prog, RuntimeRunc)
}

func newBedOf(t testing.TB, prog, runtime string) *bed {
	t.Helper()
	dir, err := os.MkdirTemp("", "eng")
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Root: dir + "/root", State: dir + "/state", Snapshotter: "overlayfs", Containerd: prog,
		ShimProgram: shimProgram,
		CRIU:        filepath.Join(tools(), "criu", "bin", "criu"), Runtime: runtime,
		Log: slog.New(slog.NewTextHandler(testWriter{t}, nil)),
	}
	e, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{Engine: e, t: t}
	t.Cleanup(func() { b.tearDown(dir) })
	b.img = b.makeImage()
	return b
}

// tearDown removes all containers and finds nothing left of them.
func (b *bed) tearDown(dir string) {
	ctx := context.Background()
	infos, err := b.List(ctx)
	if err != nil {
		b.t.Error(err)
	}
	for _, i := range infos {
		if err := b.Remove(ctx, i.Name, true); err != nil {
			b.t.Error(err)
		}
	}
	b.checkLeaks()
	if err := b.bridge.Destroy(); err != nil {
		b.t.Error(err)
	}
	if err := b.Shutdown(ctx); err != nil {
		b.t.Error(err)
	}
	for _, pattern := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		if left, _ := filepath.Glob(pattern + b.cfg.CgroupParent); len(left) > 0 {
			b.t.Errorf("leaked cgroups: %v", left)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		b.t.Error(err)
	}
}

// checkLeaks asserts that nothing of any container is on the machine.
func (b *bed) checkLeaks() {
	b.t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		b.t.Fatal(err)
	}
	for _, l := range strings.Split(string(mounts), "\n") {
		if strings.Contains(l, b.cfg.State+"/") || strings.Contains(l, b.cfg.Root+"/") {
			b.t.Errorf("leaked mount: %s", l)
		}
	}
	for _, d := range []string{b.cfg.containersDir(), b.cfg.netnsDir(), b.cfg.execDir(), b.cfg.standInsDir(),
		filepath.Join(b.cfg.runcRoot(), b.cfg.Namespace), filepath.Join(b.cfg.CNI.Dir, "results")} {
		entries, _ := os.ReadDir(d)
		for _, n := range entries {
			if !strings.HasPrefix(n.Name(), ".") { // crun's own
				b.t.Errorf("leaked file: %s/%s", d, n.Name())
			}
		}
	}
	addrs, _ := filepath.Glob(filepath.Join(b.cfg.CNI.Dir, "ipam", "*", "*.*.*.*"))
	for _, a := range addrs {
		b.t.Errorf("leaked address: %s", a)
	}
	left := make(map[string]bool)
	if err := b.strandedSnapshots(context.Background(), left); err != nil || len(left) > 0 {
		b.t.Errorf("leaked snapshots: %v %v", left, err)
	}
	b.noProcesses()
}

// noProcesses waits for shims to go and asserts that none is left.
func (b *bed) noProcesses() {
	var left []string
	for range 100 {
		left = left[:0]
		cmdlines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
		for _, p := range cmdlines {
			c, _ := os.ReadFile(p)
			if bytes.Contains(c, []byte("containerd-shim")) && bytes.Contains(c, []byte(b.Socket())) {
				left = append(left, strings.ReplaceAll(string(c), "\x00", " "))
			}
		}
		if len(left) == 0 {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	b.t.Errorf("leaked processes: %q", left)
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// makeImage unpacks the probe as the only layer, as an ordinary pull would,
// and registers the image.
func (b *bed) makeImage() *image.Image {
	b.t.Helper()
	diff := digest.FromString("probe layer")
	b.unpack(diff.String())
	img := testImage(b.t, diff)
	if err := b.Register(b.t.Context(), img, nil); err != nil {
		b.t.Fatal(err)
	}
	return img
}

// A layer that the snapshotter does not have though it was ready is asked for again.
func TestRegisterAsksAgain(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		diff := digest.FromString("late layer")
		img := testImage(t, diff)
		img.Ref.Tag = "late"
		asked := 0
		err := b.Register(t.Context(), img, func(context.Context, int) error {
			if asked++; asked == 2 {
				b.unpack(diff.String())
			}
			return nil
		})
		if err != nil || asked < 2 {
			t.Fatalf("asked %d times: %v", asked, err)
		}
		never := testImage(t, digest.FromString("no layer"))
		never.Ref.Tag = "never"
		var absent *NotRemoteError
		if err := b.Register(t.Context(), never, func(context.Context, int) error {
			return nil
		}); !errors.As(err, &absent) {
			t.Fatal(err)
		}
	})
}

func testImage(t testing.TB, diff digest.Digest) *image.Image {
	t.Helper()
	marshal := func(v any) []byte {
		j, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return j
	}
	img := &image.Image{Ref: image.Reference{Host: "test.invalid", Path: "probe", Tag: "1"}}
	img.Spec = ocispec.Image{
		Platform: ocispec.Platform{OS: "linux", Architecture: "amd64"},
		Config: ocispec.ImageConfig{Entrypoint: []string{"/probe"}, Cmd: []string{"sleep"},
			Env: []string{"A=image", "B=image"}, WorkingDir: "/work"},
		RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{diff}},
	}
	img.Config = marshal(img.Spec)
	img.ConfigD = ocispec.Descriptor{MediaType: ocispec.MediaTypeImageConfig,
		Digest: digest.FromBytes(img.Config), Size: int64(len(img.Config))}
	layer := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayerGzip, Digest: digest.FromString("blob"),
		Size: 7}
	m := ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest, Config: img.ConfigD,
		Layers: []ocispec.Descriptor{layer}}
	m.SchemaVersion = 2
	img.Manifest = marshal(m)
	img.Desc = ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest,
		Digest: digest.FromBytes(img.Manifest), Size: int64(len(img.Manifest))}
	idx := ocispec.Index{MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{img.Desc}}
	idx.SchemaVersion = 2
	img.Index = marshal(idx)
	img.Target = ocispec.Descriptor{MediaType: ocispec.MediaTypeImageIndex, Digest: digest.FromBytes(img.Index),
		Size: int64(len(img.Index))}
	img.Layers = []image.Layer{{Digest: layer.Digest, Size: layer.Size, MediaType: layer.MediaType,
		DiffID: diff}}
	return img
}

func (b *bed) unpack(chain string) {
	b.t.Helper()
	ctx := b.t.Context()
	r, err := b.c.Snapshots.Prepare(ctx,
		&snapshotsapi.PrepareSnapshotRequest{Snapshotter: b.cfg.Snapshotter, Key: "unpack",
			Labels: map[string]string{labelGCRoot: "now"}})
	if err != nil {
		b.t.Fatal(err)
	}
	dir := r.Mounts[0].Source // one layer is a bind mount
	src, err := os.ReadFile(probe)
	if err != nil {
		b.t.Fatal(err)
	}
	for d, mode := range map[string]os.FileMode{"etc": 0o755, "tmp": 0o755, "work": 0o755, "bad": 0o755,
		"shut": 0o700} {
		if err := os.Mkdir(filepath.Join(dir, d), mode); err != nil {
			b.t.Fatal(err)
		}
	}
	other := []byte(string(src[:4096]))
	other[18], other[19] = byte(elf.EM_S390), byte(elf.EM_S390>>8) // of no machine that the tests run on
	files := map[string]string{
		"etc/passwd": "root:x:0:0::/root:/probe\nweb:x:33:34::/:/probe\n",
		"etc/group":  "root:x:0:\nweb:x:34:\nlogs:x:40:web,root\n",
		"probe":      string(src),
		"bad/empty":  "", "bad/text": "echo\n", "bad/other": string(other), "bad/script": "#!/bin/none\n",
		"shut/probe": string(src),
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			b.t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "bad", "plain"), src, 0o644); err != nil {
		b.t.Fatal(err)
	}
	_, err = b.c.Snapshots.Commit(ctx,
		&snapshotsapi.CommitSnapshotRequest{Snapshotter: b.cfg.Snapshotter, Name: chain, Key: "unpack",
			Labels: map[string]string{labelGCRoot: "now"}})
	if err != nil {
		b.t.Fatal(err)
	}
}

// run creates and starts a container.
func (b *bed) run(s Spec) *Info {
	b.t.Helper()
	s.Image = b.img
	i, err := b.Create(b.t.Context(), s)
	if err != nil {
		b.t.Fatal(err)
	}
	if err := b.Engine.Start(b.t.Context(), s.Name); err != nil {
		b.t.Fatal(err)
	}
	return i
}

// output runs a container to its end and returns what it wrote.
func (b *bed) output(s Spec) (stdout, stderr string, status int) {
	b.t.Helper()
	b.run(s)
	var out, errs bytes.Buffer
	if err := b.Logs(b.t.Context(), s.Name, LogOptions{Follow: true, Stdout: &out, Stderr: &errs}); err != nil {
		b.t.Fatal(err)
	}
	x, err := b.Wait(b.t.Context(), s.Name)
	if err != nil {
		b.t.Fatal(err)
	}
	if err := b.Remove(b.t.Context(), s.Name, false); err != nil {
		b.t.Fatal(err)
	}
	return out.String(), errs.String(), x.Status
}

func TestRunToEnd(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		out, errs, status := b.output(Spec{Name: "say", Cmd: []string{"say", "to out", "to err"}})
		if out != "to out\n" || errs != "to err\n" || status != 0 {
			t.Errorf("got %q, %q, %d", out, errs, status)
		}
		_, errs, status = b.output(Spec{Name: "exit", Cmd: []string{"exit", "42"}})
		if errs != "last words\n" || status != 42 {
			t.Errorf("got %q, %d", errs, status)
		}
		out, _, _ = b.output(Spec{Name: "env", Cmd: []string{"env"}, Env: []string{"B=mine", "C=new"}})
		for _, want := range []string{"A=image\n", "B=mine\n", "C=new\n", "PATH=/usr/local/sbin", "wd=/work",
			"HOME=/root"} {
			if !strings.Contains(out, want) {
				t.Errorf("environment lacks %q: %s", want, out)
			}
		}
		out, _, _ = b.output(Spec{Name: "id", Cmd: []string{"id"}, Options: spec.Options{User: "web"}})
		if out != "33 34 [40]\n" {
			t.Errorf("user web is %q", out)
		}
		out, _, _ = b.output(Spec{Name: "root", Cmd: []string{"id"}})
		if out != "0 0 [0 40]\n" && out != "0 0 [40]\n" {
			t.Errorf("user root is %q", out)
		}
	})
}

// awaitCaught waits until a container's first process catches signals: before, the kernel keeps them from it.
// What runc's init catches, in Go too, is lost when it becomes that process.
func (b *bed) awaitCaught(pid uint32) {
	b.t.Helper()
	testkit.Eventually(b.t, "it catches signals", func() bool {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			b.t.Fatal(err)
		}
		_, rest, _ := strings.Cut(string(status), "SigCgt:")
		mask, _, _ := strings.Cut(strings.TrimSpace(rest), "\n")
		caught, err := strconv.ParseUint(mask, 16, 64)
		return err == nil && caught&(1<<(unix.SIGTERM-1)) != 0 && strings.HasPrefix(string(status), "Name:\tprobe\n")
	})
}

func TestLifecycle(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		var mu sync.Mutex
		var seen []Event
		ectx, cancel := context.WithCancel(ctx)
		listening := make(chan struct{})
		done := make(chan error, 1)
		go func() {
			done <- b.Events(ectx, func(ev Event) {
				mu.Lock()
				defer mu.Unlock()
				if seen = append(seen, ev); len(seen) == 1 {
					close(listening)
				}
			})
		}()
		<-listening
		b.run(Spec{Name: "c1"})
		i, err := b.Inspect(ctx, "c1")
		if err != nil || i.Status != Running || i.Pid == 0 || i.Image != b.img.Ref.String() {
			t.Fatalf("inspect: %+v, %v", i, err)
		}
		if _, err := b.Create(ctx, Spec{Name: "c1", Image: b.img}); !errors.Is(err, ErrExists) {
			t.Errorf("second c1: %v", err)
		}
		if err := b.Remove(ctx, "c1", false); !errors.Is(err, ErrRunning) {
			t.Errorf("remove running: %v", err)
		}
		if err := b.Engine.Start(ctx, "c1"); !errors.Is(err, ErrRunning) {
			t.Errorf("start running: %v", err)
		}
		b.awaitCaught(i.Pid)
		if err := b.Stop(ctx, "c1", testkit.Limit); err != nil {
			t.Error(err)
		}
		if i, _ := b.Inspect(ctx, "c1"); i.Status != Stopped || i.Exit == nil ||
			i.Exit.Status != 128+15 && i.Exit.Status != 2 {
			t.Errorf("stopped: %+v %+v", i, i.Exit)
		}
		if err := b.Kill(ctx, "c1", unix.SIGTERM); !errors.Is(err, ErrNotRunning) {
			t.Errorf("kill stopped: %v", err)
		}
		if err := b.Engine.Start(ctx, "c1"); err != nil {
			t.Errorf("start again: %v", err)
		}
		if err := b.Remove(ctx, "c1", true); err != nil {
			t.Error(err)
		}
		if err := b.Remove(ctx, "c1", true); !errors.Is(err, ErrNotFound) {
			t.Errorf("remove removed: %v", err)
		}
		b.run(Spec{Name: "c2", Cmd: []string{"stubborn"}})
		b.awaitLog("c2", "ignoring")
		began := time.Now()
		if err := b.Stop(ctx, "c2", 200*time.Millisecond); err != nil || time.Since(began) > testkit.Limit {
			t.Errorf("stop stubborn: %v after %v", err, time.Since(began))
		}
		if x, err := b.Wait(ctx, "c2"); err != nil || x.Status != 128+9 {
			t.Errorf("wait: %+v %v", x, err)
		}
		if l, err := b.List(ctx); err != nil || len(l) != 1 || l[0].Name != "c2" || l[0].Status != Stopped {
			t.Errorf("list: %+v, %v", l, err)
		}
		time.Sleep(50 * time.Millisecond)
		cancel()
		<-done
		var kinds []string
		for _, ev := range seen {
			kinds = append(kinds, string(ev.Kind)+" "+ev.Name)
		}
		got := strings.Join(kinds, ",")
		if !strings.HasPrefix(got, "lost ,created c1,started c1,exited c1") ||
			!strings.Contains(got, "removed c1") {
			t.Errorf("events: %s", got)
		}
	})
}

func (b *bed) awaitLog(name, want string) {
	b.t.Helper()
	stdout, _ := b.cfg.places().Output(name)
	for range 500 {
		if s, _ := os.ReadFile(stdout); strings.Contains(string(s), want) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	b.t.Fatalf("%s never said %q", name, want)
}

func TestExec(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		b.run(Spec{Name: "c"})
		var out, errs bytes.Buffer
		st, err := b.Exec(ctx, "c",
			ExecSpec{Args: []string{"/probe", "say", "o", "e"}, Stdout: &out, Stderr: &errs})
		if err != nil || st != 0 || out.String() != "o\n" || errs.String() != "e\n" {
			t.Errorf("say: %d %v %q %q", st, err, out.String(), errs.String())
		}
		if st, err := b.Exec(ctx, "c", ExecSpec{Args: []string{"/probe", "exit", "7"}}); err != nil || st != 7 {
			t.Errorf("exit: %d %v", st, err)
		}
		out.Reset()
		in := strings.NewReader(strings.Repeat("x", 300_000))
		if st, err := b.Exec(ctx, "c",
			ExecSpec{Args: []string{"/probe", "read"}, Stdin: in, Stdout: &out}); err != nil || st != 0 ||
			out.String() != "read 300000 bytes" {
			t.Errorf("read: %d %v %q", st, err, out.String())
		}
		out.Reset()
		if st, err := b.Exec(ctx, "c",
			ExecSpec{Args: []string{"/probe", "id"}, User: "web", TTY: true, Stdout: &out}); err != nil || st != 0 ||
			out.String() != "33 34 [40]\r\n" {
			t.Errorf("tty: %d %v %q", st, err, out.String())
		}
		if _, err := b.Exec(ctx, "c", ExecSpec{Args: []string{"/nothing"}}); err == nil {
			t.Error("exec of a missing program succeeds")
		}
		short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		defer cancel()
		if _, err := b.Exec(short, "c", ExecSpec{Args: []string{"/probe", "sleep"}}); !errors.Is(err,
			context.DeadlineExceeded) {
			t.Errorf("exec past its deadline: %v", err)
		}
		if _, err := b.Exec(ctx, "nobody", ExecSpec{Args: []string{"/probe", "sleep"}}); !errors.Is(err,
			ErrNotFound) {
			t.Errorf("exec in nothing: %v", err)
		}
	})
}

func TestNetworks(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		out, _, _ := b.output(Spec{Name: "none", Net: NetNone, Cmd: []string{"net"}})
		if out != "lo 0x9\n" {
			t.Errorf("links of none: %q", out)
		}
		out, _, _ = b.output(Spec{Name: "files", Net: NetNone, Cmd: []string{"cat", "/etc/hostname", "/etc/hosts"}})
		if !strings.HasPrefix(out, "files\n127.0.0.1\tlocalhost") {
			t.Errorf("files: %q", out)
		}
		p1, p2 := freePort(t), freePort(t)
		i := b.run(Spec{Name: "web", Net: NetBridge, Cmd: []string{"serve", ":8080"},
			Ports: []network.Port{{Host: p1, Container: 8080, Protocol: "tcp"}}})
		b.awaitLog("web", "serving")
		b.run(Spec{Name: "web2", Net: NetBridge, Cmd: []string{"serve", ":8080"},
			Ports: []network.Port{{Host: p2, Container: 8080, Protocol: "tcp"}}})
		b.awaitLog("web2", "serving")
		for _, addr := range []string{i.Addr.String() + ":8080", fmt.Sprintf("127.0.0.1:%d", p1),
			fmt.Sprintf("127.0.0.1:%d", p2)} {
			if body, err := get(addr); err != nil || !strings.HasPrefix(body, "hello") {
				t.Errorf("get %s: %q %v", addr, body, err)
			}
		}
		_, err := b.Create(ctx,
			Spec{Name: "web3", Image: b.img, Net: NetBridge,
				Ports: []network.Port{{Host: p1, Container: 1, Protocol: "tcp"}}})
		if !errors.Is(err, ErrPortTaken) {
			t.Errorf("port twice: %v", err)
		}
		if err := b.Remove(ctx, "web", true); err != nil {
			t.Fatal(err)
		}
		if _, err := get(fmt.Sprintf("127.0.0.1:%d", p1)); err == nil {
			t.Error("the port of a removed container answers")
		}
		if body, err := get(fmt.Sprintf("127.0.0.1:%d", p2)); err != nil {
			t.Errorf("the other container: %q %v", body, err)
		}
	})
}

func get(addr string) (string, error) {
	c := http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := c.Get("http://" + addr + "/")
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	return string(body), err
}

func freePort(t *testing.T) uint16 { return uint16(testkit.FreePort(t)) }

// What a process that was killed was registering keeps nothing: its leases end with the next one.
func TestLeasesOfTheDead(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		if _, _, _, err := b.lease(t.Context()); err != nil {
			t.Fatal(err)
		}
		count := func() int {
			r, err := b.c.Leases.List(t.Context(), &leasesapi.ListRequest{})
			if err != nil {
				t.Fatal(err)
			}
			return len(r.Leases)
		}
		before := count()
		if err := b.reconcile(t.Context()); err != nil {
			t.Fatal(err)
		}
		if left := count(); before != 1 || left != 0 {
			t.Errorf("%d leases before, %d left", before, left)
		}
	})
}
