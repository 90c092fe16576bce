package test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/engine/shimgroup"
	"dewpoint/internal/spec"
	"dewpoint/testkit/popbed"

	"golang.org/x/sys/unix"
)

// Nodes whose dewds have clocks of their own: one says 1970, as a board without a battery, another
// 2065. They are the real program, but for its asking for another of the kernel's clocks: that of the
// time since the boot, which a time namespace moves. What the kernel itself dates, files among it, has
// the machine's clock; TestPoPFaults has that.
func TestPoPClocks(t *testing.T) {
	t.Parallel()
	c := newClocks(t, filepath.Join(programs, "dewd"))
	for i := range 5 {
		c.set(i, map[int]string{bare: "1970", 1: "2065"}[i])
	}
	b := newFaultBed(t, popbed.Config{Store: popbed.Gluster, Dewd: c.program})
	b.try(t, "at once", clocksAtOnce)
	b.try(t, "killed while fetching", killedFetching)
	b.try(t, "set back", func(b *faultBed) { setBack(b, c) })
}

// clocks is a program that is dewd, with the clock of the node that it is started for.
type clocks struct {
	t       *testing.T
	program string
	dewd    string
	other   string // dewd with the clock of the boot
}

// wallClock is how time.Now begins to ask the kernel for the time of day, on amd64: the number of the clock
// is the operand of the first instruction.
var wallClock = []byte("\xbf\x00\x00\x00\x00\x48\x8d\x74\x24\x10\x48\x8b\x05")

func newClocks(t *testing.T, dewd string) *clocks {
	t.Helper()
	dir := t.TempDir()
	c := &clocks{t: t, program: filepath.Join(dir, "program"), dewd: dewd, other: filepath.Join(dir, "other", "dewd")}
	code, err := os.ReadFile(dewd)
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(code, wallClock); n != 1 {
		t.Fatalf("dewd asks for the time of day in %d places: Go, or the processor, is another one than this test knows", n)
	}
	code[bytes.Index(code, wallClock)+1] = unix.CLOCK_BOOTTIME
	script := "#!/bin/sh\nfor a; do case \"$a\" in */dewd.toml) d=${a%/*};; esac; done\nexec " + dir +
		"/${d##*/} \"$@\"\n"
	// What dewd looks for beside itself.
	beside := filepath.Dir(c.other)
	shim := filepath.Join(filepath.Dir(dewd), shimgroup.Program)
	if err := errors.Join(os.Mkdir(beside, 0o755),
		os.Symlink(shim, filepath.Join(beside, shimgroup.Program))); err != nil {
		t.Fatal(err)
	}
	for path, b := range map[string][]byte{c.other: code, c.program: []byte(script)} {
		if err := os.WriteFile(path, b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// set gives a node the clock of a year from its next start on; "" is the machine's.
func (c *clocks) set(i int, year string) {
	c.t.Helper()
	run := map[string]string{"": c.dewd, "1970": c.other,
		"2065": "unshare --time --boottime 3000000000 " + c.other}[year]
	script := fmt.Sprintf("#!/bin/sh\nexec %s \"$@\"\n", run)
	if err := os.WriteFile(filepath.Join(filepath.Dir(c.program), fmt.Sprintf("n%d", i+1)), []byte(script),
		0o755); err != nil {
		c.t.Fatal(err)
	}
}

// says asserts that what a node's dewd has said last is of that year.
func (b *faultBed) says(i int, year string) {
	b.t.Helper()
	log, err := os.ReadFile(b.Nodes[i].Log())
	b.must(err)
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	if last := lines[len(lines)-1]; !strings.Contains(last, "time="+year+"-") {
		b.t.Fatalf("%s says %q: its clock is not of %s", b.Nodes[i].Name, last, year)
	}
}

// What all want at once crosses the WAN once, and what is idle goes, whoever looks.
func clocksAtOnce(b *faultBed) {
	b.says(bare, "1970")
	b.says(1, "2065")
	for _, first := range []int{bare, 1} {
		img := b.push(4 << 20)
		var unique int64
		for _, l := range img.Layers {
			if _, ok := b.records(eye)[l.DiffID.String()]; !ok {
				unique += l.Size
			}
		}
		b.wan()
		var early sync.WaitGroup
		lead := b.prepare(first, img)
		var err error
		early.Go(func() { err = lead.start(faultTime) })
		b.served(img, 64<<10)
		runs := append(b.runs(img, (first+1)%5, (first+2)%5, (first+3)%5, (first+4)%5), lead)
		early.Wait()
		b.must(err)
		for _, c := range runs {
			c.right()
		}
		b.once(unique)
		b.shows(img)
		b.clear()
		b.must(b.evict(first))
		if _, ok := b.records(eye)[img.own()]; ok {
			b.t.Errorf("%s does not evict what nobody uses", b.Nodes[first].Name)
		}
	}
	b.tidy()
}

// A node whose clock is set back, as at the boot of a board without a battery, keeps what runs, finds what it
// has, and lets go of what nothing uses.
func setBack(b *faultBed, c *clocks) {
	used, runs := b.images(1, 2<<20, 3, 2)
	idle, own := b.images(2, 1<<20, 2, 3)
	own[0].remove() // n3 keeps its copies of the layers
	own[2].remove()
	b.must(b.StopDewd(b.t.Context(), 2))
	c.set(2, "1970")
	b.must(b.StartDewd(b.t.Context(), 2))
	b.settled()
	b.says(2, "1970")
	runs[1].right()
	b.keeps(2, used...)
	b.wan()
	again, err := b.run(2, idle[0])
	b.must(err)
	again.right()
	if n := b.wan(); n > 64<<10 {
		b.t.Errorf("%d bytes of what is here crossed the WAN", n)
	}
	again.remove()
	b.must(b.client(2, func(ctx context.Context, cl *api.Client) error {
		_, err := cl.Prune(ctx, spec.PruneOptions{Images: true})
		return err
	}))
	for k, img := range idle { // the second was used 56 years from now
		if _, err := os.Stat(filepath.Join(b.Nodes[2].Root(), "layers",
			strings.TrimPrefix(img.own(), "sha256:"))); !errors.Is(err, os.ErrNotExist) {
			b.t.Errorf("idle layer %d is still there: %v", k, err)
		}
	}
	runs[1].right()
	fresh := b.push(2 << 20)
	for _, r := range b.runs(fresh, 2, 4) {
		r.right()
	}
	b.shows(fresh)
	b.whole(2)
	time.Sleep(faultGrace) // marks of a node with another clock count on
	b.must(b.evict(4))
	b.keeps(4, used...)
	runs[1].right()
	b.must(b.StopDewd(b.t.Context(), 2))
	c.set(2, "")
	b.must(b.StartDewd(b.t.Context(), 2))
	runs[1].right()
}
