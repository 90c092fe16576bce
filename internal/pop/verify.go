package pop

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
)

// Verify reads a layer and its table and compares them with what was published.
// It returns an error that wraps ErrDamaged if they differ.
func (s *Store) Verify(ctx context.Context, l *Layer) error {
	if _, err := s.Table(ctx, l); err != nil {
		return err
	}
	f, err := s.cfg.FS.Open(ctx, l.data())
	if err != nil {
		return err
	}
	defer f.Close()
	return l.verify(ctx, f)
}

// verify compares the tar in r with the sums.
func (l *Layer) verify(ctx context.Context, r io.ReaderAt) error {
	buf := make([]byte, 256<<10)
	for at, k := int64(0), 0; at < l.Size; at, k = at+SumBytes, k+1 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		h := sha256.New()
		n, err := io.CopyBuffer(struct{ io.Writer }{h}, struct{ io.Reader }{io.NewSectionReader(r, at, min(SumBytes, l.Size-at))}, buf)
		if err != nil {
			return err
		}
		if n < min(SumBytes, l.Size-at) || !bytes.Equal(h.Sum(nil), l.Sums[k*sha256.Size:][:sha256.Size]) {
			return fmt.Errorf("layer %s at %d: %w", l.DiffID, at, ErrDamaged)
		}
	}
	return nil
}

// Quarantine takes a damaged layer out of sight, used or not: nothing new is to
// use it, and it can be published anew. Its files stay while nodes use it.
func (s *Store) Quarantine(ctx context.Context, l *Layer) error {
	if now, err := s.record(ctx, l.DiffID); errors.Is(err, ErrUnknown) || err == nil && now.Name != l.Name {
		return nil
	}
	if err := s.hide(ctx, l); err != nil {
		return err
	}
	// If it was published anew a moment ago, that is what was hidden.
	if hidden, err := s.readRecord(ctx, trashOf(l)); err == nil && hidden.Name != l.Name {
		return s.putBack(ctx, l)
	}
	if err := s.remove(ctx, trashOf(l)); err != nil { // else a sweep would put it back
		return err
	}
	s.tell(ctx, Event{Kind: Evicted, Key: l.DiffID.String()})
	return nil
}
