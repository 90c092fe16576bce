package layer_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/testkit"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv(crashEnv) != "" {
		os.Exit(crashChild())
	}
	goleak.VerifyTestMain(m)
}

// sample is one layer in all its forms.
type sample struct {
	tar   []byte
	blob  []byte
	layer image.Layer
}

// makeTar returns a tar of files with size bytes of half-compressible contents in all.
func makeTar(t testing.TB, size int, seed uint64) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := 0; buf.Len() < size; i++ {
		b := make([]byte, min(1+r.IntN(1<<20), size))
		for j := 0; j < len(b); j += 8 { // half of each byte is noise
			var w [8]byte
			binary.LittleEndian.PutUint64(w[:], r.Uint64()&0x0f0f0f0f0f0f0f0f|0x6060606060606060)
			copy(b[j:], w[:])
		}
		h := &tar.Header{Name: fmt.Sprintf("d%d/f%d", i%7, i), Mode: 0o644, Size: int64(len(b)),
			Typeflag: tar.TypeReg}
		if err := errors.Join(w.WriteHeader(h), write(w, b)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func write(w io.Writer, b []byte) error { _, err := w.Write(b); return err }

func pack(t testing.TB, tarball []byte, c image.Compression) sample {
	t.Helper()
	var buf bytes.Buffer
	media := ocispec.MediaTypeImageLayer
	if c == image.Plain {
		buf.Write(tarball)
	} else {
		media += "+" + string(c)
		// Go's compressors would take most of the tests' time under the race detector.
		cmd := exec.Command(string(c), "-c")
		cmd.Stdin, cmd.Stdout = bytes.NewReader(tarball), &buf
		if err := cmd.Run(); err != nil {
			t.Fatalf("%s: %v", c, err)
		}
	}
	return sample{tarball, buf.Bytes(), image.Layer{
		Digest: digest.FromBytes(buf.Bytes()), Size: int64(buf.Len()), MediaType: media,
		DiffID: digest.FromBytes(tarball)}}
}

// source serves a blob and does as it is told.
type source struct {
	blob  []byte
	cut   int64         // > 0: the stream fails after so many bytes of the blob
	gate  chan struct{} // not nil: reads wait until it is closed
	opens atomic.Int32
	sent  atomic.Int64
	mu    sync.Mutex
}

var errCut = errors.New("the link went down")

func (s *source) Open(ctx context.Context, _ *layer.Fill, off int64) (io.ReadCloser, error) {
	s.opens.Add(1)
	return &stream{s, ctx, off}, nil
}

type stream struct {
	s   *source
	ctx context.Context
	off int64
}

func (r *stream) Read(b []byte) (int, error) {
	if r.s.gate != nil {
		select {
		case <-r.s.gate:
		case <-r.ctx.Done():
			return 0, r.ctx.Err()
		}
	}
	end := int64(len(r.s.blob))
	r.s.mu.Lock()
	cut := r.s.cut
	r.s.mu.Unlock()
	if cut > 0 && cut < end {
		if r.off >= cut {
			return 0, errCut
		}
		end = cut
	}
	if r.off >= end {
		return 0, io.EOF
	}
	n := copy(b, r.s.blob[r.off:min(end, r.off+64<<10)])
	r.off += int64(n)
	r.s.sent.Add(int64(n))
	return n, nil
}

func (r *stream) Close() error { return nil }

func open(t testing.TB, dir string, cfg layer.Config) *layer.Store {
	t.Helper()
	if cfg.Tree {
		testkit.NeedRoot(t, "files of a tree get their owners")
	}
	cfg.Dir = dir
	s, err := layer.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mustComplete(t testing.TB, s *layer.Store, l image.Layer, src layer.Source) *layer.Layer {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	got, err := s.Fill(ctx, l, src).WaitComplete(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func checkData(t testing.TB, l *layer.Layer, want sample) {
	t.Helper()
	b, err := os.ReadFile(l.Files().Data)
	if err != nil {
		t.Fatal(err)
	}
	if sha256.Sum256(b) != sha256.Sum256(want.tar) {
		t.Fatalf("data is %d bytes and differs from the %d of the tar", len(b), len(want.tar))
	}
	if fi, err := os.Stat(l.Files().Index); err != nil || fi.Size() == 0 {
		t.Fatalf("index: %v, %v", fi, err)
	}
}

func TestFill(t *testing.T) {
	tarball := makeTar(t, 20<<20, 1)
	for _, c := range []image.Compression{image.Plain, image.Gzip, image.Zstd} {
		t.Run(string(c), func(t *testing.T) {
			dir, want := t.TempDir(), pack(t, tarball, c)
			s := open(t, dir, layer.Config{})
			l := mustComplete(t, s, want.layer, &source{blob: want.blob})
			checkData(t, l, want)
			s.Close()
			s = open(t, dir, layer.Config{})
			defer s.Close()
			l, err := s.Get(want.layer.DiffID)
			if err != nil || !l.Complete() {
				t.Fatalf("after a restart: %v, %v", l, err)
			}
			checkData(t, l, want)
			left, _ := filepath.Glob(filepath.Join(filepath.Dir(l.Files().Data), "*"))
			if len(left) != 3 {
				t.Errorf("a complete layer consists of data, index and layer.json, not of %v", left)
			}
		})
	}
}

// A media type that does not tell the truth about the compression is common.
func TestFillBelievesTheBytes(t *testing.T) {
	want := pack(t, makeTar(t, 1<<20, 2), image.Gzip)
	want.layer.MediaType = ocispec.MediaTypeImageLayer
	s := open(t, t.TempDir(), layer.Config{})
	defer s.Close()
	checkData(t, mustComplete(t, s, want.layer, &source{blob: want.blob}), want)
}

func TestImport(t *testing.T) {
	want := pack(t, makeTar(t, 3<<20, 3), image.Gzip)
	s := open(t, t.TempDir(), layer.Config{})
	defer s.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for range 2 { // the second time it is there already
		l, err := s.Import(ctx, want.layer, &source{blob: want.blob}).WaitComplete(ctx)
		if err != nil || l.DiffID != want.layer.DiffID {
			t.Fatalf("%v, %v", l, err)
		}
		checkData(t, l, want)
	}
}

// A cut pull goes on where it was, in the same process and in the next one.
func TestResume(t *testing.T) {
	testkit.Long(t)
	const bound, interval = 4 << 20, 512 << 10 // the defaults are 8 and 4 MiB
	tarball := makeTar(t, 24<<20, 4)
	for _, c := range []image.Compression{image.Plain, image.Gzip, image.Zstd} {
		for _, restart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/restart=%v", c, restart), func(t *testing.T) {
				dir, want := t.TempDir(), pack(t, tarball, c)
				s := open(t, dir, layer.Config{Interval: interval})
				src := &source{blob: want.blob, cut: int64(len(want.blob)) * 9 / 10}
				ctx, cancel := context.WithCancel(context.Background())
				_, err := s.Fill(ctx, want.layer, src).Wait(ctx)
				cancel()
				if !errors.Is(err, errCut) {
					t.Fatalf("a cut link gave %v", err)
				}
				if _, err := s.Get(want.layer.DiffID); !errors.Is(err, layer.ErrUnknown) {
					t.Fatalf("half a layer is visible: %v", err)
				}
				if restart {
					s.Close()
					s = open(t, dir, layer.Config{})
				}
				defer func() { s.Close() }()
				rest := &source{blob: want.blob}
				checkData(t, mustComplete(t, s, want.layer, rest), want)
				if again := src.sent.Load() + rest.sent.Load() - int64(len(want.blob)); again > bound {
					t.Errorf("%d bytes were fetched again, at most %d should be", again, bound)
				}
			})
		}
	}
}

// Bytes that were changed on disk between two tries are found out and fetched anew.
func TestResumeFromWrongBytes(t *testing.T) {
	dir, want := t.TempDir(), pack(t, makeTar(t, 8<<20, 5), image.Gzip)
	s := open(t, dir, layer.Config{Interval: 512 << 10})
	defer s.Close()
	src := &source{blob: want.blob, cut: int64(len(want.blob)) * 9 / 10}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if _, err := s.Fill(ctx, want.layer, src).Wait(ctx); !errors.Is(err, errCut) {
		t.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join(dir, want.layer.DiffID.Encoded(), "progress.boot"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(f)
	i := bytes.Index(b, []byte(`"data_hash":"`)) + 60
	b[i] ^= 1
	if _, err := f.WriteAt(b, 0); err != nil {
		t.Fatal(err)
	}
	f.Close()
	checkData(t, mustComplete(t, s, want.layer, &source{blob: want.blob}), want)
}

func TestWrongBytesStayInvisible(t *testing.T) {
	good := pack(t, makeTar(t, 4<<20, 6), image.Gzip)
	flipped := bytes.Clone(good.blob)
	flipped[len(flipped)/2] ^= 1
	other := good.layer
	other.DiffID = digest.FromString("something else")
	hostile := pack(t, hostileTar(t), image.Gzip)
	truncated := good
	truncated.blob = good.blob[:len(good.blob)/2]
	truncated.layer.Digest, truncated.layer.Size = digest.FromBytes(truncated.blob), int64(len(truncated.blob))
	for name, c := range map[string]struct {
		l    image.Layer
		blob []byte
		want string
	}{
		"flipped bit":          {good.layer, flipped, ""},
		"another blob":         {good.layer, pack(t, makeTar(t, 6<<20, 7), image.Gzip).blob, ""},
		"ends early":           {truncated.layer, truncated.blob, "it ends early"},
		"wrong diffID":         {other, good.blob, "the image's configuration says"},
		"name leaves the root": {hostile.layer, hostile.blob, "../"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, dir, layer.Config{})
			defer s.Close()
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			_, err := s.Fill(ctx, c.l, &source{blob: c.blob}).Wait(ctx)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("error %v, want %q in it", err, c.want)
			}
			if _, err := s.Get(c.l.DiffID); !errors.Is(err, layer.ErrUnknown) {
				t.Fatalf("it is visible: %v", err)
			}
			if left, _ := filepath.Glob(filepath.Join(dir, "*", "data")); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

func hostileTar(t testing.TB) []byte {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	if err := errors.Join(w.WriteHeader(&tar.Header{Name: "../../etc/passwd", Mode: 0o644, Size: 1}),
		write(w, []byte("x")), w.Close()); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func TestBound(t *testing.T) {
	testkit.Long(t)
	bomb := pack(t, make([]byte, 64<<20), image.Gzip)
	s := open(t, t.TempDir(), layer.Config{MaxBytes: 8 << 20})
	defer s.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	_, err := s.Fill(ctx, bomb.layer, &source{blob: bomb.blob}).Wait(ctx)
	if !errors.Is(err, layer.ErrTooLarge) || !strings.Contains(err.Error(), "that a layer may have") {
		t.Fatal(err)
	}
}

func TestTwoWhoWantALayerShareOneFill(t *testing.T) {
	want := pack(t, makeTar(t, 4<<20, 8), image.Gzip)
	s := open(t, t.TempDir(), layer.Config{})
	defer s.Close()
	src := &source{blob: want.blob, gate: make(chan struct{})}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			if _, err := s.Fill(ctx, want.layer, src).WaitComplete(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	time.Sleep(20 * time.Millisecond)
	close(src.gate)
	wg.Wait()
	if n := src.opens.Load(); n != 1 {
		t.Errorf("%d streams were opened", n)
	}
}

// One who leaves does not take the fill from the others; the last one does,
// and one who comes after that begins anew.
func TestLeaving(t *testing.T) {
	want := pack(t, makeTar(t, 4<<20, 9), image.Gzip)
	s := open(t, t.TempDir(), layer.Config{})
	defer s.Close()
	src := &source{blob: want.blob, gate: make(chan struct{})}
	one, leaveOne := context.WithCancel(context.Background())
	two, leaveTwo := context.WithCancel(context.Background())
	f := s.Fill(one, want.layer, src)
	s.Fill(two, want.layer, src)
	leaveOne()
	select {
	case <-time.After(50 * time.Millisecond):
	case <-done(f):
		t.Fatal("the fill ended though somebody waits")
	}
	leaveTwo()
	if _, err := f.Wait(context.Background()); err == nil {
		t.Fatal("the fill went on though nobody waits")
	}
	checkData(t, mustComplete(t, s, want.layer, &source{blob: want.blob}), want)
}

func done(f *layer.Fill) chan struct{} {
	ch := make(chan struct{})
	go func() { defer close(ch); f.WaitComplete(context.Background()) }()
	return ch
}

func TestSecondOpenIsRefused(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, layer.Config{})
	defer s.Close()
	if _, err := layer.Open(layer.Config{Dir: dir}); !errors.Is(err, layer.ErrLocked) {
		t.Fatalf("a second store on one directory: %v", err)
	}
}

func TestTree(t *testing.T) {
	want := pack(t, makeTar(t, 3<<20, 10), image.Gzip)
	dir := t.TempDir()
	s := open(t, dir, layer.Config{Tree: true})
	defer s.Close()
	l := mustComplete(t, s, want.layer, &source{blob: want.blob})
	if _, err := os.Stat(l.Files().Data); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the tar is stored beside the tree: %v", err)
	}
	if fi, err := os.Stat(filepath.Join(l.Files().Tree, "d0", "f0")); err != nil || fi.Size() == 0 {
		t.Errorf("%v, %v", fi, err)
	}
	// What the tree takes is known without a look at it, also by the next store, and by one
	// whose layers were made complete before that was written down.
	kept := l.DiskUse()
	if kept < want.layer.Size || kept < 3<<20 {
		t.Errorf("it takes %d bytes", kept)
	}
	if err := os.WriteFile(filepath.Join(l.Files().Tree, "late"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	s.Close()
	for _, of := range []string{"kept", "not yet"} {
		s = open(t, dir, layer.Config{Tree: true})
		if l, err := s.Peek(want.layer.DiffID); err != nil || of == "kept" && l.DiskUse() != kept ||
			of != "kept" && l.DiskUse() < kept+1<<20 {
			t.Errorf("%s: %d, %v; %d before", of, l.DiskUse(), err, kept)
		}
		s.Close()
		record := filepath.Join(filepath.Dir(l.Files().Tree), "layer.json")
		b, err := os.ReadFile(record)
		if err == nil {
			err = os.WriteFile(record, regexp.MustCompile(`"tree_disk":\d+,`).ReplaceAll(b, nil), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestRemove(t *testing.T) {
	want := pack(t, makeTar(t, 1<<20, 11), image.Gzip)
	dir := t.TempDir()
	s := open(t, dir, layer.Config{})
	defer s.Close()
	mustComplete(t, s, want.layer, &source{blob: want.blob})
	if ok, err := s.Remove(want.layer.DiffID, func(*layer.Layer) bool { return false }); ok || err != nil {
		t.Fatal(ok, err)
	}
	if ok, err := s.Remove(want.layer.DiffID, func(*layer.Layer) bool { return true }); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	mustComplete(t, s, want.layer, &source{blob: want.blob})
}
