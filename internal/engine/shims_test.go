package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/engine/shimgroup"
	"dewpoint/testkit"
)

// shimOf is the process that a container's first process is a child of.
func (b *bed) shimOf(name string) int {
	b.t.Helper()
	i, err := b.Inspect(b.t.Context(), name)
	if err != nil || i.Pid == 0 {
		b.t.Fatalf("inspect %s: %+v %v", name, i, err)
	}
	s, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", i.Pid))
	if err != nil {
		b.t.Fatal(err)
	}
	var state byte
	var parent int
	if _, err := fmt.Sscanf(string(s[strings.LastIndexByte(string(s), ')')+1:]), " %c %d", &state,
		&parent); err != nil {
		b.t.Fatal(err)
	}
	return parent
}

// runMany runs containers one after the other, which puts them into one group.
func (b *bed) runMany(names ...string) {
	for _, n := range names {
		b.run(Spec{Name: n, Net: NetNone})
	}
}

// awaitStatus polls.
func (b *bed) awaitStatus(name string, want Status) {
	b.t.Helper()
	testkit.Retry(b.t, fmt.Sprintf("%s is %s", name, want), func() error {
		i, err := b.Inspect(b.t.Context(), name)
		if err == nil && i.Status != want {
			err = fmt.Errorf("it is %+v", i)
		}
		return err
	})
}

// awaitListed polls what List says.
func (b *bed) awaitListed(name string, want Status) {
	b.t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		all, err := b.List(b.t.Context())
		if err != nil {
			b.t.Fatal(err)
		}
		for _, i := range all {
			if i.Name == name && i.Status == want && (i.Pid != 0) == (want != Stopped) {
				return
			}
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("%s is not listed as %s", name, want)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// A list says what a container is from its creation to its end, by what was known or not.
func TestListFollows(t *testing.T) {
	b := newBed(t, containerds(t)["2.x"])
	ctx := t.Context()
	if _, err := b.Create(ctx, Spec{Name: "a", Image: b.img}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		b.awaitListed("a", Created)
		if err := b.Engine.Start(ctx, "a"); err != nil {
			t.Fatal(err)
		}
		b.awaitListed("a", Running)
		if i, _, sure := b.state.Get("a"); !sure || i == nil || i.Pid == 0 {
			t.Errorf("known of a running container: %v", i)
		}
		if err := b.Kill(ctx, "a", unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		b.awaitListed("a", Stopped)
		all, err := b.List(ctx)
		if err != nil || len(all) != 1 || all[0].Exit == nil || all[0].Exit.Status != 137 {
			t.Fatalf("list: %+v %v", all[0], err)
		}
		if err := b.Remove(ctx, "a", false); err != nil {
			t.Fatal(err)
		}
		if all, err := b.List(ctx); err != nil || len(all) != 0 {
			t.Fatalf("after the removal: %v %v", all, err)
		}
		if _, err := b.Create(ctx, Spec{Name: "a", Image: b.img}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestShimIsShared(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		b.runMany("a", "b", "c")
		shim := b.shimOf("a")
		if b.shimOf("b") != shim || b.shimOf("c") != shim {
			t.Fatalf("three shims: %d, %d, %d", shim, b.shimOf("b"), b.shimOf("c"))
		}
		if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", shim)); filepath.Base(exe) != shimgroup.Real {
			t.Errorf("the shim of containerd %s is %s, %v", b.Version(), exe, err)
		}
		for _, ns := range []string{"pid", "mnt", "net", "uts", "ipc"} {
			seen := map[string]bool{}
			for _, n := range []string{"a", "b", "c"} {
				i, err := b.Inspect(ctx, n)
				if err != nil {
					t.Fatal(err)
				}
				l, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", i.Pid, ns))
				if err != nil || seen[l] {
					t.Errorf("%s: namespace %s %q is not its own: %v", n, ns, l, err)
				}
				seen[l] = true
			}
		}
		// The one that came first goes; a restart of dewd; another joins.
		if err := b.Remove(ctx, "a", true); err != nil {
			t.Fatal(err)
		}
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
		stray := filepath.Join(b.cfg.shimsDir(), "stray")
		if err := shimgroup.Make(stray, "/bin/true", "/bin/true", "/none"); err != nil {
			t.Fatal(err)
		}
		e, err := Start(ctx, b.cfg)
		if err != nil {
			t.Fatal(err)
		}
		b.Engine = e
		if _, err := os.Stat(stray); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a group of no container: %v", err)
		}
		b.runMany("d")
		if got := b.shimOf("d"); got != shim || b.shimOf("c") != shim {
			t.Errorf("d has shim %d, the others %d", got, shim)
		}
		if st, err := b.Exec(ctx, "d", ExecSpec{Args: []string{"/probe", "say", "a", "b"}}); err != nil || st != 0 {
			t.Errorf("exec: %d %v", st, err)
		}
		if err := b.Pause(ctx, "b"); err != nil {
			t.Error(err)
		}
		if err := b.Resume("b"); err != nil {
			t.Error(err)
		}
		for _, n := range []string{"b", "c", "d"} {
			if err := b.Remove(ctx, n, true); err != nil {
				t.Error(err)
			}
		}
		if left, _ := os.ReadDir(b.cfg.shimsDir()); len(left) > 0 {
			t.Errorf("groups are left: %v", left)
		}
		b.runMany("e") // not by the shim that has just been told to end
		if b.shimOf("e") == shim {
			t.Error("a shim without containers got another one")
		}
	})
}

// A shim's containers share its fate, others do not; all can be started anew.
func TestShimIsKilled(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		b.cfg.PerShim, b.shims.max = 2, 2
		b.runMany("a", "b", "c")
		if b.shimOf("a") != b.shimOf("b") || b.shimOf("a") == b.shimOf("c") {
			t.Fatalf("shims %d, %d, %d", b.shimOf("a"), b.shimOf("b"), b.shimOf("c"))
		}
		b.awaitListed("a", Running)
		if err := unix.Kill(b.shimOf("a"), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		b.awaitListed("a", Stopped)
		b.awaitListed("c", Running)
		b.awaitStatus("a", Stopped)
		b.awaitStatus("b", Stopped)
		b.awaitStatus("c", Running)
		for _, n := range []string{"a", "b"} {
			if err := b.Engine.Start(ctx, n); err != nil {
				t.Error(err)
			}
			b.awaitStatus(n, Running)
			b.awaitListed(n, Running)
		}
		for _, n := range []string{"a", "b", "c"} {
			if err := b.Remove(ctx, n, true); err != nil {
				t.Error(err)
			}
		}
	})
}

// A shim whose books name a container that containerd does not know ends after its last other one.
func TestShimKeepsOneThatNobodyKnows(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		b.runMany("a", "forgotten")
		shim := b.shimOf("a")
		if b.shimOf("forgotten") != shim {
			t.Fatal("there are two shims")
		}
		if err := b.Kill(ctx, "forgotten", unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		b.awaitStatus("forgotten", Stopped)
		bundle := b.cfg.bundle("forgotten")
		if err := errors.Join(unmountBelow(bundle), os.RemoveAll(bundle)); err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(b.containerdPid(), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if err := b.Settle(ctx); err != nil {
			t.Fatal(err)
		}
		b.awaitStatus("a", Running)
		for _, n := range []string{"forgotten", "a"} {
			if err := b.Remove(ctx, n, true); err != nil {
				t.Error(err)
			}
		}
		testkit.Eventually(t, "the shim ends", func() bool {
			return errors.Is(unix.Kill(shim, 0), unix.ESRCH)
		})
	})
}

// Containers come and go at once, and some cannot be made: no shim ends beneath another one.
func TestShimsUnderChurn(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		b.shims.max = 3
		b.churn()
		if left, _ := os.ReadDir(b.cfg.shimsDir()); len(left) > 0 {
			t.Errorf("groups are left: %v", left)
		}
	})
}

