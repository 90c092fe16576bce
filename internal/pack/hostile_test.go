package pack_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"dewpoint/internal/pack"
	"dewpoint/testkit"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
)

var errGone = errors.New("gone")

// drain reads a pack to its end.
func drain(r io.Reader) error {
	s, err := pack.Open(r)
	for err == nil {
		_, err = s.Next()
	}
	if s != nil {
		if _, again := s.Next(); again != err {
			return fmt.Errorf("%v, then %v", err, again)
		}
	}
	if err == io.EOF {
		return nil
	}
	return err
}

// A pack that ends early, at a part's boundary or elsewhere, is no invalid
// pack: its rest may be fetched. Nor is one whose source fails.
func TestTruncated(t *testing.T) {
	b := packedSmall()
	l := b.header(t).Layout()
	ends := []int64{0, 1, pack.PreambleSize - 1, pack.PreambleSize, pack.PreambleSize + 1}
	for _, spans := range [][]pack.Span{{l.Header}, l.Tables, l.Chunks, l.Points, l.Windows, l.Files} {
		for _, s := range spans {
			if s.Length > 0 {
				ends = append(ends, s.Offset, s.Offset+1, s.Offset+s.Length-1)
			}
		}
	}
	for _, n := range ends {
		if err := drain(bytes.NewReader(b.pack[:n])); !errors.Is(err, io.ErrUnexpectedEOF) ||
			errors.Is(err, pack.ErrInvalid) {
			t.Errorf("%d bytes of %d: %v", n, l.Size, err)
		}
		r := io.MultiReader(bytes.NewReader(b.pack[:n]), iotest.ErrReader(errGone))
		if err := drain(r); !errors.Is(err, errGone) || errors.Is(err, pack.ErrInvalid) {
			t.Errorf("lost after %d bytes of %d: %v", n, l.Size, err)
		}
	}
	if err := drain(bytes.NewReader(b.pack)); err != nil {
		t.Error(err)
	}
	if err := drain(bytes.NewReader(append(bytes.Clone(b.pack), 0))); !errors.Is(err, pack.ErrInvalid) {
		t.Errorf("a byte too many: %v", err)
	}
}

// Every byte that is changed is noticed, save in windows, which segments prove.
func TestChanged(t *testing.T) {
	testkit.Long(t)
	b := packedSmall()
	l := b.header(t).Layout()
	changed := bytes.Clone(b.pack)
	for at := int64(0); at < l.Size; at += l.Size/300 + 1 {
		changed[at] ^= 0x41
		err := drain(bytes.NewReader(changed))
		windows := at >= l.Windows[0].Offset && at < l.Files[0].Offset
		if !windows && !errors.Is(err, pack.ErrInvalid) && !errors.Is(err, io.ErrUnexpectedEOF) ||
			windows && err != nil {
			t.Errorf("changed at %d: %v", at, err)
		}
		changed[at] ^= 0x41
	}
}

var plainEncoder = sync.OnceValue(func() *zstd.Encoder {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		panic(err)
	}
	return e
})

// stored makes preamble and header of JSON.
func stored(text []byte) []byte {
	frame := plainEncoder().EncodeAll(text, nil)
	b := binary.LittleEndian.AppendUint32([]byte("DEWPACK1"), uint32(len(frame)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(text)))
	return append(b, frame...)
}

// small is a header in which everything is right: two layers of ten pages and
// a bit, one chunk of three ranges and a copy.
func small() map[string]any {
	sha := func(s string) string { return string(digest.FromString(s)) }
	part := func(raw int) map[string]any {
		return map[string]any{"length": raw / 2, "raw": raw, "sha256": sha("part")}
	}
	layer := func(name string) map[string]any {
		return map[string]any{"diff_id": sha(name), "blob": sha(name + "b"), "blob_size": 20_000, "size": 41_000,
			"compression": "gzip", "table": part(1000), "points": part(100), "windows": 30_000, "files": part(50)}
	}
	chunk := part(4096 + 8192 + 40)
	chunk["ranges"] = []any{[]int{0, 0, 4096}, []int{0, 8192, 8192}, []int{1, 40_960, 40}}
	chunk["copies"] = []any{[]int{1, 4096, 4096, 0}}
	return map[string]any{"version": 1, "image": sha("image"), "layers": []any{layer("a"), layer("b")},
		"chunks": []any{chunk}, "needed": 4096*2 + 8192 + 40,
		"profile": map[string]any{"runs": 1, "exercised": true, "created": "2026-01-02T03:04:05Z", "node": "n"}}
}

