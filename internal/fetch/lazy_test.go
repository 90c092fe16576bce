package fetch

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pack"
	"dewpoint/internal/registry"
	"dewpoint/testkit"
	"dewpoint/testkit/packtest"
	"dewpoint/testkit/registrytest"

	"github.com/opencontainers/go-digest"
)

// unmounted is a layer.Server that remembers which waits failed.
type unmounted struct {
	mu     sync.Mutex
	failed []layer.Span
	gone   map[digest.Digest]bool
}

func (n *unmounted) Add(_ digest.Digest, data, _ *os.File) (string, error) { return data.Name(), nil }
func (n *unmounted) Tree(digest.Digest, *os.File) (string, error)          { return "", nil }
func (n *unmounted) Present(digest.Digest, int64, int64)                   {}
func (n *unmounted) Fail(_ digest.Digest, from, to int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.failed = append(n.failed, layer.Span{From: from, To: to})
}
func (*unmounted) Warm(digest.Digest, int64, int64) {}

func (*unmounted) Mounting(_ digest.Digest, _ string, mount func() error) error { return mount() }

func (n *unmounted) Remove(id digest.Digest) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gone == nil {
		n.gone = map[digest.Digest]bool{}
	}
	n.gone[id] = true
}

// lazyBed is a bed with an image, of two layers if nothing else is said, that
// has a pack.
type lazyBed struct {
	*bed
	server *unmounted
	tars   [][]byte
	img    registrytest.Pushed
	reads  []pack.Range // what the pack says is read
	key    ed25519.PrivateKey
	wrong  chan error
	whole  chan digest.Digest
}

func newLazyBed(t testing.TB, c image.Compression) *lazyBed {
	t.Helper()
	return newLazyBedOf(t, c,
		[]pack.Range{{Layer: 1, Offset: 8192, Length: 40960}, {Layer: 0, Offset: 4 << 20, Length: 300 << 10},
			{Layer: 1, Offset: 1 << 20, Length: 4096}},
		mixedTar(50), mixedTar(51))
}

// newLazyBedOf is newLazyBed for an image with a layer of each tar.
func newLazyBedOf(t testing.TB, c image.Compression, reads []pack.Range, tars ...[]byte) *lazyBed {
	t.Helper()
	lb := &lazyBed{bed: newBed(t), server: &unmounted{}, tars: tars, reads: reads, wrong: make(chan error, 4),
		whole: make(chan digest.Digest, 4)}
	var ls []registrytest.Layer
	for _, tar := range tars {
		ls = append(ls, registrytest.Layer{Tar: tar, Compression: c})
	}
	lb.img = lb.reg.PushImage("app:1", ls, registrytest.Options{})
	lb.restart(Config{})
	return lb
}

// mixed are the tars that mixedTar has made, by seed.
var mixed sync.Map

// mixedTar is 6 MB of files of changing nature, so that deflate has reason to
// begin blocks. Nobody writes into it.
func mixedTar(seed uint64) []byte {
	if have, ok := mixed.Load(seed); ok {
		return have.([]byte)
	}
	r := rand.New(rand.NewPCG(seed, 1))
	var files []registrytest.File
	for i := range 24 {
		b := make([]byte, 256<<10)
		for j := range b {
			b[j] = byte(r.IntN(2+i*11%250)) + byte(i)
		}
		files = append(files, registrytest.File{Name: fmt.Sprintf("dir/f%d", i), Body: string(b)})
	}
	tar := registrytest.Tar(files...)
	mixed.Store(seed, tar)
	return tar
}

// ear hears of layers that have become complete.
type ear struct {
	deaf
	whole chan digest.Digest
}

func (e ear) Whole(id digest.Digest) { e.whole <- id }

// restart gives the bed another store and puller, with the same registry.
func (lb *lazyBed) restart(cfg Config) {
	lb.t.Helper()
	lb.restartAs(lb.cfg.Registry, cfg)
}

// restartAs is restart with another client of the registry.
func (lb *lazyBed) restartAs(client *registry.Client, cfg Config) {
	lb.t.Helper()
	lb.must(lb.Close())
	lb.must(lb.layers.Close())
	lb.open(client, cfg)
}

