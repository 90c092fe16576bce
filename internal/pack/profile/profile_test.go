package profile

import (
	"archive/tar"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/mount"
	"dewpoint/testkit/mounttest"
	"dewpoint/testkit/treetest"
)

const bigPages = 300

// sample is a layer of one big file, some small ones, and a last page that is
// not whole.
func sample() *treetest.Archive {
	var a treetest.Archive
	a.Dir("d").File("d/big", treetest.Text(int(bigPages*pageSize)-100))
	for i := range 20 {
		a.File(fmt.Sprintf("d/s%02d", i), treetest.Text(1000+i))
	}
	return &a
}

func each(t *testing.T, test func(t *testing.T, backend string)) {
	for _, name := range []string{mount.EROFS, mount.Loop} {
		t.Run(name, func(t *testing.T) { test(t, name) })
	}
}

func want(t *testing.T, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("recorded %s\nread     %s", got, want)
	}
}

func TestAvailable(t *testing.T) {
	check(t, Available(t.TempDir()))
}

// A tracefs that the system has mounted is used as it is.
func TestWithMountedTracefs(t *testing.T) {
	var at unix.Statfs_t
	check(t, unix.Statfs(usualTracing, &at))
	if at.Type != unix.TRACEFS_MAGIC { // as where no systemd runs
		check(t, unix.Mount("tracefs", usualTracing, "tracefs", 0, "")) // in this mount namespace only
		t.Cleanup(func() { check(t, unix.Unmount(usualTracing, 0)) })
	}
	tr, err := openTracing()
	check(t, err)
	tr.Close()
	if tr.path != usualTracing {
		t.Errorf("tracefs is taken from %s", tr.path)
	}
	check(t, Available(t.TempDir()))
	l := newLayer(t, mount.EROFS, sample())
	want(t, pages(t, record(t, func() { readAt(t, l.path("d/big"), 9, 1) }, l), l), "d/big:9")
}

// What read asks for is what is recorded, in order, nothing before or behind it.
func TestRead(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		l := newLayer(t, backend, sample())
		if readAhead(t, l) == off {
			t.Fatal("this kernel reads nothing ahead: the test proves nothing")
		}
		res := record(t, func() {
			readAt(t, l.path("d/big"), 100, 10)
			readAt(t, l.path("d/big"), 101, 2*pageSize)
			readAt(t, l.path("d/s03"), 0, 1003)
			readAt(t, l.path("d/big"), 7, 1)
			readAt(t, l.path("d/big"), 102, 1)
			readAt(t, l.path("d/big"), bigPages-1, pageSize-100)
		}, l)
		want(t, pages(t, res, l), "d/big:100 d/big:101 d/big:102 d/s03:0 d/big:7 d/big:299")
		if res.Pages != 6 || len(res.Reads) != 4 {
			t.Errorf("%d pages in %d reads", res.Pages, len(res.Reads))
		}
	})
}

// A file that is read from the beginning to some page is read that far.
func TestSequentialReadStopsWhereItStops(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		l := newLayer(t, backend, sample())
		res := record(t, func() {
			f, err := os.Open(l.path("d/big"))
			check(t, err)
			defer f.Close()
			for range 40 {
				_, err := f.Read(make([]byte, pageSize))
				check(t, err)
			}
		}, l)
		if len(res.Reads) != 1 || res.Reads[0].Length != 40*pageSize || res.Pages != 40 {
			t.Errorf("%+v", res)
		}
	})
}

// Reads of many pages at once bring no more than these.
func TestLargeReadsStopWhereTheyEnd(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		l := newLayer(t, backend, sample())
		res := record(t, func() {
			f, err := os.Open(l.path("d/big"))
			check(t, err)
			defer f.Close()
			for range 3 {
				_, err := f.Read(make([]byte, 8*pageSize))
				check(t, err)
			}
			readAt(t, l.path("d/big"), 150, 33*pageSize)
		}, l)
		from := l.toc.Entries[1].Ranges[0].Data
		if r := res.Reads; len(r) != 2 || r[0].Offset != from || r[0].Length != 24*pageSize ||
			r[1].Offset != from+150*pageSize || r[1].Length != 33*pageSize {
			t.Errorf("%+v", res)
		}
	})
}

