package profile

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/bdi"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/layer/toc"
	"dewpoint/testkit/mounttest"
	"dewpoint/testkit/treetest"
)

var pageSize = int64(os.Getpagesize())

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// layer is a mounted layer that a test knows all about.
type layer struct {
	Layer
	files mount.Files
	toc   *toc.TOC
}

func (l *layer) path(name string) string { return filepath.Join(l.Mount, name) }

// newLayer mounts the archive's layer afresh.
func newLayer(t testing.TB, backend string, a *treetest.Archive) *layer {
	t.Helper()
	tar := a.Bytes()
	f, err := mounttest.Layer(t.TempDir(), mounttest.File(t, tar), false)
	check(t, err)
	b, err := mount.New(backend)
	check(t, err)
	l := &layer{Layer: Layer{DiffID: digest.FromBytes(tar), Index: f.Index, Mount: t.TempDir()}, files: f}
	mounttest.Mounted(t, b, f, l.Mount)
	l.toc, err = toc.Read(bytes.NewReader(tar))
	check(t, err)
	return l
}

// start records the layers; the recording ends with the test if not before.
func start(t testing.TB, cfg Config, layers ...*layer) *Recording {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = t.TempDir()
	}
	cfg.Log = slog.New(slog.DiscardHandler)
	var list []Layer
	for _, l := range layers {
		list = append(list, l.Layer)
	}
	r, err := Start(context.Background(), cfg, list)
	check(t, err)
	t.Cleanup(func() { r.Stop() })
	return r
}

// record returns what was read while use ran.
func record(t testing.TB, use func(), layers ...*layer) Result {
	t.Helper()
	r := start(t, Config{}, layers...)
	use()
	return stop(t, r)
}

func stop(t testing.TB, r *Recording) Result {
	t.Helper()
	res, err := r.Stop()
	check(t, err)
	if res.Lost != 0 {
		t.Fatalf("%d events were lost", res.Lost)
	}
	return res
}

// pages writes a result as "file:page" in order, by the tars' own tables.
func pages(t testing.TB, res Result, layers ...*layer) string {
	t.Helper()
	var out []string
	for _, r := range res.Reads {
		out = append(out, pagesOf(t, r, layers)...)
	}
	return strings.Join(out, " ")
}

func pagesOf(t testing.TB, r Read, layers []*layer) (out []string) {
	t.Helper()
	for _, l := range layers {
		for _, e := range l.toc.Entries {
			if l.DiffID != r.Layer || len(e.Ranges) != 1 {
				continue
			}
			g := e.Ranges[0]
			from, to := r.Offset-g.Data, r.Offset-g.Data+r.Length
			if from < 0 || from >= g.Length {
				continue
			}
			if from%pageSize != 0 || to > g.Length || to%pageSize != 0 && to != g.Length {
				t.Errorf("%+v is not made of pages of %q, which lies at %+v", r, e.Name, g)
			}
			if r.File != e.Name {
				t.Errorf("%+v is of %q", r, e.Name)
			}
			for ; from < to; from += pageSize {
				out = append(out, fmt.Sprintf("%s:%d", e.Name, from/pageSize))
			}
			return out
		}
	}
	t.Errorf("%+v lies in no file", r)
	return nil
}

// readAt reads n bytes at a page of a file.
func readAt(t testing.TB, path string, page, n int64) {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	check(t, err)
	defer unix.Close(fd)
	got, err := unix.Pread(fd, make([]byte, n), page*pageSize)
	check(t, err)
	if int64(got) != n {
		t.Fatalf("read %d of %d bytes", got, n)
	}
}

var sink byte

// touch reads one byte of each page by mmap.
func touch(t testing.TB, path string, size int, pages ...int64) {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	check(t, err)
	defer unix.Close(fd)
	b, err := unix.Mmap(fd, 0, size, unix.PROT_READ, unix.MAP_PRIVATE)
	check(t, err)
	for _, p := range pages {
		sink += b[p*pageSize+7]
	}
	check(t, unix.Munmap(b))
}

// readAhead is what the kernel reads ahead on a layer's mount, in KiB.
func readAhead(t testing.TB, l *layer) int {
	t.Helper()
	root, _, device, err := locate(l.Layer)
	check(t, err)
	root.Close()
	kib, err := bdi.ReadAhead(device)
	check(t, err)
	return kib
}

// instances lists the kernel's tracing instances of ours.
func instances(t testing.TB) []string {
	t.Helper()
	tr, err := openTracing()
	check(t, err)
	defer tr.Close()
	entries, err := os.ReadDir(filepath.Join(tr.path, "instances"))
	check(t, err)
	var out []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) {
			out = append(out, e.Name())
		}
	}
	return out
}
