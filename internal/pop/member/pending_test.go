package member

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// What was pending when it ended, it gives when it is back, but nothing that has no room there.
func TestPendingIsRecalled(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", nil)
	rec := a.published(a.bring(a.push("app", 1))[0].Layer.DiffID)
	st := a.member.usable()
	a.eventually("nothing is pending", func() bool { return len(loadPending(a.member.cfg.Pending)) == 0 })
	// as if it had never come there
	a.must(os.Remove(filepath.Join(s.store, "layers", rec.DiffID.Encoded()+".json")))
	a.member.expects(rec.DiffID)
	a.eventually("it is complete here", func() bool {
		l, err := a.layers.Peek(rec.DiffID)
		return err == nil && l.Complete()
	})
	small, err := pop.OpenStore(t.Context(),
		pop.StoreConfig{FS: pop.NewDir(s.store, 0), Coord: a.member.cfg.Coord, Node: "a", Grace: time.Second,
			Capacity: rec.Size})
	a.must(err)
	a.ends()
	a.member.recall(t.Context(), small)
	if left := a.pendingUploads(); len(left) != 0 {
		t.Errorf("pending for a store that is too small: %v", left)
	}
	a.member.recall(t.Context(), st)
	if left := a.pendingUploads(); len(left) != 1 || left[0] != rec.DiffID {
		t.Errorf("pending: %v", left)
	}
	a.member.store.Store(small)
	a.member.giveRefused(t.Context())
	if left := a.pendingUploads(); len(left) != 1 || small.HasLayer(t.Context(), rec.DiffID) {
		t.Errorf("there is no room, and pending is %v", left)
	}
	if drafts, err := filepath.Glob(filepath.Join(s.store, "fill", "*")); err != nil || len(drafts) > 0 {
		t.Errorf("begun: %v, %v", drafts, err)
	}
	a.member.store.Store(st)
	a.member.giveRefused(t.Context())
	if left := a.pendingUploads(); len(left) != 0 || !st.HasLayer(t.Context(), rec.DiffID) ||
		len(loadPending(a.member.cfg.Pending)) != 0 {
		t.Errorf("pending: %v", left)
	}
}

// What is pending waits while the store is above its high watermark: it would be evicted at once, and be
// pending no more.
func TestPendingIsNotGivenToBeEvicted(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", nil)
	var kept int64
	var pending *pop.Layer
	for _, l := range a.bring(a.push("app", 1, 2, 3)) {
		pending = a.published(l.Layer.DiffID)
		kept += pending.Size
	}
	kept -= pending.Size
	a.eventually("nothing is pending", func() bool { return len(loadPending(a.member.cfg.Pending)) == 0 })
	a.must(s.hide(pending.DiffID))
	a.member.later(pending.DiffID)
	for capacity, gives := range map[int64]bool{kept + kept/50: false, 2 * kept: true} {
		st, err := pop.OpenStore(t.Context(),
			pop.StoreConfig{FS: pop.NewDir(s.store, 0), Coord: a.member.cfg.Coord, Node: "a", Grace: time.Second,
				Capacity: capacity})
		a.must(err)
		a.must(st.Room(t.Context(), pending.Size))
		a.member.store.Store(st)
		a.member.giveRefused(t.Context())
		if st.HasLayer(t.Context(), pending.DiffID) != gives || len(a.pendingUploads()) == 0 != gives {
			t.Errorf("of %d bytes a store has %d, and what is pending is given to it: %v", capacity, kept, !gives)
		}
		if gives {
			a.must(s.hide(pending.DiffID))
			a.member.later(pending.DiffID)
		}
	}
}

// What the store had and was evicted does not come back by itself.
func TestEvictedIsNotRecalled(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", nil)
	id := a.published(a.bring(a.push("app", 1))[0].Layer.DiffID).DiffID
	a.eventually("nothing is pending", func() bool { return len(loadPending(a.member.cfg.Pending)) == 0 })
	a.eventually("the hub is settled", func() bool { ok, _ := a.member.cfg.Coord.Settled(t.Context()); return ok })
	done, err := a.member.Prune(t.Context(), a.inUse)
	if err != nil || len(done.Layers) != 1 {
		t.Fatalf("evicted: %+v, %v", done, err)
	}
	a.ends()
	a.member.recall(t.Context(), a.member.usable())
	if left := a.pendingUploads(); len(left) != 0 || a.member.usable().HasLayer(t.Context(), id) {
		t.Errorf("pending: %v", left)
	}
}