func TestMmap(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		l := newLayer(t, backend, sample())
		res := record(t, func() {
			touch(t, l.path("d/big"), int(bigPages*pageSize)-100, 200, 10, 11, 12, 60, 59, 299)
			touch(t, l.path("d/s01"), 1001, 0)
		}, l)
		want(t, pages(t, res, l), "d/big:200 d/big:10 d/big:11 d/big:12 d/big:60 d/big:59 d/big:299 d/s01:0")
	})
}

// program is an ELF file that runs its first page, jumps to page to, and exits.
func program(pages, to int) string {
	le := binary.LittleEndian
	b := make([]byte, pages*int(pageSize))
	const base, entry = 1 << 22, 120
	copy(b, "\x7fELF\x02\x01\x01")
	le.PutUint16(b[16:], 2)
	le.PutUint16(b[18:], map[string]uint16{"amd64": 62, "arm64": 183}[runtime.GOARCH])
	le.PutUint32(b[20:], 1)
	le.PutUint64(b[24:], base+entry)
	le.PutUint64(b[32:], 64)
	le.PutUint16(b[52:], 64)
	le.PutUint16(b[54:], 56)
	le.PutUint16(b[56:], 1)
	ph := b[64:]
	le.PutUint32(ph[0:], 1) // PT_LOAD
	le.PutUint32(ph[4:], 5) // r-x
	le.PutUint64(ph[16:], base)
	le.PutUint64(ph[32:], uint64(len(b)))
	le.PutUint64(ph[40:], uint64(len(b)))
	le.PutUint64(ph[48:], 1<<16)
	at := to * int(pageSize)
	if runtime.GOARCH == "arm64" {
		le.PutUint32(b[entry:], 0x14000000|uint32(at-entry)/4) // b
		le.PutUint32(b[at:], 0xd2800ba8)                       // mov x8, #93
		le.PutUint32(b[at+4:], 0xd2800000)                     // mov x0, #0
		le.PutUint32(b[at+8:], 0xd4000001)                     // svc #0
	} else {
		b[entry] = 0xe9 // jmp
		le.PutUint32(b[entry+1:], uint32(at-entry-5))
		copy(b[at:], "\xb8\x3c\x00\x00\x00\x31\xff\x0f\x05") // mov eax, 60; xor edi, edi; syscall
	}
	return string(b)
}

func TestExec(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		var a treetest.Archive
		a.Add(tar.Header{Name: "prog", Mode: 0o755}, program(64, 17))
		l := newLayer(t, backend, &a)
		res := record(t, func() {
			out, err := exec.Command(l.path("prog")).CombinedOutput()
			if err != nil {
				t.Errorf("%v: %s", err, out)
			}
		}, l)
		want(t, pages(t, res, l), "prog:0 prog:17")
	})
}

// The order is that of the reads, whichever CPU they were made on.
func TestOrderAcrossCPUs(t *testing.T) {
	l := newLayer(t, mount.EROFS, sample())
	turns := [2]chan int64{make(chan int64), make(chan int64)}
	done := make(chan bool)
	for i := range turns {
		go func() {
			runtime.LockOSThread() // and never unlocked: the thread ends here
			var cpu unix.CPUSet
			cpu.Set(i % runtime.NumCPU())
			if err := unix.SchedSetaffinity(0, &cpu); err != nil {
				t.Error(err)
			}
			for p := range turns[i] {
				readAt(t, l.path("d/big"), p, 1)
				done <- true
			}
		}()
	}
	var order []string
	res := record(t, func() {
		for i := range int64(bigPages - 1) {
			p := i * 7 % (bigPages - 1)
			turns[i%2] <- p
			<-done
			order = append(order, fmt.Sprintf("d/big:%d", p))
		}
	}, l)
	close(turns[0])
	close(turns[1])
	want(t, pages(t, res, l), strings.Join(order, " "))
	for i := 1; i < len(res.Reads); i++ {
		if res.Reads[i].At < res.Reads[i-1].At || res.Reads[i].At > time.Minute {
			t.Fatalf("read %d at %v, the one before at %v", i, res.Reads[i].At, res.Reads[i-1].At)
		}
	}
}

