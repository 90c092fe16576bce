package layer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/image"
	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/toc"

	"github.com/opencontainers/go-digest"
)

// Elsewhere is a complete layer whose tar somebody else keeps, under a path that
// can be mounted from: a PoP's store. Its index is built here of the table: the kernel mounts none that
// another node wrote.
type Elsewhere struct {
	DiffID   digest.Digest
	Blob     digest.Digest // the compressed form that it came from
	BlobSize int64         // bytes
	Size     int64         // of the tar, bytes
	Data     string        // path of the tar
	Table    []byte        // of the tar's entries
	// Await, unless nil, is called by Attach when all else is done, before the layer is known. Its error is
	// Attach's.
	Await func() error
}

// Preparer is a Source that may know a better way to a layer than its stream.
// Prepare is called before each run of a fill and may block until the way is clear.
type Preparer interface {
	Source
	Prepare(ctx context.Context, f *Fill) (Way, error)
}

// Way is how a fill goes on.
type Way struct {
	// Elsewhere, unless nil, is the layer: nothing is to be filled.
	Elsewhere *Elsewhere
	// Tar says that Open gives the layer's tar, from the byte of it that
	// Progress.Written says on, to its end.
	Tar bool
	// Wrong, unless nil, is told when that tar was not the layer's; then the source is prepared anew, and is to
	// know other ways sooner or later.
	Wrong func(error)
}

// ErrAgain is wrapped by errors of a Preparer after which it is to be asked anew.
var ErrAgain = errors.New("there may be another way to the layer now")

// Attach makes the layer known whose tar lies elsewhere. It returns an error that
// wraps ErrBusy if the layer is here, or on its way, in another form. Several layers are
// attached at once; nothing waits for another one's Await.
func (s *Store) Attach(e *Elsewhere) (*Layer, error) {
	l, err := s.attached(e)
	if s.cfg.Tree {
		err = fmt.Errorf("layers are unpacked here: %w", ErrBusy)
	}
	if l == nil && err == nil {
		l, err = s.attachNew(e)
	}
	if err != nil {
		return nil, fmt.Errorf("attach layer %s: %w", e.DiffID, err)
	}
	return l, nil
}

// attached is the layer if it is known already; nil if nothing of it is here.
func (s *Store) attached(e *Elsewhere) (*Layer, error) {
	s.mu.Lock()
	whole, fill, partial := s.layers[e.DiffID], s.fills[e.DiffID], s.partials[e.DiffID]
	s.mu.Unlock()
	switch {
	case whole != nil && whole.At == e.Data:
		return whole, nil
	case whole != nil || fill != nil || partial != nil:
		return nil, ErrBusy
	}
	return nil, nil
}

// attachNew makes the layer's files aside, and puts them in their place when it is known
// that they are wanted.
func (s *Store) attachNew(e *Elsewhere) (*Layer, error) {
	aside, err := os.MkdirTemp(s.cfg.Dir, importPrefix)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(aside)
	l, err := s.describe(aside, e)
	if err == nil && e.Await != nil {
		err = e.Await()
	}
	if err != nil {
		return nil, err
	}
	release := s.reserve(e.DiffID)
	defer release()
	if have, err := s.attached(e); have != nil || err != nil {
		return have, err
	}
	dir := s.disk.dir(e.DiffID)
	if err := s.disk.clear(dir); err != nil {
		return nil, err
	}
	if err := os.Rename(filepath.Join(aside, "index"), filepath.Join(dir, "index")); err != nil {
		return nil, errors.Join(err, s.disk.discard(dir))
	}
	l.dir = dir
	if err := l.declare(); err != nil {
		return nil, errors.Join(err, s.disk.discard(dir))
	}
	s.mu.Lock()
	s.layers[e.DiffID] = l
	s.mu.Unlock()
	s.settleSoon(l)
	return l, nil
}

// settleTime is how long a layer that lies elsewhere waits until it is made
// durable here: what is lost with it is made again in no time, and the fsyncs of a
// start that is under way come first.
const settleTime = 3 * time.Second

func (s *Store) settleSoon(l *Layer) {
	s.work.Go(func() {
		select {
		case <-time.After(settleTime):
		case <-s.life.Done():
			return // the next process knows what is readable
		}
		if have, err := s.Peek(l.DiffID); err != nil || have != l {
			return // it was let go of; what is in its place settles itself
		}
		if err := l.settleOrLeave(); err != nil && !errors.Is(err, os.ErrNotExist) { // it may go meanwhile
			s.cfg.Log.Error("layer can be read but not made durable", "layer", l.DiffID, "err", err)
		}
	})
}

// attach makes the files of a layer that lies elsewhere, in its place.
func (s *Store) attach(dir string, e *Elsewhere) (*Layer, error) {
	if s.cfg.Tree {
		return nil, fmt.Errorf("layers are unpacked here: %w", ErrBusy)
	}
	if err := s.disk.clear(dir); err != nil {
		return nil, err
	}
	l, err := s.describe(dir, e)
	if err != nil {
		return nil, errors.Join(err, s.disk.discard(dir))
	}
	return l, nil
}

