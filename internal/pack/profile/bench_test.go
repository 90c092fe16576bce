package profile

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/bdi"
	"dewpoint/internal/layer/mount"
	"dewpoint/testkit/treetest"
)

const (
	benchFiles = 3000
	benchBytes = 11 << 10 // of each
)

// BenchmarkCost reads all files of a layer whose tar is in the page cache, on
// fresh mounts: in turn with read-ahead, without, and recorded. It gives the
// medians of time and CPU, of all threads and the kernel, in milliseconds.
// "start", "add" and "stop" are what these calls themselves take.
func BenchmarkCost(b *testing.B) {
	var a treetest.Archive
	for i := range benchFiles {
		a.File(fmt.Sprintf("d%02d/f%04d", i/100, i), treetest.Text(benchBytes))
	}
	l := newLayer(b, mount.EROFS, &a)
	again := func() {
		back, err := mount.New(mount.EROFS)
		check(b, err)
		check(b, back.Unmount(l.Mount))
		check(b, back.Mount(b.Context(), l.files, l.Mount))
	}
	m, dir := meter{}, b.TempDir()
	for b.Loop() {
		again()
		m.run("plain", func() { readAll(b, l) })

		again()
		root, _, device, err := locate(l.Layer)
		check(b, err)
		root.Close()
		check(b, bdi.SetReadAhead(device, off))
		m.run("noahead", func() { readAll(b, l) })

		again()
		var r *Recording
		m.run("start", func() { r = start(b, Config{Dir: dir}) })
		m.run("add", func() { check(b, r.Add(l.Layer)) })
		m.run("recorded", func() { readAll(b, l) })
		var res Result
		m.run("stop", func() { res = stop(b, r) })
		if res.Pages != benchFiles*((benchBytes+pageSize-1)/pageSize) {
			b.Fatalf("%d pages", res.Pages)
		}
	}
	m.report(b)
}

func readAll(b *testing.B, l *layer) {
	buf := make([]byte, benchBytes)
	for i := range benchFiles {
		fd, err := unix.Open(l.path(fmt.Sprintf("d%02d/f%04d", i/100, i)), unix.O_RDONLY, 0)
		check(b, err)
		if n, err := unix.Read(fd, buf); n != benchBytes {
			b.Fatal(n, err)
		}
		unix.Close(fd)
	}
}

// meter takes the time and the CPU of what it runs.
type meter map[string][]time.Duration

func (m meter) run(name string, use func()) {
	cpu, begin := used(), time.Now()
	use()
	m[name] = append(m[name], time.Since(begin))
	m[name+"-cpu"] = append(m[name+"-cpu"], used()-cpu)
}

func used() time.Duration {
	var u unix.Rusage
	unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func (m meter) report(b *testing.B) {
	for name, all := range m {
		slices.Sort(all)
		b.ReportMetric(float64(all[len(all)/2].Microseconds())/1000, name+"-ms")
	}
}
