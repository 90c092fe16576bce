package pop

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"path"
	"sync"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
)

// drafts are the layers that this node copies into the store, and how far others have come with theirs.
type drafts struct {
	*layout
	records *records
	trash   *trash

	mu    sync.Mutex
	fills map[digest.Digest]bool // layers of which checkpoints were made or seen here
}

// Lead takes the lease under which an object is copied into the store: while it is held, no sweep takes
// the draft for a dead node's, however long nothing is written to it. Errors are those of Leases.Acquire.
func (ds *drafts) Lead(ctx context.Context, id digest.Digest) (Lease, error) {
	return ds.cfg.Coord.Acquire(ctx, LayerLease(id), ds.Above(ctx, id))
}

// Draft is a layer that this node copies into the store while it arrives.
// One goroutine uses it. What it writes has its token in its name; nobody takes it
// for a layer before Publish. A draft that nobody writes to for the time of grace, without the
// lease and without a checkpoint, is deleted by a sweep; publishing it fails then.
type Draft struct {
	s    *drafts
	id   digest.Digest
	name string // of the files, see Layer
	rec  File   // its title
	f    File
	at   int64 // everything before it was written
	hash hash.Hash
	sums []byte
	// failed is why it can only be abandoned: a sync has failed. Linux reports once that bytes did not reach the
	// disk, so a later sync that succeeds says nothing of them.
	failed error
	placed bool // its file's name was made durable for a checkpoint
}

// checkpoint is fill/HEX.json: how far whom had come.
type checkpoint struct {
	Version int             `json:"version"`
	Name    string          `json:"name"` // of the files, see Layer
	Size    int64           `json:"size"` // bytes of the data that are durable
	Record  json.RawMessage `json:"record"`
}

func (c *checkpoint) of(id digest.Digest) bool {
	hex, _, ok := parseName(c.Name)
	return ok && hex == id.Encoded() && c.Version == formatVersion && c.Size >= 0
}

// Draft begins to copy a layer into the store, under the token of a lease.
func (ds *drafts) Draft(ctx context.Context, id digest.Digest, token uint64) (*Draft, error) {
	name := nameOf(id, token)
	rec, err := ds.cfg.FS.Append(ctx, titleOf(name))
	if err != nil {
		return nil, fmt.Errorf("copy layer %s into the store: %w", id, err)
	}
	f, err := ds.cfg.FS.Append(ctx, path.Join(layersDir, name+dataEnd))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("copy layer %s into the store: %w", id, err), rec.Close(),
			ds.trash.discard(ctx, titleOf(name), name))
	}
	return &Draft{s: ds, id: id, name: name, rec: rec, f: f, hash: sha256.New()}, nil
}

// At is up to where the layer has been written.
func (f *Draft) At() int64 { return f.at }

// Write writes what follows.
func (f *Draft) Write(b []byte) (int, error) {
	if f.failed != nil {
		return 0, f.failed
	}
	n, err := f.f.WriteAt(b, f.at)
	if err != nil {
		return 0, err
	}
	f.at += int64(n)
	for len(b) > 0 {
		had := (f.at - int64(len(b))) % SumBytes
		k := min(int64(len(b)), SumBytes-had)
		f.hash.Write(b[:k])
		if b = b[k:]; had+k == SumBytes {
			f.endSum()
		}
	}
	return n, nil
}

func (f *Draft) endSum() {
	f.sums = f.hash.Sum(f.sums)
	f.hash.Reset()
}

// Checkpoint makes what was written durable and says so, with a record of the
// fill that does not claim more than what was written.
func (f *Draft) Checkpoint(ctx context.Context, record []byte) error {
	if f.failed != nil {
		return f.failed
	}
	if err := f.f.Sync(); err != nil {
		return f.fail(ctx, err)
	}
	if !f.placed {
		if err := f.s.cfg.FS.SyncDir(ctx, layersDir); err != nil {
			return err
		}
		f.placed = true
	}
	b, err := json.Marshal(checkpoint{formatVersion, f.name, f.at, record})
	if err != nil {
		return err
	}
	f.s.noteFill(f.id)
	return f.s.cfg.FS.WriteFile(ctx, checkpointOf(f.id), b)
}

// fail discards what was written, and the checkpoint of it, since a sync has failed.
func (f *Draft) fail(ctx context.Context, err error) error {
	f.failed = fmt.Errorf("copy layer %s into the store: %w", f.id, err)
	ctx = context.WithoutCancel(ctx)
	if aerr := f.Abandon(ctx); aerr != nil { // a sweep does it else
		f.s.cfg.Log.Debug("a draft stays", "layer", f.id, "err", aerr)
	}
	f.s.forgetFill(ctx, f.id)
	return f.failed
}

// Publish makes the layer visible to all nodes: everything was written. table
// is the layer's. The caller has verified the tar that it wrote. Of l the files' names
// and sums are filled in. If the store has the layer already, that one stays. After an
// error the layer may be published or not; the draft can be closed or abandoned only. If a sync has failed,
// now or at a checkpoint, it is not published, and what was written is discarded.
func (f *Draft) Publish(ctx context.Context, l Layer, table []byte) error {
	if f.failed != nil {
		return f.failed
	}
	if have, err := f.s.records.whole(ctx, f.id, nil); err == nil && have.Size == l.Size {
		return f.Abandon(ctx)
	}
	if f.at%SumBytes != 0 {
		f.endSum()
	}
	if err := f.writeTable(ctx, table); err != nil {
		return f.fail(ctx, err)
	}
	if n, err := f.f.Size(); err != nil || n != l.Size || f.at != l.Size {
		return fmt.Errorf("publish layer %s: %d bytes were written and %d are there, of %d: %w", f.id, f.at, n,
			l.Size, errors.Join(err, ErrDamaged))
	}
	l.Version, l.DiffID, l.Name, l.Node = formatVersion, f.id, f.name, f.s.cfg.Node
	l.Table, l.Sums = digest.FromBytes(table), f.sums
	if err := f.entitle(ctx, &l); err != nil {
		return fmt.Errorf("publish layer %s: %w", f.id, err)
	}
	f.s.forgetFill(ctx, f.id)
	f.s.tell(ctx, Event{Kind: Published, Key: f.id.String()})
	if l.Checkpoint != nil {
		f.s.tell(ctx, Event{Kind: Saved, Key: f.id.String()})
	}
	return nil
}

