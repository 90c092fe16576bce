package store

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/pop"
)

// view is this node's view of the checkpoints in the PoP's store.
//
// What checkpoints the PoP's store has is found by listing its directory and reading every record that is new
// there, a layer's too: on a distributed file system that takes longer than all else that decides on a start,
// and longer the more is in the store. So it is done behind starts: a look holds until something is told that
// it did not see (Heard). Where nobody tells, a start looks itself unless somebody has just looked.
type view struct {
	*place
	every   time.Duration // lookEvery
	looking chan struct{} // has one of those that look at the PoP's store for a start
	told    chan struct{} // has one when there are news for Follow

	mu     sync.Mutex
	looked look
	news   time.Time // when Heard was told last that this may have changed; zero before the first time
}

// look is what was seen in the PoP's store. The zero value has seen nothing.
type look struct {
	at      time.Time // when it began: what changed later it may not have seen
	store   *pop.Store
	records []Record
	failed  failed
}

const (
	// lookEvery is how old a look may be that something may have been changed since.
	lookEvery = 2 * time.Second
	// lookLast is after how long one is made though nothing was told: who told may have been killed before.
	// One that is twice as old holds no more.
	lookLast = 10 * time.Minute
	// lookLater is the pause after one that failed.
	lookLater = time.Minute
)

// Look has what the PoP's store has at hand for a List of one image that follows. One that comes meanwhile
// waits for it.
func (vw *view) Look(ctx context.Context) { _, _, _ = vw.recent(ctx) } // List says why it could not

// recent is shared, unless a look is at hand that holds.
func (vw *view) recent(ctx context.Context) ([]Record, failed, error) {
	st := vw.pop()
	if st == nil {
		return nil, nil, nil
	}
	if l, ok := vw.holds(st); ok {
		return l.records, l.failed, nil
	}
	select {
	case vw.looking <- struct{}{}:
		defer func() { <-vw.looking }()
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
	before, ok := vw.holds(st)
	if ok { // somebody has looked meanwhile
		return before.records, before.failed, nil
	}
	at := time.Now()
	records, failed, err := vw.shared(ctx)
	if err == nil {
		vw.mu.Lock()
		defer vw.mu.Unlock()
		if vw.looked.at.Equal(before.at) { // else something has changed meanwhile
			vw.looked = look{at, st, records, failed}
		}
	}
	return records, failed, err
}

// holds is the last look, and whether it says what st has now.
func (vw *view) holds(st *pop.Store) (look, bool) {
	told := vw.cfg.Told != nil && vw.cfg.Told()
	vw.mu.Lock()
	defer vw.mu.Unlock()
	l, age := vw.looked, time.Since(vw.looked.at)
	return l, l.store == st && (age < vw.every || told && age < 2*lookLast && vw.sawAll(st))
}

// sawAll reports whether the last look began when every node saw what was told last. mu is held.
func (vw *view) sawAll(st *pop.Store) bool {
	return !vw.news.IsZero() && vw.looked.at.Sub(vw.news) >= st.Seen()
}

// lookAgain forgets what was seen: this node has changed it.
func (vw *view) lookAgain() {
	vw.mu.Lock()
	defer vw.mu.Unlock()
	vw.looked = look{at: time.Now()}
}

// Heard is told of events of the PoP, in their order, the Resync that each subscription begins with among
// them.
func (vw *view) Heard(e pop.Event) {
	vw.mu.Lock()
	defer vw.mu.Unlock()
	if !vw.concerned(e) {
		return
	}
	vw.news = time.Now()
	vw.looked = look{at: vw.news}
	select {
	case vw.told <- struct{}{}:
	default:
	}
}

// concerned reports whether an event may change what a look has seen. mu is held.
func (vw *view) concerned(e pop.Event) bool {
	switch e.Kind {
	case pop.Resync, pop.Saved, pop.Returned:
		return true
	case pop.Evicted, pop.Damaged: // of layers, most of them; while it is being looked, nobody knows
		return vw.looked.store == nil ||
			slices.ContainsFunc(vw.looked.records, func(r Record) bool { return digestOf(r.ID).String() == e.Key })
	}
	return false
}

// Follow looks at the PoP's store when something was told, and once more when all nodes must see that, so
// that starts need not, until ctx ends. While nothing is told it looks every ten minutes.
func (vw *view) Follow(ctx context.Context) {
	wait := lookLast
	for {
		select {
		case <-ctx.Done():
			return
		case <-vw.told:
		case <-time.After(wait):
		}
		_, _, err := vw.recent(ctx)
		wait = vw.due(err)
	}
}

// due is how long it is until Follow has to look again.
func (vw *view) due(err error) time.Duration {
	st := vw.pop()
	if err != nil || st == nil {
		return lookLater
	}
	vw.mu.Lock()
	defer vw.mu.Unlock()
	if vw.looked.store != st || !vw.news.IsZero() && !vw.sawAll(st) {
		return max(vw.every, time.Until(vw.news.Add(st.Seen())))
	}
	return max(vw.every, time.Until(vw.looked.at.Add(lookLast)))
}

func (vw *view) failures(ctx context.Context) (failed, error) {
	st := vw.pop()
	if st == nil {
		return nil, nil
	}
	all, err := st.Failures(ctx)
	return all, err
}

// shared is the records of the PoP's store, and what nodes have failed at. Those that cannot
// be understood are left out.
func (vw *view) shared(ctx context.Context) ([]Record, failed, error) {
	st := vw.pop()
	if st == nil {
		return nil, nil, nil
	}
	objects, err := st.Checkpoints(ctx)
	if err != nil && objects == nil {
		return nil, nil, err
	}
	var all []Record
	for _, l := range objects {
		r, err := parse(l.Checkpoint)
		if err == nil && (digestOf(r.ID) != l.DiffID || r.Data.Size != l.Size) {
			err = fmt.Errorf("%w: %s has the record of %s", ErrDamaged, l.DiffID, r.ID)
		}
		if err != nil {
			vw.cfg.Log.Debug("a checkpoint of the PoP's store cannot be understood", "err", err)
			continue
		}
		all = append(all, r)
	}
	f, err := vw.failures(ctx)
	return all, f, err
}

// knows reports whether the last look saw checkpoints of an image.
func (vw *view) knows(ref string) bool {
	vw.mu.Lock()
	defer vw.mu.Unlock()
	return slices.ContainsFunc(vw.looked.records, func(r Record) bool { return r.Image == ref })
}
