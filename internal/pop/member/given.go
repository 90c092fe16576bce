package member

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"dewpoint/internal/layer"
	"dewpoint/internal/pack"
	"dewpoint/internal/pop/peer"

	"github.com/opencontainers/go-digest"
)

// Given is what this node gives to the others of its PoP. It implements
// peer.Content.
type Given struct{ s *Member }

// Given returns it.
func (s *Member) Given() *Given { return &Given{s} }

// Follow implements peer.Content. What only passes through this node is not given: two nodes would wait for
// each other that each took the other to have the layer.
func (g *Given) Follow(ctx context.Context, id digest.Digest, off int64) (io.ReadCloser, int64, error) {
	if l, err := g.whole(id); err == nil {
		r, err := section(l.Files().Data, off, l.Size)
		return r, l.Size, err
	}
	f := g.s.layers.Filling(id)
	if f == nil || !g.s.leads(id) {
		return nil, 0, fmt.Errorf("layer %s: %w", id, peer.ErrUnknown)
	}
	file, err := os.Open(g.s.layers.DataPath(id))
	if errors.Is(err, os.ErrNotExist) {
		return nil, 0, fmt.Errorf("layer %s has not begun: %w", id, peer.ErrUnknown)
	}
	if err != nil {
		return nil, 0, err
	}
	return &growing{ctx: ctx, f: f, file: file, at: off}, -1, nil
}

// Progress implements peer.Content.
func (g *Given) Progress(_ context.Context, id digest.Digest) ([]byte, error) {
	f := g.s.layers.Filling(id)
	if f == nil || !g.s.leads(id) {
		return nil, fmt.Errorf("layer %s: %w", id, peer.ErrUnknown)
	}
	c, err := f.Checkpoint()
	if err != nil {
		return nil, fmt.Errorf("layer %s: %w: %w", id, err, peer.ErrUnknown)
	}
	return c.Record, nil
}

// whole is a layer whose tar this node has itself.
func (g *Given) whole(id digest.Digest) (*layer.Layer, error) {
	l, err := g.s.layers.Peek(id)
	if err == nil && (l.At != "" || l.Tree) {
		err = fmt.Errorf("layer %s is not kept here: %w", id, peer.ErrUnknown)
	}
	return l, err
}

type readCloser struct {
	io.Reader
	io.Closer
}

func section(path string, from, to int64) (io.ReadCloser, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return readCloser{io.NewSectionReader(f, from, to-from), f}, nil
}

// growing reads a layer's tar behind its fill. What it gives is verified by
// whoever takes it.
type growing struct {
	ctx  context.Context
	f    *layer.Fill
	file *os.File
	at   int64
}

// lookAgain is how often it is looked how far a fill has come.
const lookAgain = 5 * time.Millisecond

func (r *growing) Read(b []byte) (int, error) {
	for {
		// The state comes first: what was written when it is readable is all.
		p := r.f.Progress()
		if n := min(int64(len(b)), p.Written-r.at); n > 0 {
			m, err := r.file.ReadAt(b[:n], r.at)
			r.at += int64(m)
			if err == io.EOF { // it begins anew, or lies elsewhere by now
				err = io.ErrUnexpectedEOF
			}
			return m, err
		}
		switch p.State {
		case layer.Readable, layer.Complete:
			l, err := r.f.Wait(r.ctx)
			if err == nil && l.Size != r.at {
				err = fmt.Errorf("layer %s came here from elsewhere: %w", l.DiffID, io.ErrUnexpectedEOF)
			}
			if err == nil {
				err = io.EOF
			}
			return 0, err
		case layer.Failed:
			_, err := r.f.Wait(r.ctx)
			return 0, fmt.Errorf("the layer does not come: %w", errors.Join(err, io.ErrUnexpectedEOF))
		}
		select {
		case <-time.After(lookAgain):
		case <-r.ctx.Done():
			return 0, context.Cause(r.ctx)
		}
	}
}

func (r *growing) Close() error { return r.file.Close() }

// Range implements peer.Content: bytes that are absent here are fetched as for
// a reader of this node.
func (g *Given) Range(ctx context.Context, id digest.Digest, from, to int64) (io.ReadCloser, error) {
	if l, err := g.whole(id); err == nil {
		if to > l.Size {
			return nil, fmt.Errorf("layer %s has %d bytes: %w", id, l.Size, peer.ErrUnknown)
		}
		return section(l.Files().Data, from, to)
	}
	part := g.s.layers.Partial(id)
	if part == nil || to > part.Size {
		return nil, fmt.Errorf("layer %s: %w", id, peer.ErrUnknown)
	}
	for {
		at, end := part.Absent(from, to)
		if at >= to {
			return section(g.s.layers.DataPath(id), from, to)
		}
		if err := g.s.node.Bring(ctx, id, at, min(end, to)); err != nil {
			return nil, fmt.Errorf("layer %s: %w", id, err)
		}
	}
}

// Table implements peer.Content.
func (g *Given) Table(_ context.Context, id digest.Digest) ([]byte, error) {
	l, err := g.whole(id)
	if err != nil {
		return nil, fmt.Errorf("layer %s: %w", id, peer.ErrUnknown)
	}
	f, err := os.Open(l.Files().Data)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	t, err := pack.MakeTable(f, l.Size)
	if err != nil {
		return nil, err
	}
	return t.MarshalBinary()
}

// Pack implements peer.Content.
func (g *Given) Pack(ctx context.Context, manifest digest.Digest) (io.ReadCloser, error) {
	if g.s.cfg.PackDir == "" || g.s.node.Quarantined(manifest) != "" {
		return nil, fmt.Errorf("a pack of %s: %w", manifest, peer.ErrUnknown)
	}
	if r := g.s.pack(ctx, manifest); r != nil {
		return r, nil
	}
	f, err := os.Open(g.s.node.PackPath(manifest))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("a pack of %s: %w", manifest, peer.ErrUnknown)
	}
	return f, err
}
