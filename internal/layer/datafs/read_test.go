package datafs

import (
	"bytes"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"dewpoint/testkit"

	"golang.org/x/sys/unix"
)

// both runs a test over EROFS and over a tree.
func both(t *testing.T, f func(t *testing.T, show func(*testLayer) *testLayer)) {
	t.Run("erofs", func(t *testing.T) { f(t, (*testLayer).mount) })
	t.Run("tree", func(t *testing.T) { f(t, (*testLayer).tree) })
}

func TestWholeLayer(t *testing.T) {
	both(t, func(t *testing.T, show func(*testLayer) *testLayer) {
		l := show(newBed(t).start().layer(tarOf(1, 100, 5000, 0, 3<<20, 4096)))
		l.putAll()
		for _, name := range []string{"f0", "f1", "f3", "f4"} {
			got, err := os.ReadFile(l.file(name))
			if err != nil || !bytes.Equal(got, l.content(name)) {
				t.Errorf("%s: %d bytes, %v", name, len(got), err)
			}
		}
		if w := l.wanted(l.id); len(w) > 0 {
			t.Errorf("wants of a whole layer: %v", w)
		}
	})
}

func TestAbsentThenPresent(t *testing.T) {
	both(t, func(t *testing.T, show func(*testLayer) *testLayer) {
		for _, how := range []string{"read", "mmap", "direct"} {
			t.Run(how, func(t *testing.T) {
				l := show(newBed(t).start().layer(tarOf(2, 64<<10, 64<<10)))
				if how == "direct" && !l.takesDirect("f1") {
					t.Skip("EROFS from a file opens nothing with O_DIRECT")
				}
				r := startReader(t, how, l.file("f1"), 8192, 4096)
				testkit.Eventually(t, "a want", func() bool { return len(l.wanted(l.id)) > 0 })
				at := l.at("f1").from + 8192
				got := l.wanted(l.id)
				if want := (span{at / page * page, (at + 4095) / page * page}); len(got) != 1 && how != "direct" ||
					got[0].from < want.from || got[0].to > want.to+page {
					t.Errorf("wants %v for %v", got, want)
				}
				l.putAll()
				r.right(t, l.content("f1")[8192:12288])
			})
		}
	})
}

