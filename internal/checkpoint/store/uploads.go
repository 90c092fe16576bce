package store

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// uploads are the checkpoints that the PoP's store is to get from this node: what it has made is pending
// until it is there. A file says so, which is durable before the checkpoint is. A daemon that is killed, or a
// store that is away, does not lose it.
type uploads struct {
	*place
	catalog *catalog
	view    *view

	mu      sync.Mutex
	pending map[string]upload // by ID, of what is in the catalog
}

const (
	pendingEnd = ".owed"
	maxTries   = 10 // that fail for another reason than that the store is away
	// firstTry is how long who has made a checkpoint has to publish it before others may.
	firstTry  = time.Minute
	awayPause = 10 * time.Second
	mostPause = time.Hour
)

// upload is a checkpoint that is to be published.
type upload struct {
	Tries int `json:"tries"` // that have failed
	due   time.Time
}

// add notes that a checkpoint is to be published; change is held. After an error this process knows, and the
// next one may not.
func (up *uploads) add(id string, d upload) error {
	up.mu.Lock()
	up.pending[id] = d
	up.mu.Unlock()
	b, err := json.Marshal(d)
	if err != nil {
		return err
	}
	return durable.WriteFile(up.path(id+pendingEnd), b, 0o600)
}

// Lost is told of what has left the PoP's store since it was damaged there, a checkpoint or a layer. The
// checkpoints concerned that this node has made and still keeps are pending again.
func (up *uploads) Lost(id digest.Digest) {
	up.change.Lock()
	defer up.change.Unlock()
	var again []string
	for _, e := range up.catalog.all() {
		if e.Node == up.cfg.Node && (digestOf(e.ID) == id || e.Upper != nil && e.Upper.DiffID == id) {
			again = append(again, e.ID)
		}
	}
	for _, id := range again {
		if err := up.add(id, upload{}); err != nil {
			up.cfg.Log.Warn("a checkpoint that was damaged in the PoP's store may not be put there again after a restart",
				"id", id, "err", err)
		}
	}
	if len(again) > 0 {
		up.view.lookAgain()
	}
}

// Missed is Lost for what was damaged while this node was down. It is to be called at the start, when the
// PoP's store is there: it returns an error that wraps ErrNoPoP or pop.ErrStoreAway while it is not.
func (up *uploads) Missed(ctx context.Context) error {
	st := up.pop()
	if st == nil {
		return ErrNoPoP
	}
	lost, err := st.Lost(ctx)
	if err != nil {
		return err
	}
	for _, id := range lost {
		up.Lost(id)
	}
	return nil
}

// load reads what was pending for an earlier daemon: it is due at once.
func (up *uploads) load(id string) {
	var d upload
	b, err := readFile(up.path(id + pendingEnd))
	if err == nil {
		err = json.Unmarshal(b, &d)
	}
	if err != nil || d.Tries < 0 {
		d = upload{}
	}
	up.pending[id] = d
}

// PendingUploads are the checkpoints of this node that Settle was not called for and that are due, the oldest
// first; none while there is no store to publish them in.
func (up *uploads) PendingUploads() []Record {
	if up.pop() == nil {
		return nil
	}
	var all []Record
	for _, id := range up.due() {
		if r, ok := up.catalog.get(id); ok {
			all = append(all, r)
		}
	}
	slices.SortFunc(all, func(a, b Record) int { return a.Created.Compare(b.Created) })
	return all
}

// due are those whose time has come.
func (up *uploads) due() (ids []string) {
	up.mu.Lock()
	defer up.mu.Unlock()
	for id, d := range up.pending {
		if !time.Now().Before(d.due) {
			ids = append(ids, id)
		}
	}
	return ids
}

// Superseded reports whether the PoP's store has as many later checkpoints of the same image and key as it
// keeps.
func (up *uploads) Superseded(ctx context.Context, r Record) bool {
	all, _, err := up.view.shared(ctx)
	if err != nil {
		return false
	}
	later := slices.DeleteFunc(all, func(o Record) bool {
		return o.Manifest != r.Manifest || o.Key != r.Key || !o.Created.After(r.Created)
	})
	return len(later) >= up.cfg.Keep
}

// Settle notes how publishing a checkpoint ended: nil, and what will never succeed, ends it. What
// failed is due again later, as long as the store is away, else so many times. It reports whether it is.
func (up *uploads) Settle(ctx context.Context, id string, err error) (again bool) {
	up.change.Lock()
	defer up.change.Unlock()
	up.mu.Lock()
	d, pending := up.pending[id]
	up.mu.Unlock()
	if !pending {
		return false
	}
	pause := awayPause
	switch hopeless := errors.Is(err, ErrQuarantined) || errors.Is(err, ErrDamaged) ||
		errors.Is(err, ErrUnknown); {
	case err != nil && ctx.Err() != nil:
	case errors.Is(err, ErrNoPoP) || errors.Is(err, pop.ErrStoreAway):
	case err == nil || hopeless || d.Tries+1 >= maxTries:
		if err := up.end(id); err != nil {
			up.cfg.Log.Warn("a checkpoint is published once more at the next start", "id", id, "err", err)
		}
		return false
	default:
		pause = min(mostPause, awayPause<<d.Tries)
		d.Tries++
	}
	d.due = time.Now().Add(pause)
	if err := up.add(id, d); err != nil {
		up.cfg.Log.Warn("how often a checkpoint was published in vain is not noted", "id", id, "err", err)
	}
	return true
}

// end has a checkpoint not be pending any more; change is held.
func (up *uploads) end(id string) error {
	up.mu.Lock()
	delete(up.pending, id)
	up.mu.Unlock()
	return removed(os.Remove(up.path(id + pendingEnd)))
}

// leave is end of a checkpoint whose files go.
func (up *uploads) leave(id string) {
	up.mu.Lock()
	defer up.mu.Unlock()
	delete(up.pending, id)
}
