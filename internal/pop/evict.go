package pop

import (
	"context"
	"crypto/rand"
	"errors"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"dewpoint/internal/pop/evict"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// DefaultPolicy is the policy that the study recommends (docs/research/pop-study.md).
const DefaultPolicy = evict.Default

const evictLease = "evict"

// AllInUse is why no more was evicted: nodes use what is left.
const AllInUse = "all that is left is in use"

// OverQuota is why no more was evicted though there is room: nodes use what is beyond a quota.
const OverQuota = "what is beyond its quota is in use"

// Eviction is what Evict did.
type Eviction struct {
	Layers []digest.Digest // and checkpoints
	Bytes  int64           // that will be free when nobody can come back to them
	Why    string          // nothing, or why nothing was evicted though something should have been
}

// Evict takes layers and checkpoints out of the store that no node uses, and packs, until it has room for
// want bytes more, or down to its low watermark if it is above the high one. It does nothing
// unless the coordinator answers, remembers, and lets this node evict; then
// Eviction.Why says so. Deleting follows: see Sweep.
func (s *Store) Evict(ctx context.Context, want int64) (Eviction, error) {
	layers, err := s.Objects(ctx)
	if layers == nil && err != nil {
		return Eviction{}, err
	}
	packs, err := s.packs(ctx)
	if err != nil {
		return Eviction{}, err
	}
	excess, err := s.excess(ctx, append(layers[:len(layers):len(layers)], slices.Collect(maps.Values(packs))...),
		want)
	over := s.overQuota(layers)
	if err != nil || excess <= 0 && len(over) == 0 {
		return Eviction{}, err
	}
	if ok, err := s.cfg.Coord.Settled(ctx); err != nil || !ok {
		return Eviction{Why: whyNot(err, "the coordinator has lost its memory a moment ago")}, nil
	}
	lease, err := s.cfg.Coord.Acquire(ctx, evictLease, 0)
	if err != nil {
		return Eviction{Why: whyNot(err, "")}, nil
	}
	defer lease.Release(context.WithoutCancel(ctx))
	e := &evicting{s: s, lease: lease, layers: packs, on: uppers(layers), excess: excess, over: over}
	for _, l := range layers {
		e.layers[l.DiffID.String()] = l
	}
	if err := e.load(ctx); err != nil {
		return Eviction{Why: whyNot(err, "")}, nil
	}
	err = e.run(ctx)
	return e.done, errors.Join(err, e.save(ctx))
}

func whyNot(err error, else_ string) string {
	var held *HeldError
	switch {
	case errors.As(err, &held):
		return held.Holder.Node + " is evicting"
	case err != nil:
		return err.Error()
	}
	return else_
}

// filled is how many bytes are in the store, and how many it is to hold at most.
func (s *Store) filled(ctx context.Context, layers []*Layer) (used, capacity int64, err error) {
	total, free, err := s.cfg.FS.Space(ctx)
	if err != nil {
		return 0, 0, err
	}
	for _, l := range layers {
		used += l.Size
	}
	if capacity = s.Capacity(total); capacity == total {
		used = total - free - s.Trashed(ctx) // what is going already is as good as free
	}
	return used, capacity, nil
}

// excess is how many bytes have to go.
func (s *Store) excess(ctx context.Context, layers []*Layer, want int64) (int64, error) {
	used, capacity, err := s.filled(ctx, layers)
	if err != nil {
		return 0, err
	}
	if float64(used+want) <= s.cfg.High*float64(capacity) {
		return 0, nil
	}
	return used + want - int64(s.cfg.Low*float64(capacity)), nil
}

// Quota is what layers of images whose references begin so have of the store, and may have, in bytes. A layer
// counts for the image that it was fetched for first.
type Quota struct {
	Prefix      string
	Bytes, Most int64
}

// Quotas are the configured ones, by prefix.
func (s *Store) Quotas(layers []*Layer) (all []Quota) {
	for _, prefix := range slices.Sorted(maps.Keys(s.cfg.Quota)) {
		q := Quota{Prefix: prefix, Most: s.cfg.Quota[prefix]}
		for _, l := range layers {
			if strings.HasPrefix(l.Image, prefix) {
				q.Bytes += l.Size
			}
		}
		all = append(all, q)
	}
	return all
}

// overQuota is by how many bytes the layers of each quota exceed it.
func (s *Store) overQuota(layers []*Layer) map[string]int64 {
	over := map[string]int64{}
	for _, q := range s.Quotas(layers) {
		if q.Bytes > q.Most {
			over[q.Prefix] = q.Bytes - q.Most
		}
	}
	return over
}

// evicting is one round of evicting.
type evicting struct {
	s        *Store
	lease    Lease
	layers   map[string]*Layer // and packs
	policy   evict.Policy
	position string
	users    map[string][]string
	on       map[string]int   // how many checkpoints stand on a layer
	excess   int64            // bytes that are to go
	over     map[string]int64 // of these quotas, so many
	done     Eviction
}

// load makes the policy what all nodes' touches make of it.
func (e *evicting) load(ctx context.Context) error {
	state, err := e.s.cfg.Coord.LoadPolicy(ctx)
	if err != nil {
		return err
	}
	capacity := e.s.cfg.Capacity
	if capacity == 0 {
		if capacity, _, err = e.s.cfg.FS.Space(ctx); err != nil {
			return err
		}
	}
	if e.policy, err = evict.New(e.s.cfg.Policy, state.Data, capacity); err != nil && len(state.Data) > 0 {
		e.s.cfg.Log.Info("the order of eviction begins anew", "why", err)
		state.Position = ""
		e.policy, err = evict.New(e.s.cfg.Policy, nil, capacity)
	}
	if err != nil {
		return err
	}
	if e.position, err = e.replay(ctx, state.Position); err != nil {
		return err
	}
	keys := slices.Sorted(maps.Keys(e.layers)) // every node evicts in the same order
	for _, key := range keys {
		l := e.layers[key]
		had, known := e.policy.Get(key)
		images := e.s.imagesOf(l.DiffID)
		if !known || images > 0 && images != had.Images { // nobody has touched it, or other images have it now
			e.policy.Add(evict.Object{Key: key, Size: l.Size, Cost: l.Cost, Images: images})
		}
	}
	e.users, err = e.s.cfg.Coord.Users(ctx, keys...)
	return err
}

// replay tells the policy what was used since it was saved.
func (e *evicting) replay(ctx context.Context, from string) (string, error) {
	images := map[string]map[string]bool{}
	for {
		touches, next, err := e.s.cfg.Coord.Touches(ctx, from, 1000)
		if err != nil || len(touches) == 0 {
			return from, err
		}
		for _, t := range touches {
			l := e.layers[t.Key]
			if l == nil {
				e.policy.Remove(t.Key)
				continue
			}
			if images[t.Key] == nil {
				images[t.Key] = map[string]bool{}
			}
			images[t.Key][t.Image] = true
			was, known := e.policy.Get(t.Key)
			// The record knows the cost; who has the layer already does not.
			e.policy.Add(evict.Object{Key: t.Key, Size: l.Size, Cost: l.Cost,
				Images: max(was.Images, len(images[t.Key]))})
			if known {
				e.policy.Hit(t.Key)
			}
		}
		from = next
	}
}

func (e *evicting) save(ctx context.Context) error {
	b, err := e.policy.Snapshot()
	if err == nil {
		err = e.s.cfg.Coord.SavePolicy(ctx, PolicyState{Data: b, Position: e.position, Token: e.lease.Token()})
	}
	if errors.Is(err, ErrAway) || errors.Is(err, ErrFenced) {
		return nil // somebody else goes on from what he knows
	}
	return err
}

// run evicts until excess bytes are gone and no quota is exceeded. What cannot be renamed for want of room
// stays, and the error says so in the end.
func (e *evicting) run(ctx context.Context) error {
	kept := map[string]bool{} // came into use meanwhile, or stay for want of room
	var full error
	for e.excess > 0 || len(e.over) > 0 {
		select {
		case <-e.lease.Lost():
			e.done.Why = "the lease was lost"
			return nil
		default:
		}
		key, ok := e.policy.Victim(func(key string) bool { return !kept[key] && e.may(key) })
		if !ok && full != nil {
			return full
		}
		if !ok {
			if e.done.Why = OverQuota; e.excess > 0 {
				e.done.Why = AllInUse
			}
			return nil
		}
		l := e.layers[key]
		if l == nil {
			e.policy.Remove(key)
			continue
		}
		gone, err := e.take(ctx, key, l)
		if errors.Is(err, unix.ENOSPC) {
			full, err = err, nil
		}
		if err != nil {
			return err
		}
		kept[key] = !gone
	}
	return nil
}

// take evicts one object, and the layer that it stood on if nothing else does. It
// reports whether the object has gone.
func (e *evicting) take(ctx context.Context, key string, l *Layer) (bool, error) {
	if key == packKey(l.DiffID) { // nobody reads it but to copy it
		if err := e.s.DropPack(ctx, l.DiffID); err != nil {
			return false, err
		}
	} else {
		gone, err := e.s.evict(ctx, l.DiffID)
		if err != nil || !gone {
			return false, err
		}
		e.done.Layers = append(e.done.Layers, l.DiffID)
	}
	e.policy.Remove(key)
	delete(e.layers, key)
	e.done.Bytes += l.Size
	e.excess -= l.Size
	lessen(e.over, l)
	if l.Upper == "" {
		return true, nil
	}
	on := l.Upper.String()
	e.on[on]--
	var err error
	if under := e.layers[on]; under != nil && e.on[on] == 0 && len(e.users[on]) == 0 {
		_, err = e.take(ctx, on, under)
	}
	return true, err
}

// may reports whether a layer may be evicted, and helps.
func (e *evicting) may(key string) bool {
	l := e.layers[key]
	if l == nil {
		return true // it is gone already: the policy is to forget it
	}
	if len(e.users[key]) > 0 || e.on[key] > 0 {
		return false
	}
	for prefix := range e.over {
		if strings.HasPrefix(l.Image, prefix) {
			return true
		}
	}
	return e.excess > 0
}

func lessen(over map[string]int64, l *Layer) {
	for prefix := range over {
		if strings.HasPrefix(l.Image, prefix) {
			if over[prefix] -= l.Size; over[prefix] <= 0 {
				delete(over, prefix)
			}
		}
	}
}

// evict takes a layer out of sight, unless a node uses it. It reports whether it did.
func (s *Store) evict(ctx context.Context, id digest.Digest) (bool, error) {
	if used, err := s.inUse(ctx, id); err != nil || used {
		return false, err
	}
	l, err := s.record(ctx, id)
	if errors.Is(err, ErrUnknown) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	trash, err := s.hide(ctx, id, l.Name)
	if err != nil || trash == "" {
		return false, err
	}
	// A node that marked it before it was out of sight may have seen it.
	used, err := s.inUse(ctx, id)
	if err != nil || used {
		return false, errors.Join(err, s.putBack(ctx, id, trash))
	}
	s.tell(ctx, Event{Kind: Evicted, Key: id.String()})
	return true, nil
}

// hide takes the layer's record out of sight, whichever it is now, and returns its
// name in the trash, which it has to itself; "" if there was no record. The data stay.
func (s *Store) hide(ctx context.Context, id digest.Digest, name string) (string, error) {
	trash, err := s.aside(ctx, recordOf(id), name, trashEnd)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return trash, err
}

// aside renames the title of the files of that name to one in the trash that ends so, and returns it. On a
// distributed file system whose servers are full to the last byte most new names fail: a name belongs on one
// of the servers, and if the file lies on another one, a pointer has to be written there. So another name is
// tried.
func (s *Store) aside(ctx context.Context, title, name, end string) (to string, err error) {
	for range asideTries {
		to = path.Join(trashDir, name+"."+rand.Text()[:8]+end)
		if err = s.cfg.FS.Rename(ctx, title, to); !errors.Is(err, unix.ENOSPC) {
			break
		}
	}
	return to, err
}

const asideTries = 32 // with three servers, one in half a million titles finds no name

// putBack shows a layer again that was hidden, unless it was published anew or is being deleted.
func (s *Store) putBack(ctx context.Context, id digest.Digest, trash string) error {
	if s.Has(ctx, id) {
		return nil // these files go when they are not used any more
	}
	err := s.cfg.FS.Rename(ctx, trash, recordOf(id))
	if err == nil {
		s.tell(ctx, Event{Kind: Returned, Key: id.String()}) // who looked meanwhile is to look again
	}
	return unlessGone(err)
}