// set changes the value at a path like "layers 0 table raw"; nil takes it away.
func set(at any, path string, to any) {
	key, rest, more := strings.Cut(path, " ")
	switch v := at.(type) {
	case map[string]any:
		if more {
			set(v[key], rest, to)
		} else if to == nil {
			delete(v, key)
		} else {
			v[key] = to
		}
	case []any:
		var i int
		fmt.Sscan(key, &i)
		if more {
			set(v[i], rest, to)
		} else {
			v[i] = to
		}
	}
}

func parse(h any) (*pack.Header, error) {
	text, err := json.Marshal(h)
	if err != nil {
		panic(err)
	}
	return pack.ParseHeader(stored(text))
}

func TestHeaderBounds(t *testing.T) {
	if h, err := parse(small()); err != nil || h.Layout().Size == 0 || h.Chunks[0].Copies[0].Of != 0 {
		t.Fatal(err)
	}
	other := "sha512:" + strings.Repeat("a", 128)
	for _, good := range []struct {
		path string
		to   any
	}{
		{"image", other}, {"layers 0 compression", "plain"}, {"unknown", "key"}, {"layers 1 points raw", 16 << 20},
		{"layers 0 table", map[string]any{"length": 1 << 27, "raw": 1 << 27,
			"sha256": string(digest.FromString("t"))}},
	} {
		h := small()
		if set(h, good.path, good.to); good.path == "" {
			continue
		}
		if _, err := parse(h); err != nil {
			t.Errorf("%s: %v", good.path, err)
		}
	}
	for _, bad := range []struct {
		path string
		to   any
	}{
		{"version", 2}, {"version", nil}, {"version", "1"}, {"image", "sha256:1"}, {"image", nil}, {"image", 7},
		{"profile node", strings.Repeat("n", 256)}, {"profile node", "a\x1b[2J"}, {"profile runs", -1},
		{"profile created", "today"},
		{"layers 0 diff_id", other}, {"layers 0 diff_id", nil}, {"layers 0 blob", "x"},
		{"layers 1 diff_id", string(digest.FromString("a"))},
		{"layers 0 blob_size", -1}, {"layers 0 blob_size", 1<<40 + 1}, {"layers 0 size", -1},
		{"layers 0 size", 1 << 42},
		{"layers 0 size", 1e300}, {"layers 0 compression", "lzma"}, {"layers 0 compression", nil},
		{"layers 0 table", nil}, {"layers 0 table raw", 0}, {"layers 0 table raw", 1<<27 + 1},
		{"layers 0 table length", 0},
		{"layers 0 table length", 1100}, {"layers 0 table length", -5}, {"layers 0 table sha256", "md5:x"},
		{"layers 0 table sha256", other},
		{"layers 0 points raw", 16<<20 + 1}, {"layers 0 files raw", 1 << 40}, {"layers 0 windows", -1},
		{"layers 0 windows", 1 << 40},
		{"layers 0 points", nil}, // but windows
		{"chunks 0 raw", 4<<20 + 1}, {"chunks 0 raw", 4096}, {"chunks 0 length", 1 << 20}, {"chunks 0 sha256", nil},
		{"chunks 0 ranges", []any{}}, {"chunks 0 ranges 0", []int{0, 0}},
		{"chunks 0 ranges 0", []int{0, 0, 4096, 1}},
		{"chunks 0 ranges 0", []any{0, 0, 4096.5}}, {"chunks 0 ranges 0", "x"},
		{"chunks 0 ranges 0", map[string]any{"Layer": 0}},
		{"chunks 0 ranges 0", []any{0, 0, []int{4096}}}, {"chunks 0 ranges 0", []any{0, 0, "4096"}},
		{"chunks 0 ranges 0", []int{2, 0, 4096}}, {"chunks 0 ranges 0", []int{-1, 0, 4096}},
		{"chunks 0 ranges 0", []int{0, -4096, 4096}}, {"chunks 0 ranges 0", []int{0, 1, 4096}},
		{"chunks 0 ranges 0", []int{0, 40_960, 4096}},
		{"chunks 0 ranges 0", []any{0, uint64(1) << 62, 4096}},
		{"chunks 0 ranges 0", []any{0, uint64(1<<63 - 4096), 4096}},
		{"chunks 0 ranges 0", []int{0, 12_288, 4096}}, // overlaps the second
		{"chunks 0 ranges 2", []int{1, 40_956, 44}}, {"chunks 0 ranges 2", []int{1, 36_864, 40}},
		{"chunks 0 copies 0", []int{1, 4096, 4096, 3}}, {"chunks 0 copies 0", []int{1, 4096, 4096, -1}},
		{"chunks 0 copies 0", []int{1, 4096, 8192, 0}},
		{"chunks 0 copies 0", []int{1, 4096, 4096}}, {"chunks 0 copies 0", []int{0, 8192, 4096, 0}},
		{"chunks 0 copies 0", []int{0, 0, 4096, 0}},
		{"chunks 0 copies 0", []int{1, 40_960, 4096, 0}}, {"chunks 0 copies 0", []int{5, 0, 4096, 0}},
		{"needed", 1}, {"needed", nil}, {"layers", []any{}}, {"layers", "x"}, {"chunks", map[string]any{}},
	} {
		h := small()
		set(h, bad.path, bad.to)
		if _, err := parse(h); !errors.Is(err, pack.ErrInvalid) {
			t.Errorf("%s = %v: %v", bad.path, bad.to, err)
		}
	}
	h := small() // the same pages in another chunk
	again := map[string]any{"length": 10, "raw": 4096, "sha256": string(digest.FromString("x")),
		"ranges": []any{[]int{0, 0, 4096}}}
	h["chunks"], h["needed"] = append(h["chunks"].([]any), again), 4096*3+8192+40
	if _, err := parse(h); !errors.Is(err, pack.ErrInvalid) {
		t.Error("a page comes in two chunks", err)
	}
	h = small() // copies out of order
	h["needed"] = 4096*3 + 8192*2 + 40
	h["chunks"].([]any)[0].(map[string]any)["copies"] = []any{[]int{1, 8192, 8192, 1}, []int{1, 4096, 4096, 0}}
	if _, err := parse(h); !errors.Is(err, pack.ErrInvalid) {
		t.Error("copies are out of order", err)
	}
}

