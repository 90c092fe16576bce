package test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"dewpoint/testkit/registrytest"

	"golang.org/x/sys/unix"
)

// endsWithin is how long a container may take to end, whatever it waits for.
const endsWithin = 2 * time.Second

// Containers that wait for bytes which do not come are removed at once.
func TestLazyWaitingContainersEnd(t *testing.T) { onBackends(t, testLazyWaitingContainersEnd) }

func testLazyWaitingContainersEnd(t *testing.T, backend string) {
	b := newLazyBed(t, backend, off)
	b.run()
	b.reads(file(40)) // points are here
	b.hang()
	b.must("run", "-d", "--name", "one", b.li.Ref, "sum", file(3))
	b.eventually("the first process waits", func() bool { return len(b.waiting("sum\x00"+file(3))) == 1 })
	for n := range 20 {
		b.ask(file(5 + n))
	}
	b.held(file(60))

	b.within("rm -f of a container whose first process waits", "rm", "-f", "one")
	b.within("rm -f of one with many readers", "rm", "-f", "web")
	if left := gone(func() []string { return b.cgroups("/*") }); len(left) > 0 {
		t.Errorf("cgroups left: %v", left)
	}
	// The reads that nobody waits for any more take nobody's place.
	b.reg.Heal()
	b.must("run", "-d", "--name", "web", "--ready", "http:"+b.port+"/", b.li.Ref, "serve", b.port)
	b.reads(file(30))
	b.must("rm", "-f", "web")
}

// They are stopped at once too, though the thread that gets the signal may be
// one that waits.
func TestLazyWaitingContainersStop(t *testing.T) {
	onBackends(t, func(t *testing.T, backend string) {
		b := newLazyBed(t, backend, off)
		b.run()
		b.reads(file(40))
		b.hang()
		b.must("run", "-d", "--name", "one", b.li.Ref, "sum", file(3))
		b.eventually("the first process waits", func() bool { return len(b.waiting("sum\x00"+file(3))) == 1 })
		for n := range 20 {
			b.ask(file(5 + n))
		}
		b.held(file(60))
		b.within("stop of a container whose first process waits", "stop", "one")
		b.within("stop of one with many readers", "stop", "web")
		b.must("rm", "one", "web")
	})
}

// within runs dew, which has to be done in time.
func (m *machine) within(what string, args ...string) {
	m.t.Helper()
	begin := time.Now()
	m.must(args...)
	if took := time.Since(begin); took > endsWithin {
		m.t.Errorf("%s took %s", what, took)
	}
}

// waiting are the processes with such an end of their command line, in the
// node's containers, that wait for a page.
func (m *machine) waiting(line string) []int {
	var out []int
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		got, _ := os.ReadFile(d + "/cmdline")
		if !strings.Contains(string(got), line) {
			continue
		}
		mounts, _ := os.ReadFile(d + "/mountinfo")
		pid, _ := strconv.Atoi(filepath.Base(d))
		if first, _, _ := strings.Cut(string(mounts), "\n"); strings.Contains(first, m.root) && waitsForPage(d) {
			out = append(out, pid)
		}
	}
	return out
}

// waitsForPage reports whether a thread of the process sleeps in the page cache
// or for an answer of FUSE.
func waitsForPage(dir string) bool {
	tasks, _ := filepath.Glob(dir + "/task/*/wchan")
	for _, task := range tasks {
		at, _ := os.ReadFile(task)
		if s := string(at); strings.Contains(s, "folio") || s == "request_wait_answer" {
			return true
		}
	}
	return false
}

// Many readers of absent files in one container do not delay a read of a
// present one, and all get their bytes.
func TestLazyManyReaders(t *testing.T) {
	t.Parallel()
	b := newLazyBed(t, "erofs", off)
	b.run()
	b.reads(file(50))
	near := b.untouched(file(50))
	b.hang()
	var paths []string
	for n := range 40 {
		paths = append(paths, file(n))
	}
	readers := exec.Command(filepath.Join(programs, "dew"),
		append([]string{"-H", "unix://" + b.state + "/dewd.sock", "exec", "web", "/app", "each"}, paths...)...)
	done := make(chan string, 1)
	go func() {
		out, err := readers.CombinedOutput()
		done <- fmt.Sprint(string(out), err)
	}()
	t.Cleanup(func() { readers.Process.Kill() })
	b.eventually("40 readers wait", func() bool { return len(b.waiting("sum\x00/data/")) == 40 })
	a := <-b.ask(near)
	if a.said != b.li.files[near] || a.took > 500*time.Millisecond {
		t.Errorf("a present file beside 40 waiting readers: %q after %s", a.said, a.took)
	}
	b.must("exec", "web", "/app", "cat", "/etc/motd")
	b.reg.Heal()
	out := <-done
	for _, path := range paths {
		if !strings.Contains(out, path+" "+b.li.files[path]+"\n") {
			t.Errorf("%s is not right in %q", path, out)
		}
	}
	b.must("rm", "-f", "web")
}

