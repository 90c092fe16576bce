package mount_test

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/testkit/mounttest"
	"dewpoint/testkit/treetest"
)

// BenchmarkMount mounts and unmounts one small layer.
func BenchmarkMount(b *testing.B) {
	f := oneFile(b, "x")
	for _, back := range mounttest.Backends(b) {
		b.Run(back.Name(), func(b *testing.B) {
			target := b.TempDir()
			var mounting time.Duration
			for b.Loop() {
				begin := time.Now()
				if err := back.Mount(context.Background(), f, target); err != nil {
					b.Fatal(err)
				}
				mounting += time.Since(begin)
				if err := back.Unmount(target); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(mounting.Microseconds())/float64(b.N), "µs/mount")
		})
	}
}

// The tree that BenchmarkRead reads: many small files and a large one.
const (
	smallFiles = 4000
	smallSize  = 6000
	largeSize  = 64 << 20
)

var benchLayer = sync.OnceValue(func() []byte {
	var a treetest.Archive
	for i := range smallFiles {
		if i%100 == 0 {
			a.Dir(fmt.Sprintf("d%02d", i/100))
		}
		a.File(fmt.Sprintf("d%02d/f%d", i/100, i), treetest.Text(smallSize))
	}
	return a.File("large", treetest.Text(largeSize)).Bytes()
})

// BenchmarkRead reads a whole tree through overlayfs, small files and a large
// one, from the page cache (warm) and from the disk (cold). The "tree" backend
// is the measure: it is an ordinary directory.
func BenchmarkRead(b *testing.B) {
	f := prepared(b, benchLayer())
	for _, back := range mounttest.Backends(b) {
		target := filepath.Join(b.TempDir(), "1")
		mounttest.Mounted(b, back, f, target)
		merged := mounttest.Overlay(b, []string{target})
		for _, what := range []string{"d", "large"} {
			b.Run(what+"/warm/"+back.Name(), func(b *testing.B) { read(b, merged, what, false) })
			b.Run(what+"/cold/"+back.Name(), func(b *testing.B) { read(b, merged, what, true) })
		}
	}
}

func read(b *testing.B, root, what string, cold bool) {
	buf := make([]byte, 256<<10)
	var bytes int64
	readAll(b, root, what, buf)
	var cpu time.Duration
	for b.Loop() {
		if cold {
			b.StopTimer()
			dropCaches(b)
			b.StartTimer()
		}
		before := systemTime()
		bytes = readAll(b, root, what, buf)
		cpu += systemTime() - before
	}
	b.SetBytes(bytes)
	b.ReportMetric(float64(cpu.Microseconds())/float64(b.N), "cpu-µs/op")
}

// readAll reads the files whose names begin with what.
func readAll(b *testing.B, root, what string, buf []byte) (total int64) {
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || (what == "large") != (d.Name() == "large") {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		for {
			n, err := f.Read(buf)
			if total += int64(n); err != nil {
				return nil
			}
		}
	})
	if err != nil {
		b.Fatal(err)
	}
	return total
}

func dropCaches(b *testing.B) {
	unix.Sync()
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
		b.Fatal(err)
	}
}

// systemTime is the CPU time of this process so far.
func systemTime() time.Duration {
	var r unix.Rusage
	unix.Getrusage(unix.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
