package snapshot_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"go.uber.org/goleak"

	layermount "dewpoint/internal/layer/mount"
	"dewpoint/internal/snapshot"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/snapshottest"
)

func TestMain(m *testing.M) {
	testkit.RequireRoot(m, "they mount file systems")
	if dir := os.Getenv(crashEnv); dir != "" {
		crashChild(dir)
		return
	}
	goleak.VerifyTestMain(m)
}

// bed is a snapshotter over a store of its own.
type bed struct {
	*snapshot.Snapshotter
	t       *testing.T
	dir     string
	store   *snapshottest.Store
	backend *snapshottest.Backend
}

func newBed(t *testing.T) *bed {
	t.Helper()
	return newBedOn(t, layermount.EROFS)
}

// onEach runs a test on every mount backend.
func onEach(t *testing.T, test func(b *bed)) {
	for _, name := range spec.Mounts {
		t.Run(name, func(t *testing.T) { test(newBedOn(t, name)) })
	}
}

func newBedOn(t *testing.T, backend string) *bed {
	t.Helper()
	dir, err := os.MkdirTemp("", "snap")
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{t: t, dir: dir}
	if b.backend, err = snapshottest.NewBackend(backend); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "layers"), 0o700); err != nil {
		t.Fatal(err)
	}
	b.store = snapshottest.New(filepath.Join(dir, "layers"))
	b.open()
	t.Cleanup(b.remove)
	return b
}

func (b *bed) root() string { return filepath.Join(b.dir, "r") }

func (b *bed) open() {
	b.t.Helper()
	s, err := snapshot.New(b.t.Context(), snapshot.Config{
		Root: b.root(), Layers: b.store, Backend: b.backend, Log: slog.New(slog.NewTextHandler(b.t.Output(), nil)),
	})
	if err != nil {
		b.t.Fatal(err)
	}
	b.Snapshotter = s
}

// reboot closes the snapshotter, unmounts everything, and opens it again.
func (b *bed) reboot() {
	b.t.Helper()
	b.shut()
	b.open()
}

func (b *bed) shut() {
	b.t.Helper()
	if err := b.Close(); err != nil {
		b.t.Fatal(err)
	}
	if err := snapshottest.UnmountAll(b.dir); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bed) remove() {
	b.Close()
	if err := snapshottest.UnmountAll(b.dir); err != nil {
		b.t.Error(err)
	}
	if err := os.RemoveAll(b.dir); err != nil {
		b.t.Error(err)
	}
}

// layer adds a layer with these files, name and content in turn.
func (b *bed) layer(files ...string) digest.Digest {
	b.t.Helper()
	id, _, err := b.store.Add(b.t.Context(), bytes.NewReader(tarOf(b.t, files...)))
	if err != nil {
		b.t.Fatal(err)
	}
	return id
}

func tarOf(t testing.TB, files ...string) []byte {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for i := 0; i+1 < len(files); i += 2 {
		h := &tar.Header{Name: files[i], Mode: 0o644, Size: int64(len(files[i+1]))}
		if files[i][len(files[i])-1] == '/' {
			h.Typeflag, h.Mode = tar.TypeDir, 0o755
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(files[i+1])); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func ref(chain digest.Digest) snapshots.Opt {
	return snapshots.WithLabels(map[string]string{snapshots.LabelSnapshotRef: chain.String()})
}

// pull prepares the layers of an image as containerd's unpacker does and
// expects each to be there. It returns the topmost chain.
func (b *bed) pull(ids ...digest.Digest) string {
	b.t.Helper()
	parent := ""
	for i := range ids {
		chain := b.store.AddChain(ids[:i+1]...)
		_, err := b.Prepare(b.t.Context(), fmt.Sprintf("extract-%d %s", i, chain), parent, ref(chain))
		if !errdefs.IsAlreadyExists(err) {
			b.t.Fatalf("layer %d: %v, want already exists", i, err)
		}
		parent = chain.String()
		if _, err := b.Stat(b.t.Context(), parent); err != nil {
			b.t.Fatal(err)
		}
	}
	return parent
}

// mount mounts a snapshot's mounts on a fresh directory.
func (b *bed) mount(mounts []mount.Mount) string {
	b.t.Helper()
	dir, err := os.MkdirTemp(b.dir, "mnt")
	if err != nil {
		b.t.Fatal(err)
	}
	if err := mount.All(mounts, dir); err != nil {
		b.t.Fatalf("mount %v: %v", mounts, err)
	}
	return dir
}

func (b *bed) unmount(dir string) {
	b.t.Helper()
	if err := mount.UnmountAll(dir, 0); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bed) prepare(key, parent string, opts ...snapshots.Opt) []mount.Mount {
	b.t.Helper()
	m, err := b.Prepare(b.t.Context(), key, parent, opts...)
	if err != nil {
		b.t.Fatal(err)
	}
	return m
}

func (b *bed) want(path, content string) {
	b.t.Helper()
	got, err := os.ReadFile(path)
	if err != nil || string(got) != content {
		b.t.Errorf("%s holds %q, %v; want %q", path, got, err, content)
	}
}

// mounted is the number of layers that are mounted.
func (b *bed) mounted() int {
	b.t.Helper()
	m, err := snapshottest.MountsUnder(filepath.Join(b.root(), "m"))
	if err != nil {
		b.t.Fatal(err)
	}
	return len(m)
}

// written gives a new active snapshot some content.
func (b *bed) written(key, parent string, files ...string) {
	b.t.Helper()
	dir := b.mount(b.prepare(key, parent))
	for i := 0; i+1 < len(files); i += 2 {
		if err := os.WriteFile(filepath.Join(dir, files[i]), []byte(files[i+1]), 0o644); err != nil {
			b.t.Fatal(err)
		}
	}
	b.unmount(dir)
}

func (b *bed) commit(name, key string, opts ...snapshots.Opt) {
	b.t.Helper()
	if err := b.Commit(b.t.Context(), name, key, opts...); err != nil {
		b.t.Fatal(err)
	}
}

type ctx = context.Context

var background = context.Background()
