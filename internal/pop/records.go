package pop

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
)

// records reads the records of what is in the store. It remembers what it has read, since a record is small,
// seldom changes, and costs a question to a server.
type records struct {
	*layout

	mu   sync.Mutex
	read map[string]seenRecord // by name in layers
	// names of files that were found damaged: this node may still see their record for a while
	denied map[string]bool
}

// HasLayer reports whether the store has the layer, without referencing it.
func (recs *records) HasLayer(ctx context.Context, id digest.Digest) bool {
	_, err := recs.record(ctx, id)
	return err == nil
}

// Record returns the record of a layer without referencing it, or an error that
// wraps ErrUnknown.
func (recs *records) Record(ctx context.Context, id digest.Digest) (*Layer, error) {
	return recs.record(ctx, id)
}

// record reads layers/HEX.json.
func (recs *records) record(ctx context.Context, id digest.Digest) (*Layer, error) {
	if id.Validate() != nil || id.Algorithm() != digest.SHA256 {
		return nil, fmt.Errorf("%q: %w", id, ErrUnknown)
	}
	l, err := recs.readRecord(ctx, recordOf(id))
	if err == nil && l.DiffID != id {
		err = fmt.Errorf("the record of %s names %s: %w", id, l.DiffID, ErrDamaged)
	}
	if err == nil && recs.Denies(l.Name) {
		return nil, fmt.Errorf("%s: its files were damaged: %w", id, ErrUnknown)
	}
	return l, err
}

func (recs *records) readRecord(ctx context.Context, name string) (*Layer, error) {
	b, err := recs.cfg.FS.ReadFile(ctx, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", name, ErrUnknown)
	}
	if err != nil {
		return nil, err
	}
	l := new(Layer)
	if err := json.Unmarshal(b, l); err != nil || !l.valid() {
		return nil, fmt.Errorf("%s is no record of version %d: %w", name, formatVersion, ErrDamaged)
	}
	return l, nil
}

// Layers is Objects without checkpoints.
func (recs *records) Layers(ctx context.Context) ([]*Layer, error) {
	all, err := recs.Objects(ctx)
	return slices.DeleteFunc(all, func(l *Layer) bool { return l.Checkpoint != nil }), err
}

// Objects returns the records of all layers and checkpoints in the store. Those that cannot be
// read are left out and reported together. A record whose file has not changed since
// it was read last is not read again, if it was read when all nodes must have seen the file so:
// earlier, the list may be newer than what is read, and times of files may be coarse.
func (recs *records) Objects(ctx context.Context) ([]*Layer, error) {
	names, err := recs.cfg.FS.Names(ctx, layersDir)
	if err != nil {
		return nil, err
	}
	all, damaged, err := recs.readAll(ctx, names)
	return all, errors.Join(append(slices.Collect(maps.Values(damaged)), err)...)
}

// readAll are the records among the names of files in layers; damaged is why, by their
// names, some could not be understood. Of all other files nothing is asked.
func (recs *records) readAll(ctx context.Context, names []string) (all []*Layer, damaged map[string]error,
	err error) {
	recs.mu.Lock()
	before := maps.Clone(recs.read)
	recs.mu.Unlock()
	now, damaged := map[string]seenRecord{}, map[string]error{}
	for _, name := range names {
		if !strings.HasSuffix(name, ".json") || strings.HasPrefix(name, ".") {
			continue
		}
		r, rerr := recs.again(ctx, path.Join(layersDir, name), before[name])
		switch {
		case rerr == nil:
			now[name] = r
			all = append(all, r.layer)
		case errors.Is(rerr, ErrUnknown): // it went meanwhile
		case errors.Is(rerr, ErrDamaged):
			damaged[name] = rerr
		default:
			err = errors.Join(err, rerr)
		}
	}
	recs.mu.Lock()
	recs.read = now
	recs.mu.Unlock()
	return all, damaged, err
}

