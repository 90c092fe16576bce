package pop

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

// collector is the store's garbage collection. It remembers what it saw in earlier rounds: nodes share no
// clock, so a file's age is for how long one node has seen it.
type collector struct {
	*layout
	records    *records
	references *references
	nodes      *nodes
	drafts     *drafts
	trash      *trash
	images     *images

	sweeping sync.Mutex           // held for a round; guards what follows
	since    map[string]sighting  // by name of the file
	known    map[string]imageSeen // by file
}

// Sweep deletes what was evicted when its time of grace is over, and what crashed
// nodes have left. Ages are those that this Store has seen, so it is to be
// called now and then by every node. Nothing is deleted unless the coordinator answers and remembers;
// what has come into use again is put back. It returns how many bytes were freed.
func (gc *collector) Sweep(ctx context.Context) (int64, error) {
	if ok, err := gc.cfg.Coord.Settled(ctx); err != nil || !ok || !gc.sweeping.TryLock() {
		return 0, nil
	}
	defer gc.sweeping.Unlock()
	twin, strays := gc.nodes.twin(ctx)
	if strays == nil && !twin { // else they may be the other one's
		strays = gc.references.strays(ctx)
	}
	lease, err := gc.cfg.Coord.Acquire(ctx, evictLease, 0)
	if err != nil {
		gc.cfg.Log.Debug("another node sweeps", "err", err)
		return 0, strays
	}
	defer lease.Release(context.WithoutCancel(ctx))
	w := &sweep{s: gc, now: time.Now(), old: gc.since, ages: map[string]sighting{}, named: map[string]bool{},
		files: map[string]bool{}, listed: map[string][]string{}}
	names, err := w.names(ctx, layersDir)
	if err == nil {
		for _, n := range names {
			w.files[n] = true
		}
		err = w.trash(ctx)
	}
	if err == nil {
		err = w.fills(ctx)
	}
	if err == nil { // else not all is named
		err = w.orphans(ctx, names)
	}
	err = errors.Join(strays, err, w.temporary(ctx), w.incomplete(ctx), w.images(ctx), w.verified(ctx),
		w.forgetNotes(ctx))
	gc.since = w.ages
	return w.freed, err
}

// sweep is one round of sweeping.
type sweep struct {
	s     *collector
	now   time.Time
	old   map[string]sighting
	ages  map[string]sighting
	named map[string]bool // names of files that a record, a checkpoint or the trash has
	files map[string]bool // by name in layers
	freed int64

	listed  map[string][]string // by directory: each is listed once
	objects []*Layer            // in the store, as orphans saw them
}

// sighting is a file as it was when it was seen first in its present size.
type sighting struct {
	size int64
	at   time.Time
}

// names are those in a directory, as this sweep saw it first.
func (w *sweep) names(ctx context.Context, dir string) ([]string, error) {
	if names, ok := w.listed[dir]; ok {
		return names, nil
	}
	names, err := w.s.cfg.FS.Names(ctx, dir)
	if err == nil {
		w.listed[dir] = names
	}
	return names, err
}

// list is names with what the files are.
func (w *sweep) list(ctx context.Context, dir string) ([]fs.FileInfo, error) {
	ents, err := w.s.cfg.FS.ReadDir(ctx, dir)
	if err == nil {
		names := make([]string, len(ents))
		for i, e := range ents {
			names[i] = e.Name()
		}
		w.listed[dir] = names
	}
	return ents, err
}

// age is how long a file has been seen in this size.
func (w *sweep) age(name string, size int64) time.Duration {
	have, ok := w.old[name]
	if !ok || have.size != size {
		have = sighting{size, w.now}
	}
	w.ages[name] = have
	return w.now.Sub(have.at)
}

// trash deletes what was evicted, or puts it back, and what others have not
// deleted to the end.
func (w *sweep) trash(ctx context.Context) error {
	names, err := w.names(ctx, trashDir)
	errs := unlessGone(err)
	for _, n := range names {
		name := path.Join(trashDir, n)
		if dead, ok := strings.CutSuffix(n, deadEnd); ok {
			of := filesOf(dead)
			w.named[of] = true
			if w.age(name, 0) >= w.s.cfg.Grace {
				errs = errors.Join(errs, w.dead(ctx, name, of))
			}
			continue
		}
		l, err := w.s.records.readRecord(ctx, name)
		if errors.Is(err, ErrUnknown) || strings.HasPrefix(n, ".") {
			continue
		}
		if errors.Is(err, ErrDamaged) { // what it was of is in its name
			_, err = w.s.trash.kill(ctx, name, filesOf(strings.TrimSuffix(n, trashEnd)))
			err = unlessGone(err)
		}
		if err != nil || l == nil {
			errs = errors.Join(errs, err)
			continue
		}
		w.named[l.Name] = true
		if w.age(name, 0) >= w.s.cfg.Grace {
			errs = errors.Join(errs, w.end(ctx, name, l))
		}
	}
	return errs
}