// Concurrent readers of a range cause one fetch of it.
func TestLazyOneFetch(t *testing.T) {
	t.Parallel()
	b := newLazyBed(t, "erofs", off)
	b.run()
	b.reads(file(40))
	before := len(b.reg.Ranges(b.big()))
	b.reg.Fail(registrytest.Fault{Do: registrytest.Slow, At: 2 << 20, Digest: b.big()})
	var got []<-chan answer
	for n := range 24 {
		got = append(got, b.ask(file(10+n/4)))
	}
	for n := range got {
		b.right(file(10+n/4), got[n])
	}
	asked := map[int64]string{}
	for _, r := range b.reg.Ranges(b.big())[before:] {
		from, to := int64(0), int64(0)
		if _, err := fmt.Sscanf(r, "bytes=%d-%d", &from, &to); err != nil {
			t.Fatalf("a range %q: %v", r, err)
		}
		if was, twice := asked[from]; twice {
			t.Errorf("range %s was fetched, and %s", was, r)
		}
		asked[from] = r
	}
	b.must("rm", "-f", "web")
}

// Layers that are not to be completed stay as they are when another container
// starts from them.
func TestLazyOffStaysOff(t *testing.T) {
	t.Parallel()
	b := newLazyBed(t, "erofs", off)
	b.run()
	b.reads(file(40))
	before := b.li.served(b.reg)
	port := freePort(t)
	b.must("run", "-d", "--name", "two", "--ready", "http:"+port+"/", b.li.Ref, "serve", port)
	b.right(file(10), ask(port, file(10)))
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if n := b.li.served(b.reg) - before; n > 6<<20 {
			t.Fatalf("%d bytes of the layer came for one file", n)
		}
	}
	b.must("rm", "-f", "web", "two")
}

// A layer that has become whole is used from its own file by later containers,
// while earlier ones go on; when these have ended datafs has nothing, and
// neither dewd nor the machine needs a registry to start again.
func TestLazyBecomesWhole(t *testing.T) { onBackends(t, testLazyBecomesWhole) }

func testLazyBecomesWhole(t *testing.T, backend string) {
	b := newLazyBed(t, backend, "[lazy]\ndelay = \"500ms\"\n"+noLearn)
	b.run()
	b.reads(file(1))
	b.awaitComplete()
	b.reg.Close()
	b.checkLayers()
	two := freePort(t)
	rec := b.record("run", "-d", "--name", "two", "--ready", "http:"+two+"/", b.li.Ref, "serve", two)
	if rec.Way.Pull != "local" {
		t.Errorf("the way of a container after completion: %+v", rec.Way)
	}
	b.reads(file(2))
	if len(b.served()) == 0 {
		t.Error("datafs serves no file of a container that was started lazily")
	}
	b.must("rm", "-f", "web")
	if left := gone(b.served); len(left) > 0 {
		t.Errorf("datafs still has %v", left)
	}
	// Nothing but the kernel is in the way now.
	b.kill()
	b.killDatafs()
	b.eventually("datafs's end", func() bool { return b.datafs() == 0 })
	b.readsAll(two)
	b.start()
	b.readsAll(two)

	b.reboot()
	for _, d := range b.cgroups("/*") { // which a reboot takes, too
		unix.Rmdir(d)
	}
	b.start()
	b.must("rm", "-f", "two")
	b.port = freePort(t)
	rec = b.runAfterRestart("three", b.port)
	if rec.Way.Pull != "local" {
		t.Errorf("the way of a container after a reboot: %+v", rec.Way)
	}
	b.readsAll(b.port)
	b.must("rm", "-f", "three")
	b.must("rmi", b.li.Ref)
	b.must("prune")
	checkNothingLeft(t, b.machine)
}

// What was there of an image when the machine stopped is not believed, for
// nothing made it durable; its containers start again, lazily, and then become
// whole. Also when the registry is not there yet as the machine starts.
func TestLazyReboot(t *testing.T) {
	t.Parallel()
	for _, registryDown := range []bool{false, true} {
		t.Run(strconv.FormatBool(registryDown), func(t *testing.T) {
			t.Parallel()
			b := newLazyBed(t, "erofs", off)
			b.run()
			b.reads(file(10), file(40))
			b.reboot()
			b.losePages()
			b.config = strings.Replace(b.config, off, "", 1)
			if registryDown {
				b.reg.Close()
			}
			begin := time.Now()
			b.start()
			t.Logf("dewd answered after %s", time.Since(begin))
			if registryDown {
				if err := b.reg.Up(); err != nil {
					t.Fatal(err)
				}
			}
			b.must("rm", "-f", "web")
			b.runAfterRestart("web", b.port)
			b.readsAll(b.port)
			b.awaitComplete()
			b.checkLayers()
			b.must("rm", "-f", "web")
		})
	}
}

// losePages makes of the node's partial layers what a power cut may: data that
// were written and are not on disk, in another boot.
func (b *lazyBed) losePages() {
	b.t.Helper()
	files, _ := filepath.Glob(filepath.Join(b.root, "layers", "*", "present"))
	if len(files) == 0 {
		b.t.Fatal("no layer is partial")
	}
	for _, name := range files {
		data, err := os.OpenFile(filepath.Join(filepath.Dir(name), "data"), os.O_RDWR, 0)
		if err != nil {
			b.t.Fatal(err)
		}
		size, _ := data.Seek(0, 2)
		err = unix.Fallocate(int(data.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, size)
		data.Close()
		if err != nil {
			b.t.Fatal(err)
		}
		present, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			b.t.Fatal(err)
		}
		_, err = present.WriteAt([]byte("00000000-0000-0000-0000-000000000000"), 16)
		present.Close()
		if err != nil {
			b.t.Fatal(err)
		}
	}
}
