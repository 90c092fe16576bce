package datafs

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/opencontainers/go-digest"

	"dewpoint/internal/layer/toc"
	"dewpoint/testkit"
	"dewpoint/testkit/mounttest"
	"dewpoint/testkit/treetest"
)

func TestProbe(t *testing.T) {
	for _, asTree := range []bool{false, true} {
		dir := t.TempDir()
		cfg := ProbeConfig{Dir: dir, Exec: []string{"/proc/self/exe", roleServer}, Tree: asTree}
		if err := Probe(context.Background(), cfg); err != nil {
			t.Error(err)
		}
		if left, _ := os.ReadDir(dir); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
	if err := Probe(context.Background(),
		ProbeConfig{Dir: t.TempDir(), Exec: []string{"/bin/false"}}); err == nil {
		t.Error("a datafs that does not start was found good")
	}
}

// TestProbeKilled kills who probes while a reader waits: no process of the trial stays.
func TestProbeKilled(t *testing.T) {
	dir := t.TempDir()
	prober := exec.Command("/proc/self/exe", roleProbe, dir)
	prober.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := prober.Start(); err != nil {
		t.Fatal(err)
	}
	left := func(with string) bool { // processes of the trial
		all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
		return slices.ContainsFunc(all, func(p string) bool {
			b, _ := os.ReadFile(p)
			return strings.Contains(string(b), dir+"/"+probePrefix) && strings.Contains(string(b), with)
		})
	}
	testkit.Eventually(t, "a reader", func() bool { return left("-read") })
	prober.Process.Kill()
	prober.Wait()
	testkit.Eventually(t, "the end of the trial's processes", func() bool { return !left("") })
	sweepProbes(dir)
	if found, _ := os.ReadDir(dir); len(found) > 0 {
		t.Errorf("left behind: %v", found)
	}
}

// TestTreeIsTheTree compares a layer's tree with the unpacked layer, for layers
// of every kind, bare and under overlayfs.
func TestTreeIsTheTree(t *testing.T) {
	b := newBed(t).start()
	for _, c := range treetest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			l := b.layer(c.Tar)
			l.t = t
			l.putAll()
			l.tree()
			defer l.client.Remove(l.id)
			dir := unpacked(t, c.Tar)
			compareTrees(t, dir, l.target, false)
			below := t.TempDir()
			if c.Lower != nil {
				below = unpacked(t, c.Lower)
			}
			compareTrees(t, mounttest.Overlay(t, []string{below, dir}),
				mounttest.Overlay(t, []string{below, l.target}), true)
		})
	}
}

// unpacked is a directory with a layer's tree.
func unpacked(t *testing.T, raw []byte) string {
	t.Helper()
	dir := mounttest.Memory(t)
	table, err := toc.Read(bytes.NewReader(raw))
	if err == nil {
		err = mounttest.Unpack(dir, table, bytes.NewReader(raw))
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func compareTrees(t *testing.T, want, got string, merged bool) {
	t.Helper()
	a, err := treetest.Snapshot(want)
	if err != nil {
		t.Fatal(err)
	}
	b, err := treetest.Snapshot(got)
	if err != nil {
		t.Fatal(err)
	}
	// Whiteouts share an inode, and directories count their links in their own way.
	skip := func(path, field string) bool {
		f := a[path]
		return f["rdev"] == "0:0" && field != "type" && field != "rdev" ||
			f["type"] == "40000" && field == "nlink"
	}
	diff := treetest.Diff(a, b, skip)
	for _, d := range diff[:min(len(diff), 10)] {
		t.Errorf("merged %v: %s", merged, d)
	}
}

// TestFilledWhileRead reads whole layers while their pages come in random order.
func TestFilledWhileRead(t *testing.T) {
	both(t, func(t *testing.T, show func(*testLayer) *testLayer) {
		l := show(newBed(t).start().layer(tarOf(20, append(repeat(60, 30_000), 3<<20, 1)...)))
		var group sync.WaitGroup
		names := make(chan string)
		for range 6 {
			group.Go(func() {
				for name := range names {
					got, err := os.ReadFile(l.file(name))
					if err != nil || !bytes.Equal(got, l.content(name)) {
						t.Errorf("%s: %d bytes, %v", name, len(got), err)
					}
				}
			})
		}
		group.Go(func() {
			defer close(names)
			for _, e := range l.table.Entries {
				names <- e.Name
			}
		})
		group.Go(func() {
			pages := (len(l.tar) + page - 1) / page
			for _, p := range rand.New(rand.NewPCG(1, 1)).Perm(pages) {
				l.put(int64(p)*page, int64(p+1)*page)
			}
		})
		group.Wait()
		if got, err := os.ReadFile(l.path); err != nil || !bytes.Equal(got, l.tar) {
			t.Errorf("the tar itself: %d bytes, %v", len(got), err)
		}
	})
}

// TestMemory has a tree of 30,000 files listed, whole files read, and 60 readers
// wait.
func TestMemory(t *testing.T) {
	var a treetest.Archive
	for i := range 30_000 {
		a.File(strings.Repeat("d", i%7+1)+"/"+digest.FromString(string(rune(i))).Encoded(), "x")
	}
	a.File("large", strings.Repeat("0123456789abcdef", 4<<20/16))
	l := newBed(t).start().layer(a.Bytes()).tree()
	large := l.at("large")
	for i := range int64(60) {
		l.put(large.from+i*65536+16384, large.from+(i+1)*65536)
	}
	n := 0
	filepath.Walk(l.target, func(string, os.FileInfo, error) error { n++; return nil })
	if n < 30_000 {
		t.Errorf("%d names", n)
	}
	var all []*reader
	for i := range int64(60) {
		all = append(all, startReader(t, "read", l.file("large"), i*65536, 4096))
	}
	testkit.Eventually(t, "60 wants", func() bool { return len(l.wanted(l.id)) >= 60 })
	rss := memoryOf(t, l.serverPID())
	t.Logf("datafs: %d KiB", rss)
	if rss > 32<<10 {
		t.Errorf("datafs takes %d KiB", rss)
	}
	l.putAll()
	for i, r := range all {
		r.right(t, l.content("large")[i*65536:i*65536+4096])
	}
}
