package pop

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"github.com/opencontainers/go-digest"
)

// notes are what nodes tell each other of checkpoints, and of what was damaged.
//
// A checkpoint in the store is an object as a layer is: a Layer whose Checkpoint is not
// empty, and whose DiffID is the checkpoint's ID. Its data are the checkpoint's data
// file, its table is empty. So it is drafted, published, referenced, verified, evicted and deleted
// by the code that does so with layers.
//
// It stands on another layer, Upper. That one is not evicted before it, and goes with
// it if no other checkpoint stands on it. Nothing more is promised: an upper layer that was
// damaged leaves the store, whoever stands on it. A checkpoint without its upper is of no use; who
// wants to use one looks for both, and a sweep takes it out of the store.
type notes struct {
	*layout
	records *records
}

// Failures is how often a node could not restore a checkpoint, in a row.
type Failures struct {
	Count int    `json:"count"`
	Why   string `json:"why,omitempty"`
}

const (
	failedDir = "failed"
	ordersDir = "orders"
	lostDir   = "lost"
)

func failuresOf(id digest.Digest, node string) string {
	return path.Join(failedDir, id.Encoded()+"."+node)
}

// NoteFailures tells the other nodes how often this one could not restore a checkpoint; 0
// takes back what it told.
func (nt *notes) NoteFailures(ctx context.Context, id digest.Digest, f Failures) error {
	if id.Validate() != nil {
		return fmt.Errorf("%q: %w", id, ErrUnknown)
	}
	name := failuresOf(id, nt.cfg.Node)
	defer nt.tell(ctx, Event{Kind: Saved, Key: id.String()})
	if f.Count == 0 {
		return nt.remove(ctx, name)
	}
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	if err := nt.cfg.FS.Mkdir(ctx, failedDir); err != nil { // stores of an earlier version have none
		return err
	}
	return nt.cfg.FS.WriteFile(ctx, name, b)
}

// Failures returns what all nodes have told, by checkpoint and node.
func (nt *notes) Failures(ctx context.Context) (map[digest.Digest]map[string]Failures, error) {
	names, err := nt.cfg.FS.Names(ctx, failedDir)
	if err != nil {
		return nil, unlessGone(err)
	}
	all := map[digest.Digest]map[string]Failures{}
	for _, name := range names {
		id, ok := idOf(name)
		_, node, _ := strings.Cut(name, ".")
		if !ok || node == "" {
			continue
		}
		b, err := nt.cfg.FS.ReadFile(ctx, path.Join(failedDir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var f Failures
		if json.Unmarshal(b, &f) != nil || f.Count <= 0 {
			continue
		}
		if all[id] == nil {
			all[id] = map[string]Failures{}
		}
		all[id][node] = f
	}
	return all, nil
}

// PutOrder keeps what a node has learned of a checkpoint's use, over what is there.
func (nt *notes) PutOrder(ctx context.Context, id digest.Digest, order []byte) error {
	if err := nt.cfg.FS.Mkdir(ctx, ordersDir); err != nil { // stores of an earlier version have none
		return err
	}
	return nt.cfg.FS.WriteFile(ctx, path.Join(ordersDir, id.Encoded()), order)
}

// Order returns what PutOrder was given last, or an error that wraps ErrUnknown.
func (nt *notes) Order(ctx context.Context, id digest.Digest) ([]byte, error) {
	if id.Validate() != nil {
		return nil, fmt.Errorf("%q: %w", id, ErrUnknown)
	}
	b, err := nt.cfg.FS.ReadFile(ctx, path.Join(ordersDir, id.Encoded()))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("order of %s: %w", id, ErrUnknown)
	}
	return b, err
}

// noteLost writes down that an object has left the store, if that is since it was damaged: who has made it
// and is down now hears of it by Lost.
func (nt *notes) noteLost(ctx context.Context, id digest.Digest, damaged bool) {
	name := path.Join(lostDir, id.Encoded())
	var err error
	if !damaged {
		err = nt.remove(ctx, name) // of an earlier time
	} else if err = nt.cfg.FS.Mkdir(ctx, lostDir); err == nil { // stores of an earlier version have none
		err = nt.cfg.FS.WriteFile(ctx, name, nil)
	}
	if err != nil {
		nt.cfg.Log.Debug("that an object was damaged is told to those alone that hear it now", "object", id, "err",
			err)
	}
}

// Lost are the objects that were damaged and are not in the store now. They are forgotten when they are
// published again, or after the time in which notes are.
func (nt *notes) Lost(ctx context.Context) ([]digest.Digest, error) {
	names, err := nt.cfg.FS.Names(ctx, lostDir)
	var all []digest.Digest
	for _, name := range names {
		if id, ok := idOf(name); ok && !nt.records.HasLayer(ctx, id) {
			all = append(all, id)
		}
	}
	return all, unlessGone(err)
}
