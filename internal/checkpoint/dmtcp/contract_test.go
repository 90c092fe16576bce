//go:build dmtcp

package dmtcp_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/checkpoint/dmtcp"
	"dewpoint/internal/engine"
	"dewpoint/internal/image"
	"dewpoint/testkit/enginetest"
)

// lacks are the things that DMTCP does not carry over, by what a refusal says.
var lacks = map[string]string{"pidfd": "pidfd", "inotify": "inotify", "flock": "lock", "timer": "timerfd",
	"memfd": "memfd"}

// untried are the things of which it is not known whether DMTCP does.
var untried = []string{"posix", "ofd", "itimer", "ptimer", "fifo", "udp"}

// TestContract runs what of the contract DMTCP can keep: Connected is refused.
func TestContract(t *testing.T) {
	b := newBed(t)
	t.Run("Lacks", func(t *testing.T) { testLacks(t, b) })
	enginetest.Kept = slices.DeleteFunc(slices.Clone(enginetest.Kept), func(thing string) bool {
		return lacks[thing] != "" || slices.Contains(untried, thing)
	})
	enginetest.Run(t, b)
}

func testLacks(t *testing.T, b *bed) {
	for thing, says := range lacks {
		if thing == "pidfd" || thing == "inotify" {
			continue // opening one fails under DMTCP
		}
		t.Run(thing, func(t *testing.T) {
			r := b.Boot(t, enginetest.Boot{Name: "lacks-" + thing, Things: []string{thing}})
			defer b.Remove(t, r.Name)
			_, err := b.dmtcp.Dump(t.Context(), r.Container, t.TempDir(), func(context.Context) error { return nil })
			var unfit *checkpoint.UnfitError
			if !errors.As(err, &unfit) || !strings.Contains(err.Error(), says) {
				t.Errorf("dump: %v", err)
			}
		})
	}
}

func TestProbe(t *testing.T) {
	a, err := dmtcp.New(dmtcp.Config{Prefix: prefix(t)}).Probe(t.Context())
	if err != nil || a.Version == "" {
		t.Errorf("%+v, %v", a, err)
	}
}

func prefix(t *testing.T) string {
	t.Helper()
	p := dmtcp.Find("")
	if p == "" {
		t.Fatal("dmtcp_launch is not in PATH: install DMTCP 4 or newer (no suite of Debian has it)")
	}
	return p
}

// bed is a container engine whose containers see the host's programs.
type bed struct {
	dir, prefix string
	e           *engine.Engine
	dmtcp       *dmtcp.Engine
	img         *image.Image
}

