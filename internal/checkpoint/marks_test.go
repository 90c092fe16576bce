package checkpoint

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// TestServingOrLost is memory that is lost when the container is just ready: one of the two sees to it.
func TestServingOrLost(t *testing.T) {
	p := &Plan{}
	if err := p.Serving(); err != nil || p.outcome.CompareAndSwap(open, lost) {
		t.Errorf("it serves: %v, and is lost", err)
	}
	p = &Plan{}
	if !p.outcome.CompareAndSwap(open, lost) || p.Serving() == nil {
		t.Error("it is lost and serves")
	}
}

// TestAbandoned is a daemon that was killed while the memory of containers was coming.
func TestAbandoned(t *testing.T) {
	m, _, _ := newManager(t, nil)
	guard := exec.CommandContext(t.Context(), "sleep", "600")
	f, err := m.late.put("late")
	if err != nil {
		t.Fatal(err)
	}
	guard.ExtraFiles = []*os.File{f}
	if err := errors.Join(guard.Start(), f.Close()); err != nil { // as the end of the daemon does
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(m.late.dir, "earlier"), []byte("of another boot"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var told []string
	tell := func(_ context.Context, name string) error { told = append(told, name); return nil }
	if err := m.Abandoned(ctx, tell); !errors.Is(err, context.Canceled) || len(told) > 0 {
		t.Errorf("while the guard lives: %v, told %v", err, told)
	}
	if err := guard.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = guard.Wait() // killed
	bad := errors.New("not now")
	if err := m.Abandoned(t.Context(), func(context.Context, string) error {
		return bad
	}); !errors.Is(err, bad) {
		t.Errorf("%v", err)
	}
	for range 2 {
		if err := m.Abandoned(t.Context(), tell); err != nil {
			t.Error(err)
		}
	}
	if !slices.Equal(told, []string{"late"}) {
		t.Errorf("told of %v", told)
	}
}

// TestMarks goes with its container's memory, and leaves that of a later container of the name.
func TestMarks(t *testing.T) {
	m, _, _ := newManager(t, nil)
	var files []*os.File
	for range 2 {
		f, err := m.late.put("one")
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	for i, want := range []int{1, 0} {
		m.late.remove(files[i])
		if left, err := os.ReadDir(m.late.dir); err != nil || len(left) != want {
			t.Errorf("%d marks are left, %v; not %d", len(left), err, want)
		}
	}
}
