package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"sync"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// failures is what this node has noted of restoring checkpoints: how often it failed in a row, and in which
// order memory was touched. Other nodes' notes come with a look at the PoP's store (view).
type failures struct {
	*place
	catalog *catalog
	view    *view

	mu    sync.Mutex
	notes map[string]notes // by ID, of what is in the catalog or in the PoP's store
}

// notes are what this node has seen of a checkpoint.
type notes struct {
	Failures int       `json:"failures"` // of restoring it, in a row
	Why      string    `json:"why"`
	At       time.Time `json:"at"`
}

// load reads what is noted; what cannot be read was never noted.
func (fl *failures) load(id string) {
	var n notes
	b, err := readFile(fl.path(id + notesEnd))
	if err == nil {
		err = json.Unmarshal(b, &n)
	}
	if err != nil || n.Failures < 0 {
		fl.cfg.Log.Warn("what was noted of a checkpoint is lost", "id", id, "err", err)
		return
	}
	fl.notes[id] = n
}

// Succeeded notes that a checkpoint was restored: failures before that count no more.
func (fl *failures) Succeeded(ctx context.Context, id string) {
	fl.change.Lock()
	defer fl.change.Unlock()
	fl.mu.Lock()
	n := fl.notes[id]
	delete(fl.notes, id)
	fl.mu.Unlock()
	if n.Failures > 0 {
		fl.note(ctx, id, notes{})
	}
}

// note writes down what is known of a checkpoint, here and for the others; change is held.
func (fl *failures) note(ctx context.Context, id string, n notes) {
	var err error
	b := []byte(nil)
	if n.Failures == 0 {
		err = removed(os.Remove(fl.path(id + notesEnd)))
	} else if b, err = json.Marshal(n); err == nil {
		err = durable.WriteFile(fl.path(id+notesEnd), b, 0o600)
	}
	if st := fl.pop(); st != nil {
		err = errors.Join(err, st.NoteFailures(ctx, digestOf(id), pop.Failures{Count: n.Failures, Why: n.Why}))
		fl.view.lookAgain()
	}
	if err != nil {
		fl.cfg.Log.Warn("a checkpoint's failure is not noted everywhere", "id", id, "err", err)
	}
}

// failed is what other nodes have noted, by node.
type failed map[digest.Digest]map[string]pop.Failures

// judge is how often restoring a checkpoint failed, and whether it is not to be used here.
func (fl *failures) judge(id string, f failed) (failures int, quarantined bool) {
	fl.mu.Lock()
	own := fl.notes[id].Failures
	fl.mu.Unlock()
	return own + fl.elsewhere(id, f), own >= fl.cfg.MaxFailures || fl.condemned(id, f)
}

// condemned reports whether a checkpoint is not to be used anywhere: one node alone
// that cannot restore does not take it from the others.
func (fl *failures) condemned(id string, f failed) bool {
	fl.mu.Lock()
	own := fl.notes[id].Failures
	fl.mu.Unlock()
	sum, nodes := min(own, fl.cfg.MaxFailures), 0
	if own > 0 {
		nodes++
	}
	for node, n := range f[digestOf(id)] {
		if node != fl.cfg.Node && n.Count > 0 {
			sum += min(n.Count, fl.cfg.MaxFailures)
			nodes++
		}
	}
	return nodes >= 2 && sum >= 2*fl.cfg.MaxFailures
}

func (fl *failures) elsewhere(id string, f failed) (sum int) {
	for node, n := range f[digestOf(id)] {
		if node != fl.cfg.Node {
			sum += n.Count
		}
	}
	return sum
}

// forgetAfter is how long it is remembered that what is neither here nor in the
// PoP's store could not be restored.
const forgetAfter = 7 * 24 * time.Hour

// forget removes what is noted of checkpoints that are gone for long.
func (fl *failures) forget(ctx context.Context) error {
	if len(fl.all()) == 0 {
		return nil
	}
	shared, _, err := fl.view.shared(ctx)
	if err != nil || fl.cfg.PoP != nil && fl.pop() == nil {
		return nil // nobody knows
	}
	there := map[string]bool{}
	for _, r := range shared {
		there[r.ID] = true
	}
	fl.change.Lock()
	defer fl.change.Unlock()
	var gone []string
	for id, n := range fl.all() {
		if _, here := fl.catalog.get(id); !here && !there[id] && time.Since(n.At) > forgetAfter {
			gone = append(gone, id)
		}
	}
	fl.mu.Lock()
	for _, id := range gone {
		delete(fl.notes, id)
	}
	fl.mu.Unlock()
	var errs error
	for _, id := range gone {
		errs = errors.Join(errs, removed(os.Remove(fl.path(id+notesEnd))))
	}
	return errs
}

// all are the notes, by ID.
func (fl *failures) all() map[string]notes {
	fl.mu.Lock()
	defer fl.mu.Unlock()
	return maps.Clone(fl.notes)
}

// failed counts one more failure of restoring a checkpoint.
func (fl *failures) failed(id, why string) notes {
	fl.mu.Lock()
	defer fl.mu.Unlock()
	n := fl.notes[id]
	n.Failures, n.Why, n.At = n.Failures+1, fmt.Sprintf("%.500s", why), time.Now().UTC()
	fl.notes[id] = n
	return n
}

// SetOrder keeps in which order the memory of a checkpoint was touched, as its
// user writes it down: for the next restores here and, if they share a store, on other nodes.
func (fl *failures) SetOrder(ctx context.Context, id string, order []byte) error {
	if len(order) > maxRecord {
		return fmt.Errorf("an order of %d bytes: too long", len(order))
	}
	var err error
	fl.change.Lock()
	if _, here := fl.catalog.get(id); here {
		err = durable.WriteFile(fl.path(id+orderEnd), order, 0o600)
	}
	fl.change.Unlock()
	if st := fl.pop(); st != nil && st.HasLayer(ctx, digestOf(id)) {
		err = errors.Join(err, st.PutOrder(ctx, digestOf(id), order))
	}
	return err
}

// Order is what was kept last, or nil.
func (fl *failures) Order(ctx context.Context, id string) []byte {
	if b, err := readFile(fl.path(id + orderEnd)); err == nil {
		return b
	}
	if st := fl.pop(); st != nil {
		if b, err := st.Order(ctx, digestOf(id)); err == nil && len(b) <= maxRecord {
			return b
		}
	}
	return nil
}
