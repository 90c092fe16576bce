package checkpoint

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"dewpoint/internal/checkpoint/hooks"
	memory "dewpoint/internal/checkpoint/image"
	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/engine"
	"dewpoint/internal/image"
	"dewpoint/internal/pop"
	"dewpoint/internal/trace"

	"golang.org/x/sys/unix"
)

// Prepared is what a container is made with to start from a checkpoint.
type Prepared struct {
	Restore *engine.Restore
	late    *late // nil: all memory is there. It is written before Restore.Images returns
	release []func()
}

// Release lets go of what was brought, and ends what is still being brought; once the container is
// started, or given up.
func (p *Prepared) Release() {
	for i := len(p.release) - 1; i >= 0; i-- {
		p.release[i]()
	}
	p.release = nil
}

// Begin begins to bring the checkpoint's memory here, for which Restore.Images waits. Bring and Extend must
// follow before the container is made, and Release in any case.
func (p *Plan) Begin(ctx context.Context) *Prepared {
	out := &Prepared{Restore: &engine.Restore{Config: p.m.cfg.Restore}}
	bring := p.bringWhole
	if late, end := p.late(); late {
		out.Restore.Config = p.m.cfg.RestoreLazy
		bring = func(ctx context.Context) (string, func(), error) { return p.bringLate(ctx, out, end) }
	}
	var (
		dir     string
		release = func() {}
		err     error
	)
	bctx, cancel := context.WithCancel(ctx)
	brought := make(chan struct{})
	go func() {
		defer close(brought)
		_, step := trace.Start(trace.Beside(bctx), "memory")
		defer step.End()
		dir, release, err = bring(bctx)
	}()
	out.release = append(out.release, func() {
		cancel()
		<-brought
		release()
	})
	out.Restore.Images = func(ctx context.Context) (string, error) {
		select {
		case <-brought:
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
		if err != nil {
			return "", fmt.Errorf("its memory: %w", err)
		}
		return dir, nil
	}
	return out
}

// Bring brings the checkpoint's writable layer here, and waits for memory that takes its time.
func (p *Plan) Bring(ctx context.Context, out *Prepared) error {
	if err := p.bringUpper(ctx, out); err != nil || !p.far {
		return err
	}
	_, err := out.Restore.Images(ctx)
	return err
}

func (p *Plan) bringUpper(ctx context.Context, out *Prepared) error {
	u := p.Record.Upper
	if u == nil {
		return nil
	}
	p.m.making.hold(u.DiffID, 1)
	out.release = append(out.release, func() { p.m.making.hold(u.DiffID, -1) })
	if err := p.m.cfg.Layers.Bring(ctx, u.DiffID, u.Size); err != nil {
		return fmt.Errorf("its writable layer: %w", err)
	}
	out.Restore.Upper = u.DiffID
	return nil
}

// late decides whether the memory comes late. If so, end must be called once it has, or does not.
func (p *Plan) late() (late bool, end func()) {
	late, one := p.m.lazy(p.Record)
	end = func() {}
	if one {
		end, late = p.m.serving.claim(p.Record.ID)
	}
	return late, end
}

func (p *Plan) bringWhole(ctx context.Context) (dir string, release func(), err error) {
	dir, let, err := p.m.cfg.Store.Unpacked(ctx, *p.Record)
	if err != nil {
		return "", func() {}, err
	}
	var ahead sync.WaitGroup
	ahead.Go(func() { p.m.cfg.Store.ReadAhead(ctx, p.Record.ID) })
	return dir, func() {
		ahead.Wait() // ctx has ended
		let()
	}, nil
}

// Extend puts the writable layer on the image's, which must be registered.
func (p *Plan) Extend(ctx context.Context, out *Prepared) error {
	if out.Restore.Upper == "" {
		return nil
	}
	release, err := p.m.cfg.Containers.Extend(ctx, p.img, out.Restore.Upper)
	if err != nil {
		return err
	}
	out.release = append(out.release, release)
	return nil
}

// Patience is how long a restored container may take to be ready, at most most, if it took so long to
// make its processes: a machine that is slow at one is slow at the other.
func (p *Plan) Patience(most, took time.Duration) time.Duration {
	slowest := max(p.expect, took.Seconds())
	if all := p.m.boots.sorted(p.Record.ID); len(all) > 0 {
		slowest = max(slowest, all[len(all)-1])
	}
	return min(most, max(leastReady, time.Duration(patience*slowest*float64(time.Second))))
}

// After makes a container that was restored one of its own: its machine ID,
// and what its labels want to be run.
func (p *Plan) After(ctx context.Context, name string) error {
	if p.carrier != nil {
		if err := p.carrier.Awake(ctx, name); err != nil {
			return err
		}
	}
	info, err := p.m.cfg.Containers.Inspect(ctx, name)
	if err != nil {
		return err
	}
	return p.m.after(ctx, info, p.img, p.Record.ID)
}

// Again does what After does for a container that another daemon has restored, and of which it is not
// known whether that came to its end: hooks may run a second time.
func (m *Manager) Again(ctx context.Context, name string) error {
	info, err := m.cfg.Containers.Inspect(ctx, name)
	if err != nil {
		return err
	}
	img := m.cfg.Images.Image(ctx, info.Image, info.Digest)
	if img == nil {
		return fmt.Errorf("the image %s is not known here any more", info.Image)
	}
	return m.after(ctx, info, img, info.Labels[LabelRestored])
}

func (m *Manager) after(ctx context.Context, info *engine.Info, img *image.Image, id string) error {
	if info.Pid == 0 || info.Status != engine.Running {
		return engine.ErrNotRunning
	}
	if err := machineID(rootOf(info)); err != nil {
		return err
	}
	return hooks.Runner{}.After(ctx, m.hooked(info, img, id))
}

// machineID gives a container another /etc/machine-id, if it has one.
func machineID(dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	const file = "etc/machine-id"
	fi, err := root.Lstat(file)
	if err != nil || !fi.Mode().IsRegular() || fi.Size() == 0 {
		return nil // it has none
	}
	id := make([]byte, 16)
	rand.Read(id)
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80 // as systemd makes them
	f, err := root.OpenFile(file, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return fmt.Errorf("machine ID: %w", err)
	}
	_, err = f.WriteString(hex.EncodeToString(id) + "\n")
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("machine ID: %w", err)
	}
	return nil
}