func (lb *lazyBed) open(client *registry.Client, cfg Config) {
	var err error
	lb.layers, err = layer.Open(layer.Config{Dir: lb.dir, Server: lb.server,
		Mismatched: func(_ *layer.Partial, why error) { lb.wrong <- why }})
	lb.must(err)
	catalog, err := OpenCatalog(filepath.Join(lb.dir, "..", "images"), nil)
	lb.must(err)
	cfg.Registry, cfg.Layers, cfg.Catalog = client, lb.layers, catalog
	if cfg.Link == nil {
		cfg.Link = link.New(link.Config{Inflaters: 1})
	}
	cfg.Lazy.Audience = ear{whole: lb.whole}
	if cfg.Lazy.Wait == 0 {
		cfg.Lazy.Wait = 5 * time.Second
	}
	lb.Puller = NewPuller(cfg)
	lb.fresh, lb.hoursEvery = 0, 5*time.Millisecond
}

// built are the packs that were made, by image: all beds push the same ones.
var built sync.Map

type builtPack struct {
	bytes []byte
	stats pack.Stats
}

// build makes the pack. spoil may change a layer's data before.
func (lb *lazyBed) build(spoil func([][]byte)) (*bytes.Buffer, pack.Stats) {
	lb.t.Helper()
	if have, ok := built.Load(lb.img.Digest); ok && spoil == nil {
		b := have.(builtPack)
		return bytes.NewBuffer(bytes.Clone(b.bytes)), b.stats
	}
	in := pack.Input{Image: lb.img.Digest, Dir: lb.t.TempDir(),
		Profile: &pack.Profile{Version: 1, Image: lb.img.Digest, Reads: lb.reads}}
	tars := slices.Clone(lb.tars)
	if spoil != nil {
		for n := range tars {
			tars[n] = bytes.Clone(tars[n])
		}
		spoil(tars)
	}
	for i, l := range lb.img.Layers {
		in.Profile.Layers = append(in.Profile.Layers, l.DiffID)
		il := pack.InputLayer{DiffID: l.DiffID, Blob: l.Digest, BlobSize: l.Size, Size: int64(len(tars[i])),
			Compression: l.Compression(),
			Data:        bytes.NewReader(tars[i])}
		if spoil == nil {
			il.Open = func() (io.ReadCloser, error) {
				return lb.cfg.Registry.Open(lb.t.Context(), lb.ref(lb.img.Ref),
					registry.Blob{Digest: l.Digest, Size: l.Size}, 0, -1, registry.OpenOptions{})
			}
		} else {
			il.DiffID = digest.FromBytes(tars[i]) // what Build insists on; put right below
			in.Profile.Layers[i] = il.DiffID
		}
		in.Layers = append(in.Layers, il)
	}
	var out bytes.Buffer
	stats, err := pack.Build(lb.t.Context(), &out, in)
	lb.must(err)
	if spoil == nil {
		built.Store(lb.img.Digest, builtPack{bytes.Clone(out.Bytes()), stats})
	}
	return &out, stats
}

// publish pushes the pack beside the image.
func (lb *lazyBed) publish(b []byte, header digest.Digest, sign bool) {
	lb.t.Helper()
	about := map[string]string{pack.AnnotationBlob: digest.FromBytes(b).String(),
		pack.AnnotationSize:   strconv.Itoa(len(b)),
		pack.AnnotationHeader: header.String()}
	if sign {
		about[pack.AnnotationSignature] = base64.StdEncoding.EncodeToString(pack.Sign(lb.key, lb.img.Digest,
			header))
	}
	_, err := lb.cfg.Registry.PushArtifact(lb.t.Context(), lb.ref(lb.img.Ref),
		registry.Artifact{Type: pack.MediaType, Subject: lb.img.Desc, Annotations: about,
			Layers: []registry.ArtifactLayer{{MediaType: pack.MediaType, Digest: digest.FromBytes(b),
				Size: int64(len(b)),
				Open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil }}}})
	lb.must(err)
}

func (lb *lazyBed) start(ref string) *Pull {
	lb.t.Helper()
	pull, err := lb.Pull(lb.t.Context(), lb.ref(ref), Options{Lazy: true})
	lb.must(err)
	lb.must(pull.WaitMountable(lb.t.Context()))
	return pull
}

// read is what a reader of a partial layer does: it waits until [from, to) is there.
func (lb *lazyBed) read(n int, from, to int64) {
	lb.t.Helper()
	part := lb.layers.Partial(lb.img.Layers[n].DiffID)
	if part == nil {
		lb.t.Fatal("the layer is not partial")
	}
	lb.Want(part.Layer.DiffID, from, to)
	lb.eventually("wanted bytes", func() bool { at, _ := part.Absent(from, to); return at >= to })
	f, err := os.Open(part.Files().Data)
	lb.must(err)
	defer f.Close()
	got := make([]byte, to-from)
	_, err = f.ReadAt(got, from)
	lb.must(err)
	if !bytes.Equal(got, lb.tars[n][from:to]) {
		lb.t.Fatalf("layer %d, %d to %d: wrong bytes", n, from, to)
	}
}

