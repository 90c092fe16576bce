package engine

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"
)

// shimPIDs are the processes of shims that serve this engine.
func (b *bed) shimPIDs() (pids []int) {
	cmdlines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range cmdlines {
		c, _ := os.ReadFile(p)
		if bytes.Contains(c, []byte("containerd-shim")) && bytes.Contains(c, []byte(b.Socket())) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(p)))
			pids = append(pids, pid)
		}
	}
	return pids
}

// awaitSpare waits for a shim that has no container, the only one, and returns its process.
func (b *bed) awaitSpare() int {
	b.t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		b.shims.mu.Lock()
		spares, groups := 0, len(b.shims.groups)
		for _, g := range b.shims.groups {
			if g.spare() {
				spares++
			}
		}
		b.shims.mu.Unlock()
		if pids := b.shimPIDs(); spares == 1 && groups == 1 && len(pids) == 1 {
			return pids[0]
		} else if time.Now().After(deadline) {
			b.t.Fatalf("%d spare shims of %d groups, processes %v", spares, groups, pids)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// The container after the last one's end finds a shim that runs.
func TestSpareShim(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		b.spare = keepSpare(b.shims, b.log)
		t.Cleanup(func() {
			b.spare.close()
			b.spare = nil
			b.noProcesses()
		})
		remove := func(names ...string) {
			t.Helper()
			for _, n := range names {
				if err := b.Remove(ctx, n, true); err != nil {
					t.Fatal(err)
				}
			}
		}
		b.runMany("a")
		if pids := b.shimPIDs(); !slices.Equal(pids, []int{b.shimOf("a")}) {
			t.Errorf("beside a shim with room there is another one: %v", pids)
		}
		remove("a")
		spare := b.awaitSpare()
		b.runMany("b", "c")
		if b.shimOf("b") != spare || b.shimOf("c") != spare {
			t.Errorf("the spare shim is %d, b has %d and c %d", spare, b.shimOf("b"), b.shimOf("c"))
		}
		remove("b", "c")
		b.awaitSpare()
		b.shims.mu.Lock()
		b.shims.max = 3
		b.shims.mu.Unlock()
		b.churn()
		b.awaitSpare()

		// The daemon is killed: the next one knows nothing of the shim.
		b.spare.stop()
		<-b.spare.done
		b.spare = nil
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
		if len(b.shimPIDs()) != 1 {
			t.Fatalf("shims that survive the daemon: %v", b.shimPIDs())
		}
		e, err := Start(ctx, b.cfg)
		if err != nil {
			t.Fatal(err)
		}
		b.Engine = e
		b.noProcesses()
		b.spare = keepSpare(b.shims, b.log)
		b.runMany("d")
		remove("d")
		b.awaitSpare()
	})
}

// The next group is begun before the last place of the others is taken.
func TestGroupAhead(t *testing.T) {
	s := testShims(t)
	s.max, s.wide = 8, 1
	var seats []seat
	take := func(n int) {
		t.Helper()
		for range n {
			p, err := s.takeSeat(t.Context(), strconv.Itoa(len(seats)))
			if err != nil {
				t.Fatal(err)
			}
			seats = append(seats, p)
		}
	}
	take(1)
	seats[0].done(true)
	first := seats[0].group
	take(7) // the last but one finds as few places as are to be left
	for i, p := range seats[:8] {
		if other := p.group != first; other != (i == 8-s.ahead()) {
			t.Errorf("task %d of another group: %v", i, other)
		}
	}
	for _, p := range seats[1:] {
		p.done(true)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.groups) != 2 || first.stand != 7 {
		t.Errorf("%d groups, %d in the first", len(s.groups), first.stand)
	}
}