// A few bytes do not become many: not by zstd, not by JSON, not by claims.
func TestBombs(t *testing.T) {
	repeat := func(head, one, tail string, n int) []byte {
		return []byte(head + strings.Repeat(one, n-1) + tail)
	}
	chunks := repeat(`{"version":1,"chunks":[`, `{},`, `{}]}`, 5_000_000)
	arrays := repeat(`{"version":1,"chunks":[{"ranges":[`, `[],`, `[]]}]}`, 5_000_000)
	deep := bytes.Repeat([]byte{'['}, 1_000_000)
	claims := func(length, raw uint32) []byte {
		b := binary.LittleEndian.AppendUint32([]byte("DEWPACK1"), length)
		return append(binary.LittleEndian.AppendUint32(b, raw), "few bytes"...)
	}
	lies := stored(make([]byte, 100_000))
	binary.LittleEndian.PutUint32(lies[12:], 50_000)
	short := stored(make([]byte, 50_000))
	binary.LittleEndian.PutUint32(short[12:], 60_000)
	two := stored([]byte("{}")) // a second frame behind the first
	frame := two[pack.PreambleSize:]
	binary.LittleEndian.PutUint32(two[8:], uint32(2*len(frame)))
	two = append(two, frame...)
	for what, b := range map[string][]byte{
		"chunks": stored(chunks), "arrays": stored(arrays), "deep": stored(deep), "huge": claims(1<<32-1, 1<<32-1),
		"too long": claims(1<<24+1<<20, 1<<24), "empty": claims(0, 0), "magic": []byte("DEWPACK2xxxxxxxxxxxxxxx"),
		"more than it says": lies, "less than it says": short, "two frames": two,
		"no JSON": stored([]byte("DEWPACK1")),
		"large":   stored(make([]byte, pack.MaxHeader+1)), "window": wideFrame(),
	} {
		var err error
		if used := allocated(func() { err = drain(bytes.NewReader(b)) }); used > 100<<20 {
			t.Errorf("%s: %d MiB", what, used>>20)
		}
		if !errors.Is(err, pack.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	var err error
	used := allocated(func() { err = drain(bytes.NewReader(claims(1<<24, 1<<24))) })
	if !errors.Is(err, io.ErrUnexpectedEOF) || used > 2<<20 {
		t.Errorf("claims: %v, %d bytes", err, used)
	}
}

// wideFrame is a header whose frame asks for a window of 16 MiB.
func wideFrame() []byte {
	var frame bytes.Buffer
	e, err := zstd.NewWriter(&frame, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(16<<20))
	if err != nil {
		panic(err)
	}
	text := make([]byte, 10<<20)
	e.Write(text)
	e.Write(text[:1]) // no size in the frame's header, so the window counts
	e.Close()
	b := binary.LittleEndian.AppendUint32([]byte("DEWPACK1"), uint32(frame.Len()))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(text)+1))
	return append(b, frame.Bytes()...)
}

