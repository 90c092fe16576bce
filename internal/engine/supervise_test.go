package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/engine/cgroup"
	"dewpoint/internal/engine/containerd"
	"dewpoint/internal/engine/network"
	"dewpoint/internal/engine/process"
	"dewpoint/internal/engine/state"
	"dewpoint/internal/image"
)

func (b *bed) containerdPid() int {
	b.t.Helper()
	s, err := os.ReadFile(filepath.Join(b.cfg.State, "containerd", "containerd.pid"))
	if err != nil {
		b.t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.Fields(string(s))[0])
	if err != nil {
		b.t.Fatal(err)
	}
	return pid
}

func TestContainerdKilled(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		b.run(Spec{Name: "c", Cmd: []string{"count"}})
		waited := make(chan error, 1)
		go func() { _, err := b.Wait(ctx, "c"); waited <- err }()
		before, err := b.Inspect(ctx, "c")
		if err != nil {
			t.Fatal(err)
		}
		old := b.containerdPid()
		if err := unix.Kill(old, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		after, err := b.Inspect(ctx, "c")
		if err != nil || after.Status != Running || after.Pid != before.Pid {
			t.Fatalf("at the restart: %+v, %v", after, err)
		}
		if _, err := b.OCI(ctx, "nobody"); !errors.Is(err, ErrNotFound) { // waits for the new containerd
			t.Fatal(err)
		}
		if err := b.Settle(ctx); err != nil {
			t.Fatal(err)
		}
		after, err = b.Inspect(ctx, "c")
		if err != nil || after.Status != Running || after.Pid != before.Pid {
			t.Fatalf("after the restart: %+v, %v", after, err)
		}
		if b.containerdPid() == old {
			t.Error("the pid file names the dead containerd")
		}
		n := b.logLines("c")
		time.Sleep(100 * time.Millisecond)
		if b.logLines("c") <= n {
			t.Error("the container's output stopped")
		}
		if err := b.Stop(ctx, "c", time.Second); err != nil {
			t.Error(err)
		}
		if err := <-waited; err != nil {
			t.Errorf("wait across the restart: %v", err)
		}
	})
}

