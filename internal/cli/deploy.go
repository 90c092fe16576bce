package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

// Exit codes of several deployments: exitSome and the number of those that failed, at most exitMost.
const (
	exitSome = 20
	exitMost = 99
)

func deployFlags(c *call) {
	c.flags.IntVar(&c.opt.count, "count", 1, "`number` of containers of each instruction")
	c.flags.IntVar(&c.opt.parallel, "parallel", 0,
		"`number` of these deployments at once; what the node admits if 0")
	c.flags.StringVar(&c.opt.spec, "spec", "",
		"deploy what this `file` says, YAML or JSON, instead of an image; - is standard input")
	c.flags.BoolVarP(&c.opt.detach, "detach", "d", false,
		"return when the node has accepted them, and let them go on")
	c.flags.StringVar(&c.opt.terms.Key, "key", "",
		"`name` of your own for this: asked for again with it, nothing is deployed twice")
	c.flags.DurationVar(&c.opt.terms.Deadline, "deadline", 0,
		"longest `time` of each, in the queue too; none if 0")
	c.flags.BoolVar(&c.opt.remove, "rm", false, "remove the containers when they exit")
	containerFlags(c)
}

// deploy starts containers, as many as are asked for.
func deploy(ctx context.Context, c *call) error {
	m, err := c.many()
	if err != nil {
		return err
	}
	all, err := m.All()
	if err != nil {
		return misuse(c, "%v", err)
	}
	if len(all) == 1 && !m.Terms.Detach {
		r := m.Requests[0]
		r.Terms = m.Terms
		return c.background(ctx, r)
	}
	return newFleet(c, all).deploy(ctx, m)
}

// many is the instruction that the flags, the arguments and the file make.
func (c *call) many() (spec.Many, error) {
	m := spec.Many{Count: c.opt.count, Parallel: c.opt.parallel, Terms: c.opt.terms}
	m.Terms.Detach = c.opt.detach
	switch {
	case m.Count < 1:
		return m, misuse(c, "--count is at least 1")
	case m.Parallel < 0 || m.Terms.Deadline < 0:
		return m, misuse(c, "--parallel and --deadline are not below 0")
	case c.opt.spec == "":
		r, err := c.instruction()
		m.Requests = []spec.Request{r}
		return m, err
	}
	if len(c.args) > 0 {
		return m, misuse(c, "an image and --spec are given: the file names images")
	}
	for _, f := range specless() {
		if c.flags.Changed(f) {
			return m, misuse(c, "--%s and --spec are given: say it in the file", f)
		}
	}
	var err error
	m.Requests, err = c.readSpecs(c.opt.spec)
	return m, err
}

// specless are the flags that say what a file of instructions says itself.
func specless() []string {
	c := &call{flags: pflag.NewFlagSet("", pflag.ContinueOnError)}
	containerFlags(c)
	names := []string{"rm"}
	c.flags.VisitAll(func(f *pflag.Flag) {
		if f.Name != "quiet" {
			names = append(names, f.Name)
		}
	})
	return names
}

// deploy asks for m and shows how it goes. The first signal cancels what is not ready and waits
// until nothing is left of it, the second leaves at once.
func (f *fleet) deploy(ctx context.Context, m spec.Many) error {
	ctx, leave := context.WithCancel(ctx)
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	interrupted := make(chan exitStatus, 1)
	var tending sync.WaitGroup
	tending.Go(func() {
		select {
		case s := <-signals:
			interrupted <- exitStatus(128 + int(s.(syscall.Signal)))
		case <-ctx.Done():
			return
		}
		tending.Go(func() { f.cancelAll(ctx) })
		if m.Terms.Detach { // what was accepted is canceled by "dew cancel"
			leave()
		}
		select {
		case <-signals:
			leave()
		case <-ctx.Done():
		}
	})
	f.begin()
	err := f.c.client.DeployMany(ctx, m, f.watch())
	signal.Stop(signals)
	leave()
	tending.Wait()
	err = f.finish(err, m.Terms.Detach)
	select {
	case status := <-interrupted:
		return status
	default:
		return err
	}
}

// cancelAll calls off what has not ended, also what is heard of later, until ctx ends. It returns when
// the node has answered.
func (f *fleet) cancelAll(ctx context.Context) {
	var g errgroup.Group
	g.SetLimit(8)
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for asked := map[string]bool{}; ctx.Err() == nil; {
		for _, id := range f.cancelling() {
			if asked[id] {
				continue
			}
			asked[id] = true
			g.Go(func() error {
				if _, err := f.c.client.CancelDeployment(ctx, spec.DeploymentRef{ID: id}); err != nil &&
					ctx.Err() == nil {
					f.say(fmt.Sprintf("dew: %s", verdict(err).Error()))
				}
				return nil
			})
		}
		select {
		case <-again.C:
		case <-ctx.Done():
		}
	}
	_ = g.Wait() // what it runs says its errors itself
}

// sum is the error of a fleet of which some have failed: nil if none has.
func (f *fleet) sum() error {
	failed, last := 0, (*spec.Failure)(nil)
	for _, r := range f.rows {
		if r.failure != nil {
			failed++
			last = r.failure
		}
	}
	switch {
	case failed == 0:
		return nil
	case len(f.rows) == 1:
		return api.FromFailure(last)
	}
	e := api.New(api.Code(last.Code), fmt.Sprintf("%d of %d deployments failed", failed, len(f.rows)))
	e.Remedy = "see their lines above"
	e.Exit = min(exitSome+failed, exitMost)
	return e
}