// end deletes a layer whose time of grace is over, unless it came into use.
func (w *sweep) end(ctx context.Context, name string, l *Layer) error {
	used, err := w.s.references.inUse(ctx, l.DiffID)
	if err != nil {
		return err
	}
	if used && w.s.records.HasLayer(ctx, l.DiffID) { // published anew
		w.s.cfg.Log.Debug("evicted files stay: the layer is there again, and used", "files", l.Name)
		return nil
	}
	if used {
		if err = w.s.trash.putBack(ctx, l.DiffID, name); err == nil {
			w.s.tell(ctx, Event{Kind: Published, Key: l.DiffID.String()})
		}
		return err
	}
	if err := w.s.trash.discard(ctx, name, l.Name); err != nil {
		return err
	}
	w.freed += l.Size
	return nil
}

// dead deletes files whose title is dead and that nobody uses. They are not
// published any more, but nodes may stand on them.
func (w *sweep) dead(ctx context.Context, title, name string) error {
	hex, _, ok := parseName(name)
	if !ok {
		return nil
	}
	used, err := w.s.references.inUse(ctx, digest.NewDigestFromEncoded(digest.SHA256, hex))
	if err != nil || used {
		return err
	}
	return w.s.trash.bury(ctx, title, name)
}

// fills removes checkpoints that nobody goes on from, and then what they were of.
func (w *sweep) fills(ctx context.Context) error {
	ents, err := w.list(ctx, fillDir)
	errs := unlessGone(err)
	for _, e := range ents {
		if hex, ok := strings.CutSuffix(e.Name(), ".json"); ok && !strings.HasPrefix(e.Name(), ".") {
			errs = errors.Join(errs, w.checkpoint(ctx, digest.NewDigestFromEncoded(digest.SHA256, hex), e.Size()))
		}
	}
	for _, e := range ents {
		if name, ok := strings.CutSuffix(e.Name(), titleEnd); ok {
			errs = errors.Join(errs, w.draft(ctx, name))
		}
	}
	return errs
}

func (w *sweep) checkpoint(ctx context.Context, id digest.Digest, size int64) error {
	c, err := w.s.drafts.Checkpoint(ctx, id)
	switch {
	case err == nil:
		w.named[c.name] = true
		c.Close()
	case !errors.Is(err, ErrUnknown) && !errors.Is(err, ErrDamaged):
		return err
	}
	since := w.age(checkpointOf(id), size)
	if since < w.s.cfg.Grace || since < w.s.cfg.Forget && !w.s.records.HasLayer(ctx, id) {
		return nil
	}
	if _, held, err := w.s.cfg.Coord.Holder(ctx, LayerLease(id)); err != nil || held {
		return nil
	}
	return w.s.remove(ctx, checkpointOf(id))
}

// draft deletes what somebody has begun to write and does not go on with.
func (w *sweep) draft(ctx context.Context, name string) error {
	hex, _, ok := parseName(name)
	id := digest.NewDigestFromEncoded(digest.SHA256, hex)
	if !ok || id.Validate() != nil || w.named[name] {
		return nil
	}
	w.named[name] = true
	size := w.size(ctx, name+dataEnd)
	if w.age(titleOf(name), size) < w.s.cfg.Grace {
		return nil
	}
	if _, held, err := w.s.cfg.Coord.Holder(ctx, LayerLease(id)); err != nil || held {
		return nil
	}
	if err := w.s.trash.discard(ctx, titleOf(name), name); err != nil {
		return fmt.Errorf("remove what a crashed node left: %w", err)
	}
	w.freed += size
	return nil
}

// orphans removes files that have lost their title: by a power cut, or because
// two nodes published at once. That a title was not seen proves little, for it may have
// been on its way, so it must be missing for long.
func (w *sweep) orphans(ctx context.Context, names []string) error {
	layers, _, err := w.s.records.readAll(ctx, names)
	if err != nil {
		return err
	}
	w.objects = layers
	for _, l := range layers {
		w.named[l.Name] = true
	}
	var errs error
	for _, n := range names {
		name := strings.TrimSuffix(n, path.Ext(n))
		hex, _, good := parseName(name)
		file := path.Join(layersDir, n)
		if !slices.Contains(fileEnds, path.Ext(n)) || !good || w.named[name] {
			continue
		}
		if w.age(file, 0) < w.s.cfg.Forget {
			continue
		}
		errs = errors.Join(errs,
			w.orphan(ctx, digest.NewDigestFromEncoded(digest.SHA256, hex), file, w.size(ctx, n)))
	}
	return errs
}

// size is that of a file in layers, 0 if it has not been seen there: what is not there is not
// asked for by name, or this node would believe for a time that there is no such file.
func (w *sweep) size(ctx context.Context, name string) int64 {
	if !w.files[name] {
		return 0
	}
	fi, err := w.s.cfg.FS.Stat(ctx, path.Join(layersDir, name))
	if err != nil {
		return 0
	}
	return fi.Size()
}