func TestHardLinksAreOneFile(t *testing.T) {
	var a treetest.Archive
	a.File("a", treetest.Text(int(3*pageSize))).Link("b", "a").Link("c", "a")
	l := newLayer(t, mount.EROFS, &a)
	res := record(t, func() {
		readAt(t, l.path("c"), 1, 1)
		readAt(t, l.path("b"), 1, 1)
		readAt(t, l.path("a"), 0, 2*pageSize)
	}, l)
	want(t, pages(t, res, l), "a:1 a:0")
}

// Of sparse files, what is in the tar is recorded; holes and what the index
// has copied are not.
func TestSparse(t *testing.T) {
	var a treetest.Archive
	middle := treetest.Sparse{Name: "middle", Size: 3 << 20,
		Segs: []treetest.Segment{{Off: 1 << 20, Data: treetest.Text(1 << 20)}}}
	odd := treetest.Sparse{Name: "odd", Size: 100_000,
		Segs: []treetest.Segment{{Off: 10, Data: treetest.Text(100)}}}
	hole := treetest.Sparse{Name: "hole", Size: 70_000}
	a.GNU(middle).GNU(odd).GNU(hole)
	l := newLayer(t, mount.EROFS, &a)
	res := record(t, func() {
		for _, name := range []string{"middle", "odd", "hole"} {
			_, err := os.ReadFile(l.path(name))
			check(t, err)
		}
	}, l)
	r := l.toc.Entries[0].Ranges[0]
	if len(res.Reads) != 1 || res.Reads[0].Offset != r.Data || res.Reads[0].Length != 1<<20 ||
		res.Pages != (1<<20)/pageSize {
		t.Errorf("%+v, the contents are at %+v", res, r)
	}
}

// What is read through overlayfs, and of a duplicate the one that is seen.
func TestThroughOverlayfs(t *testing.T) {
	var low, high treetest.Archive
	low.File("both", treetest.Text(5000)).File("low",
		treetest.Text(5000)).Add(tar.Header{Name: "prog", Mode: 0o755}, program(8, 5))
	high.File("both", treetest.Text(5000)).File("high", treetest.Text(5000))
	bottom, top := newLayer(t, mount.EROFS, &low), newLayer(t, mount.EROFS, &high)
	merged := mounttest.Overlay(t, []string{bottom.Mount, top.Mount})
	res := record(t, func() {
		readAt(t, filepath.Join(merged, "low"), 1, 1)
		readAt(t, filepath.Join(merged, "both"), 0, 5000)
		check(t, exec.Command(filepath.Join(merged, "prog")).Run())
		touch(t, filepath.Join(merged, "high"), 5000, 1)
		readAt(t, bottom.path("both"), 1, 1)
	}, bottom, top)
	want(t, pages(t, res, bottom, top), "low:1 both:0 both:1 prog:0 prog:5 high:1 both:1")
	if a, b := res.Reads[1].Layer, res.Reads[len(res.Reads)-1].Layer; a != top.DiffID || b != bottom.DiffID {
		t.Errorf("%s and %s, want those of the top and the bottom", a, b)
	}
}

// Metadata is the index's and not the tar's.
func TestMetadataIsNotRecorded(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		a := sample()
		a.Symlink("long", strings.Repeat("x/", 1500)).Symlink("short", "d/big").Dir("many")
		for i := range 500 {
			a.Add(tar.Header{Name: fmt.Sprintf("many/a-long-name-to-fill-blocks-%d", i),
				PAXRecords: map[string]string{"SCHILY.xattr.user.x": fmt.Sprint("value", i)}}, "")
		}
		l := newLayer(t, backend, a)
		res := record(t, func() {
			check(t, filepath.WalkDir(l.Mount, func(path string, d fs.DirEntry, err error) error {
				unix.Lgetxattr(path, "user.x", make([]byte, 100))
				os.Readlink(path)
				return err
			}))
		}, l)
		if len(res.Reads) != 0 || res.Pages != 0 {
			t.Errorf("%+v", res)
		}
	})
}