func newBed(t *testing.T) *bed {
	t.Helper()
	dir, err := os.MkdirTemp("", "dmtcp")
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{dir: dir, prefix: prefix(t)}
	b.e, err = engine.Start(t.Context(),
		engine.Config{Root: dir + "/root", State: dir + "/state", Snapshotter: "overlayfs",
			Containerd: "/usr/bin/containerd", Unconfined: true, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.e.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	b.dmtcp = dmtcp.New(dmtcp.Config{Containers: b.e, Prefix: b.prefix})
	b.makeImage(t)
	return b
}

func (b *bed) Engine() checkpoint.Engine { return b.dmtcp }

func (b *bed) Boot(t testing.TB, o enginetest.Boot) enginetest.Running {
	t.Helper()
	spec := b.spec(o.Name)
	spec.Entrypoint = append([]string{"/usr/bin/python3", "/workload.py"}, o.Things...)
	if err := b.dmtcp.Carry(&spec); err != nil {
		t.Fatal(err)
	}
	r, err := b.run(t, spec, "")
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (b *bed) spec(name string) engine.Spec {
	return engine.Spec{Name: name, Image: b.img, Net: engine.NetBridge,
		Volumes: []engine.Volume{{Source: "/usr", Target: "/usr", ReadOnly: true}}}
}

// run runs a container, with the files of upper, unless "".
func (b *bed) run(t testing.TB, spec engine.Spec, upper string) (enginetest.Running, error) {
	name := spec.Name
	if _, err := b.e.Create(t.Context(), spec); err != nil {
		return enginetest.Running{}, err
	}
	i, err := b.e.Inspect(t.Context(), name)
	if _, none := os.Stat(upper + "/work"); err == nil && none == nil {
		err = exec.Command("cp", "-a", upper+"/work/.", filepath.Join("/proc", itoa(i.Pid), "root/work")).Run()
	}
	if err == nil {
		err = b.e.Start(t.Context(), name)
	}
	if err == nil && upper != "" {
		err = b.dmtcp.Awake(t.Context(), name)
	}
	if err != nil {
		b.Remove(t, name)
		return enginetest.Running{}, err
	}
	r := enginetest.Running{Container: checkpoint.Container{Name: name, PID: int(i.Pid)},
		Addr: net.JoinHostPort(i.Addr.String(), "7000")}
	if _, err := r.Ask("count"); err != nil {
		out, _ := os.ReadFile(i.Stdout)
		errs, _ := os.ReadFile(i.Stderr)
		t.Logf("%s does not answer: %v\n%s%s", name, err, out, errs)
		b.Remove(t, name)
		return r, err
	}
	return r, nil
}

func itoa(n uint32) string { return strconv.FormatUint(uint64(n), 10) }

func (b *bed) Keep(ctx context.Context, name, dir string) error {
	from, err := b.e.Upper(ctx, name)
	if err != nil {
		return err
	}
	return exec.CommandContext(ctx, "cp", "-a", from, filepath.Join(dir, "upper")).Run()
}

func (b *bed) Restore(t testing.TB, name, dir string) (enginetest.Running, error) {
	spec := b.spec(name)
	images := t.TempDir() // without the upper layer
	if out, err := exec.Command("sh", "-c", "cp -r "+dir+"/ckpt_* "+images).CombinedOutput(); err != nil {
		return enginetest.Running{}, fmt.Errorf("%w: %s", err, out)
	}
	if err := b.dmtcp.Revive(&spec, images); err != nil {
		return enginetest.Running{}, err
	}
	began := time.Now()
	r, err := b.run(t, spec, filepath.Join(dir, "upper"))
	t.Logf("%s answers after %v", name, time.Since(began))
	return r, err
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
	go func() {
		defer close(done)
		_, _ = b.e.Exec(ctx, name,
			engine.ExecSpec{Args: []string{"sleep", "1000"}, TTY: tty, Stdout: t.Output(), Stderr: t.Output()})
	}()
	t.Cleanup(func() { cancel(); <-done })
	for range 500 {
		if out, _ := exec.Command("pgrep", "-f", "^sleep 1000$").Output(); len(out) > 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("exec did not begin")
}

// makeImage makes one layer of directories that the host's are mounted at.
func (b *bed) makeImage(t testing.TB) {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+b.e.Socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx := metadata.AppendToOutgoingContext(t.Context(), "containerd-namespace", "dewpoint")
	c, labels := snapshotsapi.NewSnapshotsClient(conn), map[string]string{"containerd.io/gc.root": "now"}
	diff := digest.FromString("workload layer")
	r, err := c.Prepare(ctx,
		&snapshotsapi.PrepareSnapshotRequest{Snapshotter: "overlayfs", Key: "new", Labels: labels})
	if err != nil {
		t.Fatal(err)
	}
	root := r.Mounts[0].Source
	for _, script := range []string{
		"cd " + root + " && mkdir etc usr work && mkdir -m 1777 tmp && ln -s usr/bin bin && ln -s usr/sbin sbin && ln -s usr/lib lib && ln -s usr/lib64 lib64",
		"cp testdata/workload.py " + root, "cp -a /etc/ld.so.cache /etc/alternatives " + root + "/etc",
	} {
		if out, err := exec.Command("sh", "-c", script).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", script, err, out)
		}
	}
	if _, err := c.Commit(ctx,
		&snapshotsapi.CommitSnapshotRequest{Snapshotter: "overlayfs", Key: "new", Name: diff.String(),
			Labels: labels}); err != nil {
		t.Fatal(err)
	}
	b.img = testImage(diff)
	if err := b.e.Register(t.Context(), b.img, nil); err != nil {
		t.Fatal(err)
	}
}

func testImage(diff digest.Digest) *image.Image {
	marshal := func(v any) []byte {
		j, _ := json.Marshal(v) // of structs that can be
		return j
	}
	describe := func(kind string, b []byte) ocispec.Descriptor {
		return ocispec.Descriptor{MediaType: kind, Digest: digest.FromBytes(b), Size: int64(len(b))}
	}
	img := &image.Image{Ref: image.Reference{Host: "test.invalid", Path: "workload", Tag: "1"}}
	img.Spec = ocispec.Image{
		Platform: ocispec.Platform{OS: "linux", Architecture: "amd64"},
		Config: ocispec.ImageConfig{WorkingDir: "/work",
			Env: []string{"PATH=" + strings.Join([]string{"/usr/bin", "/usr/sbin"}, ":")}},
		RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{diff}},
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