func TestLazyStart(t *testing.T) {
	for _, c := range []image.Compression{image.Gzip, image.Zstd, image.Plain} {
		t.Run(string(c), func(t *testing.T) {
			lb := newLazyBed(t, c)
			b, stats := lb.build(nil)
			lb.publish(b.Bytes(), stats.Header, false)
			before := [2]int64{lb.reg.Served(lb.img.Layers[0].Digest), lb.reg.Served(lb.img.Layers[1].Digest)}
			served := func(n int) int64 { return lb.reg.Served(lb.img.Layers[n].Digest) - before[n] }
			pull := lb.start(lb.img.Ref)
			if pull.Lazy == nil || pull.Lazy.Trust != TrustRepository {
				t.Fatalf("not lazy: %q", pull.Why)
			}
			for _, r := range lb.reads {
				lb.read(r.Layer, r.Offset, r.Offset+r.Length)
			}
			if n := served(0) + served(1); n != 0 {
				t.Errorf("the start fetched %d bytes of layers", n)
			}
			// Something that no profile has seen.
			lb.read(0, 2<<20, 2<<20+4096)
			if c != image.Zstd { // whose one frame has to be fetched from its start
				if n := served(0); n > 3<<20 {
					t.Errorf("one page cost %d bytes", n)
				}
			}
			pull.Background()
			lb.must(pull.WaitComplete(t.Context()))
			for range lb.img.Layers {
				<-lb.whole
			}
			lb.eventually("partial layers are retired", func() bool {
				lb.server.mu.Lock()
				defer lb.server.mu.Unlock()
				return len(lb.server.gone) == 2
			})
			for n, l := range lb.img.Layers {
				got, err := lb.layers.Get(l.DiffID)
				lb.must(err)
				data, err := os.ReadFile(got.Files().Data)
				lb.must(err)
				if !bytes.Equal(data, lb.tars[n]) {
					t.Errorf("layer %d is wrong", n)
				}
			}
		})
	}
}

// Whose packs are believed.
func TestPackTrust(t *testing.T) {
	pub, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	lb := newLazyBed(t, image.Gzip)
	lb.key = key
	b, stats := lb.build(nil)
	for _, c := range []struct {
		name     string
		cfg      PackConfig
		signed   bool
		byDigest bool
		want     string // trust; "" is not lazy
	}{
		{"tag", PackConfig{}, false, false, TrustRepository},
		{"digest", PackConfig{}, false, true, ""},
		{"tag, signed wanted", PackConfig{Trust: TrustSigned, Key: pub}, false, false, ""},
		{"digest, signed, no key", PackConfig{}, true, true, ""},
		{"digest, signed", PackConfig{Key: pub}, true, true, TrustSigned},
		{"tag, pop", PackConfig{Trust: TrustPoP, Key: pub}, true, false, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			lb.publish(b.Bytes(), stats.Header, c.signed)
			lb.restart(Config{Packs: c.cfg})
			ref := lb.img.Ref
			if c.byDigest {
				ref = lb.img.ByDigest
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			pull, err := lb.Pull(ctx, lb.ref(ref), Options{Lazy: true})
			lb.must(err)
			got := ""
			if pull.Lazy != nil {
				got = pull.Lazy.Trust
			} else if pull.Why == "" {
				t.Error("no reason is given")
			}
			if got != c.want {
				t.Errorf("trust %q, want %q (%s)", got, c.want, pull.Why)
			}
			cancel()
			lb.restart(Config{})
			lb.must(os.RemoveAll(lb.dir))
		})
	}
}

// An image without a pack, or with a broken one, is pulled whole.
func TestLazyFallsBack(t *testing.T) {
	lb := newLazyBed(t, image.Gzip)
	b, stats := lb.build(nil)
	for name, spoil := range map[string]func() ([]byte, digest.Digest){
		"none":         nil,
		"nonsense":     func() ([]byte, digest.Digest) { return bytes.Repeat([]byte("x"), 5000), stats.Header },
		"other header": func() ([]byte, digest.Digest) { return b.Bytes(), digest.FromString("other") },
		"cut":          func() ([]byte, digest.Digest) { return b.Bytes()[:200], stats.Header },
	} {
		t.Run(name, func(t *testing.T) {
			if spoil != nil {
				pack, header := spoil()
				lb.publish(pack, header, false)
			}
			lb.restart(Config{})
			pull := lb.start(lb.img.Ref)
			if pull.Lazy != nil || pull.Why == "" {
				t.Errorf("lazy %v, why %q", pull.Lazy, pull.Why)
			}
			lb.must(pull.WaitComplete(t.Context()))
			lb.restart(Config{})
			lb.must(os.RemoveAll(lb.dir))
		})
	}
}

