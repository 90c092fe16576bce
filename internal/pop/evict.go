package pop

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"dewpoint/internal/evict"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// DefaultPolicy is the policy that the study recommends (docs/research/pop-study.md).
const DefaultPolicy = evict.Default

// evictor chooses what leaves a store that is full, by a policy that all nodes' uses have fed.
type evictor struct {
	*layout
	records *records
	trash   *trash
	room    *room
	images  *images
	packs   *packs
}

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
func (ev *evictor) Evict(ctx context.Context, want int64) (Eviction, error) {
	layers, err := ev.records.Objects(ctx)
	if layers == nil && err != nil {
		return Eviction{}, err
	}
	packs, err := ev.packs.all(ctx)
	if err != nil {
		return Eviction{}, err
	}
	all := append(layers[:len(layers):len(layers)], slices.Collect(maps.Values(packs))...)
	excess, err := ev.room.excess(ctx, all, want)
	over := ev.room.overQuota(layers)
	if err != nil || excess <= 0 && len(over) == 0 {
		return Eviction{}, err
	}
	if ok, err := ev.cfg.Coord.Settled(ctx); err != nil || !ok {
		return Eviction{Why: whyNot(err, "the coordinator has lost its memory a moment ago")}, nil
	}
	lease, err := ev.cfg.Coord.Acquire(ctx, evictLease, 0)
	if err != nil {
		return Eviction{Why: whyNot(err, "")}, nil
	}
	defer lease.Release(context.WithoutCancel(ctx))
	e := &evicting{s: ev, lease: lease, layers: packs, on: uppers(layers), excess: excess, over: over}
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

// evicting is one round of evicting.
type evicting struct {
	s        *evictor
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
		images := e.s.images.imagesOf(l.DiffID)
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
		if err := e.s.packs.DropPack(ctx, l.DiffID); err != nil {
			return false, err
		}
	} else {
		gone, err := e.s.trash.evict(ctx, l.DiffID)
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

// Touch notes that an image's layers were used, for who evicts.
func (ev *evictor) Touch(ctx context.Context, image, namespace string, layers ...*Layer) error {
	touches := make([]Touch, len(layers))
	for i, l := range layers {
		touches[i] = Touch{Key: l.DiffID.String(), Size: l.Size, Cost: l.Cost, Image: image, Namespace: namespace}
	}
	return ev.cfg.Coord.Touch(ctx, touches...)
}
