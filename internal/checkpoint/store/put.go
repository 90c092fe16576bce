package store

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"dewpoint/internal/checkpoint/image"
	"dewpoint/internal/durable"

	"github.com/opencontainers/go-digest"
)

// Scratch is an empty directory of mode 0700 on the store's file system, for an
// engine to dump into. remove removes it; a crash does not keep it.
func (s *Store) Scratch() (dir string, remove func(), err error) {
	dir, err = os.MkdirTemp(s.cfg.Dir, scratch)
	if err != nil {
		return "", nil, fmt.Errorf("dump a checkpoint: %w", err)
	}
	return dir, func() {
		if err := os.RemoveAll(dir); err != nil {
			s.cfg.Log.Warn("a dump's directory stays until the next start", "dir", dir, "err", err)
		}
	}, nil
}

// Pack makes a data file of an engine's directory, where Put wants it. Who does
// not hand it to Put removes it. After an error there is none.
func (s *Store) Pack(ctx context.Context, dir string) (file string, info image.Info, err error) {
	f, err := os.CreateTemp(s.cfg.Dir, "pack-*"+tmpEnd) // of mode 0600
	if err != nil {
		return "", info, fmt.Errorf("pack a checkpoint: %w", err)
	}
	info, err = image.Pack(ctx, f, dir)
	if err = errors.Join(err, f.Close()); err != nil {
		return "", image.Info{}, errors.Join(fmt.Errorf("pack a checkpoint: %w", err), os.Remove(f.Name()))
	}
	return f.Name(), info, nil
}

// Put makes a checkpoint visible on this node, durably, and returns its record, in
// which Format and ID are filled in, and Created and Node if they were not. It takes the
// data file, which lies in the store's directory as Pack has left it. The file is gone after an
// error too, unless it was refused. One that is there already stays. Older ones may go; see Config.
func (s *Store) Put(ctx context.Context, r Record, file string) (Record, error) {
	if r.Created.IsZero() {
		r.Created = time.Now().UTC()
	}
	if r.Node == "" {
		r.Node = s.cfg.Node
	}
	r.Format = format
	r.ID = r.identity()
	if err := r.check(); err != nil {
		return r, fmt.Errorf("put a checkpoint: %w", err)
	}
	fi, err := os.Stat(file)
	if err != nil {
		return r, fmt.Errorf("put a checkpoint: %w", err)
	}
	if fi.Size() != r.Data.Size {
		return r, fmt.Errorf("put a checkpoint: %w: its data have %d bytes, not %d", ErrDamaged, fi.Size(),
			r.Data.Size)
	}
	s.change.Lock()
	defer s.change.Unlock()
	if err := s.commit(&r, file); err != nil {
		return r, errors.Join(fmt.Errorf("put checkpoint %.12s: %w", r.ID, err), removed(os.Remove(file)))
	}
	if err := s.retain(r.ID); err != nil {
		s.cfg.Log.Warn("an old checkpoint stays", "err", err)
	}
	return r, context.Cause(ctx)
}

// commit moves the data and the record into place; change is held.
func (s *Store) commit(r *Record, file string) error {
	if have, here := s.catalog.get(r.ID); here {
		*r = have
		return os.Remove(file)
	}
	b, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	if len(b) > maxRecord {
		return fmt.Errorf("%w: its record has %d bytes", ErrDamaged, len(b))
	}
	if err := settle(file, s.place.path(r.ID+dataEnd)); err != nil {
		return errors.Join(err, removed(os.Remove(s.place.path(r.ID+dataEnd))))
	}
	if s.cfg.PoP != nil && r.Node == s.cfg.Node {
		err = s.uploads.add(r.ID, upload{due: time.Now().Add(firstTry)})
	}
	if err == nil {
		err = durable.WriteFile(s.place.path(r.ID+recordEnd), b, 0o600)
	}
	if err != nil {
		return errors.Join(err, removed(os.Remove(s.place.path(r.ID+dataEnd))),
			removed(os.Remove(s.place.path(r.ID+recordEnd))), s.uploads.end(r.ID))
	}
	s.catalog.add(*r)
	return nil
}

// settle makes a file durable under its final name.
func settle(file, name string) error {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	err = f.Chmod(0o600)
	if err == nil {
		err = durable.Sync(f)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return durable.Rename(file, name)
}

// Verify reads the data of a checkpoint on this node and compares them with its
// record. An error wraps ErrDamaged if they differ, and they are gone then; or ErrUnknown.
func (s *Store) Verify(ctx context.Context, id string) error {
	e, f, err := s.catalog.open(id)
	if err != nil {
		return err
	}
	err = errors.Join(compare(ctx, e.Data, f), f.Close())
	s.doubt(ctx, e.Record, true, err)
	if err != nil {
		return fmt.Errorf("verify checkpoint %.12s: %w", id, err)
	}
	return nil
}

// compare hashes what r gives.
func compare(ctx context.Context, want Blob, r io.ReaderAt) error {
	h := sha256.New()
	n, err := io.CopyBuffer(struct{ io.Writer }{h}, cancelled{ctx, io.NewSectionReader(r, 0, want.Size+1)},
		make([]byte, 1<<20))
	if err == nil && (n != want.Size || digest.NewDigest(digest.SHA256, h) != want.Digest) {
		err = fmt.Errorf("%w: its data have another digest", ErrDamaged)
	}
	return err
}

// cancelled reads until a context ends.
type cancelled struct {
	ctx context.Context
	r   io.Reader
}

func (c cancelled) Read(b []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.r.Read(b)
}

// Adopt puts the directory that a checkpoint was packed from, which lies in one that
// Scratch has made, into the cache: the first restore here need not unpack it. The directory is gone then.
// One that is there already stays.
func (s *Store) Adopt(r Record, dir string) error {
	size, err := restrict(dir)
	if err != nil {
		return fmt.Errorf("adopt %s: %w", dir, err)
	}
	err = s.cache.addWhole(r.ID, dir, size)
	// Newer ones may have displaced the checkpoint meanwhile. It leaves the catalog before it is discarded from
	// the cache: so it is looked for after the directory is in the cache, or the directory would stay.
	if _, here := s.catalog.get(r.ID); !here {
		s.cache.discard(r.ID)
	}
	s.cache.trim()
	return err
}