func (w *sweep) orphan(ctx context.Context, id digest.Digest, file string, size int64) error {
	if used, err := w.s.references.inUse(ctx, id); err != nil || used {
		return err
	}
	if err := w.s.remove(ctx, file); err != nil {
		return fmt.Errorf("remove what has no title: %w", err)
	}
	w.freed += size
	return nil
}

// temporary removes what writers left that ended before they could rename.
func (w *sweep) temporary(ctx context.Context) error {
	var errs error
	for _, dir := range append([]string{"."}, storeDirs...) {
		names, err := w.names(ctx, dir)
		errs = errors.Join(errs, unlessGone(err))
		for _, n := range names {
			if !strings.HasPrefix(n, ".") {
				continue
			}
			name := path.Join(dir, n)
			fi, err := w.s.cfg.FS.Stat(ctx, name)
			if err != nil || fi.IsDir() || w.age(name, fi.Size()) < max(w.s.cfg.Grace, 2*slowPatience) {
				errs = errors.Join(errs, unlessGone(err))
				continue
			}
			errs = errors.Join(errs, w.s.remove(ctx, name))
		}
	}
	return errs
}

// incomplete takes checkpoints out of the store whose upper layer has gone. That a record is
// not seen proves little, so it must be missing for the time of grace.
func (w *sweep) incomplete(ctx context.Context) error {
	var errs error
	for _, l := range w.objects {
		if l.Checkpoint == nil || l.Upper == "" {
			continue
		}
		if _, err := w.s.records.record(ctx, l.Upper); err == nil || !errors.Is(err, ErrUnknown) {
			continue
		}
		if w.age("without/"+l.DiffID.Encoded(), 0) >= w.s.cfg.Grace {
			_, err := w.s.trash.evict(ctx, l.DiffID)
			errs = errors.Join(errs, err)
		}
	}
	return errs
}

// forgetNotes removes what was told and learned of checkpoints that are not in the store
// for so long that nobody will publish them again, and that something was damaged which is there again.
func (w *sweep) forgetNotes(ctx context.Context) error {
	var errs error
	for _, dir := range []string{failedDir, ordersDir, lostDir} {
		names, err := w.names(ctx, dir)
		if err != nil {
			errs = errors.Join(errs, unlessGone(err))
			continue
		}
		for _, name := range names {
			id, ok := idOf(name)
			if !ok {
				continue
			}
			_, err := w.s.cfg.FS.Stat(ctx, recordOf(id))
			mended := err == nil && dir == lostDir
			if !mended && !errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if file := path.Join(dir, name); mended || w.age(file, 0) >= w.s.cfg.Forget {
				errs = errors.Join(errs, w.s.remove(ctx, file))
			}
		}
	}
	return errs
}

// images removes what references were resolved to once the store has not had all their layers for
// as long as a silent node is remembered: without them a record saves nothing.
func (w *sweep) images(ctx context.Context) error {
	ents, err := w.list(ctx, imagesDir)
	errs := unlessGone(err)
	now := map[string]imageSeen{}
	for _, e := range ents {
		name := path.Join(imagesDir, e.Name())
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		seen, ok := w.s.known[name]
		if !ok || seen.size != e.Size() || !seen.changed.Equal(e.ModTime()) {
			b, err := w.s.cfg.FS.ReadFile(ctx, name)
			if err != nil {
				errs = errors.Join(errs, unlessGone(err))
				continue
			}
			seen = imageSeen{size: e.Size(), changed: e.ModTime()}
			seen.layers, _ = layersOf(b) // it may be half written
		}
		now[name] = seen
		missing := len(seen.layers) == 0 ||
			slices.ContainsFunc(seen.layers, func(id digest.Digest) bool { return !w.files[path.Base(recordOf(id))] })
		if missing && w.age(name, e.Size()) >= w.s.cfg.Forget {
			errs = errors.Join(errs, w.s.remove(ctx, name))
		}
	}
	w.s.known = now
	sharing := map[digest.Digest]int{}
	for _, seen := range now {
		for _, id := range slices.Compact(slices.Sorted(slices.Values(seen.layers))) {
			sharing[id]++
		}
	}
	w.s.images.share(sharing)
	return errs
}

// verified removes the notes of layers that are not in the store any more.
func (w *sweep) verified(ctx context.Context) error {
	names, err := w.names(ctx, verifiedDir)
	errs := unlessGone(err)
	for _, name := range names {
		id := digest.NewDigestFromEncoded(digest.SHA256, name)
		if id.Validate() == nil && !w.files[path.Base(recordOf(id))] && !w.s.records.HasLayer(ctx, id) {
			errs = errors.Join(errs, w.s.remove(ctx, path.Join(verifiedDir, name)))
		}
	}
	return errs
}