// A second reading of what is cached is no first use.
func TestReadTwiceIsRecordedOnce(t *testing.T) {
	l := newLayer(t, mount.EROFS, sample())
	res := record(t, func() {
		for range 3 {
			f, err := os.Open(l.path("d/s00"))
			check(t, err)
			_, err = f.Read(make([]byte, 1000))
			check(t, err)
			check(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)) // and evicted
			f.Close()
		}
	}, l)
	want(t, pages(t, res, l), "d/s00:0")
}

func TestAdd(t *testing.T) {
	first, second := newLayer(t, mount.EROFS, sample()), newLayer(t, mount.EROFS, sample())
	other := newLayer(t, mount.EROFS, sample())
	second.DiffID, other.DiffID = "sha256:2", "sha256:3"
	r := start(t, Config{})
	check(t, r.Add(first.Layer))
	readAt(t, first.path("d/big"), 1, 1)
	readAt(t, second.path("d/big"), 1, 1) // not yet
	check(t, r.Add(first.Layer, second.Layer))
	readAt(t, second.path("d/big"), 200, 1)
	readAt(t, first.path("d/big"), 200, 1)
	readAt(t, other.path("d/big"), 5, 1) // never
	res := stop(t, r)
	want(t, pages(t, res, first, second), "d/big:1 d/big:200 d/big:200")
	if res.Reads[1].Layer != second.DiffID || res.Reads[2].Layer != first.DiffID {
		t.Errorf("%+v", res.Reads)
	}
	if err := r.Add(other.Layer); err == nil {
		t.Error("a recording that has ended took a layer")
	}
}

// A full buffer keeps the oldest events, and the result says that others are missing.
func TestLostEventsAreCounted(t *testing.T) {
	const all = 2000
	var a treetest.Archive
	a.File("big", treetest.Text(int(all*pageSize)))
	l := newLayer(t, mount.EROFS, &a)
	r := start(t, Config{bufferKB: 4, every: time.Hour}, l)
	_, err := os.ReadFile(l.path("big"))
	check(t, err)
	res, err := r.Stop()
	check(t, err)
	if res.Lost == 0 || res.Pages == 0 || res.Lost+res.Pages != all {
		t.Errorf("%d pages and %d lost of %d", res.Pages, res.Lost, all)
	}
	if len(res.Reads) == 0 || res.Reads[0].Offset != l.toc.Entries[0].Ranges[0].Data {
		t.Errorf("the first of %d reads is not the first", len(res.Reads))
	}
}

// More events than the buffers hold are kept, for they are emptied meanwhile.
func TestBuffersAreEmptied(t *testing.T) {
	l := newLayer(t, mount.EROFS, sample())
	r := start(t, Config{bufferKB: 4, every: time.Millisecond}, l)
	for p := range int64(bigPages - 1) {
		readAt(t, l.path("d/big"), p, 1)
		time.Sleep(200 * time.Microsecond)
	}
	if res := stop(t, r); res.Pages != bigPages-1 {
		t.Errorf("%d pages", res.Pages)
	}
}

func TestTwoRecordings(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		l, other := newLayer(t, backend, sample()), newLayer(t, backend, sample())
		other.DiffID = "sha256:2"
		before, dir := readAhead(t, l), t.TempDir()
		a := start(t, Config{Dir: dir}, l)
		readAt(t, l.path("d/big"), 1, 1)
		b := start(t, Config{Dir: dir}, l, other)
		readAt(t, l.path("d/big"), 50, 1)
		readAt(t, other.path("d/big"), 50, 1)
		want(t, pages(t, stop(t, a), l), "d/big:1 d/big:50")
		if readAhead(t, l) != off {
			t.Error("the end of one recording disturbs the other")
		}
		readAt(t, l.path("d/big"), 150, 1)
		want(t, pages(t, stop(t, b), l, other), "d/big:50 d/big:50 d/big:150")
		if got := [2]int{readAhead(t, l), readAhead(t, other)}; got != [2]int{before, before} {
			t.Errorf("read-ahead was %d and is %d", before, got)
		}
		left(t, dir)
	})
}