// allocated is how many bytes f allocates.
func allocated(f func()) uint64 {
	var a, b runtime.MemStats
	runtime.ReadMemStats(&a)
	f()
	runtime.ReadMemStats(&b)
	return b.TotalAlloc - a.TotalAlloc
}

// The parts of a right header may still lie.
func TestPartsLie(t *testing.T) {
	testkit.Long(t)
	b := packed()
	h := b.header(t)
	for what, f := range map[string]func(stored []byte) error{
		"table":  func(s []byte) error { _, err := h.DecodeTable(0, s); return err },
		"points": func(s []byte) error { _, err := h.DecodePoints(0, s); return err },
		"chunk":  func(s []byte) error { _, err := h.DecodeChunk(0, s, nil); return err },
	} {
		span := map[string]pack.Span{"table": h.TableSpan(0), "points": h.PointsSpan(0),
			"chunk": h.ChunkSpan(0)}[what]
		right := b.part(span)
		check(t, f(right))
		bomb := zst(make([]byte, 200<<20))
		for _, s := range [][]byte{nil, right[1:], append(bytes.Clone(right), 0), bomb,
			append(bomb, make([]byte, len(right))...)[:len(right)]} {
			var err error
			if used := allocated(func() { err = f(s) }); used > 4<<20 {
				t.Errorf("%s of %d bytes takes %d", what, len(s), used)
			}
			if !errors.Is(err, pack.ErrInvalid) {
				t.Errorf("%s of %d bytes: %v", what, len(s), err)
			}
		}
	}
	if _, err := h.DecodePoints(len(b.tars)-1, nil); !errors.Is(err, pack.ErrInvalid) {
		t.Error("points that are not there:", err)
	}
	if _, err := h.ParseTable(1, []byte{7, 0}); !errors.Is(err, pack.ErrInvalid) {
		t.Error("table of another size:", err)
	}
	if err := h.Chunks[0].Each(make([]byte, 5), nil); !errors.Is(err, pack.ErrInvalid) {
		t.Error("short chunk:", err)
	}
	if err := h.Chunks[0].Each(make([]byte, h.Chunks[0].Raw), func(int, int64, []byte) error {
		return errGone
	}); err != errGone {
		t.Error(err)
	}
}

