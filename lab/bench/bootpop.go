package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/testkit/demo"
	"dewpoint/testkit/popbed"
	"dewpoint/testkit/testbed"

	"golang.org/x/sync/errgroup"
)

// popCheckpoint has restores on one node of what another has published.
type popCheckpoint struct {
	*pop
	b *bootBench
}

// openPoP makes a bed whose first two nodes run dewd: the first makes
// checkpoints, the second restores them.
func (b *bootBench) openPoP(ctx context.Context) (*popCheckpoint, error) {
	if err := b.o.build(ctx, b.stderr); err != nil {
		return nil, err
	}
	all := &popBench{o: b.o, self: b.self, stdout: b.stdout, stderr: b.stderr}
	p, err := all.open(ctx, popConfig{kind: b.store, nodes: 3, dewds: 2, layout: b.o.layout, engine: bootSubnet})
	if err != nil {
		return nil, err
	}
	return &popCheckpoint{p, b}, nil
}

// dew is the command line, on node i.
func (p *popCheckpoint) dew(ctx context.Context, i int, command string, args ...string) ([]byte, error) {
	cmd := p.Command(ctx, p.Nodes[i].Name, filepath.Join(p.b.o.bin, "dew"),
		append([]string{"-H", p.Nodes[i].Host(), "--json", command}, args...)...)
	return p.Nodes[i].Group().Run(cmd)
}

// bring runs an image on node i, and returns how it came up and the seconds until it answered.
func (p *popCheckpoint) bring(ctx context.Context, i int, image, restore string) (Sample, error) {
	return p.bringAll(ctx, i, image, restore, 1)
}

// bringAll runs so many containers of an image at once on node i, and returns how the first came up and the
// seconds until all answered.
func (p *popCheckpoint) bringAll(ctx context.Context, i int, image, restore string, n int) (s Sample,
	err error) {
	group, parent := p.Nodes[i].Group(), popbed.ParentCgroup(p.Nodes[i].State())
	before, err := engineCPU(group, parent)
	if err != nil {
		return s, err
	}
	start := time.Now()
	records := make([]spec.Record, n)
	var g errgroup.Group
	for k := range n {
		g.Go(func() (err error) {
			records[k], err = p.one(ctx, i, image, restore, cloneName(k))
			return err
		})
	}
	err = g.Wait()
	s = Sample{Image: image, Engine: map[string]string{"never": "boot", "always": "restore"}[restore],
		Seconds: time.Since(start).Seconds()}
	after, cerr := engineCPU(group, parent)
	s.CPU = after - before
	s.Way, s.Attached = startOf(records[0]), records[0].Stages[spec.Mounted]
	return s, errors.Join(err, cerr)
}

func cloneName(k int) string {
	if k == 0 {
		return bootName
	}
	return fmt.Sprintf("%s-%d", bootName, k)
}

// one runs one container on node i and returns once it has answered.
func (p *popCheckpoint) one(ctx context.Context, i int, image, restore, name string) (r spec.Record,
	err error) {
	app, err := applicationOf(image)
	if err != nil {
		return r, err
	}
	said, err := p.dew(ctx, i, "run", "-d", "--lazy", "never", "--net", "bridge", "--ready", app.ready,
		"--ready-timeout", "3m",
		"--restore", restore, "--name", name, popbed.Registry+"/"+image)
	if err != nil {
		return r, err
	}
	address, err := addressAt(ctx, p.Nodes[i].Host(), name)
	if err != nil {
		return r, err
	}
	dial := func(ctx context.Context, _, at string) (net.Conn, error) { return p.Dial(ctx, i, at) }
	err = until(ctx, 3*time.Minute, func() error { return answerAt(ctx, image, address, dial) })
	return r, errors.Join(err, json.Unmarshal(said, &r))
}

// checkpoint makes one on node i of what runs there, and waits until the store has it.
func (p *popCheckpoint) checkpoint(ctx context.Context, i int) error {
	_, err := p.dew(ctx, i, "checkpoint", "--stateful", bootName)
	return err
}

