package layer

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/internal/image"
	"dewpoint/internal/layer/inflate"

	"github.com/opencontainers/go-digest"
)

// FuzzPoints reads what claims to be a list of restart points.
func FuzzPoints(f *testing.F) {
	f.Add("")
	f.Add("1 0 0 0 0 0\n2 9 5 0 0 0\n")
	var b strings.Builder
	k := &pointWriter{}
	if file, err := os.Create(filepath.Join(f.TempDir(), "points")); err == nil {
		k.f = file
		_ = k.add(inflate.Point{In: 5 << 20, Bit: 3, Out: 9 << 20, CRC: 7, Length: 8, Window: make([]byte, 100)})
		_ = k.add(inflate.Point{In: 9 << 20, Out: 19 << 20})
		k.close()
		text, _ := os.ReadFile(file.Name())
		b.Write(text)
	}
	f.Add(b.String())
	f.Fuzz(func(t *testing.T, text string) {
		var last inflate.Point
		var before int64
		err := eachPoint(strings.NewReader(text), func(p inflate.Point, window int, end int64) error {
			if p.In <= last.In || p.Out <= last.Out || window < 0 || int64(window) > p.Out || p.Bit > 7 ||
				end <= before || end > int64(len(text)) {
				t.Fatalf("%+v with %d bytes before it, behind %+v; its line ends at %d", p, window, last, end)
			}
			last, before = p, end
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	})
}

// FuzzSeed takes what claims to be another node's checkpoint of a fill.
func FuzzSeed(f *testing.F) {
	id := digest.FromString("tar")
	l := image.Layer{DiffID: id}
	l.Digest, l.Size, l.MediaType = digest.FromString("blob"), 1000, "application/vnd.oci.image.layer.v1.tar+gzip"
	f.Add([]byte(`{"version":1,"blob":"` + l.Digest.String() + `"}`))
	f.Add([]byte(`{"version":1,"blob":"` + l.Digest.String() + `","kept":5,"blob_at":9}`))
	dir := f.TempDir()
	s, err := Open(Config{Dir: dir})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { s.Close() })
	f.Fuzz(func(t *testing.T, record []byte) {
		fill := &Fill{store: s, Layer: l}
		data := strings.NewReader("the tar's first bytes")
		_ = fill.Seed(Seed{Record: record, Data: data})
		_ = os.RemoveAll(s.disk.dir(id))
	})
}

// FuzzStore opens a store in which a power cut, or a hand, has spoilt the records of a layer.
func FuzzStore(f *testing.F) {
	f.Add([]byte(`{"digest":"sha256:00","size":5}`), []byte(`{"version":1}`))
	f.Add([]byte(`null`), []byte(`{}`))
	id := digest.FromString("tar")
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, record, progress []byte) {
		s, err := Open(Config{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		at := s.disk.dir(id)
		s.Close()
		if err := os.MkdirAll(at, 0o755); err != nil {
			t.Fatal(err)
		}
		for name, b := range map[string][]byte{layerFile: record, readyFile: record, progressFile: progress,
			partialFile: record, "data": []byte("four")} {
			if err := os.WriteFile(filepath.Join(at, name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if s, err = Open(Config{Dir: dir}); err != nil {
			t.Fatal(err)
		}
		if l, err := s.Get(id); err == nil && l.DiffID != id {
			t.Fatalf("%s is taken for %s", l.DiffID, id)
		}
		s.Close()
		_ = os.RemoveAll(at)
	})
}