// A killed dewd's partial layers are served by the next one.
func TestRevive(t *testing.T) {
	lb := newLazyBed(t, image.Gzip)
	b, stats := lb.build(nil)
	lb.publish(b.Bytes(), stats.Header, false)
	lb.start(lb.img.Ref)
	r := lb.reads[0]
	lb.read(r.Layer, r.Offset, r.Offset+r.Length)
	lb.restart(Config{Lazy: LazyConfig{Off: true}})
	lb.Revive()
	lb.read(r.Layer, r.Offset, r.Offset+r.Length)
	lb.read(0, 3<<20, 3<<20+8192)
	lb.restart(Config{})
	lb.Revive()
	for range lb.img.Layers {
		<-lb.whole
	}
}

// A registry that is away: absent reads wait, then fail; when it is back they come.
func TestWantRegistryAway(t *testing.T) {
	lb := newLazyBed(t, image.Gzip)
	b, stats := lb.build(nil)
	lb.publish(b.Bytes(), stats.Header, false)
	lb.restart(Config{Lazy: LazyConfig{Wait: 700 * time.Millisecond}})
	lb.start(lb.img.Ref)
	lb.read(lb.reads[1].Layer, lb.reads[1].Offset, lb.reads[1].Offset+lb.reads[1].Length)
	lb.read(0, 3<<20, 3<<20+8192) // the points are here
	lb.reg.Close()
	id := lb.img.Layers[0].DiffID
	lb.Want(id, 0, 4096)
	lb.eventually("the wait fails", func() bool {
		lb.server.mu.Lock()
		defer lb.server.mu.Unlock()
		return len(lb.server.failed) == 1
	})
	if got := lb.server.failed[0]; got != (layer.Span{From: 0, To: 4096}) {
		t.Errorf("failed: %v", got)
	}
	lb.eventually("the failure is known", func() bool { return len(lb.FailedReads(time.Time{})) == 1 })
	if f := lb.FailedReads(time.Time{})[0]; f.Layer != id || f.Count != 1 || f.Err == nil {
		t.Errorf("known: %+v", f)
	}
	if f := lb.FailedReads(time.Now()); len(f) != 0 {
		t.Errorf("since now: %+v", f)
	}
	lb.must(lb.reg.Up())
	lb.read(0, 0, 4096)
}

// A pack that does not match its layers is found out, told, and not used again.
func TestPackLies(t *testing.T) {
	lb := newLazyBed(t, image.Gzip)
	honest := []image.Layer{lb.img.Layers[0], lb.img.Layers[1]}
	b, _ := lb.build(func(tars [][]byte) { tars[1][20000] ^= 0xff })
	// The false pack names the honest layers.
	relabelled, header := packtest.Relabel(t, b.Bytes(), honest)
	lb.publish(relabelled, header, false)
	lb.restart(Config{Packs: PackConfig{Dir: t.TempDir()}})
	pull := lb.start(lb.img.Ref)
	if pull.Lazy == nil {
		t.Fatalf("not lazy: %s", pull.Why)
	}
	<-pull.Lazy.done
	pull.Background()
	lb.must(pull.WaitComplete(t.Context()))
	select {
	case err := <-lb.wrong:
		if !errors.Is(err, layer.ErrEarlyMismatch) {
			t.Errorf("told: %v", err)
		}
		lb.must(lb.Quarantine(lb.img.Digest, err))
	case <-time.After(testkit.Limit):
		t.Fatal("unmounted noticed")
	}
	if _, err := lb.findPack(t.Context(), pull.Image); err == nil ||
		!strings.Contains(err.Error(), "quarantined") {
		t.Errorf("the pack is found again: %v", err)
	}
	for n, l := range honest {
		got, err := lb.layers.Get(l.DiffID)
		lb.must(err)
		data, err := os.ReadFile(got.Files().Data)
		lb.must(err)
		if !bytes.Equal(data, lb.tars[n]) {
			t.Errorf("layer %d is wrong", n)
		}
	}
}