// A power cut leaves containerd's database as no flush has promised it; the
// containers that were there a moment before still are.
func TestPowerCut(t *testing.T) {
	b := newBed(t, containerds(t)["2.x"])
	ctx := t.Context()
	b.run(Spec{Name: "c", Cmd: []string{"count"}})
	db := filepath.Join(b.cfg.Root, "containerd", "io.containerd.metadata.v1.bolt", "meta.db")
	if err := b.Remove(ctx, "c", true); err != nil {
		t.Fatal(err)
	}
	b.run(Spec{Name: "d", Cmd: []string{"count"}})
	if err := b.Kill(ctx, "d", unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	p, err := process.Open(b.containerdPid(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := unix.Kill(p.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.Exited(time.Minute) // what still ends would be adopted
	if err := os.Truncate(db, 5000); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(db+".unsynced", []byte("another boot"), 0o600); err != nil {
		t.Fatal(err)
	}
	e, err := Start(ctx, b.cfg)
	if err != nil {
		t.Fatal(err)
	}
	b.Engine = e
	all, err := b.List(ctx)
	if err != nil || len(all) != 1 || all[0].Name != "d" {
		t.Fatalf("after the power cut: %+v %v", all, err)
	}
}

func (b *bed) logLines(name string) int {
	stdout, _ := b.cfg.places().Output(name)
	s, _ := os.ReadFile(stdout)
	return strings.Count(string(s), "\n")
}

func TestDaemonRestart(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		port := freePort(t)
		web := Spec{Name: "web", Net: NetBridge, Cmd: []string{"serve", ":80"},
			Ports: []network.Port{{Host: port, Container: 80, Protocol: "tcp"}}}
		first := b.run(web)
		pid := b.containerdPid()
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
		b.plantRemains()
		e, err := Start(ctx, b.cfg)
		if err != nil {
			t.Fatal(err)
		}
		b.Engine = e
		if b.containerdPid() != pid {
			t.Error("a second containerd was started")
		}
		l, err := b.List(ctx)
		if err != nil || len(l) != 1 || l[0].Status != Running || l[0].Addr != first.Addr || len(l[0].Ports) != 1 {
			t.Fatalf("list: %+v, %v", l, err)
		}
		_, err = b.Create(ctx, Spec{Name: "two", Image: b.img, Net: NetBridge, Ports: web.Ports})
		if !errors.Is(err, ErrPortTaken) {
			t.Errorf("published port forgotten: %v", err)
		}
		if st, err := b.Exec(ctx, "web", ExecSpec{Args: []string{"/probe", "say", "a", "b"}}); err != nil ||
			st != 0 {
			t.Errorf("exec: %d %v", st, err)
		}
		if err := b.Remove(ctx, "web", true); err != nil {
			t.Error(err)
		}
		b.checkLeaks()
	})
}

// A daemon that finds an older containerd than the one that runs, since its PATH
// is another, leaves that and its containers alone.
func TestOlderContainerdIsNotTaken(t *testing.T) {
	programs := containerds(t)
	b := newBed(t, programs["2.x"])
	ctx := t.Context()
	before := b.run(Spec{Name: "c", Cmd: []string{"count"}})
	pid := b.containerdPid()
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", filepath.Dir(programs["system"])+":"+os.Getenv("PATH"))
	b.cfg.Containerd = ""
	e, err := Start(ctx, b.cfg)
	if err != nil {
		t.Fatal(err)
	}
	b.Engine = e
	after, err := b.Inspect(ctx, "c")
	if err != nil || after.Status != Running || after.Pid != before.Pid || b.containerdPid() != pid {
		t.Errorf("containerd %d, was %d; the container: %+v, %v", b.containerdPid(), pid, after, err)
	}
}

// plantRemains leaves what a crash in the middle of Create would.
func (b *bed) plantRemains() {
	b.t.Helper()
	c, err := containerd.Dial(b.private.Socket(), b.cfg.Namespace)
	if err != nil {
		b.t.Fatal(err)
	}
	defer c.Conn.Close()
	e := compose(b.cfg)
	e.c, e.state, e.bridge = c, b.state, b.bridge
	s := Spec{Name: "half", Image: b.img, Net: NetBridge}
	ctx := context.Background()
	if _, err := e.reserve(ctx, &s); err != nil {
		b.t.Fatal(err)
	}
	if err := os.MkdirAll(b.cfg.dir("half"), 0o711); err != nil {
		b.t.Fatal(err)
	}
	if _, err := e.network(ctx, state.Record{Name: "half", Net: NetBridge}); err != nil {
		b.t.Fatal(err)
	}
}

func TestSystemContainerd(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		dir := t.TempDir()
		cfg := Config{Address: b.Socket(), Root: dir + "/r", State: dir + "/s", Namespace: "other",
			Snapshotter: "overlayfs"}
		e, err := Start(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		e.Close()
		cfg.Snapshotter = ""
		_, err = Start(t.Context(), cfg)
		var missing *containerd.SnapshotterMissingError
		if !errors.As(err, &missing) || !strings.Contains(err.Error(), "[proxy_plugins.dewpoint]") {
			t.Errorf("without the proxy plugin: %v", err)
		}
	})
}

func TestMissingContainerd(t *testing.T) {
	dir := t.TempDir()
	_, err := Start(t.Context(), Config{Root: dir + "/r", State: dir + "/s", Containerd: dir + "/containerd"})
	if !errors.Is(err, ErrMissing) || !strings.Contains(err.Error(), "apt-get install containerd") {
		t.Errorf("got %v", err)
	}
}

func TestLimits(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		i := b.run(Spec{Name: "small", Memory: 64 << 20, CPUs: 0.5})
		files := map[string]string{"memory/memory.limit_in_bytes": "67108864", "cpu/cpu.cfs_quota_us": "50000"}
		if cgroup.Unified() {
			files = map[string]string{"x/memory.max": "67108864", "x/cpu.max": "50000 100000"}
		}
		for f, want := range files {
			p := filepath.Join(i.CgroupDir(filepath.Dir(f)), filepath.Base(f))
			if got, err := os.ReadFile(p); err != nil || strings.TrimSpace(string(got)) != want {
				t.Errorf("%s is %q, %v; want %s", p, got, err, want)
			}
		}
		b.run(Spec{Name: "hog", Memory: 32 << 20, Cmd: []string{"hog"}})
		if x, err := b.Wait(t.Context(), "hog"); err != nil || x.Status != 128+9 {
			t.Errorf("hog: %+v %v", x, err)
		}
	})
}

