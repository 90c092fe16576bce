package pop

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
)

// Verify reads a layer, its table and its index, and compares them with what was published, at most rate
// bytes a second; 0 is as fast as it goes. It returns an error that wraps ErrDamaged if they differ,
// ErrUnknown if the layer has left the store meanwhile. What is not there wraps ErrMissing, until this node
// has seen it missing for StoreConfig.Forget; then ErrDamaged.
func (s *Store) Verify(ctx context.Context, l *Layer, rate int64) error {
	err := s.compare(ctx, l, rate)
	if !errors.Is(err, ErrUnknown) && !errors.Is(err, fs.ErrNotExist) {
		if err == nil || errors.Is(err, ErrDamaged) {
			s.complete(l)
		}
		return err
	}
	if now, rerr := s.record(ctx, l.DiffID); rerr != nil || now.Name != l.Name {
		s.complete(l)
		return fmt.Errorf("layer %s: %w", l.DiffID, errors.Join(ErrUnknown, unlessUnknown(rerr)))
	}
	if s.lacking(l) < s.cfg.Forget {
		return fmt.Errorf("layer %s: %w", l.DiffID, ErrMissing)
	}
	return fmt.Errorf("layer %s: %w: %w", l.DiffID, err, ErrDamaged)
}

// absence is what this node has seen of files that were missing.
type absence struct{ first, last time.Time }

// lacking notes that files of a layer are missing, and returns for how long they have been. They were there
// in between if that was not seen for StoreConfig.Forget.
func (s *Store) lacking(l *Layer) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	a, now := s.lacks[l.Name], time.Now()
	if now.Sub(a.last) > s.cfg.Forget {
		a.first = now
	}
	a.last = now
	s.lacks[l.Name] = a
	return now.Sub(a.first)
}

// complete notes that no files of a layer are missing, or that it is none any more.
func (s *Store) complete(l *Layer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.lacks, l.Name)
}

func unlessUnknown(err error) error {
	if errors.Is(err, ErrUnknown) {
		return nil
	}
	return err
}

func (s *Store) compare(ctx context.Context, l *Layer, rate int64) error {
	if _, err := s.Table(ctx, l); err != nil {
		return err
	}
	if l.Index != "" {
		if _, err := s.Index(ctx, l); err != nil {
			return err
		}
	}
	f, err := s.cfg.FS.Open(ctx, l.data())
	if err != nil {
		return err
	}
	defer f.Close()
	if rate > 0 {
		return l.verify(ctx, paced{ctx, f, rate})
	}
	return l.verify(ctx, f)
}

// paced gives at most rate bytes a second, in the mean of each read.
type paced struct {
	ctx  context.Context
	r    io.ReaderAt
	rate int64
}

func (p paced) ReadAt(b []byte, off int64) (int, error) {
	n, err := p.r.ReadAt(b, off)
	select {
	case <-time.After(time.Duration(n) * time.Second / time.Duration(p.rate)):
	case <-p.ctx.Done():
		return 0, context.Cause(p.ctx)
	}
	return n, err
}

