package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/term"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

func runFlags(c *call) {
	c.flags.BoolVarP(&c.opt.detach, "detach", "d", false,
		"return when the container is ready, and print its name")
	c.flags.BoolVar(&c.opt.remove, "rm", false, "remove the container when it exits")
	c.flags.StringVar(&c.opt.cidfile, "cidfile", "", "write the container's name to a new `file`")
	containerFlags(c)
}

func run(ctx context.Context, c *call) error {
	req, err := c.instruction()
	if err != nil {
		return err
	}
	if c.opt.detach {
		return c.background(ctx, req)
	}
	if req.TTY && req.Stdin && !term.IsTerminal(int(c.cfg.Stdin.Fd())) {
		return misuse(c, "-t needs a terminal as standard input, with -i")
	}
	f := &foreground{c: c, show: c.progress(req.Image), off: newRecall(c), created: make(chan string, 1),
		ready: make(chan string, 1), left: make(chan struct{}, 1)}
	return f.run(ctx, req)
}

// background deploys and prints the name or the record.
func (c *call) background(ctx context.Context, req spec.Request) error {
	show := c.progress(req.Image)
	watch, err := c.noting(show.watch())
	if err != nil {
		return err
	}
	off := newRecall(c)
	ctx, end := off.tend(ctx)
	record, err := c.client.Deploy(ctx, req, off.watch(watch))
	end()
	show.finish(record, err)
	err = off.outcome(ctx, err)
	if c.json && record.Image != "" {
		return errors.Join(err, c.print(record))
	}
	if err == nil {
		fmt.Fprintln(c.cfg.Stdout, record.Name)
	}
	return err
}

// foreground is a run that stays with its container.
type foreground struct {
	c       *call
	show    *progress
	off     *recall       // until it is ready
	created chan string   // the container's name, once it can be attached to
	ready   chan string   // the container's name, once it can be stopped
	left    chan struct{} // the user has left the container to itself

	name   string // of the container that was left
	spoken bool   // the container has written something
	inLine bool   // and its last output on stdout did not end the line
}

func (f *foreground) run(ctx context.Context, req spec.Request) error {
	watch, err := f.c.noting(f.watch())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)
	var tending sync.WaitGroup
	tending.Go(func() { f.tend(ctx, signals, cancel) })
	if req.TTY || req.Stdin {
		tending.Go(func() { f.join(ctx, req.Options) })
	}

	record, status, err := f.c.client.Run(ctx, req, f.off.watch(watch), f.output)
	f.off.settle()
	cancel(nil)
	tending.Wait()
	f.show.finish(record, err)
	err = f.off.outcome(ctx, err)
	if errors.Is(err, exitStatus(0)) {
		f.c.left(f.name)
	}
	if f.c.json && record.Image != "" {
		if f.inLine {
			fmt.Fprintln(f.c.cfg.Stdout)
		}
		err = errors.Join(err, f.c.print(record))
	}
	if err != nil {
		return err
	}
	if status != 0 {
		return exitStatus(status)
	}
	return nil
}

// watch also learns the container's name. It is ready, and from then on
// stopped instead of undone, when the stage says so.
func (f *foreground) watch() spec.Watch {
	w := f.show.watch()
	reached := w.Reached
	w.Reached = func(name, stage string, at float64) {
		reached(name, stage, at)
		var to chan string
		switch stage {
		case spec.Created:
			to = f.created
		case spec.Ready:
			to = f.ready
		}
		select {
		case to <- name:
		default:
		}
	}
	return w
}

// join passes on input once the container is made.
func (f *foreground) join(ctx context.Context, has spec.Options) {
	var name string
	select {
	case name = <-f.created:
	case <-ctx.Done():
		return
	}
	if has.TTY {
		f.show.silence()
	}
	_, err := f.c.join(ctx, name, has, spec.ExecIO{})
	if errors.Is(err, errLeft) {
		f.left <- struct{}{}
		return
	}
	// That it has ended is told by who waits for it.
	if err == nil || ctx.Err() != nil {
		return
	}
	if code := verdict(err).Code; code != api.NotRunning && code != api.NotFound {
		fmt.Fprintf(f.c.cfg.Stderr, "dew: %s\n", verdict(err).Error())
	}
}

// output passes on what the container writes, after progress is off the screen.
func (f *foreground) output(c spec.LogChunk) error {
	if !f.spoken {
		f.spoken = true
		f.show.silence()
	}
	var w io.Writer = f.c.cfg.Stdout
	if c.Stream == spec.Stderr {
		w = f.c.cfg.Stderr
	} else if len(c.Data) > 0 {
		f.inLine = c.Data[len(c.Data)-1] != '\n'
	}
	_, err := w.Write(c.Data)
	return err
}

// recall cancels the deployment. One that was ready meanwhile is stopped.
func (f *foreground) recall(ctx context.Context, s os.Signal, cancel context.CancelCauseFunc) {
	d, err := f.off.cancel(ctx, s)
	if err == nil && d.State == spec.StateDone {
		err = f.c.client.Stop(ctx, d.Name, api.DefaultTimeout)
	}
	if err != nil {
		cancel(statusOf(s))
	}
}

// tend turns signals into stops: the first asks the container to end, the
// second kills it, the third leaves it. So do the keys that leave it, once it is
// ready. Before the container is ready a signal cancels the deployment.
func (f *foreground) tend(ctx context.Context, signals <-chan os.Signal, cancel context.CancelCauseFunc) {
	var name string
	var stops sync.WaitGroup
	defer stops.Wait()
	leaving := false
	for n := 0; ; {
		if leaving && name != "" {
			f.name = name
			cancel(exitStatus(0))
			return
		}
		select {
		case <-ctx.Done():
			return
		case name = <-f.ready:
		case <-f.left:
			if leaving = true; name == "" {
				fmt.Fprintln(f.c.cfg.Stderr, "dew: it is left once it is ready; ctrl-c cancels it")
			}
		case s := <-signals:
			select {
			case name = <-f.ready: // it was ready before the signal came
			default:
			}
			n++
			switch {
			case name == "" && n == 1:
				stops.Go(func() { f.recall(ctx, s, cancel) })
				continue
			case name == "" || n > 2:
				cancel(statusOf(s))
				return
			}
			timeout := api.DefaultTimeout
			if n == 2 {
				timeout = 0
			}
			stops.Go(func() {
				if err := f.c.client.Stop(ctx, name, timeout); err != nil && ctx.Err() == nil {
					fmt.Fprintf(f.c.cfg.Stderr, "dew: %s\n", verdict(err).Error())
				}
			})
		}
	}
}

func pullFlags(c *call) {
	p := &c.opt.pull
	c.flags.BoolVar(&p.Blobs, "blobs", false, "also put the original blobs into containerd's content store")
	c.flags.BoolVarP(&c.opt.quiet, "quiet", "q", false, "show no progress")
	imageFlags(c.flags, &p.Lazy, &p.Order, &p.Inflaters)
}

func pull(ctx context.Context, c *call) error {
	image, err := c.one("image")
	if err != nil {
		return err
	}
	req := c.opt.pull
	req.Image = image
	if err := req.Validate(); err != nil {
		return misuse(c, "%v", err)
	}
	ctx, stop := interruptible(ctx)
	defer stop()
	show := c.progress(image)
	record, err := c.client.Pull(ctx, req, show.watch())
	show.finish(record, err)
	if c.json && record.Image != "" {
		return errors.Join(err, c.print(record))
	}
	if err == nil {
		fmt.Fprintln(c.cfg.Stdout, record.Digest)
	}
	return err
}
