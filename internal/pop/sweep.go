package pop

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
)

// Sweep deletes what was evicted when its time of grace is over, and what crashed
// nodes have left. Ages are those that this Store has seen, so it is to be
// called now and then by every node. Nothing is deleted unless the coordinator answers and remembers;
// what has come into use again is put back. It returns how many bytes were freed.
func (s *Store) Sweep(ctx context.Context) (int64, error) {
	if ok, err := s.cfg.Coord.Settled(ctx); err != nil || !ok {
		return 0, nil
	}
	lease, err := s.cfg.Coord.Acquire(ctx, evictLease, 0)
	if err != nil {
		return 0, nil // another node does it
	}
	defer lease.Release(context.WithoutCancel(ctx))
	w := &sweep{s: s, now: time.Now(), old: s.since, ages: map[string]sighting{}, named: map[string]bool{}}
	if s.since == nil {
		w.old = map[string]sighting{}
	}
	err = errors.Join(w.trash(ctx), w.fills(ctx), w.orphans(ctx), w.temporary(ctx), s.forgetVerified(ctx))
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
	freed int64
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

// trash deletes what was evicted, or puts it back.
func (w *sweep) trash(ctx context.Context) error {
	ents, err := w.s.cfg.FS.ReadDir(ctx, trashDir)
	var errs error
	for _, e := range ents {
		name := path.Join(trashDir, e.Name())
		l, err := w.s.readRecord(ctx, name)
		if errors.Is(err, ErrUnknown) || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		if err != nil {
			errs = errors.Join(errs, err)
			continue
		}
		w.named[l.Name] = true
		if w.age(name, e.Size()) >= w.s.cfg.Grace {
			errs = errors.Join(errs, w.end(ctx, name, l))
		}
	}
	return errors.Join(err, errs)
}

// end deletes a layer whose time of grace is over. Taking its record away comes
// first: after that nobody can put it back.
func (w *sweep) end(ctx context.Context, name string, l *Layer) error {
	used, err := w.s.inUse(ctx, l.DiffID)
	if err != nil {
		return err
	}
	if used {
		if w.s.Has(ctx, l.DiffID) {
			return nil // published anew; these files go when they are not used any more
		}
		err := w.s.cfg.FS.Rename(ctx, name, recordOf(l.DiffID))
		if err == nil {
			w.s.tell(ctx, Event{Kind: Published, Key: l.DiffID.String()})
		}
		return unlessGone(err)
	}
	if err := w.s.cfg.FS.Remove(ctx, name); err != nil {
		return unlessGone(err) // put back, or somebody else deletes it
	}
	w.freed += l.Size
	return errors.Join(w.s.remove(ctx, l.data()), w.s.remove(ctx, l.table()))
}

func unlessGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// fills removes checkpoints that nobody goes on from.
func (w *sweep) fills(ctx context.Context) error {
	ents, err := w.s.cfg.FS.ReadDir(ctx, fillDir)
	var errs error
	for _, e := range ents {
		hex, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		id := digest.NewDigestFromEncoded(digest.SHA256, hex)
		if c, err := w.s.Checkpoint(ctx, id); err == nil {
			w.named[c.name] = true
			c.Close()
		}
		name := path.Join(fillDir, e.Name())
		since := w.age(name, e.Size())
		if since < w.s.cfg.Grace || since < w.s.cfg.Forget && !w.s.Has(ctx, id) {
			continue
		}
		if _, held, err := w.s.cfg.Coord.Holder(ctx, LayerLease(id)); err != nil || held {
			continue
		}
		errs = errors.Join(errs, w.s.remove(ctx, name))
	}
	return errors.Join(err, errs)
}

// LayerLease names the lease of who brings a layer into the PoP.
func LayerLease(id digest.Digest) string { return "layer/" + id.String() }

// orphans removes files of layers that nothing names, long after they were
// written to last.
func (w *sweep) orphans(ctx context.Context) error {
	ents, err := w.s.cfg.FS.ReadDir(ctx, layersDir)
	if err != nil {
		return err
	}
	for _, e := range ents { // records first: they name the others
		if strings.HasSuffix(e.Name(), ".json") {
			if l, err := w.s.readRecord(ctx, path.Join(layersDir, e.Name())); err == nil {
				w.named[l.Name] = true
			}
		}
	}
	var errs error
	for _, e := range ents {
		name, ok := strings.CutSuffix(e.Name(), dataEnd)
		if !ok {
			name, ok = strings.CutSuffix(e.Name(), tableEnd)
		}
		hex, _, good := parseName(name)
		if !ok || !good || w.named[name] {
			continue
		}
		file := path.Join(layersDir, e.Name())
		if w.age(file, e.Size()) < w.s.cfg.Grace {
			continue
		}
		errs = errors.Join(errs, w.orphan(ctx, digest.NewDigestFromEncoded(digest.SHA256, hex), name, file, e.Size()))
	}
	return errs
}

func (w *sweep) orphan(ctx context.Context, id digest.Digest, name, file string, size int64) error {
	if used, err := w.s.inUse(ctx, id); err != nil || used {
		return err
	}
	if _, held, err := w.s.cfg.Coord.Holder(ctx, LayerLease(id)); err != nil || held {
		return nil
	}
	if l, err := w.s.record(ctx, id); err == nil && l.Name == name {
		return nil // published meanwhile
	}
	if err := w.s.remove(ctx, file); err != nil {
		return fmt.Errorf("remove what a crashed node left: %w", err)
	}
	w.freed += size
	return nil
}

// temporary removes what writers left that ended before they could rename.
func (w *sweep) temporary(ctx context.Context) error {
	var errs error
	for _, dir := range append([]string{"."}, storeDirs...) {
		ents, err := w.s.cfg.FS.ReadDir(ctx, dir)
		if err != nil {
			errs = errors.Join(errs, unlessGone(err))
			continue
		}
		for _, e := range ents {
			name := path.Join(dir, e.Name())
			if e.IsDir() || !strings.HasPrefix(e.Name(), ".") || w.age(name, e.Size()) < max(w.s.cfg.Grace, 2*slowPatience) {
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