// awaitCheckpoint waits until node i sees a checkpoint of an image.
func (p *popCheckpoint) awaitCheckpoint(ctx context.Context, i int, image string) error {
	return until(ctx, time.Minute, func() error {
		said, err := p.dew(ctx, i, "checkpoints", popbed.Registry+"/"+image)
		if err != nil {
			return err
		}
		var all []checkpointed
		if err := json.Unmarshal(said, &all); err != nil {
			return err
		}
		if len(all) == 0 {
			return fmt.Errorf("node %d sees no checkpoint of %s", i+1, image)
		}
		return nil
	})
}

// anew has node i begin with nothing but the PoP.
func (p *popCheckpoint) anew(ctx context.Context, i int) error {
	if err := p.KillNode(i); err != nil {
		return err
	}
	// Its name is let go of, as dewd's error says of a machine that was installed anew.
	owner := filepath.Join(p.Nodes[0].Store, "nodes", p.Nodes[i].Name+".owner")
	if err := errors.Join(testbed.Clean(p.Nodes[i].Root()), os.Remove(owner)); err != nil {
		return err
	}
	if err := p.RebootNode(ctx, i); err != nil {
		return err
	}
	return dropCaches()
}

// fromPoP compares boots and restores on a node that has neither image nor
// checkpoint, which the PoP's store has.
func (b *bootBench) fromPoP(ctx context.Context) (err error) {
	p, err := b.openPoP(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	for _, image := range b.o.images {
		if err := p.publish(ctx, image); err != nil {
			return err
		}
		if err := p.compare(ctx, image); err != nil {
			return err
		}
	}
	var what []string
	for _, n := range b.popClones() {
		what = append(what, atStore(n))
	}
	b.bootTable("from the PoP's store on another node ("+string(b.store)+
		"), image and checkpoint, seconds until all have answered", what, b.popVerdict)
	return nil
}

const storeStart = "store"

// popClones are how many containers start at once on the other node: one, unless -clones is given.
func (b *bootBench) popClones() []int {
	if b.o.asked("clones") {
		return b.clones
	}
	return []int{1}
}

func atStore(n int) string {
	if n == 1 {
		return storeStart
	}
	return fmt.Sprintf("%s, %s", storeStart, clonesOf(n))
}

// publish boots an image on the first node and makes a checkpoint of it.
func (p *popCheckpoint) publish(ctx context.Context, image string) error {
	if _, err := p.bring(ctx, 0, image, "never"); err != nil {
		return err
	}
	if err := p.checkpoint(ctx, 0); err != nil {
		p.b.refuse(image, err)
	} else if err := p.awaitCheckpoint(ctx, 1, image); err != nil {
		return err
	}
	return p.Remove(ctx, 0, bootName)
}

func (p *popCheckpoint) compare(ctx context.Context, image string) error {
	ways := []string{"never", "always"}
	if p.b.refused[image] != "" {
		ways = ways[:1]
	}
	for round := range p.b.o.rounds {
		for _, n := range p.b.popClones() {
			for i := range ways {
				if err := p.measure(ctx, image, ways[(i+round)%len(ways)], n, round); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// measure starts so many at once on the second node, which has nothing.
func (p *popCheckpoint) measure(ctx context.Context, image, restore string, n, round int) error {
	if err := p.anew(ctx, 1); err != nil {
		return err
	}
	if restore == "always" {
		if err := p.awaitCheckpoint(ctx, 1, image); err != nil {
			return err
		}
	}
	s, err := p.bringAll(ctx, 1, image, restore, n)
	if err != nil && restore == "always" { // noted, and the next anew takes what is left
		p.b.refuse(image, err)
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", image, err)
	}
	s.What, s.Round = atStore(n), round
	p.b.report.add(s)
	return nil
}

// popVerdict holds all of a restore against 0.7 s, and against a boot what either takes once the image is
// attached: that is the same of both, and nothing that a checkpoint saves.
func (b *bootBench) popVerdict(image, what string, _, restore float64) string {
	if what != storeStart {
		return ""
	}
	verdict := "at most 0.7 s: " + b.met(restore <= 0.7)
	alone := func(engine string) float64 {
		return median(values(b.report.of(key{image, 0, what}, engine), func(s Sample) float64 {
			return s.Seconds - s.Attached
		}))
	}
	boot, restore := alone("boot"), alone("restore")
	times := 0.0
	switch {
	case boot > 5:
		times = 10
	case boot > 2:
		times = 5
	default:
		return verdict
	}
	return verdict + fmt.Sprintf("; once the image is attached (boot %.2f s, restore %.2f s) %.0f times faster: %s", boot, restore, times, b.met(boot >= times*restore))
}

// --- traffic -----------------------------------------------------------------------

// The trace of figure 6.8: a minute, each second; a checkpoint is made at 6 s, a restore at 15 s.
const (
	traceTime    = 60 * time.Second
	checkpointAt = 6 * time.Second
	restoreAt    = 15 * time.Second
)

// traffic traces what the nodes send and receive: the one that deploys and one
// that only has a brick (figure 6.8).
func (b *bootBench) traffic(ctx context.Context) (err error) {
	if !b.o.asked("images") {
		b.o.images = []string{"redis:1"} // as in the thesis
	}
	p, err := b.openPoP(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	for _, image := range b.o.images {
		if err := p.traceAll(ctx, image); err != nil {
			return err
		}
	}
	b.trafficTable()
	return nil
}

func (p *popCheckpoint) traceAll(ctx context.Context, image string) error {
	if _, err := p.bring(ctx, 0, image, "never"); err != nil {
		return err
	}
	layers, err := p.layersOf(image)
	if err != nil {
		return err
	}
	if err := p.awaitStored(ctx, layers); err != nil {
		return err
	}
	nothing := func() error { return nil }
	if err := p.trace(ctx, image, "idle", 0, 0, nothing); err != nil {
		return err
	}
	if err := p.trace(ctx, image, "checkpoint", 0, checkpointAt, func() error {
		return p.checkpoint(ctx, 0)
	}); err != nil {
		return err
	}
	if err := errors.Join(p.Remove(ctx, 0, bootName), p.anew(ctx, 1)); err != nil {
		return err
	}
	err = p.trace(ctx, image, "restore", 1, restoreAt, func() error {
		_, err := p.bring(ctx, 1, image, "always")
		return err
	})
	return errors.Join(err, p.Remove(ctx, 1, bootName))
}

func (p *popCheckpoint) layersOf(image string) (int, error) {
	m, err := demo.Manifest(p.b.o.layout, image)
	return len(m.Layers), err
}

// trace counts bytes each second, and does something after a while.
func (p *popCheckpoint) trace(ctx context.Context, image, state string, deploys int, at time.Duration,
	do func() error) error {
	done := make(chan error, 1)
	time.AfterFunc(at, func() { done <- do() })
	nodes := map[string]int{"node": deploys, "brick": 2}
	last := map[string]popbed.Traffic{}
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for range int(traceTime / time.Second) {
		for name, i := range nodes {
			now, err := p.LAN(i)
			if err != nil {
				return err
			}
			if was, ok := last[name]; ok {
				p.b.count(image, state, name+" in", float64(now.In-was.In)/1e3)
				p.b.count(image, state, name+" out", float64(now.Out-was.Out)/1e3)
			}
			last[name] = now
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
	}
	return <-done
}

// count adds a second's traffic, in kB, without a word.
func (b *bootBench) count(image, state, what string, v float64) {
	b.figures = merge(b.figures,
		[]figure{{Image: image, State: state, What: what, Unit: "kB/s", Values: []float64{v}}})
}

func (b *bootBench) trafficTable() {
	var rows [][]string
	for _, image := range b.o.images {
		for _, state := range []string{"idle", "checkpoint", "restore"} {
			row := []string{image, state}
			for _, what := range []string{"node in", "node out", "brick in", "brick out"} {
				f := find(b.figures, image, state, what)
				if f == nil {
					continue
				}
				sum := 0.0
				for _, v := range f.Values {
					sum += v
				}
				row = append(row, fmt.Sprintf("%.1f", f.median()), fmt.Sprintf("%.0f", slices.Max(f.Values)),
					fmt.Sprintf("%.2f", math.Round(sum)/1e3))
			}
			rows = append(rows, row)
		}
	}
	head := []string{"image", "state"}
	for _, what := range []string{"node in", "node out", "brick in", "brick out"} {
		head = append(head, what+": median kB/s", "peak kB/s", "MB in all")
	}
	b.markdown("traffic of the PoP's nodes within a minute, store "+string(b.store), head, rows)
}