// TestPresentBesideAbsent reads every present page of a file whose other pages
// are absent, while 40 readers wait for absent ones. A page of the file lies on
// two of the tar, so two and two are present and absent.
func TestPresentBesideAbsent(t *testing.T) {
	both(t, func(t *testing.T, show func(*testLayer) *testLayer) {
		const pages = 256
		l := show(newBed(t).start().layer(tarOf(3, pages*page, 40*32*page)))
		at := l.at("f0").from / page * page
		for i := int64(0); i < pages; i += 4 {
			l.put(at+i*page, at+(i+2)*page)
		}
		var group sync.WaitGroup
		for i := range 40 {
			group.Go(func() {
				b := make([]byte, page)
				f, err := os.Open(l.file("f1"))
				if err == nil {
					_, err = f.ReadAt(b, int64(i)*32*page)
					f.Close()
				}
				if off := i * 32 * page; err != nil || !bytes.Equal(b, l.content("f1")[off:off+page]) {
					t.Errorf("read of what was absent: %v", err)
				}
			})
		}
		testkit.Eventually(t, "40 wants", func() bool { return len(l.wanted(l.id)) >= 40 })
		f, err := os.Open(l.file("f0"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		start := time.Now()
		b := make([]byte, 1024)
		for off := int64(0); off < pages*page; off += 4 * page {
			if _, err := f.ReadAt(b, off); err != nil || !bytes.Equal(b, l.content("f0")[off:off+1024]) {
				t.Fatalf("byte %d: %v", off, err)
			}
		}
		if took := time.Since(start); took > 5*time.Second {
			t.Errorf("present pages took %v", took)
		}
		l.putAll()
		group.Wait()
	})
}

func TestOneWantForManyReaders(t *testing.T) {
	both(t, func(t *testing.T, show func(*testLayer) *testLayer) {
		l := show(newBed(t).start().layer(tarOf(4, 256<<10)))
		var all []*reader
		for range 8 {
			all = append(all, startReader(t, "read", l.file("f0"), 0, 64<<10))
		}
		testkit.Eventually(t, "a want", func() bool { return len(l.wanted(l.id)) > 0 })
		time.Sleep(200 * time.Millisecond)
		l.putAll()
		for _, r := range all {
			r.right(t, l.content("f0")[:64<<10])
		}
		w := l.wanted(l.id)
		slices.SortFunc(w, func(a, b span) int { return int(a.from - b.from) })
		for i := 1; i < len(w); i++ {
			if w[i].from < w[i-1].to {
				t.Errorf("wanted twice: %v and %v", w[i-1], w[i])
			}
		}
	})
}

func TestKillWaitingReader(t *testing.T) {
	both(t, func(t *testing.T, show func(*testLayer) *testLayer) {
		l := show(newBed(t).start().layer(tarOf(5, 64<<10, 64<<10, 64<<10, 64<<10)))
		// Neighbours that are present make the kernel's read-ahead mixed.
		l.put(l.at("f3").from, l.at("f3").from+page)
		for i, how := range []string{"read", "mmap", "exec", "direct"} {
			if how == "direct" && !l.takesDirect("f3") {
				continue
			}
			for _, sig := range []unix.Signal{unix.SIGKILL, unix.SIGTERM} {
				name := []string{"f0", "f1", "f2", "f3"}[i]
				before := len(l.wanted(l.id))
				off := int64(0)
				if sig == unix.SIGTERM {
					off = 32 << 10
				}
				r := startReader(t, how, l.file(name), off+page, page)
				if how != "exec" || sig == unix.SIGKILL {
					testkit.Eventually(t, "a want", func() bool { return len(l.wanted(l.id)) > before })
				}
				time.Sleep(50 * time.Millisecond)
				// A harmless signal first: only its arrival is told to datafs.
				r.cmd.Process.Signal(unix.SIGCHLD)
				r.cmd.Process.Signal(unix.SIGURG)
				time.Sleep(50 * time.Millisecond)
				start := time.Now()
				r.cmd.Process.Signal(unix.SIGKILL)
				r.ends(t, 2*time.Second)
				t.Logf("%s: %v", how, time.Since(start))
			}
		}
		l.putAll()
		for _, name := range []string{"f0", "f1", "f2", "f3"} {
			if got, err := os.ReadFile(l.file(name)); err != nil || !bytes.Equal(got, l.content(name)) {
				t.Errorf("%s after kills: %d bytes, %v", name, len(got), err)
			}
		}
	})
}

func TestHarmlessSignal(t *testing.T) {
	both(t, func(t *testing.T, show func(*testLayer) *testLayer) {
		for _, how := range []string{"read", "mmap", "direct"} {
			l := show(newBed(t).start().layer(tarOf(6, 64<<10)))
			if how == "direct" && !l.takesDirect("f0") {
				continue
			}
			r := startReader(t, how, l.file("f0"), 0, 16<<10)
			testkit.Eventually(t, "a want", func() bool { return len(l.wanted(l.id)) > 0 })
			for range 20 {
				r.cmd.Process.Signal(unix.SIGURG) // the Go runtime handles it
				time.Sleep(10 * time.Millisecond)
			}
			l.putAll()
			r.right(t, l.content("f0")[:16<<10])
		}
	})
}

func TestFailAndRecover(t *testing.T) {
	both(t, func(t *testing.T, show func(*testLayer) *testLayer) {
		l := show(newBed(t).start().layer(tarOf(7, 64<<10)))
		for _, abort := range []bool{false, true} {
			before := len(l.wanted(l.id))
			r := startReader(t, "read", l.file("f0"), 0, 16<<10)
			testkit.Eventually(t, "a want", func() bool { return len(l.wanted(l.id)) > before })
			w := l.wanted(l.id)[before]
			if abort {
				l.client.Abort(l.id)
			} else {
				l.client.Fail(l.id, w.from, w.to)
			}
			if err := r.ends(t, 5*time.Second); err == nil ||
				!bytes.Contains(r.out.Bytes(), []byte("input/output error")) {
				t.Errorf("failed read: %v, %s", err, r.out.String())
			}
			time.Sleep(failsFor)
		}
		before := len(l.wanted(l.id))
		r := startReader(t, "read", l.file("f0"), 0, 64<<10)
		testkit.Eventually(t, "a want after the failure", func() bool { return len(l.wanted(l.id)) > before })
		l.putAll()
		r.right(t, l.content("f0"))
	})
}