func (b *bed) churn() {
	ctx, t := b.t.Context(), b.t
	var wg sync.WaitGroup
	for w := range 6 {
		wg.Go(func() {
			for i := range 3 {
				s := Spec{Name: fmt.Sprintf("c%d-%d", w, i), Image: b.img}
				if w%3 == 0 {
					s.Entrypoint = []string{"/absent"}
				}
				_, err := b.Create(ctx, s)
				if w%3 == 0 {
					if !errors.Is(err, ErrNoCommand) {
						t.Errorf("%s: %v", s.Name, err)
					}
					continue
				}
				if err == nil {
					err = b.Engine.Start(ctx, s.Name)
				}
				if err == nil {
					err = b.Remove(ctx, s.Name, true)
				}
				if err != nil {
					t.Errorf("%s: %v", s.Name, err)
				}
			}
		})
	}
	wg.Wait()
}

// Without the small program, or with one container each, containerd's own shim serves.
func TestShimOfItsOwn(t *testing.T) {
	b := newBed(t, containerds(t)["2.x"])
	b.shims.program = ""
	b.runMany("a", "b")
	if b.shimOf("a") == b.shimOf("b") {
		t.Error("a shim is shared")
	}
}

func testShims(t *testing.T) *shims {
	t.Helper()
	s := newShims(Config{State: t.TempDir(), PerShim: 3, ShimProgram: "/bin/true"})
	s.serve("", "v2.4.2")
	s.real = "/bin/true"
	return s
}

func TestFirstOfAGroupIsAlone(t *testing.T) {
	s := testShims(t)
	s.wide = 1
	first, err := s.takeSeat(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	second := make(chan seat, 1)
	go func() {
		p, err := s.takeSeat(context.Background(), "b")
		if err != nil {
			t.Error(err)
		}
		second <- p
	}()
	select {
	case <-second:
		t.Fatal("the second is made beside the first")
	case <-time.After(50 * time.Millisecond):
	}
	first.done(false) // its shim ends
	p := <-second
	if p.group == first.group {
		t.Error("the second is in the group whose first failed")
	}
	p.done(true)
	if _, err := os.Stat(filepath.Join(s.dir, first.group.name)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the group that failed: %v", err)
	}
}

func TestLastOfAGroupWaits(t *testing.T) {
	s := testShims(t)
	must := func(p seat, err error) seat {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	must(s.takeSeat(t.Context(), "a")).done(true)
	b := must(s.takeSeat(t.Context(), "b"))
	left := make(chan func(bool), 1)
	go func() {
		f, err := s.leave(context.Background(), "a")
		if err != nil {
			t.Error(err)
		}
		left <- f
	}()
	select {
	case <-left:
		t.Fatal("the last is deleted while another is made")
	case <-time.After(50 * time.Millisecond):
	}
	b.done(true)
	(<-left)(true)
	if c := must(s.takeSeat(t.Context(), "c")); c.group != b.group {
		t.Error("c is not with b, which stands")
	} else {
		c.done(true)
	}
	for _, n := range []string{"b", "c"} {
		f, err := s.leave(t.Context(), n)
		if err != nil {
			t.Fatal(err)
		}
		if n == "c" {
			if d := must(s.takeSeat(t.Context(), "d")); d.group == b.group {
				t.Error("d is in a group whose last is being deleted")
			} else {
				d.done(false)
			}
		}
		f(true)
	}
	if dirs, _ := os.ReadDir(s.dir); len(dirs) > 0 {
		t.Errorf("left: %v", dirs)
	}
}
