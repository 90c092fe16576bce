package member

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"

	"dewpoint/internal/layer"
	"dewpoint/internal/layer/presence"
	"dewpoint/internal/pop"
)

// peerRange is what is asked of another node at least: its neighbours cost
// nothing on a LAN.
const peerRange = 256 << 10

// Want implements fetch.Source.
func (s *routes) Want(ctx context.Context, part *layer.Partial, from, to int64) (n int64, ok bool) {
	n, err := s.bringStored(ctx, part, from, to)
	if err != nil && !errors.Is(err, context.Canceled) {
		n, err = s.bringFromHolder(ctx, part, from, to)
	}
	if err == nil {
		at, _ := part.Absent(from, to)
		return n, at >= to
	}
	return n, false
}

// bringStored reads whole pieces that the store's record has sums of.
func (s *routes) bringStored(ctx context.Context, part *layer.Partial, from, to int64) (got int64,
	err error) {
	st := s.usable()
	if st == nil {
		return 0, pop.ErrStoreAway
	}
	rec, err := st.Record(ctx, part.Layer.DiffID)
	if err != nil {
		return 0, err
	}
	f, err := st.Open(ctx, rec)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for at := from / pop.SumBytes * pop.SumBytes; at < min(to, rec.Size); at += pop.SumBytes {
		b := make([]byte, min(pop.SumBytes, rec.Size-at))
		if n, err := f.ReadAt(b, at); n < len(b) {
			return got, cmp.Or(err, io.ErrUnexpectedEOF)
		}
		if k := at / pop.SumBytes * sha256.Size; sha256.Sum256(b) != [sha256.Size]byte(rec.Sums[k:k+sha256.Size]) {
			s.verifier.damaged(ctx, st, rec, fmt.Errorf("at %d: %w", at, pop.ErrDamaged))
			return got, pop.ErrDamaged
		}
		if err := s.node.Put(part, at, b); err != nil {
			return got, err
		}
		got += int64(len(b))
	}
	return got, nil
}

// bringFromHolder asks the node that is fetching the layer: if it lacks the bytes
// too, it fetches them, once for all.
func (s *routes) bringFromHolder(ctx context.Context, part *layer.Partial, from, to int64) (int64, error) {
	id := part.Layer.DiffID
	if s.cfg.Peers == nil || s.leads(id) {
		return 0, pop.ErrUnknown
	}
	h, held, err := s.cfg.Coord.Holder(ctx, pop.LayerLease(id))
	if err != nil {
		return 0, err
	}
	if !held || h.Holder.Address == "" || h.Holder.Node == s.cfg.Node {
		return 0, pop.ErrUnknown
	}
	from = from / peerRange * peerRange
	to = min((to+peerRange-1)/peerRange*peerRange, part.Size)
	r, err := s.cfg.Peers.Range(ctx, h.Holder.Address, id, from, to)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	b := make([]byte, to-from)
	if _, err := io.ReadFull(r, b); err != nil {
		return 0, err
	}
	return to - from, s.node.Put(part, from-from%presence.Page, b)
}

// damaged takes a layer out of the store whose bytes are not what was published,
// and has it replaced.
func (s *verifier) damaged(ctx context.Context, st *pop.Store, rec *pop.Layer, why error) {
	s.quarantine(ctx, st, rec, why)
	s.work.Go(func() { s.replace(s.life, rec.DiffID) })
}