// writeTable writes the layer's table, and makes all that the record is to name durable.
func (f *Draft) writeTable(ctx context.Context, table []byte) error {
	var all errgroup.Group
	all.Go(f.f.Sync)
	all.Go(func() error { return f.write(ctx, tableEnd, packTable(table)) })
	if err := all.Wait(); err != nil {
		return err
	}
	return f.s.cfg.FS.SyncDir(ctx, layersDir)
}

// write writes one of the layer's files, where it stays: nobody looks for it before there is a record.
func (f *Draft) write(ctx context.Context, end string, b []byte) error {
	w, err := f.s.cfg.FS.Append(ctx, path.Join(layersDir, f.name+end))
	if err != nil {
		return err
	}
	if _, err = w.WriteAt(b, 0); err == nil {
		err = w.Sync()
	}
	return errors.Join(err, w.Close())
}

// entitle fills in the title and renames it into place. A sweep that took the
// files for a dead node's has taken the title first: then there is none to rename.
func (f *Draft) entitle(ctx context.Context, l *Layer) error {
	b, err := json.Marshal(l)
	if err == nil {
		_, err = f.rec.WriteAt(b, 0)
	}
	if err == nil {
		err = f.rec.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return f.fail(ctx, err)
	}
	return f.s.cfg.FS.Rename(ctx, titleOf(f.name), recordOf(f.id))
}

// Abandon gives up what was written, unless it was published.
func (f *Draft) Abandon(ctx context.Context) error {
	_ = f.Close() // it goes
	return f.s.trash.discard(ctx, titleOf(f.name), f.name)
}

// Close leaves what was written and checkpointed for who goes on with the layer. It
// may be called after Publish and Abandon.
func (f *Draft) Close() error {
	if f.f == nil {
		return nil
	}
	err := errors.Join(f.f.Close(), f.rec.Close())
	f.f = nil
	return err
}

// Checkpoint is how far somebody has come with a layer that is not complete.
type Checkpoint struct {
	Size   int64  // bytes of the tar that Data gives
	Record []byte // of the fill
	Data   io.Reader
	name   string
	file   File
}

// Close ends the reading of Data.
func (c *Checkpoint) Close() error { return c.file.Close() }

// Checkpoint returns the last checkpoint of a layer, or an error that wraps ErrUnknown.
func (ds *drafts) Checkpoint(ctx context.Context, id digest.Digest) (*Checkpoint, error) {
	b, err := ds.cfg.FS.ReadFile(ctx, checkpointOf(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("a checkpoint of %s: %w", id, ErrUnknown)
	}
	if err != nil {
		return nil, err
	}
	var c checkpoint
	if err := json.Unmarshal(b, &c); err != nil || !c.of(id) {
		return nil, fmt.Errorf("the checkpoint of %s: %w", id, ErrDamaged)
	}
	f, err := ds.cfg.FS.Open(ctx, path.Join(layersDir, c.Name+dataEnd))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("the data of the checkpoint of %s: %w", id, ErrUnknown)
	}
	if err != nil {
		return nil, err
	}
	if n, err := f.Size(); err != nil || n < c.Size {
		return nil, errors.Join(fmt.Errorf("the checkpoint of %s has %d bytes of %d: %w", id, n, c.Size,
			ErrUnknown), err, f.Close())
	}
	ds.noteFill(id)
	return &Checkpoint{Size: c.Size, Record: c.Record, Data: io.NewSectionReader(f, 0, c.Size), name: c.Name,
		file: f}, nil
}

// Above is the greatest token that the store shows for a layer: a lease of it
// must have a greater one.
func (ds *drafts) Above(ctx context.Context, id digest.Digest) uint64 {
	published := make(chan uint64, 1)
	go func() {
		var token uint64
		if l, err := ds.records.record(ctx, id); err == nil {
			_, token, _ = parseName(l.Name)
		}
		published <- token
	}()
	var token uint64
	if b, err := ds.cfg.FS.ReadFile(ctx, checkpointOf(id)); err == nil {
		var c checkpoint
		if json.Unmarshal(b, &c) == nil && c.of(id) {
			_, token, _ = parseName(c.Name)
		}
	}
	return max(token, <-published)
}

// noteFill notes that a layer has a checkpoint.
func (ds *drafts) noteFill(id digest.Digest) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	ds.fills[id] = true
}

// forgetFill removes the checkpoint of a layer that was published, if this node has made or seen one. What an
// earlier holder wrote is left to the sweep: it may still be writing.
func (ds *drafts) forgetFill(ctx context.Context, id digest.Digest) {
	ds.mu.Lock()
	known := ds.fills[id]
	delete(ds.fills, id)
	ds.mu.Unlock()
	if !known {
		return
	}
	if err := ds.remove(ctx, checkpointOf(id)); err != nil {
		ds.cfg.Log.Debug("checkpoint stays", "layer", id, "err", err)
	}
}
