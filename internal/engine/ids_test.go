package engine

import (
	"context"
	"errors"
	"io"
	"testing"

	"dewpoint/testkit"
)

// An ID is of one container: nothing that is asked of it happens to another one that has its name by now.
func TestIDIsOfOneContainer(t *testing.T) {
	b := newBed(t, containerds(t)["2.x"])
	ctx := t.Context()
	first := b.run(Spec{Name: "a"})
	seen, err := b.Inspect(ctx, first.ID())
	if err != nil || seen.ID() != first.ID() || Name(seen.ID()) != "a" {
		t.Fatalf("by its ID %s: %+v, %v", first.ID(), seen, err)
	}
	if status, err := b.Exec(ctx, first.ID(), ExecSpec{Args: []string{"/probe", "exit", "0"}}); err != nil || status != 0 {
		t.Errorf("exec by its ID: %d, %v", status, err)
	}
	if err := b.Remove(ctx, first.ID(), true); err != nil {
		t.Fatal(err)
	}
	second := b.run(Spec{Name: "a"})
	if first.ID() == second.ID() {
		t.Fatalf("both have the ID %s", first.ID())
	}
	_, inspected := b.Inspect(ctx, first.ID())
	_, ran := b.Exec(ctx, first.ID(), ExecSpec{Args: []string{"/probe", "exit", "0"}})
	_, waited := b.Wait(ctx, first.ID())
	soon, cancel := context.WithTimeout(ctx, testkit.Limit)
	defer cancel()
	_, attached := b.Attach(soon, first.ID(), AttachSpec{})
	for what, err := range map[string]error{
		"inspect": inspected, "exec": ran, "wait": waited, "attach": attached,
		"stop":   b.Stop(ctx, first.ID(), 0),
		"kill":   b.Kill(ctx, first.ID(), 9),
		"start":  b.StartAnew(ctx, first.ID(), nil, nil),
		"logs":   b.Logs(ctx, first.ID(), LogOptions{Stdout: io.Discard, Stderr: io.Discard}),
		"remove": b.Remove(ctx, first.ID(), true),
	} {
		if !errors.Is(err, ErrNotFound) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if i, err := b.Inspect(ctx, "a"); err != nil || i.ID() != second.ID() || i.Status != Running {
		t.Errorf("the second is %+v, %v", i, err)
	}
	if err := b.StartAnew(ctx, second.ID(), nil, nil); !errors.Is(err, ErrRunning) {
		t.Errorf("it runs, and is started: %v", err)
	}
	for range 2 {
		if err := b.Stop(ctx, second.ID(), 0); err != nil {
			t.Error(err)
		}
		if err := b.StartAnew(ctx, second.ID(), nil, nil); err != nil {
			t.Error(err)
		}
	}
	if err := b.Stop(ctx, second.ID(), 0); err != nil {
		t.Error(err)
	}
	if err := b.Remove(ctx, second.ID(), false); err != nil {
		t.Error(err)
	}
}
