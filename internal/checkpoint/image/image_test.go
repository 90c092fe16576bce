package image_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/internal/checkpoint/image"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// memory is n bytes of which some are zeros, some compress and some do not.
func memory(seed uint64, n int) []byte {
	r, b := rand.New(rand.NewPCG(seed, 0)), make([]byte, n)
	for at := 0; at < n; at += 100 << 10 {
		part := b[at:min(n, at+100<<10)]
		switch r.IntN(3) {
		case 0:
			for i := range part {
				part[i] = byte(r.Uint32())
			}
		case 1:
			copy(part, bytes.Repeat([]byte(fmt.Sprintf("object %d, ", r.Uint32())), len(part)/8))
		}
	}
	return b
}

// dump writes what an engine may leave.
func dump(t testing.TB, files map[string][]byte) string {
	t.Helper()
	dir := t.TempDir()
	for name, b := range files {
		path := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(path), 0o700)
		if err == nil {
			err = os.WriteFile(path, b, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func usual() map[string][]byte {
	holes := make([]byte, 5*image.ChunkSize+17)
	holes[3*image.ChunkSize] = 1
	return map[string][]byte{
		"inventory.img": []byte("inventory"), "core-1.img": memory(1, 9000), "empty.img": nil,
		"sub/dir/descriptors.json": []byte("[]"), "sub/pages-1.img": []byte("not memory"),
		"pages-1.img": memory(2, 3<<20+123), "pages-2.img": holes, "pages-10.img": nil,
		"pages-3.img": make([]byte, image.ChunkSize),
	}
}

func pack(t testing.TB, dir string) ([]byte, image.Info) {
	t.Helper()
	var b bytes.Buffer
	info, err := image.Pack(t.Context(), &b, dir)
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes(), info
}

func open(t testing.TB, b []byte) *image.Reader {
	t.Helper()
	r, err := image.Open(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// contents are the files below dir, directories with a slash.
func contents(t testing.TB, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		name := strings.TrimPrefix(path, dir)
		if err != nil || name == "" {
			return err
		}
		fi, err := e.Info()
		if err != nil {
			return err
		}
		if want := map[bool]os.FileMode{true: 0o700, false: 0o600}[e.IsDir()]; fi.Mode().Perm() != want {
			t.Errorf("%s has mode %v", name, fi.Mode())
		}
		if !e.IsDir() {
			b, err := os.ReadFile(path)
			all[name[1:]] = string(b)
			return err
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	return all
}

func same(t testing.TB, got map[string]string, want map[string][]byte) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%d files, not %d", len(got), len(want))
	}
	for name, b := range want {
		if g, ok := got[name]; !ok || g != string(b) {
			t.Errorf("%s: %d bytes, not %d, or others", name, len(g), len(b))
		}
	}
}

func TestRoundTrip(t *testing.T) {
	want := usual()
	b, info := pack(t, dump(t, want))
	var meta, mem int64
	for name, f := range want {
		if strings.HasPrefix(name, "pages-") {
			mem += int64(len(f))
		} else {
			meta += int64(len(f))
		}
	}
	if info != (image.Info{Size: int64(len(b)), Digest: digest.FromBytes(b), Meta: meta, Pages: mem,
		Files: len(want)}) {
		t.Errorf("%+v", info)
	}
	if again, _ := pack(t, dump(t, want)); !bytes.Equal(b, again) {
		t.Error("the same files give other bytes")
	}
	for _, workers := range []int{0, 1, 3} {
		dir := t.TempDir()
		if err := open(t, b).Unpack(t.Context(), dir, workers); err != nil {
			t.Fatal(err)
		}
		same(t, contents(t, dir), want)
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, "pages-2.img"), &st); err != nil ||
			st.Blocks*512 > 2*image.ChunkSize {
			t.Errorf("zeros take %d bytes, %v", st.Blocks*512, err)
		}
	}
}

func TestNothing(t *testing.T) {
	b, info := pack(t, t.TempDir())
	dir := t.TempDir()
	if err := open(t, b).Unpack(t.Context(), dir, 1); err != nil || info.Files != 0 {
		t.Errorf("%+v, %v", info, err)
	}
	same(t, contents(t, dir), nil)
}

func TestRandomAccess(t *testing.T) {
	want := usual()
	b, _ := pack(t, dump(t, want))
	r := open(t, b)
	dir := t.TempDir()
	if err := r.Meta(dir); err != nil {
		t.Fatal(err)
	}
	buf := bytes.Repeat([]byte{0xff}, image.ChunkSize)
	for i, f := range r.Pages() {
		for k := 0; k*image.ChunkSize < len(want[f.Name]); k++ {
			part := want[f.Name][k*image.ChunkSize:]
			part = part[:min(len(part), image.ChunkSize)]
			n, err := r.ReadPages(t.Context(), i, k, buf)
			if err != nil || !bytes.Equal(buf[:n], part) {
				t.Errorf("%s: chunk %d: %d bytes, %v", f.Name, k, n, err)
			}
			if got, err := r.Chunk(t.Context(), f.Name, k); err != nil || !bytes.Equal(got, part) {
				t.Errorf("%s by name: chunk %d: %d bytes, %v", f.Name, k, len(got), err)
			}
		}
		if _, err := r.ReadPages(t.Context(), i, int(f.Size/image.ChunkSize)+1, buf); err == nil {
			t.Errorf("%s has a chunk behind its end", f.Name)
		}
		delete(want, f.Name)
	}
	same(t, contents(t, dir), want)
	if _, err := r.Chunk(t.Context(), "pages-99.img", 0); err == nil {
		t.Error("a file that is not there has a chunk")
	}
}

// drain reads everything that is in a file.
func drain(t testing.TB, b io.ReaderAt, size int64, dir string) error {
	r, err := image.Open(b, size)
	if err != nil {
		return err
	}
	return r.Unpack(t.Context(), dir, 2)
}

// Whatever bit is wrong and wherever it ends: what is given out is right, or there is an error.
func TestDamage(t *testing.T) {
	want := map[string][]byte{"a.img": []byte("some text, some text"), "d/b.img": nil,
		"pages-1.img": memory(3, image.ChunkSize+9000)}
	b, _ := pack(t, dump(t, want))
	step := max(1, len(b)/120)
	for at := 0; at < len(b); at++ {
		if at > 40 && at < len(b)-120 && at%step > 0 {
			continue
		}
		if err := drain(t, bytes.NewReader(b[:at]), int64(at), t.TempDir()); !errors.Is(err, image.ErrDamaged) {
			t.Fatalf("cut at %d of %d: %v", at, len(b), err)
		}
		if err := drain(t, bytes.NewReader(b[:at]), int64(len(b)), t.TempDir()); !errors.Is(err, image.ErrDamaged) {
			t.Fatalf("ends at %d of %d: %v", at, len(b), err)
		}
		bad := bytes.Clone(b)
		bad[at] ^= byte(1 << (at % 8))
		dir := t.TempDir()
		if err := drain(t, bytes.NewReader(bad), int64(len(b)), dir); err == nil {
			same(t, contents(t, dir), want)
		} else if !errors.Is(err, image.ErrDamaged) {
			t.Fatalf("wrong at %d of %d: %v", at, len(b), err)
		}
	}
}

var errAway = errors.New("away")

// failing fails at what lies behind after.
type failing struct {
	io.ReaderAt
	after int64
}

func (f failing) ReadAt(b []byte, at int64) (int, error) {
	if at <= f.after && at+int64(len(b)) > f.after {
		return 0, errAway
	}
	return f.ReaderAt.ReadAt(b, at)
}

// That what is read from fails says nothing of the file.
func TestReadErrors(t *testing.T) {
	b, _ := pack(t, dump(t, usual()))
	for at := int64(0); at < int64(len(b)); at += int64(len(b))/50 + 1 {
		err := drain(t, failing{bytes.NewReader(b), at}, int64(len(b)), t.TempDir())
		if !errors.Is(err, errAway) || errors.Is(err, image.ErrDamaged) {
			t.Errorf("at %d: %v", at, err)
		}
	}
}

type full struct{ room int }

var errFull = errors.New("no space left")

func (f *full) Write(b []byte) (int, error) {
	if f.room -= len(b); f.room < 0 {
		return 0, errFull
	}
	return len(b), nil
}

func TestPackErrors(t *testing.T) {
	dir := dump(t, usual())
	_, info := pack(t, dir)
	for room := 0; room < int(info.Size); room += int(info.Size)/20 + 1 {
		if _, err := image.Pack(t.Context(), &full{room}, dir); !errors.Is(err, errFull) {
			t.Errorf("room for %d: %v", room, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := image.Pack(ctx, io.Discard, dir); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if _, err := image.Pack(t.Context(), io.Discard, dir+"-not"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if _, err := image.Pack(t.Context(), io.Discard, dir); err == nil {
		t.Error("a link is packed")
	}
}

func TestUnpackCancelled(t *testing.T) {
	b, _ := pack(t, dump(t, usual()))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := open(t, b).Unpack(ctx, t.TempDir(), 2); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// large is 256 MiB of memory that compresses as a process's does, about 4:1.
func large(b *testing.B) string {
	text := memory(7, 64<<20)
	return dump(b, map[string][]byte{"core-1.img": memory(8, 200<<10), "pages-1.img": bytes.Repeat(text, 4)})
}

func BenchmarkPack(b *testing.B) {
	dir := large(b)
	b.SetBytes(256 << 20)
	for b.Loop() {
		info, err := image.Pack(b.Context(), io.Discard, dir)
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(info.Size)/(1<<20), "MiB")
	}
}

func BenchmarkUnpack(b *testing.B) {
	packed, _ := pack(b, large(b))
	b.SetBytes(256 << 20)
	for b.Loop() {
		dir := b.TempDir()
		if err := open(b, packed).Unpack(b.Context(), dir, 2); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkTar is what tar and zstd -1 do with the same, both ways.
func BenchmarkTar(b *testing.B) {
	dir := large(b)
	run := func(b *testing.B, script string) {
		b.SetBytes(256 << 20)
		for b.Loop() {
			if out, err := exec.Command("sh", "-c", script, "sh", dir, b.TempDir()).CombinedOutput(); err != nil {
				b.Fatalf("%v: %s", err, out)
			}
		}
	}
	b.Run("Pack", func(b *testing.B) { run(b, `tar -C "$1" -cf - . | zstd -q -1 -T2 >/dev/null`) })
	if out, err := exec.Command("sh", "-c", `tar -C "$1" -cf - . | zstd -q -1 >"$1.tzst"`, "sh",
		dir).CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	b.Run("Unpack", func(b *testing.B) { run(b, `zstd -q -dc "$1.tzst" | tar -C "$2" -xf -`) })
}
