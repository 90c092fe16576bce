package pop_test

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/local"
)

// A name is one machine's, also of many that want it at once, until the node is forgotten.
func TestNameOfOneMachine(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		ctx, hub := t.Context(), local.NewHub()
		a, endA := openNode(t, hub, dir, "a")
		defer endA()
		machines := []string{"1", "2", "3", "4"}
		got := make([]error, len(machines))
		stores := make([]*pop.Store, len(machines))
		var all sync.WaitGroup
		for i := range machines {
			st, end := openNode(t, hub, dir, "b")
			defer end()
			stores[i] = st
			all.Go(func() { got[i] = st.Claim(ctx, machines[i]) })
		}
		all.Wait()
		owner := -1
		for i, err := range got {
			switch {
			case err == nil && owner < 0:
				owner = i
			case !errors.Is(err, pop.ErrTaken):
				t.Errorf("machine %s: %v, and %d has the name", machines[i], err, owner)
			}
		}
		if owner < 0 {
			t.Fatal("nobody has the name")
		}
		for i, st := range stores { // started again
			if err := st.Claim(ctx, machines[i]); (err == nil) != (i == owner) {
				t.Errorf("machine %s again: %v", machines[i], err)
			}
		}
		if left, _ := filepath.Glob(filepath.Join(dir, "nodes", ".*")); len(left) > 0 {
			t.Errorf("%v stay", left)
		}
		if err := a.Claim(ctx, "1"); err != nil { // another name of the same machine
			t.Error(err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		hub := local.NewHub()
		a, endA := openNode(t, hub, dir, "a")
		defer endA()
		if err := a.Forget(t.Context(), "b"); !errors.Is(err, pop.ErrLives) {
			t.Fatal(err)
		}
		time.Sleep(70 * time.Second)
		if err := a.Forget(t.Context(), "b"); err != nil {
			t.Fatal(err)
		}
		b, endB := openNode(t, hub, dir, "b")
		defer endB()
		if err := b.Claim(t.Context(), "new"); err != nil {
			t.Errorf("the name of a node that was forgotten: %v", err)
		}
	})
}

// A node that the coordinator hears of twice leaves the references alone that it does not
// know: the other machine's containers may stand on them.
func TestTwinsKeepTheirMarks(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		ctx, hub := t.Context(), local.NewHub()
		one, endOne := twinNode(t, hub, dir, "10.0.0.1:7070")
		defer endOne()
		two, endTwo := twinNode(t, hub, dir, "10.0.0.2:7070")
		id := put(t, one, []byte("layer"))
		if _, err := two.Use(ctx, id); err != nil {
			t.Fatal(err)
		}
		references := func() int {
			names, err := os.ReadDir(filepath.Join(dir, "refs", "n"))
			if err != nil {
				t.Fatal(err)
			}
			return len(names)
		}
		time.Sleep(20 * time.Second) // it remembers
		if _, err := one.Sweep(ctx); err != nil || references() != 1 {
			t.Errorf("%d references after a sweep: %v", references(), err)
		}
		endTwo()
		time.Sleep(20 * time.Second)
		if _, err := one.Sweep(ctx); err != nil || references() != 0 { // as a late one of its own
			t.Errorf("%d references of nobody after a sweep: %v", references(), err)
		}
	})
}

func twinNode(t *testing.T, hub *local.Hub, dir, address string) (*pop.Store, func()) {
	t.Helper()
	c, err := hub.Join(pop.Config{Node: "n"})
	if err != nil {
		t.Fatal(err)
	}
	st, err := pop.OpenStore(t.Context(), pop.StoreConfig{FS: pop.NewDir(dir, 0), Coord: c, Node: "n"})
	if err == nil {
		err = c.Announce(t.Context(), pop.Member{Address: address})
	}
	if err != nil {
		t.Fatal(err)
	}
	return st, func() { c.Close() }
}
