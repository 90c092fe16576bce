package peer

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/opencontainers/go-digest"
)

// disk gives one file, as a node gives a complete layer from its page cache.
type disk struct {
	*node
	path string
	size int64
}

func (d *disk) Range(_ context.Context, _ digest.Digest, from, to int64) (io.ReadCloser, error) {
	f, err := os.Open(d.path)
	if err != nil {
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{io.NewSectionReader(f, from, to-from), f}, nil
}

func (d *disk) Follow(ctx context.Context, id digest.Digest, off int64) (io.ReadCloser, int64, error) {
	r, err := d.Range(ctx, id, off, d.size)
	return r, d.size, err
}

// BenchmarkStream moves a layer of 256 MiB from a node to another on the same machine, both in this process:
// the CPU seconds are those of both sides and of the kernel.
func BenchmarkStream(b *testing.B) {
	const size = 256 << 20
	path := filepath.Join(b.TempDir(), "data")
	check(b, os.WriteFile(path, noise(size), 0o600))
	auth := newAuth(b)
	_, addr := serve(b, Config{Auth: auth, Content: &disk{path: path, size: size}})
	c := client(b, Config{Auth: auth})
	id := digest.FromString("a layer")
	b.Run("follow", func(b *testing.B) {
		stream(b, size, func() (io.ReadCloser, error) {
			r, _, err := c.Follow(b.Context(), addr, id, 0)
			return r, err
		})
	})
	b.Run("range", func(b *testing.B) {
		stream(b, size, func() (io.ReadCloser, error) { return c.Range(b.Context(), addr, id, 0, size) })
	})
	b.Run("range-64KiB", func(b *testing.B) {
		stream(b, 64<<10, func() (io.ReadCloser, error) {
			return c.Range(b.Context(), addr, id, 1<<20, 1<<20+64<<10)
		})
	})
}

func stream(b *testing.B, size int64, open func() (io.ReadCloser, error)) {
	buf := make([]byte, 256<<10)
	b.SetBytes(size)
	from := cpu(b)
	for b.Loop() {
		r, err := open()
		check(b, err)
		n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, r, buf)
		check(b, err)
		if n != size {
			b.Fatal(n)
		}
		check(b, r.Close())
	}
	b.ReportMetric((cpu(b)-from)/(float64(b.N)*float64(size)/1e9), "cpu-s/GB")
}

// cpu is what this process has taken, in seconds.
func cpu(b *testing.B) float64 {
	var u syscall.Rusage
	check(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}
