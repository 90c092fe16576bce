package erofs_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/toc"
	"dewpoint/testkit/treetest"
)

// layerFile writes a tar of n entries that resembles a distribution's layer:
// ten files to a directory, of 8 KiB in the mean, some with long names.
func layerFile(b *testing.B, n int) *os.File {
	b.Helper()
	rnd := rand.New(rand.NewPCG(1, 2))
	f, err := os.Create(filepath.Join(b.TempDir(), "layer.tar"))
	check(b, err)
	b.Cleanup(func() { f.Close() })
	w := tar.NewWriter(f)
	zeros := make([]byte, 1<<20)
	dir := ""
	for i := range n {
		h := &tar.Header{Name: fmt.Sprintf("%sfile-of-some-length-%d.py", dir, i), Mode: 0o644,
			ModTime: treetest.Time}
		switch {
		case i%11 == 0:
			dir = fmt.Sprintf("usr/lib/python3/dist-packages/package%d/", i/110)
			if i%110 != 0 {
				dir += fmt.Sprintf("sub%d/", i)
			}
			h.Name, h.Typeflag, h.Mode = dir, tar.TypeDir, 0o755
		case i%13 == 0:
			h.Typeflag, h.Linkname = tar.TypeSymlink, "../target"
		case i%17 == 0:
			h.Format, h.ModTime = tar.FormatPAX, treetest.Time.Add(5)
			fallthrough
		default:
			h.Size = min(int64(rnd.ExpFloat64()*8192), 1<<20)
		}
		check(b, w.WriteHeader(h))
		_, err := w.Write(zeros[:h.Size])
		check(b, err)
	}
	check(b, w.Close())
	return f
}

// cpu reports the processor time of the loop that ends when the returned
// function is called: unlike wall time, it holds on a busy machine.
func cpu(b *testing.B) func() {
	now := func() int64 {
		var r unix.Rusage
		check(b, unix.Getrusage(unix.RUSAGE_SELF, &r))
		return r.Utime.Nano() + r.Stime.Nano()
	}
	start := now()
	return func() { b.ReportMetric(float64(now()-start)/1e6/float64(b.N), "cpu-ms/op") }
}

func BenchmarkBuild(b *testing.B) {
	for _, n := range []int{11_000, 200_000} {
		f := layerFile(b, n)
		list, err := toc.Read(f)
		check(b, err)
		b.Run(fmt.Sprintf("entries=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			defer cpu(b)()
			var index bytes.Buffer
			for b.Loop() {
				index.Reset()
				check(b, erofs.Build(&index, list, erofs.Options{DataSize: list.End}))
			}
			b.ReportMetric(float64(index.Len())/float64(n), "index-B/entry")
		})
	}
}

func BenchmarkScan(b *testing.B) {
	for _, n := range []int{11_000, 200_000} {
		f := layerFile(b, n)
		b.Run(fmt.Sprintf("entries=%d/toc", n), func(b *testing.B) {
			b.ReportAllocs()
			defer cpu(b)()
			for b.Loop() {
				_, err := toc.Read(f)
				check(b, err)
			}
		})
		b.Run(fmt.Sprintf("entries=%d/go", n), func(b *testing.B) {
			b.ReportAllocs()
			defer cpu(b)()
			for b.Loop() {
				_, err := f.Seek(0, io.SeekStart)
				check(b, err)
				r := tar.NewReader(f)
				for err == nil {
					_, err = r.Next()
				}
			}
		})
	}
}
