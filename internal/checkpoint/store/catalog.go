package store

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

// catalog is which checkpoints are on this node, and who reads them.
type catalog struct {
	*place

	mu      sync.Mutex
	entries map[string]*entry // by ID
}

// adopt takes up the checkpoint of that ID, if it is whole.
func (cat *catalog) adopt(id string) {
	b, err := readFile(cat.path(id + recordEnd))
	var r Record
	if err == nil {
		r, err = parse(b)
	}
	if err == nil && r.ID != id {
		err = fmt.Errorf("%w: it is the record of %.12s", ErrDamaged, r.ID)
	}
	var fi os.FileInfo
	if err == nil {
		fi, err = os.Stat(cat.path(id + dataEnd))
	}
	if err == nil && fi.Size() != r.Data.Size {
		err = fmt.Errorf("%w: %d bytes of %d", ErrDamaged, fi.Size(), r.Data.Size)
	}
	if err != nil {
		cat.cfg.Log.Warn("a checkpoint is dropped", "id", id, "err", err)
		return
	}
	cat.entries[id] = &entry{Record: r, used: fi.ModTime()}
}

// open opens what is on this node.
func (cat *catalog) open(id string) (*entry, *Data, error) {
	cat.mu.Lock()
	e := cat.entries[id]
	if e == nil {
		cat.mu.Unlock()
		return nil, nil, fmt.Errorf("%.12s: %w", id, ErrUnknown)
	}
	e.readers++
	cat.mu.Unlock()
	cat.use(id)
	end := func() {
		cat.mu.Lock()
		defer cat.mu.Unlock()
		e.readers--
	}
	f, err := os.Open(cat.path(id + dataEnd))
	if err != nil {
		end()
		return nil, nil, fmt.Errorf("checkpoint %.12s: %w", id, err)
	}
	return e, &Data{ReaderAt: f, Size: e.Data.Size, Local: true, close: func() error {
		end()
		return f.Close()
	}}, nil
}

// use notes that a checkpoint of this node is used, also for the order of use after a restart: the data
// file's time.
func (cat *catalog) use(id string) {
	now := time.Now()
	cat.mu.Lock()
	e := cat.entries[id]
	if e != nil {
		e.used = now
	}
	cat.mu.Unlock()
	if e == nil {
		return
	}
	if err := os.Chtimes(cat.path(id+dataEnd), now, now); err != nil {
		cat.cfg.Log.Debug("a checkpoint's use is not noted", "id", id, "err", err)
	}
}

// OfferRecords is what this node gives of a manifest's checkpoints: the records, as JSON, of those whose
// upper layer has says it can give, too.
func (cat *catalog) OfferRecords(manifest digest.Digest, has func(upper digest.Digest) bool) ([]byte, error) {
	out := []Record{}
	for _, e := range cat.all() {
		if e.Manifest == manifest.String() && (e.Upper == nil || has(e.Upper.DiffID)) {
			out = append(out, e.Record)
		}
	}
	return json.Marshal(out)
}

// Manifests are those that this node has checkpoints of.
func (cat *catalog) Manifests() []digest.Digest {
	cat.mu.Lock()
	defer cat.mu.Unlock()
	all := map[digest.Digest]bool{}
	for _, e := range cat.entries {
		all[digest.Digest(e.Manifest)] = true
	}
	return slices.Collect(maps.Keys(all))
}

// GiveData opens the data of a checkpoint on this node for another one, or returns an error that wraps
// ErrUnknown.
func (cat *catalog) GiveData(id digest.Digest) (*Data, error) {
	_, d, err := cat.open(id.Encoded())
	return d, err
}

// entry is a checkpoint whose data are here; catalog.mu guards what changes.
type entry struct {
	Record
	readers int
	used    time.Time
}

// Uppers are the diffIDs of the layers that checkpoints on this node stand on: they
// are to be kept on this node.
func (cat *catalog) Uppers() map[digest.Digest]bool {
	cat.mu.Lock()
	defer cat.mu.Unlock()
	all := map[digest.Digest]bool{}
	for _, e := range cat.entries {
		if e.Upper != nil {
			all[e.Upper.DiffID] = true
		}
	}
	return all
}

// get is the record of a checkpoint that is here.
func (cat *catalog) get(id string) (Record, bool) {
	cat.mu.Lock()
	defer cat.mu.Unlock()
	e := cat.entries[id]
	if e == nil {
		return Record{}, false
	}
	return e.Record, true
}

// all are copies of the entries.
func (cat *catalog) all() []entry {
	cat.mu.Lock()
	defer cat.mu.Unlock()
	all := make([]entry, 0, len(cat.entries))
	for _, e := range cat.entries {
		all = append(all, *e)
	}
	return all
}

// add has a checkpoint be here: its files are.
func (cat *catalog) add(r Record) {
	cat.mu.Lock()
	defer cat.mu.Unlock()
	cat.entries[r.ID] = &entry{Record: r, used: time.Now()}
}

// leave has a checkpoint not be here any more: its files are to go. It reports whether it was. The error
// wraps ErrInUse if it is being read.
func (cat *catalog) leave(id string) (there bool, err error) {
	cat.mu.Lock()
	defer cat.mu.Unlock()
	e := cat.entries[id]
	if e != nil && e.readers > 0 {
		return true, fmt.Errorf("%.12s: %w", id, ErrInUse)
	}
	delete(cat.entries, id)
	return e != nil, nil
}
