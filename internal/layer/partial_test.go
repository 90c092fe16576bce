package layer_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/presence"
	"dewpoint/internal/layer/toc"
	"dewpoint/testkit"

	"github.com/opencontainers/go-digest"
)

// shower is a layer.Server that shows nothing and remembers what it was told.
type shower struct {
	mu      sync.Mutex
	added   map[digest.Digest]int
	present map[digest.Digest][]layer.Span
	removed []digest.Digest
}

func newShower() *shower {
	return &shower{added: map[digest.Digest]int{}, present: map[digest.Digest][]layer.Span{}}
}

func (s *shower) Add(id digest.Digest, data, present *os.File) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.added[id]++
	return data.Name(), nil
}

func (s *shower) Tree(id digest.Digest, _ *os.File) (string, error) {
	return id.Encoded() + ".tree", nil
}

func (s *shower) Present(id digest.Digest, from, to int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.present[id] = append(s.present[id], layer.Span{From: from, To: to})
}

func (s *shower) Fail(digest.Digest, int64, int64) {}

func (*shower) Warm(digest.Digest, int64, int64) {}

func (*shower) Mounting(_ digest.Digest, _ string, mount func() error) error { return mount() }

func (s *shower) Remove(id digest.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.removed = append(s.removed, id)
}

func table(t testing.TB, tarball []byte) []byte {
	t.Helper()
	tab, err := toc.MakeTable(bytes.NewReader(tarball), int64(len(tarball)), nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := tab.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// shown is the bytes of [from, to) as readers of the partial layer see them.
func shown(t *testing.T, p *layer.Partial, from, to int64) []byte {
	t.Helper()
	if at, _ := p.Absent(from, to); at < to {
		t.Fatalf("bytes %d to %d: %d is absent", from, to, at)
	}
	f, err := os.Open(p.Files().Data)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, to-from)
	if _, err := f.ReadAt(b, from); err != nil {
		t.Fatal(err)
	}
	return b
}

// A layer is begun, gets bytes early, is filled meanwhile, survives a restart
// in between, and ends as any other layer.
func TestPartial(t *testing.T) {
	tarball := makeTar(t, 9<<20, 31)
	for _, c := range []image.Compression{image.Gzip, image.Zstd, image.Plain} {
		t.Run(string(c), func(t *testing.T) {
			dir, want, srv := t.TempDir(), pack(t, tarball, c), newShower()
			size := int64(len(tarball))
			s := open(t, dir, layer.Config{Server: srv, Interval: 256 << 10})
			p, err := s.Begin(want.layer, table(t, tarball), layer.Origin{})
			if err != nil {
				t.Fatal(err)
			}
			if again, err := s.Begin(want.layer, nil, layer.Origin{}); again != p || err != nil {
				t.Fatalf("begun twice: %v", err)
			}
			early := []layer.Span{{From: 5 * presence.Page, To: 9 * presence.Page},
				{From: (size - 1) / presence.Page * presence.Page, To: size}}
			for _, e := range early {
				if err := p.Put(e.From, tarball[e.From:e.To]); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(shown(t, p, e.From, e.To), tarball[e.From:e.To]) {
					t.Fatal("what was put is not what is shown")
				}
			}
			if at, to := p.Absent(0, size); at != 0 || to != early[0].From {
				t.Errorf("absent: %d to %d", at, to)
			}
			// Half of the stream, then another process.
			ctx, cancel := context.WithCancel(t.Context())
			_, err = s.Fill(ctx, want.layer, &source{blob: want.blob, cut: int64(len(want.blob)) / 2}).Wait(ctx)
			cancel()
			if !errors.Is(err, errCut) {
				t.Fatal(err)
			}
			s.Close()
			s = open(t, dir, layer.Config{Server: srv})
			defer func() { s.Close() }()
			if p = s.Partial(want.layer.DiffID); p == nil || p.Whole() {
				t.Fatal("the next process does not go on with the partial layer")
			}
			if srv.added[want.layer.DiffID] != 2 {
				t.Error("the layer was not served again")
			}
			for _, e := range early {
				if !bytes.Equal(shown(t, p, e.From, e.To), tarball[e.From:e.To]) {
					t.Fatal("after a restart early bytes are wrong")
				}
			}
			l := mustComplete(t, s, want.layer, &source{blob: want.blob})
			checkData(t, l, want)
			if !p.Whole() || !bytes.Equal(shown(t, p, 0, size), tarball) {
				t.Error("what is mounted from before does not see the whole layer")
			}
			s.Release(want.layer.DiffID) // not retired: nothing happens
			if s.Partial(want.layer.DiffID) != p {
				t.Error("forgotten though it is in use")
			}
			s.Retire(want.layer.DiffID)
			s.Release(want.layer.DiffID)
			left, _ := filepath.Glob(filepath.Join(filepath.Dir(l.Files().Data), "*"))
			if len(left) != 3 {
				t.Errorf("left of a partial layer: %v", left)
			}
			if len(srv.removed) != 1 || s.Partial(want.layer.DiffID) != nil {
				t.Errorf("not forgotten: %v", srv.removed)
			}
		})
	}
}

// The index of a partial layer is that of the whole one, byte for byte.
func TestPartialIndex(t *testing.T) {
	want := pack(t, makeTar(t, 3<<20, 32), image.Gzip)
	whole := open(t, t.TempDir(), layer.Config{})
	defer whole.Close()
	l := mustComplete(t, whole, want.layer, &source{blob: want.blob})
	s := open(t, t.TempDir(), layer.Config{Server: newShower()})
	defer s.Close()
	p, err := s.Begin(want.layer, table(t, want.tar), layer.Origin{})
	if err != nil {
		t.Fatal(err)
	}
	a, err1 := os.ReadFile(p.Files().Index)
	b, err2 := os.ReadFile(l.Files().Index)
	if err1 != nil || err2 != nil || !bytes.Equal(a, b) {
		t.Errorf("indexes differ: %v, %v", err1, err2)
	}
}

// Early bytes, or a table, that are not the layer's are found when the stream
// has passed. The layer is then right, and what was mounted gets the rest of it.
func TestPartialLie(t *testing.T) {
	testkit.Long(t)
	tarball := makeTar(t, 5<<20, 33)
	other := append([]byte(nil), tarball...)
	copy(other[100:], "0004755") // the first file is setuid there
	var sum int
	copy(other[148:156], "        ")
	for _, c := range other[:512] {
		sum += int(c)
	}
	copy(other[148:], fmt.Sprintf("%06o\x00 ", sum))
	longer := append(append([]byte(nil), tarball[:len(tarball)-1024]...), makeTar(t, 2<<20, 34)...)
	for name, lie := range map[string]struct {
		table []byte
		spoil bool
		tree  bool // layers are served as trees
	}{"bytes": {tarball, true, false}, "shorter": {tarball[:len(tarball)-512], false, false},
		"longer": {longer, false, false},
		"names":  {other, false, false}, "names in a tree": {other, false, true}} {
		t.Run(name, func(t *testing.T) {
			want := pack(t, tarball, image.Gzip)
			var told *layer.Partial
			var why error
			mounts := &mounted{shower: newShower()}
			defer mounts.close()
			s := open(t, t.TempDir(),
				layer.Config{Server: mounts, LazyTree: lie.tree, Mismatched: func(p *layer.Partial, err error) {
					told, why = p, err
				}})
			defer s.Close()
			p, err := s.Begin(want.layer, table(t, lie.table), layer.Origin{})
			if err != nil {
				t.Fatal(err)
			}
			early := append([]byte(nil), lie.table[:8*presence.Page]...)
			if !lie.spoil {
				early = append([]byte(nil), tarball[:8*presence.Page]...)
			}
			if lie.spoil {
				early[5000] ^= 1
			}
			if err := p.Put(0, early); err != nil {
				t.Fatal(err)
			}
			l := mustComplete(t, s, want.layer, &source{blob: want.blob})
			checkData(t, l, want)
			if told != p || !errors.Is(why, layer.ErrEarlyMismatch) {
				t.Fatalf("told: %v, %v", told, why)
			}
			if s.Partial(want.layer.DiffID) != nil {
				t.Error("a layer with a mismatch is still to be mounted")
			}
			if at, _ := mounts.present.Absent(0, p.Size); at < p.Size {
				t.Errorf("what is mounted waits for ever for %d of %d", at, p.Size)
			}
			tail := make([]byte, 1<<20)
			if _, err := mounts.data.ReadAt(tail, 1<<20); err != nil || !bytes.Equal(tail, tarball[1<<20:2<<20]) {
				t.Errorf("what is mounted has other bytes than the layer, or %v", err)
			}
		})
	}
}

// mounted is a layer.Server that keeps the files of the layer it was given last.
type mounted struct {
	*shower
	data    *os.File
	present *presence.Map
}

func (m *mounted) Add(id digest.Digest, data, present *os.File) (string, error) {
	path, err := m.shower.Add(id, data, present)
	m.close()
	again := func(f *os.File) *os.File {
		var g *os.File
		if err == nil {
			g, err = os.Open(fmt.Sprint("/proc/self/fd/", f.Fd()))
		}
		return g
	}
	m.data = again(data)
	if bits := again(present); err == nil {
		m.present, err = presence.View(bits)
	}
	return path, err
}

func (m *mounted) close() {
	if m.present != nil {
		m.present.Close()
		m.data.Close()
	}
	m.data, m.present = nil, nil
}

// files is how many files this process has open.
func files(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// liar begins a layer whose pack lies.
func liar(t *testing.T, s *layer.Store, tarball []byte) (sample, *layer.Partial) {
	t.Helper()
	want := pack(t, tarball, image.Gzip)
	p, err := s.Begin(want.layer, table(t, tarball), layer.Origin{})
	if err != nil {
		t.Fatal(err)
	}
	early := append([]byte(nil), tarball[:8*presence.Page]...)
	early[5000] ^= 1
	if err := p.Put(0, early); err != nil {
		t.Fatal(err)
	}
	return want, p
}

// Layers with a mismatch are not kept open, whichever way they come to their end.
func TestPartialMismatchIsClosed(t *testing.T) {
	testkit.Long(t)
	for name, end := range map[string]func(*testing.T, *layer.Store, sample){
		"repaired": func(t *testing.T, s *layer.Store, want sample) {
			mustComplete(t, s, want.layer, &source{blob: want.blob})
		},
		"repaired late": func(t *testing.T, s *layer.Store, want sample) {
			failOnce(t, s, want)
			mustComplete(t, s, want.layer, &source{blob: want.blob})
		},
		"released": func(t *testing.T, s *layer.Store, want sample) {
			failOnce(t, s, want)
			s.Release(want.layer.DiffID)
		},
	} {
		t.Run(name, func(t *testing.T) {
			mounts, dir := &mounted{shower: newShower()}, t.TempDir()
			s := open(t, dir, layer.Config{Server: mounts, Mismatched: func(*layer.Partial, error) {}})
			defer s.Close()
			before := files(t)
			for seed := range 20 {
				want, p := liar(t, s, makeTar(t, 1<<20, uint64(100+seed)))
				end(t, s, want)
				at, _ := mounts.present.Absent(0, p.Size)
				if whole := at >= p.Size; whole != (name != "released") {
					t.Errorf("what is mounted is whole: %v", whole)
				}
				mounts.close()
			}
			now := files(t)
			for end := time.Now().Add(testkit.Limit); now != before && time.Now().Before(end); now = files(t) {
				time.Sleep(5 * time.Millisecond) // a fill that failed closes its own a moment after it has said so
			}
			if now != before {
				t.Errorf("%d files are open, %d were", now, before)
			}
			if left, _ := filepath.Glob(filepath.Join(dir, "*", "present")); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// failOnce fills a layer with a mismatch; the stream that is to follow is cut.
func failOnce(t *testing.T, s *layer.Store, want sample) {
	t.Helper()
	if _, err := s.Fill(t.Context(), want.layer,
		&second{source{blob: want.blob}}).WaitComplete(t.Context()); !errors.Is(err, errCut) {
		t.Fatal(err)
	}
}

// second is a source whose second stream fails.
type second struct{ source }

func (s *second) Open(ctx context.Context, f *layer.Fill, off int64) (io.ReadCloser, error) {
	if s.opens.Load() > 0 {
		return nil, errCut
	}
	return s.source.Open(ctx, f, off)
}

// A stream that does not verify leaves the early bytes as they are.
func TestPartialSurvivesABadStream(t *testing.T) {
	want := pack(t, makeTar(t, 5<<20, 35), image.Plain)
	bad := append([]byte(nil), want.blob...)
	bad[3<<20] ^= 1
	bad[5100] ^= 1 // also where early bytes are
	s := open(t, t.TempDir(),
		layer.Config{Server: newShower(), Mismatched: func(*layer.Partial, error) { t.Error("the pack did not lie") }})
	defer s.Close()
	p, err := s.Begin(want.layer, table(t, want.tar), layer.Origin{})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Put(4096, want.tar[4096:8192]); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Fill(t.Context(), want.layer, &source{blob: bad}).Wait(t.Context()); !errors.Is(err,
		layer.ErrMismatch) {
		t.Fatalf("a bad stream gave %v", err)
	}
	if !bytes.Equal(shown(t, p, 4096, 8192), want.tar[4096:8192]) {
		t.Error("early bytes were overwritten")
	}
	if at, _ := p.Absent(0, p.Size); at != 0 {
		t.Error("bytes of a bad stream are shown")
	}
	checkData(t, mustComplete(t, s, want.layer, &source{blob: want.blob}), want)
	if !p.Whole() {
		t.Error("not whole after a good stream")
	}
}

// What the stream has written is shown before it verifies only against a digest.
func TestVouch(t *testing.T) {
	want := pack(t, makeTar(t, 5<<20, 36), image.Plain)
	s := open(t, t.TempDir(), layer.Config{Server: newShower(), Interval: 64 << 10})
	defer s.Close()
	p, err := s.Begin(want.layer, table(t, want.tar), layer.Origin{})
	if err != nil {
		t.Fatal(err)
	}
	half := int64(len(want.blob)) / 2
	f := s.Fill(t.Context(), want.layer, stalling{want.blob[:half]})
	for f.Progress().Written < half-1<<20 {
		time.Sleep(time.Millisecond)
	}
	sum := func(from, to int64) layer.Sum {
		h := sha256.Sum256(want.tar[from:to])
		return layer.Sum{Span: layer.Span{From: from, To: to},
			SHA256: digest.NewDigestFromBytes(digest.SHA256, h[:])}
	}
	wrong := sum(0, 100)
	wrong.To = 101
	for _, c := range []struct {
		parts []layer.Sum
		ok    bool
	}{
		{[]layer.Sum{wrong}, false},
		{[]layer.Sum{sum(half, half+1<<20)}, false}, // the stream has not come there
		{[]layer.Sum{sum(1000, 70000), sum(70000, 100000)}, true},
	} {
		if ok, err := p.Vouch(c.parts); ok != c.ok || err != nil {
			t.Errorf("Vouch(%v) = %v, %v", c.parts, ok, err)
		}
	}
	if at, to := p.Absent(0, p.Size); at != 0 || to != 4096 {
		t.Errorf("absent: %d to %d", at, to)
	}
	if !bytes.Equal(shown(t, p, 4096, 98304), want.tar[4096:98304]) {
		t.Error("wrong bytes are shown")
	}
}

// stalling gives some bytes and then nothing.
type stalling struct{ blob []byte }

func (s stalling) Open(ctx context.Context, _ *layer.Fill, off int64) (io.ReadCloser, error) {
	return io.NopCloser(io.MultiReader(bytes.NewReader(s.blob[off:]), silent{ctx})), nil
}

type silent struct{ ctx context.Context }

func (s silent) Read([]byte) (int, error) {
	<-s.ctx.Done()
	return 0, s.ctx.Err()
}

// Whole and partial exclude each other.
func TestBeginBusy(t *testing.T) {
	want := pack(t, makeTar(t, 1<<20, 37), image.Gzip)
	s := open(t, t.TempDir(), layer.Config{Server: newShower()})
	defer s.Close()
	src := &source{blob: want.blob, gate: make(chan struct{})}
	f := s.Fill(t.Context(), want.layer, src)
	if _, err := s.Begin(want.layer, table(t, want.tar), layer.Origin{}); !errors.Is(err, layer.ErrBusy) {
		t.Errorf("begun while it is filled: %v", err)
	}
	close(src.gate)
	if _, err := f.WaitComplete(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Begin(want.layer, table(t, want.tar), layer.Origin{}); !errors.Is(err, layer.ErrBusy) {
		t.Errorf("begun though it is whole: %v", err)
	}
	if _, err := s.Begin(image.Layer{DiffID: digest.FromString("x"), Digest: digest.FromString("y")},
		[]byte("no table"), layer.Origin{}); err == nil {
		t.Error("begun from nonsense")
	}
}

// A lie is found also when it was put where the stream had been, when the stream
// was cut after it, and when the layer is not partial any more.
func TestPartialLieIsNotForgotten(t *testing.T) {
	want := pack(t, makeTar(t, 5<<20, 38), image.Plain)
	lie := bytes.Clone(want.tar[:2*presence.Page])
	lie[700] ^= 1
	half := int64(len(want.blob)) / 2
	begin := func(t *testing.T, dir string, told *int) (*layer.Store, *layer.Partial) {
		s := open(t, dir, layer.Config{Server: newShower(), Interval: 64 << 10,
			Mismatched: func(*layer.Partial, error) {
				*told++
			}})
		p, err := s.Begin(want.layer, table(t, want.tar), layer.Origin{})
		if err != nil {
			t.Fatal(err)
		}
		return s, p
	}
	cut := func(t *testing.T, s *layer.Store) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if _, err := s.Fill(ctx, want.layer, &source{blob: want.blob, cut: half}).Wait(ctx); !errors.Is(err,
			errCut) {
			t.Fatal(err)
		}
	}
	for name, act := range map[string]func(*testing.T, *layer.Store, *layer.Partial, string) *layer.Store{
		"put behind the stream": func(t *testing.T, s *layer.Store, p *layer.Partial, _ string) *layer.Store {
			cut(t, s)
			if err := p.Put(0, lie); err != nil {
				t.Fatal(err)
			}
			return s
		},
		"cut after it": func(t *testing.T, s *layer.Store, p *layer.Partial, dir string) *layer.Store {
			if err := p.Put(0, lie); err != nil {
				t.Fatal(err)
			}
			cut(t, s)
			s.Close()
			return open(t, dir, layer.Config{Server: newShower(), Mismatched: func(*layer.Partial, error) {}})
		},
		"released": func(t *testing.T, s *layer.Store, p *layer.Partial, _ string) *layer.Store {
			if err := p.Put(0, lie); err != nil {
				t.Fatal(err)
			}
			cut(t, s)
			s.Retire(want.layer.DiffID)
			s.Release(want.layer.DiffID)
			return s
		},
	} {
		t.Run(name, func(t *testing.T) {
			var told int
			dir := t.TempDir()
			s, p := begin(t, dir, &told)
			s = act(t, s, p, dir)
			defer s.Close()
			checkData(t, mustComplete(t, s, want.layer, &source{blob: want.blob}), want)
		})
	}
}
