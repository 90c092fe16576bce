package criu_test

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/checkpoint/criu"
	"dewpoint/internal/engine"
	"dewpoint/internal/image"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/enginetest"
	"dewpoint/testkit/shimtest"
)

var (
	workload    string // the static program of the test image
	shimProgram string // by which crun is executed
)

func TestMain(m *testing.M) {
	testkit.RequireRoot(m, "they run containers")
	if helper := helpers[os.Getenv(helperVar)]; helper != nil {
		helper()
		return
	}
	dir, err := os.MkdirTemp("", "workload")
	if err != nil {
		panic(err)
	}
	if workload, err = enginetest.BuildWorkload(dir); err != nil {
		panic(err)
	}
	if shimProgram, err = shimtest.Build(dir, "../../.."); err != nil {
		panic(err)
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

func containerds() map[string]string {
	tools := cmp.Or(os.Getenv("DEWPOINT_TOOLS"), "/var/cache/dewpoint/tools")
	return map[string]string{"system": "/usr/bin/containerd",
		"2.x": filepath.Join(tools, "containerd-2.4.2", "containerd")}
}

// bed is a container engine on directories of its own, with one image.
type bed struct {
	cfg      engine.Config
	e        *engine.Engine
	loose    *engine.Engine // the same, without a filter of system calls
	criu     *criu.Engine
	conn     *grpc.ClientConn
	patience time.Duration // with a restore; default a minute
	// changed names a file of the working directory to which Keep adds a byte.
	changed string
	group   string // the containers' parent cgroup
	img     *image.Image
}

// newBed has crun make containers under one containerd, and runc under the other.
func newBed(t testing.TB, containerd string) *bed {
	t.Helper()
	runtime := engine.RuntimeCrun
	if containerd == containerds()["system"] {
		runtime = engine.RuntimeRunc
	}
	dir, err := os.MkdirTemp("", "criu")
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{cfg: engine.Config{
		Root: dir + "/root", State: dir + "/state", Snapshotter: "overlayfs", Containerd: containerd,
		CRIU:    criu.Find(t.Context(), ""),
		Runtime: runtime, ShimProgram: shimProgram,
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}}
	if b.e, err = engine.Start(t.Context(), b.cfg); err != nil {
		t.Fatal(err)
	}
	loose := b.cfg
	loose.Unconfined = true
	loose.Address = b.e.Socket()
	if b.loose, err = engine.Start(t.Context(), loose); err != nil {
		t.Fatal(err)
	}
	b.criu = b.newCRIU()
	if b.conn, err = grpc.NewClient("unix://"+b.e.Socket(),
		grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.tearDown(t, dir) })
	b.img = b.makeImage(t)
	return b
}

func (b *bed) newCRIU() *criu.Engine {
	return criu.New(criu.Config{Containers: b.e, Program: b.cfg.CRIU, State: b.cfg.State, Log: b.cfg.Log})
}

// tearDown finds nothing left of the containers.
func (b *bed) tearDown(t testing.TB, dir string) {
	ctx := context.Background()
	infos, err := b.e.List(ctx)
	if err != nil || len(infos) > 0 {
		t.Errorf("left: %v, %v", infos, err)
	}
	for _, i := range infos {
		_ = b.e.Remove(ctx, i.Name, true)
	}
	for _, d := range []string{"state/restore", "state/netns", "root/containers"} {
		left, _ := os.ReadDir(filepath.Join(dir, d))
		for _, f := range left {
			t.Errorf("left: %s/%s", d, f.Name())
		}
	}
	for _, pattern := range []string{"state/criu-*", "state/runc/dewpoint/[^.]*", "state/standin/*"} {
		if left, _ := filepath.Glob(filepath.Join(dir, pattern)); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
	b.conn.Close()
	if err := b.loose.Close(); err != nil {
		t.Error(err)
	}
	if err := b.e.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	for _, pattern := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		if left, _ := filepath.Glob(pattern + b.group); b.group != "" && len(left) > 0 {
			t.Errorf("cgroups are left: %v", left)
		}
	}
	if m, _ := os.ReadFile("/proc/self/mounts"); strings.Contains(string(m), dir) {
		t.Errorf("mounts are left in %s", dir)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Error(err)
	}
}

func (b *bed) Engine() checkpoint.Engine { return b.criu }

func (b *bed) Boot(t testing.TB, o enginetest.Boot) enginetest.Running {
	t.Helper()
	e := b.e
	if o.Unconfined {
		e = b.loose
	}
	i, err := e.Create(t.Context(),
		engine.Spec{Name: o.Name, Image: b.img, Net: engine.NetBridge, Cmd: o.Things,
			Options: spec.Options{User: o.User}, Dumpable: o.Dumpable})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(t.Context(), o.Name); err != nil {
		t.Fatal(err)
	}
	b.group = path.Dir(i.Cgroup)
	r := running(i, int(i.Pid))
	if _, err := r.Ask("count"); err != nil {
		out, _ := os.ReadFile(i.Stdout)
		t.Fatalf("%s does not answer: %v\n%s", o.Name, err, out)
	}
	return r
}

func running(i *engine.Info, pid int) enginetest.Running {
	return enginetest.Running{Container: checkpoint.Container{Name: i.Name, PID: pid},
		Addr: net.JoinHostPort(i.Addr.String(), "7000")}
}

// Keep makes the writable layer a snapshot that stands on the image's.
func (b *bed) Keep(ctx context.Context, name, dir string) error {
	from, err := b.e.Upper(ctx, name)
	if err != nil {
		return err
	}
	id := upperOf(dir)
	parent := b.img.Spec.RootFS.DiffIDs[0]
	return b.snapshot(ctx, parent.String(), identity.ChainID([]digest.Digest{parent, id}).String(),
		func(to string) error {
			err := exec.CommandContext(ctx, "cp", "-a", from+"/.", to).Run()
			if err == nil && b.changed != "" {
				err = os.WriteFile(filepath.Join(to, "work", b.changed), []byte("x"), 0o600)
			}
			return err
		})
}

func upperOf(dir string) digest.Digest { return digest.FromString(dir) }

// snapshot commits what fill puts into a directory.
func (b *bed) snapshot(ctx context.Context, parent, name string, fill func(dir string) error) error {
	ctx = metadata.AppendToOutgoingContext(ctx, "containerd-namespace", "dewpoint")
	c := snapshotsapi.NewSnapshotsClient(b.conn)
	labels := map[string]string{"containerd.io/gc.root": "now"}
	r, err := c.Prepare(ctx,
		&snapshotsapi.PrepareSnapshotRequest{Snapshotter: "overlayfs", Key: "new " + name, Parent: parent,
			Labels: labels})
	if err != nil {
		return err
	}
	dir := r.Mounts[0].Source
	for _, o := range r.Mounts[0].Options {
		if upper, ok := strings.CutPrefix(o, "upperdir="); ok {
			dir = upper
		}
	}
	if err := fill(dir); err != nil {
		return err
	}
	_, err = c.Commit(ctx,
		&snapshotsapi.CommitSnapshotRequest{Snapshotter: "overlayfs", Key: "new " + name, Name: name,
			Labels: labels})
	return err
}

func (b *bed) Restore(t testing.TB, name, dir string) (enginetest.Running, error) {
	if _, err := b.e.Create(t.Context(), b.restoreSpec(name, dir)); err != nil {
		return enginetest.Running{}, err
	}
	ctx, cancel := context.WithTimeout(t.Context(), cmp.Or(b.patience, time.Minute))
	defer cancel()
	if err := b.e.Start(ctx, name); err != nil {
		err = criu.ExplainRestore(filepath.Join(b.e.WorkDir(name), "restore.log"), err)
		b.Remove(t, name)
		return enginetest.Running{}, err
	}
	i, err := b.e.Inspect(t.Context(), name)
	if err != nil {
		return enginetest.Running{}, err
	}
	return running(i, int(i.Pid)), nil
}

func (b *bed) restoreSpec(name, dir string) engine.Spec {
	return engine.Spec{Name: name, Image: b.img, Net: engine.NetBridge,
		Restore: &engine.Restore{Images: engine.ImagesIn(dir), Upper: upperOf(dir),
			Config: criu.RestoreConfig(false)}}
}

func (b *bed) Remove(t testing.TB, name string) {
	t.Helper()
	if err := b.e.Remove(context.Background(), name, true); err != nil {
		t.Error(err)
	}
}

func (b *bed) Exec(t testing.TB, name string, tty bool) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	in, hold, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(done)
		_, _ = b.e.Exec(ctx, name,
			engine.ExecSpec{Args: []string{"/workload", "echo"}, TTY: tty, Stdin: in, Stdout: t.Output(),
				Stderr: t.Output()})
	}()
	t.Cleanup(func() { cancel(); hold.Close(); <-done; in.Close() })
	i, err := b.e.Inspect(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	for range 500 { // until it is there
		if procs, _ := os.ReadFile(filepath.Join(i.CgroupDir("pids"), "cgroup.procs")); strings.Count(string(procs),
			"\n") > 1 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("exec did not begin")
}

// makeImage unpacks the workload as the only layer, as a pull would.
func (b *bed) makeImage(t testing.TB) *image.Image {
	t.Helper()
	diff := digest.FromString("workload layer")
	err := b.snapshot(t.Context(), "", diff.String(), func(dir string) error {
		program, err := os.ReadFile(workload)
		if err != nil {
			return err
		}
		for _, d := range []string{"etc", "tmp", "work"} {
			if err := os.Mkdir(filepath.Join(dir, d), 0o777); err != nil {
				return err
			}
		}
		if err := os.WriteFile(filepath.Join(dir, "etc/passwd"), []byte("root:x:0:0::/:\nweb:x:33:33::/:\n"),
			0o644); err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, "workload"), program, 0o755)
	})
	if err != nil {
		t.Fatal(err)
	}
	img := testImage(t, diff)
	if err := b.e.Register(t.Context(), img, nil); err != nil {
		t.Fatal(err)
	}
	return img
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
	describe := func(kind string, b []byte) ocispec.Descriptor {
		return ocispec.Descriptor{MediaType: kind, Digest: digest.FromBytes(b), Size: int64(len(b))}
	}
	img := &image.Image{Ref: image.Reference{Host: "test.invalid", Path: "workload", Tag: "1"}}
	img.Spec = ocispec.Image{
		Platform: ocispec.Platform{OS: "linux", Architecture: "amd64"},
		Config:   ocispec.ImageConfig{Entrypoint: []string{"/workload"}, WorkingDir: "/work"},
		RootFS:   ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{diff}},
	}
	img.Config = marshal(img.Spec)
	img.ConfigD = describe(ocispec.MediaTypeImageConfig, img.Config)
	layer := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayerGzip, Digest: digest.FromString("blob"),
		Size: 7}
	m := ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest, Config: img.ConfigD,
		Layers: []ocispec.Descriptor{layer}}
	m.SchemaVersion = 2
	img.Manifest = marshal(m)
	img.Desc = describe(ocispec.MediaTypeImageManifest, img.Manifest)
	img.Target = img.Desc
	img.Layers = []image.Layer{{Digest: layer.Digest, Size: layer.Size, MediaType: layer.MediaType,
		DiffID: diff}}
	return img
}