// left fails the test if recordings have left anything behind.
func left(t *testing.T, dir string) {
	t.Helper()
	files, err := os.ReadDir(dir)
	check(t, err)
	for _, i := range instances(t) {
		if strings.Contains(i, fmt.Sprintf("%s%d-", prefix, os.Getpid())) {
			t.Errorf("instance %s is left", i)
		}
	}
	if len(files) > 0 {
		t.Errorf("%v is left", files)
	}
}

func TestContextEndsRecording(t *testing.T) {
	l := newLayer(t, mount.EROFS, sample())
	before, dir := readAhead(t, l), t.TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	r, err := Start(ctx, Config{Dir: dir}, []Layer{l.Layer})
	check(t, err)
	readAt(t, l.path("d/big"), 1, 1)
	cancel()
	<-r.done
	left(t, dir)
	if readAhead(t, l) != before {
		t.Error("read-ahead was not restored")
	}
	for range 2 {
		want(t, pages(t, stop(t, r), l), "d/big:1")
	}
}

// A mount that goes away while it is recorded is no error.
func TestUnmountedMeanwhile(t *testing.T) {
	l := newLayer(t, mount.EROFS, sample())
	r := start(t, Config{}, l)
	readAt(t, l.path("d/big"), 1, 1)
	check(t, mount.Unmount(l.Mount))
	want(t, pages(t, stop(t, r), l), "d/big:1")
}

func TestWhatCannotBeRecorded(t *testing.T) {
	l := newLayer(t, mount.EROFS, sample())
	before := readAhead(t, l)
	for name, bad := range map[string]Layer{
		"tree":     {DiffID: "sha256:1", Tree: t.TempDir(), Mount: t.TempDir()},
		"no EROFS": {DiffID: "sha256:1", Index: l.Index, Mount: t.TempDir()},
	} {
		dir := t.TempDir()
		if _, err := Start(context.Background(), Config{Dir: dir}, []Layer{l.Layer, bad}); !errors.Is(err,
			ErrUnsupported) {
			t.Errorf("%s: %v", name, err)
		}
		left(t, dir)
		if readAhead(t, l) != before {
			t.Errorf("%s: read-ahead was not restored", name)
		}
	}
}

// What a killed process leaves is removed; what runs is left alone.
func TestClean(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		l, mine := newLayer(t, backend, sample()), newLayer(t, backend, sample())
		before, dir := readAhead(t, l), t.TempDir()
		r := start(t, Config{Dir: dir}, mine)
		child := exec.Command("/proc/self/exe")
		child.Env = append(os.Environ(), childEnv+"="+strings.Join([]string{dir, l.Index, l.Mount}, "\n"))
		in, err := child.StdinPipe()
		check(t, err)
		defer in.Close()
		out, err := child.StdoutPipe()
		check(t, err)
		check(t, child.Start())
		said := make([]byte, 1000)
		n, _ := out.Read(said)
		name := fmt.Sprintf("%s%d-", prefix, child.Process.Pid)
		listed := func() bool { return strings.Contains(strings.Join(instances(t), " "), name) }
		check(t, Clean(dir))
		if string(said[:n]) != "recording\n" || !listed() || readAhead(t, l) != off {
			t.Errorf("the child says %q, instances %v, read-ahead %d", said[:n], instances(t), readAhead(t, l))
		}
		check(t, child.Process.Kill())
		child.Wait()
		if !listed() || readAhead(t, l) != off {
			t.Error("the killed process left nothing: the test proves nothing")
		}
		check(t, Clean(dir))
		if listed() || readAhead(t, l) != before {
			t.Errorf("instances %v, read-ahead %d", instances(t), readAhead(t, l))
		}
		readAt(t, mine.path("d/big"), 3, 1)
		want(t, pages(t, stop(t, r), mine), "d/big:3")
		left(t, dir)
	})
}
