package pop_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/local"

	"github.com/opencontainers/go-digest"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// openNode is a node's view of the store in dir. end takes it out of the PoP.
func openNode(t *testing.T, hub *local.Hub, dir, name string) (st *pop.Store, end func()) {
	t.Helper()
	c, err := hub.Join(pop.Config{Node: name})
	if err != nil {
		t.Fatal(err)
	}
	st, err = pop.OpenStore(t.Context(), pop.StoreConfig{FS: pop.NewDir(dir, 0), Coord: c, Node: name})
	if err == nil {
		err = errors.Join(c.Announce(t.Context(), pop.Member{}), st.Beat(t.Context()))
	}
	if err != nil {
		t.Fatal(err)
	}
	return st, func() { c.Close() }
}

// put publishes a layer.
func put(t *testing.T, st *pop.Store, tar []byte) digest.Digest {
	t.Helper()
	ctx, id := t.Context(), digest.FromBytes(tar)
	d, err := st.Draft(ctx, id, 1)
	if err == nil {
		_, err = d.Write(tar)
	}
	if err == nil {
		err = d.Publish(ctx, pop.Layer{DiffID: id, Size: int64(len(tar))}, []byte("table"))
	}
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// Only a node that has been silent, and that nobody hears of, is forgotten, and
// only when asked twice.
func TestForget(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		ctx, hub := t.Context(), local.NewHub()
		a, endA := openNode(t, hub, dir, "a")
		defer endA()
		b, endB := openNode(t, hub, dir, "b")
		id := put(t, a, []byte("layer"))
		if _, err := b.Use(ctx, id); err != nil {
			t.Fatal(err)
		}
		references := func() int {
			names, err := filepath.Glob(filepath.Join(dir, "refs", "b", "*"))
			if err != nil {
				t.Fatal(err)
			}
			return len(names)
		}
		refused := func(why string, node string, want error) {
			t.Helper()
			if err := a.Forget(ctx, node); !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", why, err, want)
			}
			if references() != 1 {
				t.Errorf("%s: the reference is gone", why)
			}
		}
		refused("it is this one", "a", pop.ErrLives)
		refused("there is no such node", "c", pop.ErrUnknown)
		for _, name := range []string{"", ".", "..", "../refs/b", "b/", "b/" + id.Encoded()} {
			refused("a name that is a path", name, pop.ErrUnknown)
		}
		refused("the coordinator hears of it", "b", pop.ErrLives)
		endB()
		refused("it was not looked at before", "b", pop.ErrLives)
		time.Sleep(50 * time.Second)
		if err := b.Beat(context.WithoutCancel(ctx)); err != nil { // its coordinator is away, and it lives
			t.Fatal(err)
		}
		time.Sleep(50 * time.Second)
		refused("it gave a sign of life", "b", pop.ErrLives)
		time.Sleep(70 * time.Second)
		if got, err := a.Silent(ctx); err != nil || len(got) != 1 || got[0].Node != "b" || got[0].References != 1 ||
			got[0].For != 70*time.Second {
			t.Errorf("silent: %+v, %v", got, err)
		}
		if err := a.Forget(ctx, "b"); err != nil {
			t.Fatal(err)
		}
		if n := references(); n != 0 {
			t.Errorf("%d references stay", n)
		}
		if err := b.Beat(ctx); err != nil { // it comes back
			t.Fatal(err)
		}
		if n := references(); n != 1 {
			t.Errorf("who comes back has %d references of what it uses", n)
		}
	})
}

// TestMissingFiles is a part of the store's file system that is away, and comes back or does not.
func TestMissingFiles(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		st := b.open(pop.StoreConfig{Node: "x", Forget: time.Hour})
		l, err := st.Record(t.Context(), fill(t, st, 1)[0])
		if err != nil {
			t.Fatal(err)
		}
		data, away := filepath.Join(b.dir, l.Data()), filepath.Join(b.dir, "away")
		after := func(d time.Duration, what string, want error) {
			t.Helper()
			time.Sleep(d)
			if err := st.Verify(t.Context(), l, 0); !errors.Is(err, want) ||
				want == pop.ErrMissing && errors.Is(err, pop.ErrDamaged) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if err := os.Rename(data, away); err != nil {
			t.Fatal(err)
		}
		after(0, "away", pop.ErrMissing)
		after(time.Hour-time.Second, "away for less than forget", pop.ErrMissing)
		if err := os.Rename(away, data); err != nil {
			t.Fatal(err)
		}
		after(time.Hour, "back", nil)
		if err := os.Remove(data); err != nil {
			t.Fatal(err)
		}
		after(time.Hour, "away again", pop.ErrMissing)
		after(2*time.Hour, "away, and not looked at for longer than that takes", pop.ErrMissing)
		after(time.Hour, "away for as long as a node that is forgotten", pop.ErrDamaged)
	})
}

// Whatever of a layer is damaged or missing is found; what was evicted is none.
func TestVerify(t *testing.T) {
	dir := t.TempDir()
	st, end := openNode(t, local.NewHub(), dir, "a")
	defer end()
	ctx := t.Context()
	tar := make([]byte, pop.SumBytes+1000)
	rec, err := st.Record(ctx, put(t, st, tar))
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Verify(ctx, rec, 1<<40); err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(dir, rec.Data())
	table := data[:len(data)-len("data")] + "table"
	for name, harm := range map[string]func() error{
		"the last byte": func() error {
			b := append([]byte{}, tar...)
			b[len(b)-1] = 1
			return os.WriteFile(data, b, 0o600)
		},
		"the end":   func() error { return os.Truncate(data, pop.SumBytes) },
		"all of it": func() error { return os.Remove(data) },
		"the table": func() error { return os.WriteFile(table, []byte("no table"), 0o600) },
		"no table":  func() error { return os.Remove(table) },
	} {
		saved, err := os.ReadFile(table)
		if err == nil {
			err = harm()
		}
		if err != nil {
			t.Fatal(err)
		}
		want := pop.ErrDamaged
		if _, err := os.Stat(data); err != nil || name == "no table" {
			want = pop.ErrMissing
		}
		if err := st.Verify(ctx, rec, 0); !errors.Is(err, want) ||
			want == pop.ErrMissing && errors.Is(err, pop.ErrDamaged) {
			t.Errorf("%s: %v", name, err)
		}
		if err := errors.Join(os.WriteFile(data, tar, 0o600), os.WriteFile(table, saved, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := st.Quarantine(ctx, rec); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(data), os.Remove(table)); err != nil {
		t.Fatal(err)
	}
	if err := st.Verify(ctx, rec, 0); !errors.Is(err, pop.ErrUnknown) || errors.Is(err, pop.ErrDamaged) {
		t.Errorf("a layer that has left the store: %v", err)
	}
}
