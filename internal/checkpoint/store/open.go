package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"dewpoint/internal/checkpoint/image"
	"dewpoint/internal/pop"
)

// Data is a data file that is open for reading. It stays, wherever it lies, until Close.
type Data struct {
	io.ReaderAt
	Size  int64
	Local bool
	close func() error
	once  sync.Once
}

// Close ends the reading. It may be called twice.
func (d *Data) Close() error {
	var err error
	d.once.Do(func() { err = d.close() })
	return err
}

// Open opens the data of a checkpoint: on this node, or else in the PoP's store, whose reads
// end after its patience with an error that wraps pop.ErrStoreAway. While there is no such store, a
// checkpoint that another node gives is copied to this one first. What is read is
// verified by who reads it (package image).
func (s *Store) Open(ctx context.Context, r Record) (*Data, error) {
	_, d, err := s.open(r.ID)
	if !errors.Is(err, ErrUnknown) {
		return d, err
	}
	if s.cfg.Peers == nil || s.pop() != nil {
		return s.openShared(ctx, r)
	}
	if err := s.take(ctx, r); err != nil {
		return nil, err
	}
	_, d, err = s.open(r.ID)
	return d, err
}

// open opens what is on this node.
func (s *Store) open(id string) (*entry, *Data, error) {
	s.mu.Lock()
	e := s.entries[id]
	if e == nil {
		s.mu.Unlock()
		return nil, nil, fmt.Errorf("%.12s: %w", id, ErrUnknown)
	}
	e.readers++
	s.mu.Unlock()
	s.use(id)
	end := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		e.readers--
	}
	f, err := os.Open(s.path(id + dataEnd))
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
func (s *Store) use(id string) {
	now := time.Now()
	s.mu.Lock()
	e := s.entries[id]
	if e != nil {
		e.used = now
	}
	s.mu.Unlock()
	if e == nil {
		return
	}
	if err := os.Chtimes(s.path(id+dataEnd), now, now); err != nil {
		s.cfg.Log.Debug("a checkpoint's use is not noted", "id", id, "err", err)
	}
}

// openShared opens what is in the PoP's store, and keeps it there meanwhile.
func (s *Store) openShared(ctx context.Context, r Record) (*Data, error) {
	st := s.pop()
	if st == nil {
		return nil, fmt.Errorf("%.12s: %w", r.ID, errors.Join(ErrUnknown, ErrNoPoP))
	}
	l, release, err := st.Hold(ctx, digestOf(r.ID))
	if errors.Is(err, pop.ErrUnknown) {
		if _, rerr := st.Record(ctx, digestOf(r.ID)); rerr == nil { // nobody has taken it out
			return nil, fmt.Errorf("checkpoint %.12s: %w: %w", r.ID, ErrTorn, err)
		}
		return nil, fmt.Errorf("%.12s: %w: %w", r.ID, ErrUnknown, err)
	}
	if err != nil {
		return nil, fmt.Errorf("checkpoint %.12s: %w", r.ID, err)
	}
	f, err := st.Open(ctx, l)
	if err == nil && l.Size != r.Data.Size {
		err = errors.Join(fmt.Errorf("%w: %d bytes of %d", ErrDamaged, l.Size, r.Data.Size), f.Close())
	}
	if err != nil {
		release()
		return nil, fmt.Errorf("checkpoint %.12s: %w", r.ID, err)
	}
	if err := st.Touch(ctx, l.Image, "", l); err != nil {
		s.cfg.Log.Debug("a checkpoint's use is not told", "id", r.ID, "err", err)
	}
	return &Data{ReaderAt: f, Size: l.Size, close: func() error {
		err := f.Close()
		release()
		return err
	}}, nil
}

func (s *Store) pop() *pop.Store {
	if s.cfg.PoP == nil {
		return nil
	}
	return s.cfg.PoP()
}

// reader opens the data as an image.
func (s *Store) reader(ctx context.Context, r Record) (*image.Reader, *Data, error) {
	d, err := s.Open(ctx, r)
	if err != nil {
		return nil, nil, err
	}
	img, err := image.Open(d, d.Size)
	if err != nil {
		err = errors.Join(fmt.Errorf("checkpoint %.12s: %w", r.ID, err), d.Close())
		s.doubt(ctx, r, d.Local, err)
		return nil, nil, err
	}
	return img, d, nil
}

// doubt takes data away that were found to be damaged where they are: on this node, or in the PoP's store.
// Who asks for them next finds them elsewhere, or nowhere, until the node that has made them puts them there
// again (Lost).
func (s *Store) doubt(ctx context.Context, r Record, local bool, err error) {
	if !errors.Is(err, image.ErrDamaged) && !errors.Is(err, ErrDamaged) {
		return
	}
	s.cfg.Log.Error("a checkpoint is damaged: it is taken out", "id", r.ID, "local", local, "err", err)
	var rerr error
	if local {
		s.change.Lock()
		_, rerr = s.drop(r.ID)
		s.change.Unlock()
	} else {
		_, rerr = s.takeOut(context.WithoutCancel(ctx), r.ID, (*pop.Store).Quarantine)
	}
	if rerr != nil {
		s.cfg.Log.Error("it could not be taken out", "id", r.ID, "err", rerr)
	}
}