// TestCreateFails makes each step of Create fail and finds nothing left.
func TestCreateFails(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		bridge := Spec{Name: "bad", Image: b.img, Net: NetBridge}
		noUser, noCommand, noImage := bridge, bridge, bridge
		noUser.User = "nobody-at-all"
		noCommand.Entrypoint = []string{"/does/not/exist"}
		other := *b.img
		other.Spec.RootFS.DiffIDs = append(other.Spec.RootFS.DiffIDs[:0:0],
			"sha256:"+"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef")
		noImage.Image = &other
		badVolume := bridge
		badVolume.Volumes = []Volume{{Source: "/proc/none/such", Target: "/v"}}
		for name, s := range map[string]Spec{"user": noUser, "command": noCommand, "image": noImage,
			"volume": badVolume} {
			i, err := b.Create(ctx, s)
			if err == nil { // runc finds a missing program when it starts
				err = b.Engine.Start(ctx, i.Name)
				if rerr := b.Remove(ctx, i.Name, true); rerr != nil {
					t.Error(rerr)
				}
			}
			if err == nil {
				t.Errorf("%s: no error", name)
			}
			b.checkLeaks()
		}
		defer func(own *network.Bridge) { b.bridge = own }(b.bridge)
		b.bridge = network.NewBridge(network.Config{Bin: []string{t.TempDir()}, Dir: b.cfg.CNI.Dir,
			Bridge: b.cfg.CNI.Bridge})
		if _, err := b.Create(ctx, bridge); !errors.Is(err, network.ErrMissing) {
			t.Errorf("without plugins: %v", err)
		}
		b.checkLeaks()
	})
}

// TestNetworkLost starts a stopped container whose namespace is gone, as after
// a reboot.
func TestNetworkLost(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		port := freePort(t)
		b.run(Spec{Name: "web", Net: NetBridge, Cmd: []string{"serve", ":80"},
			Ports: []network.Port{{Host: port, Container: 80, Protocol: "tcp"}}})
		if err := b.Stop(ctx, "web", time.Second); err != nil {
			t.Fatal(err)
		}
		if err := b.deleteTask(ctx, "web"); err != nil {
			t.Fatal(err)
		}
		if err := network.RemoveNS(b.cfg.netns("web")); err != nil {
			t.Fatal(err)
		}
		if i, err := b.Inspect(ctx, "web"); err != nil || i.Status != Stopped || i.Exit != nil {
			t.Errorf("without a task: %+v, %v", i, err)
		}
		stdout, _ := b.cfg.places().Output("web")
		if err := os.Truncate(stdout, 0); err != nil {
			t.Fatal(err)
		}
		if err := b.Engine.Start(ctx, "web"); err != nil {
			t.Fatal(err)
		}
		b.awaitLog("web", "serving")
		if body, err := get(fmt.Sprintf("127.0.0.1:%d", port)); err != nil {
			t.Errorf("%q %v", body, err)
		}
	})
}

func TestVolumes(t *testing.T) {
	b := newBed(t, containerds(t)["2.x"])
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/f", []byte("from the host"), 0o644); err != nil {
		t.Fatal(err)
	}
	out, _, _ := b.output(Spec{Name: "v", Cmd: []string{"cat", "/data/f"},
		Volumes: []Volume{{Source: dir, Target: "/data", ReadOnly: true}}})
	if out != "from the host" {
		t.Errorf("got %q", out)
	}
}

// TestClients asserts that containerd's own client sees a registered image and runs it.
func TestClients(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctr := func(args ...string) (string, error) {
			prog := filepath.Join(filepath.Dir(b.private.Program()), "ctr")
			out, err := exec.Command(prog,
				append([]string{"-a", b.Socket(), "-n", b.cfg.Namespace}, args...)...).CombinedOutput()
			return string(out), err
		}
		out, err := ctr("run", "--rm", "--snapshotter", "overlayfs", b.img.Ref.String(), "ctr-run", "/probe", "say",
			"by ctr", "")
		if err != nil || !strings.Contains(out, "by ctr") {
			t.Errorf("ctr run: %v %s", err, out)
		}
		l, err := b.List(t.Context())
		if err != nil || len(l) != 0 {
			t.Errorf("list: %v %v", l, err)
		}
		if _, err := ctr("content", "prune", "references"); err != nil {
			t.Log(err)
		}
		back, err := b.LocalImage(t.Context(), b.img.Ref)
		if err != nil || fmt.Sprintf("%+v", *back) != fmt.Sprintf("%+v", *b.img) {
			t.Errorf("local image: %+v\nwant %+v, %v", back, b.img, err)
		}
		if err := b.Register(t.Context(), b.img, nil); err != nil {
			t.Error(err)
		}
		if err := b.RemoveImage(t.Context(), b.img.Ref.String(), true); err != nil {
			t.Error(err)
		}
		if _, err := b.LocalImage(t.Context(), b.img.Ref); err == nil {
			t.Error("the removed image is here")
		}
		if err := b.Register(t.Context(), b.img, nil); err != nil {
			t.Error(err)
		}
		other := *b.img
		other.Spec.RootFS.DiffIDs = append(other.Spec.RootFS.DiffIDs[:0:0],
			"sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef")
		other.Ref = image.Reference{Host: "h", Path: "p", Tag: "t"}
		var nr *NotRemoteError
		if err := b.Register(t.Context(), &other, nil); !errors.As(err, &nr) {
			t.Errorf("layers that are not here: %v", err)
		}
	})
}
