package pop

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// Sweep deletes what was evicted when its time of grace is over, and what crashed
// nodes have left. Ages are those that this Store has seen, so it is to be
// called now and then by every node. Nothing is deleted unless the coordinator answers and remembers;
// what has come into use again is put back. It returns how many bytes were freed.
func (s *Store) Sweep(ctx context.Context) (int64, error) {
	if ok, err := s.cfg.Coord.Settled(ctx); err != nil || !ok || !s.sweeping.TryLock() {
		return 0, nil
	}
	defer s.sweeping.Unlock()
	twin, strays := s.twin(ctx)
	if strays == nil && !twin { // else they may be the other one's
		strays = s.strays(ctx)
	}
	lease, err := s.cfg.Coord.Acquire(ctx, evictLease, 0)
	if err != nil {
		return 0, strays // another node does it
	}
	defer lease.Release(context.WithoutCancel(ctx))
	w := &sweep{s: s, now: time.Now(), old: s.since, ages: map[string]sighting{}, named: map[string]bool{},
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
	s.since = w.ages
	return w.freed, err
}

// sighting is a file as it was when it was seen first in its present size.
type sighting struct {
	size int64
	at   time.Time
}

// sweep is one round of sweeping.
type sweep struct {
	s     *Store
	now   time.Time
	old   map[string]sighting
	ages  map[string]sighting
	named map[string]bool // names of files that a record, a checkpoint or the trash has
	files map[string]bool // by name in layers
	freed int64

	listed  map[string][]string // by directory: each is listed once
	objects []*Layer            // in the store, as orphans saw them
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

const (
	trashEnd = ".json" // of what was evicted
	deadEnd  = ".dead" // of what is deleted
)

// kill makes the title of the files of that name dead, and returns what it is called then.
func (s *Store) kill(ctx context.Context, title, name string) (dead string, err error) {
	dead = path.Join(trashDir, name+deadEnd)
	if err = s.cfg.FS.Rename(ctx, title, dead); errors.Is(err, unix.ENOSPC) {
		return s.aside(ctx, title, name, deadEnd)
	}
	return dead, err
}

// filesOf is the name of the files that a title in the trash is of, which it begins with.
func filesOf(title string) string {
	parts := strings.SplitN(title, ".", 4)
	return strings.Join(parts[:min(3, len(parts))], ".")
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
		l, err := w.s.readRecord(ctx, name)
		if errors.Is(err, ErrUnknown) || strings.HasPrefix(n, ".") {
			continue
		}
		if errors.Is(err, ErrDamaged) { // what it was of is in its name
			_, err = w.s.kill(ctx, name, filesOf(strings.TrimSuffix(n, trashEnd)))
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
	used, err := w.s.inUse(ctx, l.DiffID)
	if err != nil {
		return err
	}
	if used && w.s.Has(ctx, l.DiffID) {
		return nil // published anew
	}
	if used {
		if err = w.s.putBack(ctx, l.DiffID, name); err == nil {
			w.s.tell(ctx, Event{Kind: Published, Key: l.DiffID.String()})
		}
		return err
	}
	if err := w.s.discard(ctx, name, l.Name); err != nil {
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
	used, err := w.s.inUse(ctx, digest.NewDigestFromEncoded(digest.SHA256, hex))
	if err != nil || used {
		return err
	}
	return w.s.bury(ctx, title, name)
}

// discard deletes the files of that name if the title that lies at from is theirs
// to the end: if it can be made dead, they are no layer and never will be.
func (s *Store) discard(ctx context.Context, from, name string) error {
	dead, err := s.kill(ctx, from, name)
	if err != nil {
		return unlessGone(err) // published, or put back, or somebody else deletes them
	}
	return s.bury(ctx, dead, name)
}

// bury deletes the files of a dead title, and it.
func (s *Store) bury(ctx context.Context, title, name string) error {
	for _, end := range fileEnds {
		if err := s.remove(ctx, path.Join(layersDir, name+end)); err != nil {
			return err
		}
	}
	return s.remove(ctx, title)
}

// fileEnds end the names of a layer's files.
var fileEnds = []string{dataEnd, tableEnd, indexEnd, blobEnd}

func unlessGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
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
	c, err := w.s.Checkpoint(ctx, id)
	switch {
	case err == nil:
		w.named[c.name] = true
		c.Close()
	case !errors.Is(err, ErrUnknown) && !errors.Is(err, ErrDamaged):
		return err
	}
	since := w.age(checkpointOf(id), size)
	if since < w.s.cfg.Grace || since < w.s.cfg.Forget && !w.s.Has(ctx, id) {
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
	size := w.size(ctx, name+dataEnd) + w.size(ctx, name+blobEnd)
	if w.age(titleOf(name), size) < w.s.cfg.Grace {
		return nil
	}
	if _, held, err := w.s.cfg.Coord.Holder(ctx, LayerLease(id)); err != nil || held {
		return nil
	}
	if err := w.s.discard(ctx, titleOf(name), name); err != nil {
		return fmt.Errorf("remove what a crashed node left: %w", err)
	}
	w.freed += size
	return nil
}

// LayerLease names the lease of who brings a layer into the PoP.
func LayerLease(id digest.Digest) string { return "layer/" + id.String() }

// orphans removes files that have lost their title: by a power cut, or because
// two nodes published at once. That a title was not seen proves little, for it may have
// been on its way, so it must be missing for long.
func (w *sweep) orphans(ctx context.Context, names []string) error {
	layers, _, err := w.s.records(ctx, names)
	if err != nil {
		return err
	}
	w.objects = layers
	published := map[string]bool{}
	for _, l := range layers {
		w.named[l.Name], published[l.Name] = true, true
	}
	var errs error
	for _, n := range names {
		name := strings.TrimSuffix(n, path.Ext(n))
		hex, _, good := parseName(name)
		file := path.Join(layersDir, n)
		if published[name] && path.Ext(n) == blobEnd {
			errs = errors.Join(errs, w.needless(ctx, file))
			continue
		}
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

// needless removes compressed bytes that were kept for a layer which is published: its
// publisher has died before he could.
func (w *sweep) needless(ctx context.Context, file string) error {
	if w.age(file, 0) < w.s.cfg.Grace {
		return nil
	}
	return w.s.remove(ctx, file)
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
	if used, err := w.s.inUse(ctx, id); err != nil || used {
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

// Trashed is how many bytes will be free when what was evicted is deleted.
func (s *Store) Trashed(ctx context.Context) int64 {
	ents, err := s.cfg.FS.ReadDir(ctx, trashDir)
	if err != nil {
		return 0
	}
	var sum int64
	for _, e := range ents {
		if l, err := s.readRecord(ctx, path.Join(trashDir, e.Name())); err == nil {
			sum += l.Size
		}
	}
	return sum
}
