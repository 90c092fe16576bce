package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

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
	_, d, err := s.catalog.open(r.ID)
	if !errors.Is(err, ErrUnknown) {
		return d, err
	}
	if s.cfg.Peers == nil || s.pop() != nil {
		return s.sharing.openShared(ctx, r)
	}
	if err := s.take(ctx, r); err != nil {
		return nil, err
	}
	_, d, err = s.catalog.open(r.ID)
	return d, err
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
		_, rerr = s.sharing.takeOut(context.WithoutCancel(ctx), r.ID, (*pop.Store).Quarantine)
	}
	if rerr != nil {
		s.cfg.Log.Error("it could not be taken out", "id", r.ID, "err", rerr)
	}
}

// Unpacked is a directory with the checkpoint's files as its engine wrote them, which
// must not be changed, and stays until release is called. All callers share it: the
// first unpacks it, from this node's data file or from the PoP's store, the others wait. It was
// verified as it was unpacked. An error wraps ErrUnknown, image.ErrDamaged, in which case the
// damaged data are gone, or what reading or writing returned; no directory is left then.
func (s *Store) Unpacked(ctx context.Context, r Record) (dir string, release func(), err error) {
	s.catalog.use(r.ID)
	return s.cache.directory(ctx, r.ID, r.ID, func(ctx context.Context, dir string) error {
		img, d, err := s.reader(ctx, r)
		if err != nil {
			return err
		}
		err = errors.Join(img.Unpack(ctx, dir, s.cfg.Workers), d.Close())
		s.doubt(ctx, r, d.Local, err)
		return err
	})
}

// Meta is Unpacked without memory, which is to be read from the image: both stay until release, which is told
// what reading it returned: damaged data are taken out. prepare, unless nil, adds to the directory, once for
// all who share it, what else is needed there: it must be the same for all calls.
func (s *Store) Meta(ctx context.Context, r Record,
	prepare func(ctx context.Context, dir string, img *image.Reader) error) (dir string, img *image.Reader,
	release func(read error), err error) {
	img, d, err := s.reader(ctx, r)
	if err != nil {
		return "", nil, nil, err
	}
	dir, end, err := s.cache.directory(ctx, r.ID, r.ID+metaEnd, func(ctx context.Context, dir string) error {
		err := img.Meta(dir)
		if err == nil && prepare != nil {
			err = prepare(ctx, dir, img)
		}
		return err
	})
	if err != nil {
		err = errors.Join(err, d.Close())
		s.doubt(ctx, r, d.Local, err)
		return "", nil, nil, err
	}
	return dir, img, func(read error) {
		end()
		if err := d.Close(); err != nil {
			s.cfg.Log.Debug("close a checkpoint's data", "id", r.ID, "err", err)
		}
		s.doubt(ctx, r, d.Local, read)
	}, nil
}

// take copies a checkpoint that another node gives to this one, verified. One comes after the other.
// An error wraps ErrUnknown if nobody gives what its record says.
func (s *Store) take(ctx context.Context, r Record) error {
	end, err := s.peers.turn(ctx)
	if err != nil {
		return err
	}
	defer end()
	if _, here := s.catalog.get(r.ID); here { // meanwhile
		return nil
	}
	err = fmt.Errorf("%.12s: %w", r.ID, ErrUnknown)
	for _, from := range s.peers.who(r) {
		terr := s.takeFrom(ctx, from, r)
		if terr == nil {
			s.cfg.Log.Info("a checkpoint came from another node", "id", r.ID, "node", from, "bytes", r.Data.Size)
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		err = errors.Join(err, fmt.Errorf("from %s: %w", from, terr))
	}
	return err
}

func (s *Store) takeFrom(ctx context.Context, from string, r Record) error {
	file, err := s.peers.bring(ctx, from, r)
	if err != nil {
		return err
	}
	if _, err = s.Put(ctx, r, file); err != nil {
		err = errors.Join(err, removed(os.Remove(file)))
	}
	return err
}