// Explain finds out more about why a container could not be started. It is to
// be called before the container is removed.
func (p *Plan) Explain(name string, err error) error {
	if a := p.m.able.Load(); a != nil {
		if x, ok := a.engine.(Explainer); ok {
			return x.Explain(p.m.cfg.Containers.WorkDir(name), err)
		}
	}
	return err
}

// Serving decides that the container, which is ready, was restored. It returns an error if its memory was
// lost meanwhile: the container has ended then, or is about to, and nobody else starts it anew.
func (p *Plan) Serving() error {
	if !p.outcome.CompareAndSwap(open, served) && p.outcome.Load() == lost {
		return errors.New("its memory was lost when it was ready")
	}
	return nil
}

// Restored records that the container is ready, in seconds since its restore began.
func (p *Plan) Restored(ctx context.Context, seconds float64) {
	p.m.stats.restored.Add(1)
	p.m.cfg.Store.Succeeded(ctx, p.Record.ID)
	if err := p.m.boots.add(p.Record.ID, seconds); err != nil {
		p.m.cfg.Log.Warn("remember how long a restore took", "err", err)
	}
}

// Failed records that a container did not start from the checkpoint. Whether the checkpoint is to blame is
// known when the container has booted instead (Booted): one that does not become ready then has too little
// memory, a check that nothing passes, or the like.
func (p *Plan) Failed(why error) {
	p.m.stats.failed.Add(1)
	p.m.cfg.Log.Warn("a container could not be restored", "checkpoint", p.Record.ID, "image", p.img.Ref, "err",
		why)
	p.failed = why
}

// blame counts a failure. After a few the checkpoint is not used any more. One that is gone is not to blame,
// nor is one that this node had no room for, or that the PoP's store did not give; damaged data have been
// taken out.
func (p *Plan) blame(ctx context.Context) {
	for _, other := range []error{nil, store.ErrUnknown, store.ErrDamaged, memory.ErrDamaged, store.ErrNoPoP,
		pop.ErrStoreAway, unix.ENOSPC, unix.EDQUOT} {
		if errors.Is(p.failed, other) {
			return
		}
	}
	bad := p.m.cfg.Store.Fail(ctx, p.Record.ID, p.failed.Error())
	if bad && p.m.cfg.Audience != nil {
		p.m.cfg.Audience.Quarantined(*p.Record, p.failed)
	}
}