// verify compares the tar in r with the sums.
func (l *Layer) verify(ctx context.Context, r io.ReaderAt) error {
	buf := make([]byte, min(256<<10, l.Size))
	for at, k := int64(0), 0; at < l.Size; at, k = at+SumBytes, k+1 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		h := sha256.New()
		n, err := io.CopyBuffer(struct{ io.Writer }{h},
			struct{ io.Reader }{io.NewSectionReader(r, at, min(SumBytes, l.Size-at))}, buf)
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
func (s *Store) Quarantine(ctx context.Context, l *Layer) error { return s.takeOut(ctx, l, Damaged) }

// Withdraw does what Quarantine does to one that is as it was published, and no longer wanted: nobody
// is to publish it anew.
func (s *Store) Withdraw(ctx context.Context, l *Layer) error { return s.takeOut(ctx, l, Evicted) }

// takeOut takes a layer out of sight, and tells why.
func (s *Store) takeOut(ctx context.Context, l *Layer, kind string) error {
	if now, err := s.record(ctx, l.DiffID); errors.Is(err, ErrUnknown) || err == nil && now.Name != l.Name {
		return nil
	}
	trash, err := s.hide(ctx, l.DiffID, l.Name)
	if err != nil || trash == "" {
		return err
	}
	// If it was published anew a moment ago, that is what was hidden.
	if hidden, err := s.readRecord(ctx, trash); err == nil && hidden.Name != l.Name {
		return s.putBack(ctx, l.DiffID, trash)
	}
	// From here on a sweep does not put it back.
	if _, err := s.kill(ctx, trash, l.Name); unlessGone(err) != nil {
		return err
	}
	s.noteLost(ctx, l.DiffID, kind == Damaged)
	e := Event{Kind: kind, Key: l.DiffID.String()}
	if kind == Damaged {
		e.Name = l.Name
	}
	s.tell(ctx, e)
	return nil
}

// Broken are the layers whose records are there and cannot be understood.
func (s *Store) Broken(ctx context.Context) ([]digest.Digest, error) {
	names, err := s.cfg.FS.Names(ctx, layersDir)
	if err != nil {
		return nil, err
	}
	_, damaged, err := s.records(ctx, names)
	var all []digest.Digest
	for _, name := range slices.Sorted(maps.Keys(damaged)) {
		id := digest.NewDigestFromEncoded(digest.SHA256, strings.TrimSuffix(name, ".json"))
		if id.Validate() == nil {
			all = append(all, id)
		}
	}
	return all, err
}

// Mend removes a record that cannot be understood, so that the layer can be
// published anew. A sweep removes what it named.
func (s *Store) Mend(ctx context.Context, id digest.Digest) error {
	if _, err := s.record(ctx, id); !errors.Is(err, ErrDamaged) {
		return nil
	}
	aside := path.Join(trashDir, "."+id.Encoded()+".json."+s.boot)
	if err := unlessGone(s.cfg.FS.Rename(ctx, recordOf(id), aside)); err != nil {
		return err
	}
	if _, err := s.readRecord(ctx, aside); err == nil { // published anew a moment ago
		return s.putBack(ctx, id, aside)
	}
	s.noteLost(ctx, id, true)
	s.tell(ctx, Event{Kind: Damaged, Key: id.String()})
	return s.remove(ctx, aside)
}

// Verification says when a layer was verified last.
type Verification struct {
	Node string `json:"node"` // whose clock it is
	At   int64  `json:"at"`   // seconds since 1970
	Name string `json:"name"` // of the files, see Layer
}

const verifiedDir = "verified"

func verificationOf(id digest.Digest) string { return path.Join(verifiedDir, id.Encoded()) }

// NoteVerified records that this node has found a layer to be right, or has seen
// it for the first time.
func (s *Store) NoteVerified(ctx context.Context, l *Layer) error {
	b, err := json.Marshal(Verification{Node: s.cfg.Node, At: time.Now().Unix(), Name: l.Name})
	if err != nil {
		return err
	}
	if err := s.cfg.FS.Mkdir(ctx, verifiedDir); err != nil { // stores of an earlier version have none
		return err
	}
	return s.cfg.FS.WriteFile(ctx, verificationOf(l.DiffID), b)
}

// Verified returns what is noted of a layer, or an error that wraps ErrUnknown.
func (s *Store) Verified(ctx context.Context, l *Layer) (Verification, error) {
	var v Verification
	b, err := s.cfg.FS.ReadFile(ctx, verificationOf(l.DiffID))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return v, err
	}
	if err != nil || json.Unmarshal(b, &v) != nil || v.Name != l.Name {
		return Verification{}, fmt.Errorf("verification of layer %s: %w", l.DiffID, ErrUnknown)
	}
	return v, nil
}

// verified removes the notes of layers that are not in the store any more.
func (w *sweep) verified(ctx context.Context) error {
	names, err := w.names(ctx, verifiedDir)
	errs := unlessGone(err)
	for _, name := range names {
		id := digest.NewDigestFromEncoded(digest.SHA256, name)
		if id.Validate() == nil && !w.files[path.Base(recordOf(id))] && !w.s.Has(ctx, id) {
			errs = errors.Join(errs, w.s.remove(ctx, path.Join(verifiedDir, name)))
		}
	}
	return errs
}
