package engine

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"dewpoint/testkit"
)

// A container whose first process has the number of one that has ended, in the same shim, ends as any other.
func TestNumberIsUsedAgain(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		b.runMany("keep")
		b.createInPlace("new", "old")
		if err := b.Engine.Start(ctx, "new"); err != nil {
			t.Fatal(err)
		}
		b.awaitStatus("new", Running)
		if b.shimOf("new") != b.shimOf("keep") {
			t.Error("there are two shims")
		}
		if err := b.Kill(ctx, "new", unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		b.awaitStatus("new", Stopped)
		if i, err := b.Inspect(ctx, "old"); err != nil || i.Exit == nil || i.Exit.Status != 137 {
			t.Errorf("the one that had the number first: %+v %v", i, err)
		}
		if err := b.Engine.Start(ctx, "old"); err != nil {
			t.Error(err)
		}
		b.awaitStatus("old", Running)
	})
}

// createInPlace creates a container whose first process has the number of another one's, which has ended. The
// number may be taken by others of the machine: then another old one is tried.
func (b *bed) createInPlace(name, old string) {
	b.t.Helper()
	ctx := b.t.Context()
	testkit.Eventually(b.t, "a number is used again", func() bool {
		b.runMany(old)
		i, err := b.Inspect(ctx, old)
		if err == nil {
			err = b.Kill(ctx, old, unix.SIGKILL)
		}
		if err != nil {
			b.t.Fatal(err)
		}
		b.awaitStatus(old, Stopped)
		if b.createAs(name, i.Pid) {
			return true
		}
		if err := b.Remove(ctx, old, true); err != nil {
			b.t.Fatal(err)
		}
		return false
	})
}

// createAs tries to create a container whose first process has that number.
func (b *bed) createAs(name string, pid uint32) bool {
	b.t.Helper()
	ctx, ahead := b.t.Context(), 8 // processes and threads that are made before it
	for range 30 {
		last := fmt.Append(nil, int(pid)-1-ahead)
		if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", last, 0); err != nil {
			b.t.Fatal(err)
		}
		i, err := b.Create(ctx, Spec{Name: name, Image: b.img, Net: NetNone})
		if err != nil {
			b.t.Fatal(err)
		}
		if i.Pid == pid {
			return true
		}
		ahead = max(0, min(200, ahead+int(i.Pid)-int(pid)))
		if err := b.Remove(ctx, name, true); err != nil {
			b.t.Fatal(err)
		}
	}
	return false
}