// describe writes the index of a layer that lies elsewhere into dir.
func (s *Store) describe(dir string, e *Elsewhere) (l *Layer, err error) {
	l = &Layer{store: s, DiffID: e.DiffID, Size: e.Size, Blob: e.Blob, BlobSz: e.BlobSize, At: e.Data, dir: dir,
		used: time.Now()}
	t, err := toc.ParseTable(e.Table)
	if err != nil {
		return nil, err
	}
	if t.Size() != e.Size {
		return nil, fmt.Errorf("its table says %d bytes, its record %d: %w", t.Size(), e.Size, ErrMismatch)
	}
	l.Implied, l.Index, err = writeIndex(dir, e.DiffID, e.Size, t)
	return l, err
}

// writeIndex builds dir's index from t: a layer's tar of size bytes, or its table. It
// returns what the layer implies, and the index's size.
func writeIndex(dir string, id digest.Digest, size int64, t io.ReaderAt) (names, int64, error) {
	list, err := toc.Read(t)
	if err != nil {
		return nil, 0, err
	}
	tree, err := list.Tree()
	if err != nil {
		return nil, 0, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "index.tmp"), os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return nil, 0, err
	}
	err = erofs.Write(f, tree, erofs.Options{UUID: erofs.UUID(id.String()), DataSize: size, Data: t})
	var n int64
	if fi, serr := f.Stat(); serr == nil {
		n = fi.Size()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, "index"))
	}
	return withoutRoot(tree.Implied()), n, err
}

// Unpacks reports whether layers are unpacked here: such a store has none that lie elsewhere.
func (s *Store) Unpacks() bool { return s.cfg.Tree }

// Filling is the fill of a layer that is under way, or nil.
func (s *Store) Filling(id digest.Digest) *Fill {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fills[id]
}

// Elsewhere reports whether the fill has ended as a layer that lies elsewhere.
func (f *Fill) Elsewhere() bool {
	l := f.shown()
	return l != nil && l.At != ""
}

// DataPath is where the tar of a layer lies that is being filled, or partial.
func (s *Store) DataPath(id digest.Digest) string { return filepath.Join(s.disk.dir(id), "data") }

// Detach forgets a layer that lies elsewhere and is not there any more, or not
// mounted here any more.
func (s *Store) Detach(id digest.Digest) error {
	s.mu.Lock()
	l := s.layers[id]
	if l == nil || l.At == "" {
		s.mu.Unlock()
		return nil
	}
	delete(s.layers, id)
	trash, err := s.disk.hide(l.dir)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	return os.RemoveAll(trash)
}

// Localize makes a layer that lies elsewhere one of this node's own, of the tar
// that r gives, and verifies it. Mounts go on with what they have; the next ones
// take the node's own file.
func (s *Store) Localize(l *Layer, r io.Reader) error {
	if err := l.settleOrLeave(); err != nil { // which removes what is temporary
		return explain(err)
	}
	tmp := filepath.Join(l.dir, "data.tmp")
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return explain(err)
	}
	h := l.DiffID.Verifier()
	n, err := io.CopyBuffer(struct{ io.Writer }{io.MultiWriter(f, h)}, struct{ io.Reader }{r},
		make([]byte, pieceBytes))
	if err == nil && (n != l.Size || !h.Verified()) {
		err = fmt.Errorf("copy of layer %s: %d bytes: %w", l.DiffID, n, ErrMismatch)
	}
	if err == nil {
		err = durable.Sync(f)
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = durable.Rename(tmp, filepath.Join(l.dir, "data"))
	}
	if err != nil {
		os.Remove(tmp)
		return explain(err)
	}
	return s.own(l)
}

// own puts a layer in the place of l that has the same files and its own data.
func (s *Store) own(l *Layer) error {
	own := &Layer{store: s, DiffID: l.DiffID, Size: l.Size, Index: l.Index, Blob: l.Blob, BlobSz: l.BlobSz,
		Implied: l.Implied, dir: l.dir, complete: true, used: l.Used(), noted: time.Now()}
	b, err := json.Marshal(own)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.layers[l.DiffID] != l {
		return fmt.Errorf("%s: %w", l.DiffID, ErrUnknown)
	}
	if err := durable.WriteFile(filepath.Join(l.dir, layerFile), b, 0o600); err != nil {
		return err
	}
	s.layers[l.DiffID] = own
	return nil
}

// tarProgress is where a fill that reads the layer's tar goes on: p is where one that
// reads the blob would.
func tarProgress(p *progress, id digest.Digest) *progress {
	out := p.Point.Out
	t := &progress{Version: progressVersion, Blob: id, BlobAt: out, BlobHash: p.BlobHash, DataHash: p.DataHash,
		Compression: image.Plain}
	t.Point.In, t.Point.Out = out, out
	return t
}
