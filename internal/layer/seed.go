package layer

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"dewpoint/internal/durable"
)

// Checkpoint is how far a fill has come, in a form that holds on every node.
type Checkpoint struct {
	Record []byte // of the fill
	Data   string // path of the tar
	Size   int64  // of the tar's bytes that go with the record
	// Blob is the path of compressed bytes, at their own offsets, which are to be inflated where the
	// tar's bytes end: those from From up to To. There may be none.
	Blob     string
	From, To int64
}

// Checkpoint returns how far the fill has come. It is ErrUnknown, wrapped, if there is nothing to
// go on from.
func (f *Fill) Checkpoint() (Checkpoint, error) {
	none := fmt.Errorf("a checkpoint of layer %s: %w", f.Layer.DiffID, ErrUnknown)
	f.mu.Lock()
	dir := f.dir
	f.mu.Unlock()
	p := loadProgress(dir, f.Layer.Digest)
	if p == nil {
		return Checkpoint{}, none
	}
	c := Checkpoint{Data: filepath.Join(dir, "data"), Size: p.Point.Out, Blob: filepath.Join(dir, blobFile)}
	c.From, c.To = f.worthKeeping(p, c.Blob)
	if c.Size == 0 && c.From == c.To {
		return Checkpoint{}, none
	}
	var err error
	p.Boot, p.Kept = "", 0
	c.Record, err = json.Marshal(p)
	return c, err
}

// worthKeeping is which of the compressed bytes in the file at path spare who goes on from p the fetching of
// more than an interval or two, as where a stream has frames of any size it does. They come
// by whole intervals, so that not every look finds more of them.
func (f *Fill) worthKeeping(p *progress, path string) (from, to int64) {
	fi, err := os.Stat(path)
	if err != nil {
		return 0, 0
	}
	every := f.store.cfg.Interval
	n := max(0, fi.Size()-p.BlobAt) / every * every
	switch {
	case n < 2*every:
		return 0, 0
	case fi.Size() >= f.Layer.Size:
		return p.BlobAt, f.Layer.Size
	}
	return p.BlobAt, p.BlobAt + n
}

// Runs counts how often the fill has begun: what an earlier run wrote may have been wrong.
func (f *Fill) Runs() int64 { return f.runs.Load() }

// Seed is another node's checkpoint: what Fill.Checkpoint says, and what lies there.
type Seed struct {
	Record   []byte
	Data     io.Reader // the tar's bytes
	Blob     io.Reader // the compressed bytes from From up to To; nil for none
	From, To int64
}

// Seed has the fill go on from another node's checkpoint, if it has come further
// than what is here. It is to be called by Prepare only. What the checkpoint gives is
// believed no more than what a fill finds on its own disk: the whole is hashed at the end.
func (f *Fill) Seed(s Seed) error {
	var p progress
	if err := json.Unmarshal(s.Record, &p); err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	if p.Boot, p.Kept = "", 0; s.Blob != nil {
		p.Kept = s.To
	}
	if !p.fits(f.Layer.Digest) || p.sane() != nil ||
		s.Blob != nil && (s.From > p.BlobAt || s.To > f.Layer.Size || !keeps(f.Layer)) {
		return fmt.Errorf("a checkpoint of another blob: %w", ErrUnknown)
	}
	if f.seeded {
		return nil // it did not verify, or is lost
	}
	dir := f.store.disk.dir(f.Layer.DiffID)
	if have := loadProgress(dir, f.Layer.Digest); have != nil && f.here(dir, have) >= p.here() {
		return nil
	}
	mounted := f.store.Partial(f.Layer.DiffID) != nil
	if mounted && p.Point.Out > 0 {
		return nil // other bytes of the tar are there already
	}
	if !mounted {
		if err := f.writeSeed(dir, s.Data, p.Point.Out); err != nil {
			return errors.Join(explain(err), f.store.disk.discard(dir))
		}
	}
	if s.Blob != nil {
		if err := writeBlob(dir, s); err != nil {
			return explain(err)
		}
	}
	f.seeded = true
	f.seed.Store(max(p.BlobAt, p.Kept))
	return p.saveBoot(dir)
}

// here is up to which compressed byte p and what is kept beside it in dir spare the fetching.
func (f *Fill) here(dir string, p *progress) int64 {
	if fi, err := os.Stat(filepath.Join(dir, blobFile)); err == nil && keeps(f.Layer) && p.Boot != "" {
		return max(p.here(), fi.Size())
	}
	return p.here()
}

func (f *Fill) writeSeed(dir string, data io.Reader, size int64) error {
	if err := f.store.disk.discard(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := durable.WriteFile(filepath.Join(dir, earlyFile), nil, 0o600); err != nil {
		return err
	}
	return writeAt(filepath.Join(dir, "data"), 0o644, 0, size, data)
}

// writeBlob writes the compressed bytes of a seed where a fill looks for those that it has kept.
func writeBlob(dir string, s Seed) error {
	path := filepath.Join(dir, blobFile)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return writeAt(path, 0o600, s.From, s.To-s.From, s.Blob)
}

// writeAt writes size bytes that r gives to a new file, from offset at on.
func writeAt(path string, mode os.FileMode, at, size int64, r io.Reader) error {
	out, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	n, err := io.CopyBuffer(struct{ io.Writer }{io.NewOffsetWriter(out, at)},
		struct{ io.Reader }{io.LimitReader(r, size)}, make([]byte, pieceBytes))
	if err == nil && n < size {
		err = io.ErrUnexpectedEOF
	}
	return errors.Join(err, out.Close())
}
