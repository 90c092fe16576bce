package engine

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"
)

// What an engine was making when its process was killed is taken back by the next one, whose containerd is
// the system's: that goes on with what it was asked for, and knows nothing of either.
func TestTakeBackOfSystem(t *testing.T) {
	b := newBed(t, containerds(t)["system"])
	ctx, dir := t.Context(), t.TempDir()
	cfg := Config{Address: b.Socket(), ContainerdState: b.private.StateDir(), Root: dir + "/r",
		State:     dir + "/s",
		Namespace: "other", Snapshotter: "overlayfs", Runtime: b.cfg.Runtime, ShimProgram: shimProgram, Log: b.log}
	other := &bed{t: t}
	start := func() {
		var err error
		if other.Engine, err = Start(ctx, cfg); err != nil {
			t.Fatal(err)
		}
	}
	start()
	other.img = other.makeImage()
	for n, after := range []time.Duration{40 * time.Millisecond} {
		name := fmt.Sprint("c", n)
		made := make(chan error, 1)
		go func(e *Engine) {
			_, err := e.Create(ctx, Spec{Name: name, Image: other.img, Net: NetNone})
			made <- err
		}(other.Engine)
		time.Sleep(after)
		other.Close() // from here on it can do nothing, not even undo
		<-made
		start()
		if err := other.TakeBack(ctx, name); err != nil {
			t.Fatal(err)
		}
		if _, err := other.Inspect(ctx, name); !errors.Is(err, ErrNotFound) {
			t.Errorf("after %s it is there: %v", after, err)
		}
		if _, err := os.Lstat(other.cfg.bundle(name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("after %s its bundle is there: %v", after, err)
		}
		other.checkLeaks()
		if _, stderr, status := other.output(Spec{Name: name, Net: NetNone,
			Cmd: []string{"say", "a", "b"}}); status != 0 {
			t.Errorf("its name made anew: %d, %s", status, stderr)
		}
	}
	other.Close()
}
