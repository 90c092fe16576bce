package deploy

import (
	"context"
	"sync"

	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/trace"
)

// registration makes an image known to containerd. It begins when the image is
// known: its documents are written while it is found out how its layers come.
type registration struct {
	giveUp context.CancelCauseFunc // for a reason
	ended  chan struct{}
	err    error // once ended is closed

	pulled chan struct{} // closed when pull is there
	pull   *fetch.Pull
}

// register begins one, which ends with ctx at the latest.
func (d *Deployer) register(ctx context.Context, img *image.Image) *registration {
	ctx, giveUp := context.WithCancelCause(ctx)
	g := &registration{giveUp: giveUp, ended: make(chan struct{}), pulled: make(chan struct{})}
	go func() {
		defer close(g.ended)
		ctx, step := trace.Start(ctx, "register")
		defer step.End()
		err := d.cfg.Engine.Register(ctx, img, g.layer)
		if cause := context.Cause(ctx); err != nil && cause != nil {
			err = cause
		}
		g.err = err
	}()
	return g
}

// follow says by which pull the layers come.
func (g *registration) follow(p *fetch.Pull) {
	g.pull = p
	close(g.pulled)
}

// layer blocks until layer i can be mounted.
func (g *registration) layer(ctx context.Context, i int) error {
	select {
	case <-g.pulled:
		return g.pull.WaitLayer(ctx, i)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// wait blocks until containerd has the image and its layers can be mounted. An error of any layer ends it at
// once.
func (g *registration) wait(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var filling sync.WaitGroup
	defer filling.Wait()
	defer cancel()
	filling.Go(func() {
		if err := g.pull.WaitMountable(ctx); err != nil && ctx.Err() == nil { // else it is this wait that ends
			g.giveUp(err)
		}
	})
	select {
	case <-g.ended:
		if g.err != nil {
			return g.err
		}
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return g.pull.WaitMountable(ctx) // also what containerd had of an earlier time is here
}

// close gives it up, unless it has ended, and waits for its end. g may be nil.
func (g *registration) close() {
	if g != nil {
		g.giveUp(nil)
		<-g.ended
	}
}