// Packs beyond the bound go, those that were used last stay.
func TestCollectPacks(t *testing.T) {
	b := newBed(t)
	b.cfg.Packs = PackConfig{Dir: t.TempDir(), MaxBytes: 2500}
	var ids []digest.Digest
	for i := range 4 {
		id := digest.FromString(fmt.Sprint(i))
		ids = append(ids, id)
		b.must(os.WriteFile(b.PackPath(id), make([]byte, 1000), 0o600))
		at := time.Now().Add(time.Duration(i-10) * time.Hour)
		b.must(os.Chtimes(b.PackPath(id), at, at))
	}
	if b.localPack(ids[0]) == nil { // now it was used last
		t.Fatal("no pack")
	}
	freed, err := b.Collect(t.Context(), 0, func(digest.Digest) bool { return false })
	b.must(err)
	var left []int
	for i, id := range ids {
		if _, err := os.Stat(b.PackPath(id)); err == nil {
			left = append(left, i)
		}
	}
	if freed.Bytes != 2000 || !slices.Equal(left, []int{0, 3}) {
		t.Errorf("freed %d, left %v", freed.Bytes, left)
	}
}

// A pack whose chunks are broken is given up for the layers' streams; what it
// says is read comes all the same, and right.
func TestBrokenChunk(t *testing.T) {
	lb := newLazyBed(t, image.Gzip)
	b, stats := lb.build(nil)
	spoilt := bytes.Clone(b.Bytes())
	h, err := pack.Open(bytes.NewReader(spoilt))
	lb.must(err)
	at := h.Header.ChunkSpan(0)
	for i := range at.Length {
		spoilt[at.Offset+i] ^= 0x55
	}
	lb.publish(spoilt, stats.Header, false)
	pull := lb.start(lb.img.Ref)
	if pull.Lazy == nil {
		t.Fatalf("not lazy: %s", pull.Why)
	}
	for _, r := range lb.reads {
		lb.read(r.Layer, r.Offset, r.Offset+r.Length)
	}
	pull.Background()
	lb.must(pull.WaitComplete(t.Context()))
}

// What lies far behind a pack's stream is fetched by itself; that of a pack which is passed on, and so read
// to its end, is waited for.
func TestPassedPackComesOnce(t *testing.T) {
	testkit.Long(t)
	for _, passed := range []bool{false, true} {
		t.Run(fmt.Sprint("passed ", passed), func(t *testing.T) {
			const size = 6 << 20
			lb := newLazyBedOf(t, image.Gzip, []pack.Range{{Length: size}}, registrytest.RandomTar(52, 1, size))
			b, _ := lb.build(nil)
			s, err := pack.Open(bytes.NewReader(b.Bytes()))
			lb.must(err)
			chunks := s.Header.Chunks
			if len(chunks) <= aheadOfStream+2 {
				t.Fatalf("%d chunks only", len(chunks))
			}
			img, err := lb.resolve(t.Context(), lb.ref(lb.img.Ref), Options{},
				&lookup{p: lb.packs, done: make(chan struct{})})
			lb.must(err)
			var alone atomic.Int32
			goOn := make(chan struct{})
			f := &packFile{size: int64(b.Len()), passed: passed,
				open: func(_ context.Context, at pack.Span) (io.ReadCloser, error) {
					all := io.NewSectionReader(bytes.NewReader(b.Bytes()), at.Offset, at.Length)
					if at.Length < int64(b.Len()) {
						alone.Add(1)
						return io.NopCloser(all), nil
					}
					first := s.Header.ChunkSpan(1).Offset
					return io.NopCloser(io.MultiReader(io.LimitReader(all, first), &gated{open: goOn, Reader: all})), nil
				}}
			_, err = lb.openStart(t.Context(), img, Options{}, f, outlook{rate: 1e5, absent: 100e6})
			lb.must(err)
			last := chunks[len(chunks)-1].Ranges[0]
			lb.Want(lb.img.Layers[0].DiffID, last.Offset, last.Offset+1)
			if passed {
				time.Sleep(100 * time.Millisecond)
			} else {
				lb.eventually("a request for it alone", func() bool { return alone.Load() == 1 })
			}
			close(goOn)
			lb.read(0, last.Offset, last.Offset+last.Length)
			if n := alone.Load(); passed && n > 0 {
				t.Errorf("%d chunks crossed the link twice", n)
			}
		})
	}
}

// gated is read once open is closed.
type gated struct {
	io.Reader
	open chan struct{}
}

func (g *gated) Read(b []byte) (int, error) {
	<-g.open
	return g.Reader.Read(b)
}
