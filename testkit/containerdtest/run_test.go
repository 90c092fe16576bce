package containerdtest_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/opencontainers/go-digest"

	"dewpoint/internal/layer/mount"
	"dewpoint/internal/snapshot"
	"dewpoint/testkit"
	"dewpoint/testkit/containerdtest"
	"dewpoint/testkit/registrytest"
	"dewpoint/testkit/snapshottest"
)

func TestMain(m *testing.M) {
	testkit.RequireRoot(m, "they run containers")
	os.Exit(m.Run())
}

// node is a containerd with the snapshotter, and a registry with one image.
type node struct {
	*containerdtest.Containerd
	t        *testing.T
	dir      string
	store    *snapshottest.Store
	snap     *snapshot.Snapshotter
	registry *registrytest.Server
	image    registrytest.Pushed
	tars     [][]byte
	down     func() // ends the plugins' server and closes the snapshotter
}

func newNode(t *testing.T, v containerdtest.Version) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "node")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o711); err != nil { // for containers in user namespaces
		t.Fatal(err)
	}
	n := &node{t: t, dir: dir, registry: registrytest.New(t)}
	for _, d := range []string{"layers", "c"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o711); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(n.remove)
	n.store = snapshottest.New(filepath.Join(dir, "layers"))
	n.up()
	t.Cleanup(func() { n.down() })
	n.Containerd = containerdtest.Start(t, v, filepath.Join(dir, "c"), n.socket())
	n.push()
	return n
}

func (n *node) socket() string { return filepath.Join(n.dir, "s.sock") }

