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

// sharing puts checkpoints of this node into the PoP's store, takes them out, and opens those of others.
type sharing struct {
	*place
	catalog  *catalog
	failures *failures
	view     *view
}

// openShared opens what is in the PoP's store, and keeps it there meanwhile.
func (sh *sharing) openShared(ctx context.Context, r Record) (*Data, error) {
	st := sh.pop()
	if st == nil {
		return nil, fmt.Errorf("%.12s: %w", r.ID, errors.Join(ErrUnknown, ErrNoPoP))
	}
	l, release, err := st.Hold(ctx, digestOf(r.ID))
	if errors.Is(err, pop.ErrUnknown) {
		if _, rerr := st.Record(ctx, digestOf(r.ID)); rerr == nil { // nobody has taken it out
			return nil, fmt.Errorf("checkpoint %.12s: %w: %w", r.ID, ErrTorn, err)
		}
		return nil, fmt.Errorf("%.12s: %w: %w", r.ID, ErrUnknown, err)
	}
	if err != nil {
		return nil, fmt.Errorf("checkpoint %.12s: %w", r.ID, err)
	}
	f, err := st.Open(ctx, l)
	if err == nil && l.Size != r.Data.Size {
		err = errors.Join(fmt.Errorf("%w: %d bytes of %d", ErrDamaged, l.Size, r.Data.Size), f.Close())
	}
	if err != nil {
		release()
		return nil, fmt.Errorf("checkpoint %.12s: %w", r.ID, err)
	}
	if err := st.Touch(ctx, l.Image, "", l); err != nil {
		sh.cfg.Log.Debug("a checkpoint's use is not told", "id", r.ID, "err", err)
	}
	return &Data{ReaderAt: f, Size: l.Size, close: func() error {
		err := f.Close()
		release()
		return err
	}}, nil
}

// HasUpper reports whether the writable layer of a checkpoint can be had: this node keeps those
// of its own, others' are in the PoP's store unless it has lost them, or come from who gives the checkpoint.
func (sh *sharing) HasUpper(ctx context.Context, l Listed) bool {
	return l.Local || l.Peer || sh.upperThere(ctx, l.Upper)
}

// upperThere reports whether the PoP's store has the layer.
func (sh *sharing) upperThere(ctx context.Context, upper *Layer) bool {
	if upper == nil {
		return true
	}
	st := sh.pop()
	return st != nil && st.HasLayer(ctx, upper.DiffID)
}

// Publish copies a checkpoint of this node into the PoP's store, verifying it, unless it is there, under a
// lease that is renewed meanwhile: a copy that stands still for longer than the store's grace is not swept.
// Of several at once one copies, the others wait. Its upper layer is there already, else the error wraps
// ErrNoUpper; it wraps ErrQuarantined if restoring failed too often, ErrDamaged if the data are not what the
// record says, ErrNoPoP, ErrUnknown.
func (sh *sharing) Publish(ctx context.Context, id string) error {
	if err := sh.publish(ctx, id); err != nil {
		return fmt.Errorf("publish checkpoint %.12s: %w", id, err)
	}
	return nil
}

func (sh *sharing) publish(ctx context.Context, id string) error {
	st := sh.pop()
	if st == nil {
		return ErrNoPoP
	}
	e, d, err := sh.catalog.open(id)
	if err != nil {
		return err
	}
	defer d.Close()
	failed, err := sh.view.failures(ctx)
	if err != nil {
		return err
	}
	if _, bad := sh.failures.judge(id, failed); bad {
		return ErrQuarantined
	}
	if !sh.upperThere(ctx, e.Upper) {
		return ErrNoUpper
	}
	token, release, err := sh.claim(ctx, st, digestOf(id))
	if err != nil {
		return err
	}
	defer release()
	if st.HasLayer(ctx, digestOf(id)) {
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
	sh.view.lookAgain()
	if err != nil {
		return err
	}
	return sh.retainShared(ctx, e.Record)
}

// claimEvery is the time between two tries to get a lease that another node holds.
const claimEvery = time.Second

// claim takes the lease of a checkpoint that is to be copied into the PoP's store, or waits until who
// has it has published the checkpoint or given up. Without a coordinator there is none: nobody sweeps then.
func (sh *sharing) claim(ctx context.Context, st *pop.Store, id digest.Digest) (token uint64, release func(),
	err error) {
	for !st.HasLayer(ctx, id) {
		lease, err := st.Lead(ctx, id)
		if err == nil {
			return lease.Token(), func() {
				if err := lease.Release(context.WithoutCancel(ctx)); err != nil {
					sh.cfg.Log.Debug("a lease ends by itself", "checkpoint", id, "err", err)
				}
			}, nil
		}
		if !errors.As(err, new(*pop.HeldError)) {
			sh.cfg.Log.Debug("a checkpoint is published without a lease", "id", id, "err", err)
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
func (sh *sharing) retainShared(ctx context.Context, r Record) error {
	all, _, err := sh.view.shared(ctx)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(o Record) bool { return o.Manifest != r.Manifest || o.Key != r.Key })
	slices.SortFunc(all, func(a, b Record) int { return b.Created.Compare(a.Created) })
	for k, o := range all {
		if k >= sh.cfg.Keep && o.ID != r.ID {
			_, uerr := sh.unpublish(ctx, o.ID)
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
func (sh *sharing) unpublish(ctx context.Context, id string) (bool, error) {
	return sh.takeOut(ctx, id, (*pop.Store).Withdraw)
}

// takeOut takes a checkpoint out of the PoP's store in one of its ways, and reports whether it was there.
func (sh *sharing) takeOut(ctx context.Context, id string,
	out func(*pop.Store, context.Context, *pop.Layer) error) (bool, error) {
	st := sh.pop()
	if st == nil || digestOf(id).Validate() != nil || !st.HasLayer(ctx, digestOf(id)) {
		return false, nil
	}
	l, err := st.Record(ctx, digestOf(id))
	if err == nil {
		err = out(st, ctx, l)
	}
	sh.view.lookAgain()
	if errors.Is(err, pop.ErrUnknown) {
		return false, nil
	}
	return true, err
}
