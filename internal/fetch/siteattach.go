package fetch

import (
	"context"
	"errors"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop"

	"golang.org/x/sync/errgroup"
)

// errReplaced says that a layer of the store is another one than it was a moment before.
var errReplaced = errors.New("the layer was replaced meanwhile")

// attachEarly makes a layer of the store known. Marking it waits for the store several times: meanwhile
// its index is built, of the table that the record named before. After errReplaced that was in vain, and the layer is marked.
func (s *site) attachEarly(ctx context.Context, st *pop.Store, l image.Layer) (*pop.Layer, error) {
	before, err := st.Record(ctx, l.DiffID)
	if err != nil {
		return nil, err
	}
	var rec *pop.Layer
	var marking errgroup.Group
	marking.Go(func() (err error) {
		rec, err = st.Use(ctx, l.DiffID)
		return err
	})
	marking.Go(func() error { // Use looks at the data last, and finds them known
		_, _ = s.cfg.Dir.Stat(ctx, before.Data())
		return nil
	})
	marked := func() error {
		if err := marking.Wait(); err != nil {
			return err
		}
		if rec.Name != before.Name {
			return errReplaced
		}
		return nil
	}
	e := s.described(before, l)
	e.Await = marked
	if e.Table, err = st.Table(ctx, before); err == nil {
		_, err = s.p.cfg.Layers.Attach(e)
	}
	if merr := marked(); merr != nil {
		err = merr // whatever the table of a layer that went was
	}
	return rec, err
}

// elsewhere is a layer that the store has, marked as used by this node.
func (s *site) elsewhere(ctx context.Context, st *pop.Store, l image.Layer) (*pop.Layer, *layer.Elsewhere, error) {
	rec, err := st.Use(ctx, l.DiffID)
	if err != nil {
		return nil, nil, err
	}
	e := s.described(rec, l)
	e.Table, err = st.Table(ctx, rec)
	return rec, e, err
}

func (s *site) described(rec *pop.Layer, l image.Layer) *layer.Elsewhere {
	return &layer.Elsewhere{DiffID: l.DiffID, Blob: rec.Blob, BlobSize: rec.BlobSize, Size: rec.Size, Data: s.cfg.Dir.Path(rec.Data())}
}