// rawPoints encodes points as docs/design/formats.md says.
func rawPoints(list ...[6]uint64) []byte {
	b := binary.AppendUvarint(nil, uint64(len(list)))
	for _, p := range list {
		for _, v := range p {
			b = binary.AppendUvarint(b, v)
		}
		b = append(b, make([]byte, 32)...)
	}
	return b
}

func TestPointBounds(t *testing.T) {
	// Layer 0 has 41,000 bytes, 20,000 compressed, and windows of 30,000.
	first := [6]uint64{}
	points := func(compression string, raw []byte) error {
		h := small()
		set(h, "layers 0 compression", compression)
		if compression != "gzip" {
			set(h, "layers 0 windows", 0)
		}
		head, err := parse(h)
		check(t, err)
		_, err = head.ParsePoints(0, raw)
		return err
	}
	check(t, points("gzip", rawPoints(first, [6]uint64{100, 3, 20_000, 1, 2, 30_000})))
	check(t, points("zstd", rawPoints(first, [6]uint64{100, 0, 20_000, 0, 0, 0})))
	check(t, points("plain", rawPoints(first, [6]uint64{9000, 0, 9000, 0, 0, 0})))
	check(t, points("zstd", rawPoints(first, [6]uint64{0, 0, 9000, 0, 0, 0}, [6]uint64{0, 0, 9000, 0, 0, 0})))
	for what, err := range map[string]error{
		"nothing":          points("gzip", nil),
		"none":             points("gzip", rawPoints()),
		"too many":         points("gzip", binary.AppendUvarint(nil, 1<<40)),
		"more than bytes":  points("gzip", append(binary.AppendUvarint(nil, 1000), make([]byte, 500)...)),
		"cut":              points("gzip", rawPoints(first, [6]uint64{100, 3, 20_000, 1, 2, 30_000})[:60]),
		"bytes behind":     points("zstd", append(rawPoints(first), 0)),
		"first is late":    points("zstd", rawPoints([6]uint64{1, 0, 1, 0, 0, 0})),
		"first has window": points("gzip", rawPoints([6]uint64{0, 0, 0, 0, 0, 30_000})),
		"beyond blob":      points("zstd", rawPoints(first, [6]uint64{20_000, 0, 100, 0, 0, 0})),
		"beyond tar":       points("zstd", rawPoints(first, [6]uint64{100, 0, 41_000, 0, 0, 0})),
		"same place": points("zstd",
			rawPoints(first, [6]uint64{100, 0, 100, 0, 0, 0}, [6]uint64{0, 0, 100, 0, 0, 0})),
		"place after none": points("zstd",
			rawPoints(first, [6]uint64{0, 0, 100, 0, 0, 0}, [6]uint64{100, 0, 100, 0, 0, 0})),
		"no place, bit":    points("gzip", rawPoints(first, [6]uint64{0, 1, 100, 0, 0, 30_000})),
		"plain, no place":  points("plain", rawPoints(first, [6]uint64{0, 0, 9000, 0, 0, 0})),
		"empty segment":    points("zstd", rawPoints(first, [6]uint64{100, 0, 0, 0, 0, 0})),
		"bit":              points("gzip", rawPoints(first, [6]uint64{100, 8, 20_000, 1, 2, 30_000})),
		"bit of zstd":      points("zstd", rawPoints(first, [6]uint64{100, 1, 20_000, 0, 0, 0})),
		"sum of zstd":      points("zstd", rawPoints(first, [6]uint64{100, 0, 20_000, 1, 0, 0})),
		"large sum":        points("gzip", rawPoints(first, [6]uint64{100, 3, 20_000, 1 << 32, 2, 30_000})),
		"window of zstd":   points("zstd", rawPoints(first, [6]uint64{100, 0, 20_000, 0, 0, 5})),
		"large window":     points("gzip", rawPoints(first, [6]uint64{100, 3, 20_000, 1, 2, 40_000})),
		"windows missing":  points("gzip", rawPoints(first, [6]uint64{100, 3, 20_000, 1, 2, 20_000})),
		"plain, elsewhere": points("plain", rawPoints(first, [6]uint64{9000, 0, 9001, 0, 0, 0})),
	} {
		if !errors.Is(err, pack.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	h := small()
	set(h, "layers 0 size", 17<<20)
	set(h, "layers 0 windows", 0)
	head, err := parse(h)
	check(t, err)
	if _, err := head.ParsePoints(0, rawPoints(first)); !errors.Is(err, pack.ErrInvalid) {
		t.Error("long segment:", err)
	}
	if _, err := head.ParsePoints(0, rawPoints(first, [6]uint64{5, 0, 17<<20 - 5, 0, 0, 0})); !errors.Is(err,
		pack.ErrInvalid) {
		t.Error("long first segment:", err)
	}
}

// A pack of an earlier build ends with digests of files, which nobody reads.
func TestPackWithFiles(t *testing.T) {
	b := packedSmall()
	h := b.header(t)
	old := *h
	old.Layers = slices.Clone(h.Layers)
	files := []byte("digests of files")
	frame := zst(files)
	old.Layers[0].Files = &pack.Part{Length: int64(len(frame)), Raw: int64(len(files)),
		SHA256: digest.FromBytes(files)}
	text, err := json.Marshal(&old)
	check(t, err)
	whole := slices.Concat(stored(text), b.pack[h.Layout().Header.Length:], frame)
	check(t, drain(bytes.NewReader(whole)))
	if err := drain(bytes.NewReader(whole[:len(whole)-1])); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("without its last byte: %v", err)
	}
}

func FuzzHeader(f *testing.F) {
	text, _ := json.Marshal(small())
	f.Add(text)
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) == 0 || len(text) > pack.MaxHeader {
			return
		}
		h, err := pack.ParseHeader(stored(text))
		if err != nil {
			if !errors.Is(err, pack.ErrInvalid) {
				t.Fatal(err)
			}
			return
		}
		end := h.Layout().Header.Length
		for i := range h.Layers {
			end += h.TableSpan(i).Length + h.PointsSpan(i).Length + h.WindowsSpan(i).Length +
				h.Layout().Files[i].Length
		}
		for k := range h.Chunks {
			end += h.ChunkSpan(k).Length
		}
		if end != h.Layout().Size {
			t.Fatalf("parts of %d bytes in %d", end, h.Layout().Size)
		}
	})
}

