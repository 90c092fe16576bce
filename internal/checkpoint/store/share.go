package store

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// shared is the records of the PoP's store, and what nodes have failed at. Those that cannot
// be understood are left out.
func (s *Store) shared(ctx context.Context) ([]Record, failed, error) {
	st := s.pop()
	if st == nil {
		return nil, nil, nil
	}
	objects, err := st.Checkpoints(ctx)
	if err != nil && objects == nil {
		return nil, nil, err
	}
	var all []Record
	for _, l := range objects {
		r, err := parse(l.Checkpoint)
		if err == nil && (digestOf(r.ID) != l.DiffID || r.Data.Size != l.Size) {
			err = fmt.Errorf("%w: %s has the record of %s", ErrDamaged, l.DiffID, r.ID)
		}
		if err != nil {
			s.cfg.Log.Debug("a checkpoint of the PoP's store cannot be understood", "err", err)
			continue
		}
		all = append(all, r)
	}
	f, err := s.failures(ctx)
	return all, f, err
}

// HasUpper reports whether the writable layer of a checkpoint can be had: this node keeps those
// of its own, others' are in the PoP's store unless it has lost them, or come from who gives the checkpoint.
func (s *Store) HasUpper(ctx context.Context, l Listed) bool {
	return l.Local || l.Peer || s.upperThere(ctx, l.Upper)
}

// upperThere reports whether the PoP's store has the layer.
func (s *Store) upperThere(ctx context.Context, upper *Layer) bool {
	if upper == nil {
		return true
	}
	st := s.pop()
	return st != nil && st.Has(ctx, upper.DiffID)
}

// Publish copies a checkpoint of this node into the PoP's store, verifying it, unless it is there, under a
// lease that is renewed meanwhile: a copy that stands still for longer than the store's grace is not swept.
// Of several at once one copies, the others wait. Its upper layer is there already, else the error wraps
// ErrNoUpper; it wraps ErrQuarantined if restoring failed too often, ErrDamaged if the data are not what the
// record says, ErrNoPoP, ErrUnknown.
func (s *Store) Publish(ctx context.Context, id string) error {
	if err := s.publish(ctx, id); err != nil {
		return fmt.Errorf("publish checkpoint %.12s: %w", id, err)
	}
	return nil
}

func (s *Store) publish(ctx context.Context, id string) error {
	st := s.pop()
	if st == nil {
		return ErrNoPoP
	}
	e, d, err := s.open(id)
	if err != nil {
		return err
	}
	defer d.Close()
	failed, err := s.failures(ctx)
	if err != nil {
		return err
	}
	if _, bad := s.judge(id, failed); bad {
		return ErrQuarantined
	}
	if !s.upperThere(ctx, e.Upper) {
		return ErrNoUpper
	}
	token, release, err := s.claim(ctx, st, digestOf(id))
	if err != nil {
		return err
	}
	defer release()
	if st.Has(ctx, digestOf(id)) {
		return nil
	}
	b, err := json.Marshal(e.Record)
	if err != nil {
		return err
	}
	l := pop.Layer{Size: e.Data.Size, Image: e.Image, Cost: max(0.1, e.Boot-e.Record.Restore), Checkpoint: b}
	if e.Upper != nil {
		l.Upper = e.Upper.DiffID
	}
	err = copyTo(ctx, st, digestOf(id), token, e.Data.Digest, d, l)
	s.lookAgain()
	if err != nil {
		return err
	}
	return s.retainShared(ctx, e.Record)
}

// claimEvery is the time between two tries to get a lease that another node holds.
const claimEvery = time.Second

// claim takes the lease of a checkpoint that is to be copied into the PoP's store, or waits until who
// has it has published the checkpoint or given up. Without a coordinator there is none: nobody sweeps then.
func (s *Store) claim(ctx context.Context, st *pop.Store, id digest.Digest) (token uint64, release func(),
	err error) {
	for !st.Has(ctx, id) {
		lease, err := st.Lead(ctx, id)
		if err == nil {
			return lease.Token(), func() {
				if err := lease.Release(context.WithoutCancel(ctx)); err != nil {
					s.cfg.Log.Debug("a lease ends by itself", "checkpoint", id, "err", err)
				}
			}, nil
		}
		if !errors.As(err, new(*pop.HeldError)) {
			s.cfg.Log.Debug("a checkpoint is published without a lease", "id", id, "err", err)
			break
		}
		select {
		case <-time.After(claimEvery):
		case <-ctx.Done():
			return 0, nil, context.Cause(ctx)
		}
	}
	return st.Above(ctx, id) + 1, func() {}, nil
}

// retainShared takes older checkpoints of the same image and key out of the PoP's store,
// beyond Keep. Who reads one goes on.
func (s *Store) retainShared(ctx context.Context, r Record) error {
	all, _, err := s.shared(ctx)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(o Record) bool { return o.Manifest != r.Manifest || o.Key != r.Key })
	slices.SortFunc(all, func(a, b Record) int { return b.Created.Compare(a.Created) })
	for k, o := range all {
		if k >= s.cfg.Keep && o.ID != r.ID {
			_, uerr := s.unpublish(ctx, o.ID)
			err = errors.Join(err, uerr)
		}
	}
	return err
}

// copyTo publishes a data file if its bytes are right.
func copyTo(ctx context.Context, st *pop.Store, id digest.Digest, token uint64, want digest.Digest, d *Data,
	l pop.Layer) error {
	draft, err := st.Draft(ctx, id, token)
	if err != nil {
		return err
	}
	h := sha256.New()
	_, err = io.CopyBuffer(io.MultiWriter(draft, h), cancelled{ctx, io.NewSectionReader(d, 0, d.Size)},
		make([]byte, 1<<20))
	if err == nil && digest.NewDigest(digest.SHA256, h) != want {
		err = fmt.Errorf("%w: this node's copy", ErrDamaged)
	}
	if err != nil {
		return errors.Join(err, draft.Abandon(context.WithoutCancel(ctx)))
	}
	return errors.Join(draft.Publish(ctx, l, nil), draft.Close())
}

// unpublish takes a checkpoint out of the PoP's store, for good, and reports whether it was there.
func (s *Store) unpublish(ctx context.Context, id string) (bool, error) {
	return s.takeOut(ctx, id, (*pop.Store).Withdraw)
}

// takeOut takes a checkpoint out of the PoP's store in one of its ways, and reports whether it was there.
func (s *Store) takeOut(ctx context.Context, id string,
	out func(*pop.Store, context.Context, *pop.Layer) error) (bool, error) {
	st := s.pop()
	if st == nil || digestOf(id).Validate() != nil || !st.Has(ctx, digestOf(id)) {
		return false, nil
	}
	l, err := st.Record(ctx, digestOf(id))
	if err == nil {
		err = out(st, ctx, l)
	}
	s.lookAgain()
	if errors.Is(err, pop.ErrUnknown) {
		return false, nil
	}
	return true, err
}
