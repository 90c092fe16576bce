package pop

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
)

// Span is bytes of a layer's compressed form, from From up to To.
type Span struct {
	From int64 `json:"from"`
	To   int64 `json:"to"`
}

// kept are compressed bytes beside a draft, at their own offsets in a file of its name. Who goes on
// with a layer whose stream cannot be entered where the tar ends, one zstd frame, inflates
// them instead of fetching them.
type kept struct {
	tried bool // there may be a file
	f     File // nil before anything was kept
	span  Span // what goes with the next checkpoint
	at    int64
}

// Keep has compressed bytes go with the checkpoints that follow: those of span, which r gives at their
// own offsets. What earlier calls have written of them is not written again, and no span may
// begin before an earlier one. An empty span is none. Nobody takes them for anything but what they
// claim to be, and they are deleted when the layer is published.
func (f *Draft) Keep(ctx context.Context, r io.ReaderAt, span Span) error {
	if f.failed != nil {
		return f.failed
	}
	k := &f.kept
	if span.From >= span.To {
		k.span = Span{}
		return nil
	}
	if k.f == nil {
		k.tried = true
		file, err := f.s.cfg.FS.Append(ctx, path.Join(layersDir, f.name+blobEnd))
		if err != nil {
			return fmt.Errorf("keep what layer %s arrives in: %w", f.id, err)
		}
		k.f = file
	}
	k.at = max(k.at, span.From)
	n, err := io.CopyBuffer(struct{ io.Writer }{io.NewOffsetWriter(k.f, k.at)},
		struct{ io.Reader }{io.NewSectionReader(r, k.at, span.To-k.at)}, make([]byte, 256<<10))
	k.at += n
	if err == nil && k.at < span.To {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("keep what layer %s arrives in: %w", f.id, err)
	}
	k.span = span
	return nil
}

func (k *kept) sync() error {
	if k.span == (Span{}) {
		return nil
	}
	return k.f.Sync()
}

func (k *kept) close() error {
	if k.f == nil {
		return nil
	}
	return k.f.Close()
}

// forgetKept removes what was kept of a layer that was published. A sweep does it else.
func (f *Draft) forgetKept(ctx context.Context) {
	if !f.kept.tried {
		return
	}
	if err := f.s.remove(ctx, path.Join(layersDir, f.name+blobEnd)); err != nil {
		f.s.cfg.Log.Debug("what a layer arrived in stays", "layer", f.id, "err", err)
	}
}

// openKept opens the compressed bytes of a checkpoint. It has none if they are not there: the tar
// alone is less, and good.
func (c *Checkpoint) openKept(ctx context.Context, in FS, span Span) error {
	if span.From >= span.To {
		return nil
	}
	f, err := in.Open(ctx, path.Join(layersDir, c.name+blobEnd))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	c.files = append(c.files, f)
	n, err := f.Size()
	if err == nil && n >= span.To {
		c.Kept, c.Blob = span, io.NewSectionReader(f, span.From, span.To-span.From)
	}
	return err
}
