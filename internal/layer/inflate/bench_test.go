package inflate

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"dewpoint/internal/image"

	kgzip "github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

const sampleSize = 100 << 20

// sample is a tar of the system's libraries and its compressed forms.
var sample = sync.OnceValue(func() (s struct{ tar, gz1, gz6, zst []byte }) {
	cmd := exec.Command("tar", "--sort=name", "-cf", "-", "-C", "/usr", "lib", "bin")
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		panic(err)
	}
	if err := cmd.Start(); err != nil {
		panic(err)
	}
	s.tar, err = io.ReadAll(io.LimitReader(pipe, sampleSize))
	if err != nil || len(s.tar) < sampleSize/2 {
		panic("no sample: /usr/lib and /usr/bin are too small")
	}
	cmd.Process.Kill()
	cmd.Wait()
	dir, err := os.MkdirTemp("", "inflate-bench-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	tar := filepath.Join(dir, "tar")
	if err := os.WriteFile(tar, s.tar, 0o600); err != nil {
		panic(err)
	}
	for level, gz := range map[string]*[]byte{"-1": &s.gz1, "-6": &s.gz6} {
		if *gz, err = exec.Command("gzip", level, "-c", tar).Output(); err != nil {
			panic(err)
		}
	}
	w, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		panic(err)
	}
	s.zst = w.EncodeAll(s.tar, nil)
	return s
})

func cpuTime() time.Duration {
	var u syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// inflateAll reports MB of output per second and per CPU second.
func inflateAll(b *testing.B, blob []byte, open func(io.Reader) (io.Reader, error)) {
	buf := make([]byte, 1<<20)
	b.SetBytes(int64(len(sample().tar)))
	begin := cpuTime()
	for b.Loop() {
		r, err := open(bytes.NewReader(blob))
		if err != nil {
			b.Fatal(err)
		}
		var got int64
		for err == nil {
			var n int
			n, err = r.Read(buf)
			got += int64(n)
		}
		if err != io.EOF || got != int64(len(sample().tar)) {
			b.Fatal(got, err)
		}
		if c, ok := r.(io.Closer); ok {
			c.Close()
		}
	}
	b.ReportMetric(float64(len(sample().tar))*float64(b.N)/1e6/(cpuTime()-begin).Seconds(), "MB/cpu-s")
}

func gzipReaders() map[string]func(io.Reader) (io.Reader, error) {
	m := map[string]func(io.Reader) (io.Reader, error){
		"compress-gzip":  func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) },
		"klauspost-gzip": func(r io.Reader) (io.Reader, error) { return kgzip.NewReader(r) },
	}
	for name, make := range engines {
		m["ours-"+name] = func(r io.Reader) (io.Reader, error) { return newGzip(r, make(), &Point{}), nil }
	}
	return m
}

func BenchmarkGzip6(b *testing.B) {
	for name, open := range gzipReaders() {
		b.Run(name, func(b *testing.B) { inflateAll(b, sample().gz6, open) })
	}
}

func BenchmarkGzip1(b *testing.B) {
	for name, open := range gzipReaders() {
		b.Run(name, func(b *testing.B) { inflateAll(b, sample().gz1, open) })
	}
}

func BenchmarkZstd(b *testing.B) {
	b.Run("ours", func(b *testing.B) {
		inflateAll(b, sample().zst, func(r io.Reader) (io.Reader, error) { return NewReader(r, image.Zstd, nil) })
	})
	b.Run("klauspost-zstd", func(b *testing.B) {
		inflateAll(b, sample().zst, func(r io.Reader) (io.Reader, error) {
			return zstd.NewReader(r, zstd.WithDecoderConcurrency(1))
		})
	})
}

// BenchmarkPoints asks for a point every 4 MiB, as filling a layer does.
func BenchmarkPoints(b *testing.B) {
	for name, make := range engines {
		b.Run(name, func(b *testing.B) {
			inflateAll(b, sample().gz6, func(r io.Reader) (io.Reader, error) {
				return &marking{Reader: newGzip(r, make(), &Point{})}, nil
			})
		})
	}
}

type marking struct {
	Reader
	n int
}

func (m *marking) Read(p []byte) (int, error) {
	if m.n > 4<<20 {
		m.Mark()
		m.n = 0
	}
	n, err := m.Reader.Read(p)
	m.Point()
	m.n += n
	return n, err
}

// BenchmarkHash is what the layer's digest costs beside it.
func BenchmarkHash(b *testing.B) {
	data := sample().tar
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		sha256.Sum256(data)
	}
}