func FuzzPoints(f *testing.F) {
	f.Add(rawPoints([6]uint64{}, [6]uint64{100, 3, 20_000, 1, 2, 30_000}))
	f.Add(rawPoints([6]uint64{}, [6]uint64{100, 0, 20_000, 0, 0, 0}, [6]uint64{1, 3, 1, 1, 2, 30_000}))
	h, err := parse(small())
	check(f, err)
	blob := bytes.Repeat([]byte{1, 2, 3, 4, 5}, 6000)
	f.Fuzz(func(t *testing.T, raw []byte) {
		p, err := h.ParsePoints(0, raw)
		if err != nil {
			if !errors.Is(err, pack.ErrInvalid) {
				t.Fatal(err)
			}
			return
		}
		for i := range p.Len() {
			from, to := p.Data(i)
			lo, hi := p.Blob(i)
			w := p.Window(i)
			if from >= to || to > 41_000 || lo >= hi || hi > 20_000 || w.Offset+w.Length > 30_000 ||
				p.Segment(from) != i {
				t.Fatal(i, from, to, lo, hi, w)
			}
			if p.Inflate(i, bytes.NewReader(blob[lo:hi]), blob[:w.Length], make([]byte, to-from)) == nil {
				t.Fatal("nothing hashes to that")
			}
		}
	})
}

func FuzzStream(f *testing.F) {
	f.Add(stored([]byte(`{"version":1}`)))
	f.Add(stored([]byte(`{"version":1,"image":"` + string(digest.FromString("x")) + `"}`)))
	f.Fuzz(func(t *testing.T, b []byte) { drain(bytes.NewReader(b)) })
}
