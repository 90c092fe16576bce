package datafs

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// BenchmarkPresent compares reading a layer that is all there over datafs with
// reading it over its file, in turns: 5,000 small files and 200 MB in one,
// with and without what the page cache holds. What it reports are ratios of
// medians, over datafs to without. Run it with -benchtime 1x.
func BenchmarkPresent(b *testing.B) {
	l := newBed(b).start().layer(tarOf(30, append(repeat(5000, 6000), 200<<20)...))
	l.putAll()
	l.data.Sync()
	l.mount()
	direct := *l
	direct.path = filepath.Join(l.dir, "data")
	direct.target = filepath.Join(l.dir, "direct")
	os.Mkdir(direct.target, 0o755)
	if err := unix.Mount(filepath.Join(l.dir, "index"), direct.target, "erofs", unix.MS_RDONLY,
		"device="+direct.path); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { unix.Unmount(direct.target, unix.MNT_DETACH) })
	for _, cold := range []bool{true, false} {
		var times [2][2][]time.Duration
		for range 5 {
			for i, way := range []*testLayer{&direct, l} {
				for k, read := range []func(*testLayer){readSmall, readLarge} {
					if cold {
						dropCaches(b)
					} else {
						read(way)
					}
					start := time.Now()
					read(way)
					times[k][i] = append(times[k][i], time.Since(start))
				}
			}
		}
		for k, what := range []string{"small", "large"} {
			d, f := median(times[k][0]), median(times[k][1])
			b.Logf("%s, cold %v: %v over the file, %v over datafs: %.2f", what, cold, d, f, f.Seconds()/d.Seconds())
			b.ReportMetric(f.Seconds()/d.Seconds(),
				fmt.Sprintf("%s-%s-ratio", what, map[bool]string{true: "cold", false: "warm"}[cold]))
		}
	}
	b.Logf("datafs: %d KiB", memoryOf(b, l.serverPID()))
}

func readSmall(l *testLayer) {
	for i := range 5000 {
		os.ReadFile(l.file(fmt.Sprintf("f%d", i)))
	}
}

func readLarge(l *testLayer) {
	f, err := os.Open(l.file("f5000"))
	if err != nil {
		l.t.Fatal(err)
	}
	defer f.Close()
	io.CopyBuffer(io.Discard, struct{ io.Reader }{f}, make([]byte, 128<<10))
}

func dropCaches(b *testing.B) {
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
		b.Fatal(err)
	}
}

func median(d []time.Duration) time.Duration {
	d = slices.Clone(d)
	slices.Sort(d)
	return d[len(d)/2]
}