// A layer that is evicted and published anew while another node has it attached was not damaged.
func TestEvictedIsNotReplaced(t *testing.T) {
	s := newPoPBed(t)
	a, b := s.node("a", nil), s.node("b", nil)
	p := a.push("app", 1)
	id := a.bring(p)[0].Layer.DiffID
	was := a.published(id)
	b.bring(p)
	at := func() string {
		l, err := b.layers.Peek(id)
		if err != nil || l.At == "" {
			return ""
		}
		return filepath.Base(l.At)
	}
	if at() != filepath.Base(was.Data()) {
		t.Fatalf("b has it at %q", at())
	}
	b.must(b.member.usable().Unuse(t.Context(), id)) // its reference is lost
	a.must(s.hide(id))                               // and its time of grace is over
	a.must(a.member.cfg.Coord.Publish(t.Context(), pop.Event{Kind: pop.Evicted, Key: id.String()}))
	b.eventually("it is in the store again", func() bool {
		now, err := b.member.usable().Record(t.Context(), id)
		return err == nil && now.Name != was.Name
	})
	b.eventually("it is not where it was", func() bool { return at() != filepath.Base(was.Data()) })
	b.eventually("b is done with it", func() bool { return b.member.begins(id) })
	if b.member.Stats().Replaced != 0 || len(b.replaced) != 0 {
		t.Errorf("%d were replaced: %v", b.member.Stats().Replaced, b.replaced)
	}
}

// ends is what becomes of a node's memory of what is pending when it ends, and another process begins.
func (n *popNode) ends() {
	n.member.uploads.mu.Lock()
	defer n.member.uploads.mu.Unlock()
	n.member.refused, n.member.pending = map[digest.Digest]bool{}, loadPending(n.member.cfg.Pending)
}

func (n *popNode) pendingUploads() []digest.Digest {
	n.member.uploads.mu.Lock()
	defer n.member.uploads.mu.Unlock()
	return slices.Collect(maps.Keys(n.member.refused))
}

// What a tag was resolved to while the store was away is not given up for what the store says, which is
// older; and it is told when the store is back, unless another node has resolved it since.
func TestResolvedWhileAway(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", nil)
	now := func(tag string) digest.Digest {
		return a.member.catalog.Get(a.ref(tag)).Desc.Digest
	}
	st := a.member.usable()
	for _, since := range []bool{false, true} {
		old := a.push("app", 1, 2)
		a.bring(old)
		a.eventually("it is told", func() bool {
			_, err := st.Resolved(t.Context(), old.Ref)
			return err == nil && len(a.member.untoldNow()) == 0
		})
		was := now(old.Ref)
		a.member.store.Store(nil)
		a.bring(a.push("app", 1, 3))
		new := now(old.Ref)
		if was == new {
			t.Fatal("the tag means the same")
		}
		a.member.store.Store(st)
		a.member.heard(t.Context(), pop.Event{Kind: pop.Resync})
		if now(old.Ref) != new {
			t.Error("the tag means what it did before")
		}
		for _, r := range a.member.untoldNow() {
			r.at = r.at.Add(-time.Hour)
			if !since { // nobody has
				a.must(os.Chtimes(imageFile(t, s.store), time.Time{}, r.at.Add(-time.Hour)))
			}
		}
		a.member.tellAll(t.Context())
		want := new
		if since {
			want = was
		}
		if len(a.member.untoldNow()) != 0 || now(old.Ref) != want {
			t.Errorf("resolved by another node since: %v, and it is %v", since, now(old.Ref))
		}
		b, err := st.Image(t.Context(), old.Ref)
		a.must(err)
		if !strings.Contains(string(b), want.String()) {
			t.Errorf("resolved by another node since: %v, and the store has %s", since, b)
		}
	}
}

// What was removed since it was resolved does not come back with what another node has resolved, and a PoP
// without a store remembers nothing.
func TestResolvedAndRemoved(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", nil)
	p := a.push("app", 1)
	a.bring(p)
	a.eventually("it is told", func() bool { return len(a.member.untoldNow()) == 0 })
	ref, catalog := a.ref(p.Ref), a.member.catalog
	old := *catalog.Get(ref)
	old.Desc.Digest = digest.FromString("an older one")
	a.must(catalog.Forget(ref))
	a.member.names.mu.Lock()
	a.member.untold[ref.String()] = &resolution{&old, time.Now().Add(-time.Hour)}
	a.member.names.mu.Unlock()
	a.member.tellAll(t.Context())
	if catalog.Get(ref) != nil || len(a.member.untoldNow()) != 0 {
		t.Errorf("it is back: %v", catalog.Get(ref))
	}
	a.member.cfg.Store = nil
	if a.member.resolved(&old); len(a.member.untoldNow()) != 0 {
		t.Error("what nobody can be told is remembered")
	}
}

// untoldNow is what the store does not know yet.
func (s *names) untoldNow() []*resolution {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.untold))
}

// imageFile is the only image record of a store.
func imageFile(t *testing.T, store string) string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(store, "images", "*.json"))
	if err != nil || len(all) != 1 {
		t.Fatalf("%v, %v", all, err)
	}
	return all[0]
}

// A layer that the store is to get is pending; once that would not take it, it may go from a full cache.
func TestPending(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", nil)
	id := a.published(a.bring(a.push("app", 1))[0].Layer.DiffID).DiffID
	pending := func() [2]bool { return [2]bool{a.member.Pending(id, false), a.member.Pending(id, true)} }
	a.eventually("nothing is pending", func() bool { return pending() == [2]bool{} })
	a.member.expects(id)
	if got := pending(); got != [2]bool{true, true} {
		t.Errorf("on its way: %v", got)
	}
	a.member.later(id) // the store has no room, or is away
	if got := pending(); got != [2]bool{true, false} {
		t.Errorf("refused: %v", got)
	}
}
