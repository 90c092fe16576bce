package deploy

import (
	"context"

	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/trace"
)

// registration makes an image known to containerd. It begins when the image is
// known: its documents are written while it is found out how its layers come.
type registration struct {
	end   context.CancelCauseFunc // gives it up, for a reason
	ended chan struct{}
	err   error // once ended is closed

	pulled chan struct{} // closed when pull is there
	pull   *fetch.Pull
}

// register begins one, which ends with ctx at the latest.
func (d *Deployer) register(ctx context.Context, img *image.Image) *registration {
	ctx, end := context.WithCancelCause(ctx)
	g := &registration{end: end, ended: make(chan struct{}), pulled: make(chan struct{})}
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

// wait returns when it has ended, or ctx has: it goes on then.
func (g *registration) wait(ctx context.Context) error {
	select {
	case <-g.ended:
		return g.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// close gives it up, unless it has ended, and waits for its end. g may be nil.
func (g *registration) close() {
	if g != nil {
		g.end(nil)
		<-g.ended
	}
}