// up opens the snapshotter and serves it, as dewd does.
func (n *node) up() {
	n.t.Helper()
	backend, err := mount.New(mount.EROFS)
	if err != nil {
		n.t.Fatal(err)
	}
	n.snap, err = snapshot.New(n.t.Context(), snapshot.Config{
		Root: filepath.Join(n.dir, "r"), Layers: n.store, Backend: backend,
		Log: slog.New(slog.NewTextHandler(n.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	if err != nil {
		n.t.Fatal(err)
	}
	stop := n.serve()
	n.down = func() {
		stop()
		n.snap.Close()
	}
}

// serve starts the plugins' server and returns what ends it. It reads blobs
// from a containerd that starts later.
func (n *node) serve() (stop func()) {
	n.t.Helper()
	client, err := containerd.New(filepath.Join(n.dir, "c", "c.sock"), containerd.WithTimeout(0))
	if err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- snapshot.Serve(ctx, n.socket(), n.snap, snapshot.NewDiff(n.snap, client.ContentStore()))
	}()
	return func() {
		cancel()
		if err := <-done; err != nil {
			n.t.Error(err)
		}
		client.Close()
	}
}

func (n *node) remove() {
	if err := snapshottest.UnmountAll(n.dir); err != nil {
		n.t.Error(err)
	}
	if err := os.RemoveAll(n.dir); err != nil {
		n.t.Error(err)
	}
}

// push makes the image: the libraries of cat, cat, and something to read; the
// last layer hides a file of the second.
func (n *node) push() {
	n.t.Helper()
	n.tars = [][]byte{
		tarOf(n.t, libraries(n.t, "/bin/cat")),
		tarOf(n.t, map[string][]byte{"cat": read(n.t, "/bin/cat"), "hidden": []byte("x")}),
		tarOf(n.t, map[string][]byte{"greeting": []byte("hello\n"), ".wh.hidden": nil, "fifo": nil}),
	}
	var layers []registrytest.Layer
	for _, tar := range n.tars {
		layers = append(layers, registrytest.Layer{Tar: tar})
	}
	n.image = n.registry.PushImage("test/greet:1", layers, registrytest.Options{})
}

// know puts the image's layers into the store, as dew pull does.
func (n *node) know() {
	n.t.Helper()
	var ids []digest.Digest
	for _, tar := range n.tars {
		id, _, err := n.store.Add(n.t.Context(), bytes.NewReader(tar))
		if err != nil {
			n.t.Fatal(err)
		}
		ids = append(ids, id)
	}
	n.store.AddChain(ids...)
}

func libraries(t testing.TB, program string) map[string][]byte {
	out, err := exec.Command("ldd", program).Output()
	if err != nil {
		t.Fatal(err)
	}
	files := make(map[string][]byte)
	for _, path := range regexp.MustCompile(`/\S+`).FindAllString(string(out), -1) {
		files[strings.TrimPrefix(path, "/")] = read(t, path)
	}
	return files
}

func read(t testing.TB, path string) []byte {
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func tarOf(t testing.TB, files map[string][]byte) []byte {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for name, content := range files {
		h := &tar.Header{Name: name, Mode: 0o755, Size: int64(len(content))}
		if name == "fifo" {
			h.Typeflag = tar.TypeFifo
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		w.Write(content)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// pull runs ctr images pull.
func (n *node) pull(args ...string) {
	n.t.Helper()
	n.Ctr(append(append([]string{"images", "pull", "--snapshotter", "dewpoint", "--plain-http"}, args...),
		n.image.Ref)...)
}

// greet runs a container of the image and checks what it prints.
func (n *node) greet(image string, args ...string) {
	n.t.Helper()
	id := fmt.Sprintf("snap-%d-%s", os.Getpid(), digest.FromString(n.t.Name() + fmt.Sprint(args)).Encoded()[:12])
	all := append([]string{"run", "--rm", "--snapshotter", "dewpoint"}, args...)
	out := n.Ctr(append(all, image, id, "/cat", "/greeting")...)
	if !strings.Contains(out, "hello") {
		n.t.Errorf("the container says %q", out)
	}
}

// kinds counts the committed snapshots that are image layers, and directories.
func (n *node) kinds() (layers, dirs int) {
	n.t.Helper()
	err := n.snap.Walk(n.t.Context(), func(_ context.Context, i snapshots.Info) error {
		switch {
		case i.Kind != snapshots.KindCommitted:
		case i.Labels[snapshot.LabelLayer] != "":
			layers++
		default:
			dirs++
		}
		return nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return layers, dirs
}

func (n *node) wantKinds(layers, dirs int) {
	n.t.Helper()
	if l, d := n.kinds(); l != layers || d != dirs {
		n.t.Errorf("%d image layers and %d directories, want %d and %d", l, d, layers, dirs)
	}
	mounts, err := snapshottest.MountsUnder(filepath.Join(n.dir, "r", "m"))
	if err != nil || len(mounts) != layers {
		n.t.Errorf("%d mounted layers, %v; want %d", len(mounts), err, layers)
	}
}

// blobs counts how many of the image's layers containerd has fetched.
func (n *node) blobs() (count int) {
	n.t.Helper()
	have := n.Ctr("content", "ls", "-q")
	for _, l := range n.image.Layers {
		if strings.Contains(have, l.Digest.String()) {
			count++
		}
	}
	return count
}

// forget removes the image and expects nothing to stay.
func (n *node) forget(images ...string) {
	n.t.Helper()
	n.Ctr(append([]string{"images", "rm", "--sync"}, images...)...)
	n.wantKinds(0, 0)
	if used := n.snap.InUse(); len(used) != 0 {
		n.t.Errorf("in use: %v", used)
	}
	if left, _ := os.ReadDir(filepath.Join(n.dir, "r", "snapshots")); len(left) != 0 {
		n.t.Errorf("directories: %v", left)
	}
}

// archive writes the image as a tar for ctr images import.
func (n *node) archive() string {
	n.t.Helper()
	file := filepath.Join(n.dir, "image.tar")
	n.Ctr("images", "export", "--platform", "linux/"+runtime.GOARCH, file, n.image.Ref)
	return file
}