// again reads a record that was r before, unless that still holds.
func (recs *records) again(ctx context.Context, file string, r seenRecord) (seenRecord, error) {
	fi, err := recs.cfg.FS.Stat(ctx, file)
	if errors.Is(err, fs.ErrNotExist) {
		return r, fmt.Errorf("%s: %w", file, ErrUnknown)
	}
	if err != nil {
		return r, err
	}
	if r.layer == nil || fi.ModTime().IsZero() || !r.changed.Equal(fi.ModTime()) || r.size != fi.Size() {
		r = seenRecord{size: fi.Size(), changed: fi.ModTime(), since: time.Now()}
	}
	if r.sure {
		return r, nil
	}
	r.sure = time.Since(r.since) >= recs.cfg.Grace
	r.layer, err = recs.readRecord(ctx, file)
	return r, err
}

// seenRecord is a record and what its file was when it was read.
type seenRecord struct {
	layer   *Layer
	size    int64
	changed time.Time
	since   time.Time // when this node saw the file so first, by its clock
	sure    bool      // it was read long enough after that
}

// Checkpoints returns the records of the checkpoints in the store. Those that
// cannot be read are left out and reported together. What was published anew under a
// name that was seen before may be told as it was: Hold looks again.
func (recs *records) Checkpoints(ctx context.Context) ([]*Layer, error) {
	names, err := recs.cfg.FS.Names(ctx, layersDir)
	if err != nil {
		return nil, err
	}
	all := []*Layer{}
	var bad error
	for _, name := range names {
		if !strings.HasSuffix(name, ".json") || strings.HasPrefix(name, ".") {
			continue
		}
		recs.mu.Lock()
		l := recs.read[name].layer
		recs.mu.Unlock()
		if l == nil {
			if l, err = recs.readRecord(ctx, path.Join(layersDir, name)); err != nil {
				bad = errors.Join(bad, unlessUnknown(err))
				continue
			}
			recs.mu.Lock()
			recs.read[name] = seenRecord{layer: l} // whoever needs to know more reads it again
			recs.mu.Unlock()
		}
		if l.Checkpoint != nil {
			all = append(all, l)
		}
	}
	return all, bad
}

// uppers is how many of the objects stand on each layer.
func uppers(objects []*Layer) map[string]int {
	on := map[string]int{}
	for _, l := range objects {
		if l.Upper != "" {
			on[l.Upper.String()]++
		}
	}
	return on
}

// Broken are the layers whose records are there and cannot be understood.
func (recs *records) Broken(ctx context.Context) ([]digest.Digest, error) {
	names, err := recs.cfg.FS.Names(ctx, layersDir)
	if err != nil {
		return nil, err
	}
	_, damaged, err := recs.readAll(ctx, names)
	var all []digest.Digest
	for _, name := range slices.Sorted(maps.Keys(damaged)) {
		id := digest.NewDigestFromEncoded(digest.SHA256, strings.TrimSuffix(name, ".json"))
		if id.Validate() == nil {
			all = append(all, id)
		}
	}
	return all, err
}

// Deny has the store not show files of that name any more, which another node has found damaged and taken
// out: what this node sees of the file system may be older than what it is told.
func (recs *records) Deny(name string) {
	recs.mu.Lock()
	defer recs.mu.Unlock()
	recs.denied[name] = true
}

// Denies reports whether Deny was called with that name.
func (recs *records) Denies(name string) bool {
	recs.mu.Lock()
	defer recs.mu.Unlock()
	return recs.denied[name]
}

// Open opens a layer's tar for reading.
func (recs *records) Open(ctx context.Context, l *Layer) (File, error) {
	return recs.cfg.FS.Open(ctx, l.data())
}

// Table returns the layer's table, verified.
func (recs *records) Table(ctx context.Context, l *Layer) ([]byte, error) {
	b, err := recs.cfg.FS.ReadFile(ctx, l.table())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("table of layer %s: %w", l.DiffID, ErrUnknown)
	}
	if err != nil {
		return nil, err
	}
	return unpackTable(b, l.Table)
}

func packTable(table []byte) []byte {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithWindowSize(256<<10), zstd.WithLowerEncoderMem(true))
	if err != nil {
		panic(err) // of the options
	}
	defer enc.Close()
	return enc.EncodeAll(table, nil)
}

func unpackTable(b []byte, want digest.Digest) ([]byte, error) {
	dec, err := zstd.NewReader(bytes.NewReader(b), zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderMaxMemory(maxTable), zstd.WithDecoderMaxWindow(16<<20))
	if err != nil {
		return nil, err
	}
	defer dec.Close()
	table, err := io.ReadAll(io.LimitReader(dec, maxTable+1))
	if err != nil || len(table) > maxTable || want.Validate() != nil || digest.FromBytes(table) != want {
		return nil, fmt.Errorf("table %s: %w", want, ErrDamaged)
	}
	return table, nil
}

