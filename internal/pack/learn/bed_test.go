package learn

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/fetch"
	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/layer/toc"
	"dewpoint/internal/pack"
	"dewpoint/internal/registry"
	"dewpoint/internal/snapshot"
	"dewpoint/testkit"
	"dewpoint/testkit/mounttest"
	"dewpoint/testkit/registrytest"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

const childArg = "build-a-pack"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == childArg {
		err := Child(context.Background(), os.Stdin, os.Stdout)
		if nice, _ := unix.Getpriority(unix.PRIO_PROCESS, 0); err == nil && nice != 1 { // 20 less the nice value
			err = fmt.Errorf("it worked with priority %d", nice)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	mounttest.Main(m)
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// bed is a Learner over a real store, snapshotter and registry.
type bed struct {
	*Learner
	t      testing.TB
	reg    *registrytest.Server
	puller *fetch.Puller
	snaps  *snapshot.Snapshotter
	packs  string
	built  chan digest.Digest // packs that are to be shared

	mu    sync.Mutex
	paths map[digest.Digest]string // where layers were mounted anew
}

// bare keeps snapshots of layers that are here, and fetches none.
type bare struct{ *fetch.Puller }

func (b bare) Fetch(context.Context, snapshot.Want) (digest.Digest, error) {
	return "", snapshot.ErrNotHere
}
func (b bare) Files(id digest.Digest) (mount.Files, error) {
	return b.Puller.Files(context.Background(), id)
}
func (b bare) Import(context.Context, ocispec.Descriptor, io.Reader) (digest.Digest, int64, error) {
	return "", 0, errors.New("not here")
}

// shared tells which packs are given to others.
type shared chan<- digest.Digest

// SharePack implements Shared.
func (s shared) SharePack(manifest digest.Digest) { s <- manifest }

// Fresh implements Mounts.
func (b *bed) Fresh(ctx context.Context, id digest.Digest) (string, func(), error) {
	path, release, err := b.snaps.Fresh(ctx, id)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.paths[id] = path
	return path, release, err
}

func newBed(t testing.TB, backend string, change func(*Config)) *bed {
	t.Helper()
	dir := t.TempDir()
	b := &bed{t: t, reg: registrytest.New(t), packs: filepath.Join(dir, "packs"), built: make(chan digest.Digest, 8),
		paths: map[digest.Digest]string{}}
	check(t, os.Mkdir(b.packs, 0o700))
	client, err := registry.New(registry.Config{Hosts: map[string]registry.Host{b.reg.Host(): {PlainHTTP: true}},
		DockerConfig: filepath.Join(dir, "none"), Backoff: time.Millisecond})
	check(t, err)
	t.Cleanup(client.Close)
	layers, err := layer.Open(layer.Config{Dir: filepath.Join(dir, "layers"), Tree: backend == mount.Tree,
		Points: true})
	check(t, err)
	t.Cleanup(func() { layers.Close() })
	log := slog.New(slog.DiscardHandler)
	catalog, err := fetch.OpenCatalog(filepath.Join(dir, "images"), log)
	check(t, err)
	b.puller = fetch.NewPuller(fetch.Config{Registry: client, Layers: layers, Catalog: catalog,
		Link:  link.New(link.Config{}),
		Packs: fetch.PackConfig{Dir: b.packs}})
	t.Cleanup(func() { b.puller.Close() })
	back, err := mount.New(backend)
	check(t, err)
	cfg := Config{Mounts: b, Layers: layers, Packs: b.puller, Registry: client, Images: catalog,
		Shared: shared(b.built),
		Exec:   []string{"/proc/self/exe", childArg}, Dir: filepath.Join(dir, "state"), Node: "n1",
		After: 10 * time.Millisecond}
	if change != nil {
		change(&cfg)
	}
	b.snaps, err = snapshot.New(t.Context(),
		snapshot.Config{Root: filepath.Join(dir, "snaps"), Layers: bare{b.puller}, Backend: back,
			Prepared: func(ids []digest.Digest, gone <-chan struct{}) { b.Learner.Prepared(ids, gone) }})
	check(t, err)
	t.Cleanup(func() { b.snaps.Close() })
	b.Learner = New(cfg)
	t.Cleanup(b.Learner.Close)
	return b
}

const page = 4096

// image pushes and pulls an image of two layers: a with pages of "a" and a
// page of "both", under b with pages of "b" and one of "both".
func (b *bed) image(name string) *image.Image {
	b.t.Helper()
	body := func(s string, pages int) string {
		var w strings.Builder
		for i := range pages * page / 16 {
			fmt.Fprintf(&w, "%-10s%5d\n", s, i)
		}
		return w.String()
	}
	one := registrytest.Tar(registrytest.File{Name: "d/a", Body: body("a of "+name, 40)},
		registrytest.File{Name: "both", Body: body("below", 1)})
	two := registrytest.Tar(registrytest.File{Name: "b", Body: body("b", 300)},
		registrytest.File{Name: "both", Body: body("above", 1)})
	p := b.reg.PushImage(name,
		[]registrytest.Layer{{Tar: one, Compression: image.Gzip}, {Tar: two, Compression: image.Gzip}},
		registrytest.Options{})
	return b.pull(p.Ref)
}

func (b *bed) pull(name string) *image.Image {
	b.t.Helper()
	ref, err := image.ParseReference(name)
	check(b.t, err)
	pull, err := b.puller.Pull(b.t.Context(), ref, fetch.Options{})
	check(b.t, err)
	check(b.t, pull.WaitComplete(b.t.Context()))
	return pull.Image
}

// overlay is what a container of the image would see.
func (b *bed) overlay(img *image.Image) string {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	var lower []string
	for _, l := range img.Layers {
		lower = append(lower, b.paths[l.DiffID])
	}
	return mounttest.Overlay(b.t, lower)
}

// start does what a container's start would: a process reads pages 3 and 4 of
// d/a, page 1 of b and all of both.
func (b *bed) start(root string) {
	b.t.Helper()
	for _, dd := range []string{"if=d/a skip=3 count=2", "if=b skip=1 count=1", "if=both count=1"} {
		cmd := exec.Command("dd", append(strings.Fields(dd), "bs=4096", "of=/dev/null", "status=none")...)
		cmd.Dir = root
		if out, err := cmd.CombinedOutput(); err != nil {
			b.t.Fatalf("%v: %s", err, out)
		}
	}
}

// startReads is what start reads: layer, file and page.
var startReads = []fileRead{{0, "d/a", 3}, {0, "d/a", 4}, {1, "b", 1}, {1, "both", 0}}

type fileRead struct {
	layer int
	name  string
	page  int64
}

// tarPages are the pages of the layers' tars that hold what was read.
func (b *bed) tarPages(img *image.Image, reads []fileRead) []string {
	b.t.Helper()
	var out []string
	for _, r := range reads {
		l, err := b.cfg.Layers.Peek(img.Layers[r.layer].DiffID)
		check(b.t, err)
		f, err := os.Open(l.Files().Data)
		check(b.t, err)
		list, err := toc.Read(f)
		f.Close()
		check(b.t, err)
		i := slices.IndexFunc(list.Entries, func(e *toc.Entry) bool { return e.Name == r.name })
		at := list.Entries[i].Ranges[0].Data + r.page*page
		for p := at / page; p <= (at+page-1)/page; p++ {
			out = append(out, fmt.Sprintf("%d:%d", r.layer, p))
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func (b *bed) wait() {
	b.t.Helper()
	select {
	case <-b.built:
	case <-time.After(testkit.Limit):
		b.t.Fatal("no pack was built")
	}
}

// packed gives the pages that the image's pack holds, as tarPages does, and
// checks that they are the layers'.
func (b *bed) packed(img *image.Image) []string {
	b.t.Helper()
	raw, err := os.ReadFile(b.cfg.Packs.PackPath(img.Desc.Digest))
	check(b.t, err)
	s, err := pack.Open(bytes.NewReader(raw))
	check(b.t, err)
	if s.Header.Image != img.Desc.Digest || len(s.Header.Layers) != len(img.Layers) {
		b.t.Fatalf("header %+v", s.Header)
	}
	var out []string
	for {
		it, err := s.Next()
		if err == io.EOF {
			slices.Sort(out)
			return out
		}
		check(b.t, err)
		if it.Kind != pack.KindChunk {
			continue
		}
		check(b.t, s.Header.Chunks[it.Chunk].Each(it.Data, func(l int, off int64, data []byte) error {
			for p := off / page; p*page < off+int64(len(data)); p++ {
				out = append(out, fmt.Sprintf("%d:%d", l, p))
			}
			return b.compare(s.Header.Layers[l].DiffID, off, data)
		}))
	}
}

// holds fails the test unless the pack holds exactly what was read.
func (b *bed) holds(img *image.Image, reads []fileRead) {
	b.t.Helper()
	if got, want := b.packed(img), b.tarPages(img, reads); !slices.Equal(got, want) {
		b.t.Errorf("the pack holds %v\nread was      %v", got, want)
	}
}

func (b *bed) compare(id digest.Digest, off int64, data []byte) error {
	l, err := b.cfg.Layers.Peek(id)
	if err != nil {
		return err
	}
	f, err := os.Open(l.Files().Data)
	if err != nil {
		return err
	}
	defer f.Close()
	have := make([]byte, len(data))
	if _, err := f.ReadAt(have, off); err != nil || !bytes.Equal(have, data) {
		return fmt.Errorf("%d bytes at %d of %s differ: %v", len(data), off, id, err)
	}
	return nil
}
