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
}

// Checkpoint returns how far the fill has come. It is ErrUnknown, wrapped, if there is nothing to
// go on from.
func (f *Fill) Checkpoint() (Checkpoint, error) {
	none := fmt.Errorf("a checkpoint of layer %s: %w", f.Layer.DiffID, ErrUnknown)
	f.mu.Lock()
	dir := f.dir
	f.mu.Unlock()
	p := loadProgress(dir, f.Layer.Digest)
	if p == nil || p.Point.Out == 0 {
		return Checkpoint{}, none
	}
	c := Checkpoint{Data: filepath.Join(dir, "data"), Size: p.Point.Out}
	var err error
	p.Boot, p.Kept = "", 0
	c.Record, err = json.Marshal(p)
	return c, err
}

// Runs counts how often the fill has begun: what an earlier run wrote may have been wrong.
func (f *Fill) Runs() int64 { return f.runs.Load() }

// Seed is another node's checkpoint: what Fill.Checkpoint says, and what lies there.
type Seed struct {
	Record []byte
	// Data are the tar's bytes; nil are those that this fill has written already, as a tar from elsewhere.
	Data io.Reader
}

// Seed has the fill go on from another node's checkpoint, if it has come further
// than what is here. It is to be called by Prepare only. What the checkpoint gives is
// believed no more than what a fill finds on its own disk: the whole is hashed at the end.
func (f *Fill) Seed(s Seed) error {
	var p progress
	if err := json.Unmarshal(s.Record, &p); err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	p.Boot, p.Kept = "", 0
	if !p.fits(f.Layer.Digest) || p.sane() != nil || !p.within(f.Layer) {
		return fmt.Errorf("a checkpoint of another blob: %w", ErrUnknown)
	}
	if f.seeded {
		return nil // it did not verify, or is lost
	}
	dir := f.store.disk.dir(f.Layer.DiffID)
	if have := loadProgress(dir, f.Layer.Digest); have != nil && have.sparedBytes() >= p.sparedBytes() {
		return nil
	}
	if f.store.Partial(f.Layer.DiffID) != nil {
		return nil // other bytes of the tar are there already
	}
	if s.Data == nil {
		if f.written.Load() < p.Point.Out {
			return fmt.Errorf("a checkpoint of bytes that are not here: %w", ErrUnknown)
		}
		if err := durable.WriteFile(filepath.Join(dir, earlyFile), nil, 0o600); err != nil {
			return explain(err)
		}
	} else if err := f.writeSeed(dir, s.Data, p.Point.Out); err != nil {
		return errors.Join(explain(err), f.store.disk.discard(dir))
	}
	f.seeded = true
	f.seed.Store(p.BlobAt)
	return p.saveBoot(dir)
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
	return writeData(filepath.Join(dir, "data"), size, data)
}

// writeData writes size bytes that r gives to a new file.
func writeData(path string, size int64, r io.Reader) error {
	out, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	n, err := io.CopyBuffer(struct{ io.Writer }{out},
		struct{ io.Reader }{io.LimitReader(r, size)}, make([]byte, pieceBytes))
	if err == nil && n < size {
		err = io.ErrUnexpectedEOF
	}
	return errors.Join(err, out.Close())
}