// maxTable bounds a table (docs/design/formats.md).
const maxTable = 128 << 20

// whole is the record of a layer whose data are seen to be there; g, unless nil, is an earlier look at it.
func (recs *records) whole(ctx context.Context, id digest.Digest, g *Lookup) (*Layer, error) {
	l, err := recs.recordNow(ctx, id, g)
	if err != nil {
		return nil, err
	}
	fi, err := recs.cfg.FS.Stat(ctx, l.data())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%s: its data: %w", id, ErrUnknown)
	case err != nil:
		return nil, err
	case fi.Size() != l.Size:
		return nil, fmt.Errorf("%s: %d bytes of %d: %w", id, fi.Size(), l.Size, ErrUnknown)
	}
	return l, nil
}

// wholes are the records of those layers whose data are seen to be there. The error
// is of the others.
func (recs *records) wholes(ctx context.Context, ids []digest.Digest,
	lookups map[digest.Digest]*Lookup) (map[digest.Digest]*Layer, error) {
	var mu sync.Mutex
	have := map[digest.Digest]*Layer{}
	var errs error
	var looks sync.WaitGroup
	for _, id := range ids {
		looks.Go(func() {
			l, err := recs.whole(ctx, id, lookups[id])
			mu.Lock()
			defer mu.Unlock()
			if errs = errors.Join(errs, err); err == nil {
				have[id] = l
			}
		})
	}
	looks.Wait()
	return have, errs
}

// recordNow is the record of a layer as it is now. One whose file is as it was before a look read it is not
// read again.
func (recs *records) recordNow(ctx context.Context, id digest.Digest, g *Lookup) (*Layer, error) {
	if g == nil {
		return recs.record(ctx, id)
	}
	l, err := g.Record()
	if err != nil {
		return recs.record(ctx, id)
	}
	fi, err := recs.cfg.FS.Stat(ctx, recordOf(id))
	if err != nil || !sameFile(fi, g.file) || recs.Denies(l.Name) {
		return recs.record(ctx, id)
	}
	return l, nil
}

// sameFile reports whether two looks saw the same file, which nobody has written to between them.
func sameFile(a, b fs.FileInfo) bool {
	x, _ := a.Sys().(*syscall.Stat_t)
	y, _ := b.Sys().(*syscall.Stat_t)
	return a.Size() == b.Size() && !a.ModTime().IsZero() && a.ModTime().Equal(b.ModTime()) &&
		(x == nil || y == nil || x.Ino == y.Ino)
}

// LookUp looks at a layer, behind its caller. Its data are looked up, too: a caller that references the
// layer looks at them last, and finds them known.
func (recs *records) LookUp(ctx context.Context, id digest.Digest) *Lookup {
	g := &Lookup{done: make(chan struct{})}
	go func() {
		defer close(g.done)
		if g.file, g.err = recs.cfg.FS.Stat(ctx, recordOf(id)); errors.Is(g.err, fs.ErrNotExist) {
			g.err = fmt.Errorf("%s: %w", id, ErrUnknown)
		}
		if g.err == nil {
			g.rec, g.err = recs.record(ctx, id)
		}
		if g.err == nil {
			_, _ = recs.cfg.FS.Stat(ctx, g.rec.data())
		}
	}()
	return g
}

// Lookup is what a look at a layer has shown that was made before it was referenced: it may be out of date.
type Lookup struct {
	done chan struct{}
	rec  *Layer
	file fs.FileInfo // of the record, before that was read
	err  error
}

// Record waits for the look, and returns the record that it has read, or an error that wraps ErrUnknown.
func (g *Lookup) Record() (*Layer, error) {
	<-g.done
	return g.rec, g.err
}

// Lookups are those of several layers.
func (recs *records) Lookups(ctx context.Context, ids []digest.Digest) map[digest.Digest]*Lookup {
	all := map[digest.Digest]*Lookup{}
	for _, id := range ids {
		all[id] = recs.LookUp(ctx, id)
	}
	return all
}

func unlessUnknown(err error) error {
	if errors.Is(err, ErrUnknown) {
		return nil
	}
	return err
}
