package simtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/session"
	"dewpoint/testkit/poptest"

	"github.com/opencontainers/go-digest"
)

// node is a machine of the PoP: processes come and go on it, containers stay
// until the power goes.
type node struct {
	w    *world
	name string
	seed uint64

	mu      sync.Mutex // never held while the clock goes
	life    int        // number of the process
	at      *process   // nil: none
	locks   map[digest.Digest]chan struct{}
	standOn map[digest.Digest]map[*container]bool
}

// process is a dewd.
type process struct {
	n      *node
	rng    *rand.Rand
	client *Client
	coord  *session.Session
	store  *pop.Store
	mu     sync.Mutex // guards dead and the coordinator's faults
	dead   bool
	faults float64
	seed   uint64
}

func newNode(w *world, name string, seed uint64) *node {
	return &node{w: w, name: name, seed: seed, locks: map[digest.Digest]chan struct{}{},
		standOn: map[digest.Digest]map[*container]bool{}}
}

// boot starts a process, which opens the store as soon as it can.
func (n *node) boot() {
	n.mu.Lock()
	n.life++
	seed := n.seed + uint64(n.life)<<32
	p := &process{n: n, rng: rand.New(rand.NewPCG(seed, 2)), seed: seed}
	n.mu.Unlock()
	faults := n.w.faults
	if n.w.stopped() {
		faults = Faults{Stale: faults.Stale}
	} else {
		p.faults = faults.Before + faults.After
	}
	p.client = n.w.disk.Client(n.name, seed, faults)
	cfg, err := session.Defaults(pop.Config{Node: n.name, TTL: ttl})
	if err != nil {
		panic(err)
	}
	p.coord = session.New(cfg, &poptest.Faulty{Server: n.w.hub.Line(cfg), Fault: p.fault})
	n.mu.Lock()
	n.at = p
	n.mu.Unlock()
	n.w.note("%s starts", n.name)
	n.w.wg.Go(p.live)
}

// fault is how a step of the coordinator fails. It takes as long as the node stands
// still. What is drawn depends on what is asked when, not on what was asked before: the
// session's goroutines may ask at one instant.
func (p *process) fault(op, _ string) poptest.Fault {
	h := fnv.New64a()
	fmt.Fprint(h, p.seed, op, time.Since(epoch))
	draw := rand.New(rand.NewPCG(p.seed, h.Sum64()))
	p.client.Gate(time.Duration(draw.IntN(1e6)))
	p.mu.Lock()
	defer p.mu.Unlock()
	switch x := draw.Float64(); {
	case p.dead:
		return poptest.Before
	case x < p.faults/2:
		return poptest.Before
	case x < p.faults:
		return poptest.After
	}
	return poptest.None
}

func (p *process) alive() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.dead
}

// kill ends the process as kill -9 does; containers go on unless the power is off.
func (n *node) kill(off bool) {
	n.mu.Lock()
	p := n.at
	n.at = nil
	n.mu.Unlock()
	if p == nil {
		return
	}
	n.w.note("%s dies, power off: %v", n.name, off)
	p.mu.Lock()
	p.dead = true
	p.mu.Unlock()
	p.client.Kill(off)
	n.ends(func(c *container) bool { return off || c.of.checkpoint != nil })
	if off {
		n.w.disk.Crash(n.name, rand.New(rand.NewPCG(p.seed, 3)))
	}
	n.w.wg.Go(func() { p.coord.Close() })
}

// ends ends the containers that which chooses.
func (n *node) ends(which func(c *container) bool) {
	var all []*container
	n.mu.Lock()
	for _, cs := range n.standOn {
		for c := range cs {
			if which(c) {
				all = append(all, c)
				delete(cs, c)
			}
		}
	}
	n.mu.Unlock()
	slices.SortFunc(all, func(a, b *container) int { return strings.Compare(a.name, b.name) })
	for _, c := range all {
		n.w.end(c)
	}
}

// crash kills the process and starts another after a time.
func (n *node) crash(off bool, after time.Duration) {
	n.kill(off)
	time.Sleep(after)
	n.mu.Lock()
	there := n.at != nil
	n.mu.Unlock()
	if !there {
		n.boot()
	}
}

func (n *node) process() *process {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.at
}

func (n *node) cut(cut bool) {
	if p := n.process(); p != nil {
		p.client.Cut(cut)
	}
}

func (n *node) stand(d time.Duration) {
	if p := n.process(); p != nil {
		p.client.Stand(d)
	}
}

// calm makes nothing fail any more.
func (n *node) calm() {
	if p := n.process(); p != nil {
		p.client.Heal()
		p.mu.Lock()
		p.faults = 0
		p.mu.Unlock()
	}
	n.w.hub.Cut(n.name, false)
}

// lock excludes other goroutines of the node from beginning or ceasing to use a layer.
func (n *node) lock(id digest.Digest) (unlock func()) {
	n.mu.Lock()
	l := n.locks[id]
	if l == nil {
		l = make(chan struct{}, 1)
		n.locks[id] = l
	}
	n.mu.Unlock()
	select {
	case l <- struct{}{}:
	default:
		l <- struct{}{}
		// who had it goes on at this instant
		time.Sleep(time.Duration(1 + (time.Since(epoch)+apart(id, n.name))%99991))
	}
	return func() { <-l }
}

// apart is a time that differs from node to node and from layer to layer.
func apart(id digest.Digest, node string) time.Duration {
	h := fnv.New32a()
	fmt.Fprint(h, id, node)
	return time.Duration(h.Sum32())
}

func (n *node) lockAll(ids []digest.Digest) (unlock func()) {
	var undo []func()
	for _, id := range slices.Sorted(slices.Values(ids)) {
		undo = append(undo, n.lock(id))
	}
	return func() {
		for _, unlock := range undo {
			unlock()
		}
	}
}

func (n *node) stands(id digest.Digest) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.standOn[id]) > 0
}

// live is all that a process does.
func (p *process) live() {
	ctx := context.Background()
	for p.alive() {
		s, err := pop.OpenStore(ctx,
			pop.StoreConfig{FS: p.client, Coord: p.coord, Node: p.n.name, Grace: grace, Forget: forget,
				Capacity: p.n.w.capacity(), Policy: "lru"})
		if err == nil {
			p.store = s
			break
		}
		if !errors.Is(err, pop.ErrStoreAway) && !errors.Is(err, ErrDead) && !errors.Is(err, fs.ErrNotExist) {
			p.n.w.violated("%s: open: %v", p.n.name, err)
		}
		p.pause(5 * time.Second)
	}
	if p.store == nil {
		return
	}
	p.revalidate(ctx)
	for i := range 2 {
		rng := rand.New(rand.NewPCG(p.rng.Uint64(), uint64(i)))
		p.n.w.wg.Go(func() {
			for p.alive() && !p.n.w.stopped() {
				time.Sleep(time.Duration(rng.Int64N(int64(3 * time.Second))))
				p.act(ctx, rng)
			}
		})
	}
	for p.alive() && !p.n.w.stopped() {
		p.keep(ctx)
		p.pause(8 * time.Second)
	}
}

func (p *process) pause(d time.Duration) {
	time.Sleep(d + time.Duration(p.rng.Int64N(int64(d))))
}

// revalidate takes up what the containers of an earlier process stand on.
func (p *process) revalidate(ctx context.Context) {
	for _, of := range p.n.w.layers {
		if p.n.stands(of.id) {
			unlock := p.n.lock(of.id)
			_, _ = p.store.Use(ctx, of.id)
			unlock()
		}
	}
}

// keep is what a node does from time to time.
func (p *process) keep(ctx context.Context) {
	_ = p.store.Beat(ctx)
	for _, ids := range p.store.Used() {
		p.unuse(ctx, ids...)
	}
	e, err := p.store.Evict(ctx, 0)
	if len(e.Layers) > 0 || err != nil {
		p.n.w.note("%s evicts %v %v", p.n.name, e, err)
	}
	if freed, err := p.store.Sweep(ctx); freed > 0 || err != nil {
		p.n.w.note("%s sweeps %d %v", p.n.name, freed, err)
	}
}

func (p *process) unuse(ctx context.Context, ids ...digest.Digest) {
	defer p.n.lockAll(ids)()
	ids = slices.DeleteFunc(slices.Clone(ids), func(id digest.Digest) bool {
		held := slices.ContainsFunc(p.n.w.layers, func(of *content) bool {
			return of.id == id && of.checkpoint != nil
		})
		return !held && p.n.stands(id) // what is held stays referenced
	})
	if p.alive() && len(ids) > 0 {
		p.n.w.note("%s does not use %.8s: %v", p.n.name, ids, p.store.Unuse(ctx, ids...))
	}
}

func (p *process) act(ctx context.Context, rng *rand.Rand) {
	of := p.n.w.layers[rng.IntN(len(p.n.w.layers))]
	actions := [...]func(){
		func() { _ = p.deployImage(ctx, p.n.w.images[rng.IntN(len(p.n.w.images))], rng) },
		func() { p.unuse(ctx, of.id) },
		func() { _, _ = p.store.Evict(ctx, int64(rng.IntN(1+int(p.n.w.capacity())))) },
		func() { p.verify(ctx, of) },
		func() { _, _ = p.store.Sweep(ctx) },
	}
	k := rng.IntN(p.n.w.weights[0] + p.n.w.weights[1] + p.n.w.weights[2] + p.n.w.weights[3] + p.n.w.weights[4])
	for i, weight := range p.n.w.weights {
		if k -= weight; k < 0 {
			actions[i]()
			return
		}
	}
}

// deploy runs a container on the layer for a time, which is brought into the store if need be.
func (p *process) deploy(ctx context.Context, of *content, rng *rand.Rand) error {
	err := p.start(ctx, of, rng)
	if errors.Is(err, pop.ErrUnknown) {
		if err = p.bring(ctx, of, rng); err == nil {
			err = p.start(ctx, of, rng)
		}
	}
	return err
}

func (p *process) start(ctx context.Context, of *content, rng *rand.Rand) error {
	unlock := p.n.lock(of.id)
	defer unlock()
	l, release, err := p.use(ctx, of)
	if err != nil {
		return err
	}
	return p.run(of, l, release, rng)
}

// deployImage runs containers on several layers, which are referenced at once; those that
// the store does not have are brought, and so are checkpoints.
func (p *process) deployImage(ctx context.Context, img []*content, rng *rand.Rand) error {
	var errs error
	have := p.startAll(ctx, img, rng)
	for _, of := range img {
		if !have[of.id] {
			errs = errors.Join(errs, p.deploy(ctx, of, rng))
		}
	}
	return errs
}

func (p *process) startAll(ctx context.Context, img []*content, rng *rand.Rand) map[digest.Digest]bool {
	var ids []digest.Digest
	for _, of := range img {
		if of.checkpoint == nil {
			ids = append(ids, of.id)
		}
	}
	started := map[digest.Digest]bool{}
	if len(ids) == 0 {
		return started
	}
	defer p.n.lockAll(ids)()
	lookups := p.store.Lookups(ctx, ids)
	found, err := p.store.UseAll(ctx, lookups)
	p.n.w.wg.Go(func() { // UseAll does not wait for them if it can make no references
		for _, g := range lookups {
			_, _ = g.Record()
		}
	})
	p.n.w.note("%s uses %d of %d: %v", p.n.name, len(found), len(ids), err != nil)
	for _, of := range img {
		if l := found[of.id]; l != nil {
			started[of.id] = p.run(of, l, func() {}, rng) == nil
		}
	}
	return started
}

// run runs a container on what the store gave.
func (p *process) run(of *content, l *pop.Layer, release func(), rng *rand.Rand) error {
	n := p.n
	n.mu.Lock()
	if n.at != p { // killed as it got it
		n.mu.Unlock()
		return ErrDead
	}
	n.mu.Unlock()
	c := n.w.run(n, of, l)
	n.mu.Lock()
	if n.standOn[of.id] == nil {
		n.standOn[of.id] = map[*container]bool{}
	}
	n.standOn[of.id][c] = true
	n.mu.Unlock()
	span, apart := time.Duration(rng.Int64N(int64(n.w.stay))), time.Duration(1+rng.IntN(1e6))
	n.w.wg.Go(func() {
		for end := time.Now().Add(span); ; { // it does not end as it begins
			time.Sleep(span/7 + 1)
			if !time.Now().Before(end) || n.w.stopped() {
				break
			}
		}
		n.w.end(c)
		n.mu.Lock()
		delete(n.standOn[of.id], c)
		n.mu.Unlock()
		time.Sleep(apart) // it may have begun at this instant
		defer p.n.lock(of.id)()
		release()
	})
	return nil
}

// use references a layer until unuse, or a checkpoint until release.
func (p *process) use(ctx context.Context, of *content) (l *pop.Layer, release func(), err error) {
	if of.checkpoint == nil {
		l, err = p.store.Use(ctx, of.id)
		return l, func() {}, err
	}
	if of.upper != nil && !p.store.HasLayer(ctx, of.upper.id) {
		return nil, nil, fmt.Errorf("what it stands on: %w", pop.ErrUnknown)
	}
	return p.store.Hold(ctx, of.id)
}

// bring does what the holder of the lease does.
func (p *process) bring(ctx context.Context, of *content, rng *rand.Rand) error {
	if of.upper != nil && !p.store.HasLayer(ctx, of.upper.id) {
		if err := p.bring(ctx, of.upper, rng); err != nil {
			return err
		}
	}
	lease, err := p.coord.Acquire(ctx, pop.LayerLease(of.id), p.store.Above(ctx, of.id))
	if err != nil {
		return err
	}
	p.n.w.granted(of, lease.Token())
	// now and then it is forgotten for a time
	hold := time.Duration(rng.Int64N(int64(2*ttl))) * time.Duration(rng.IntN(8)/7)
	defer p.n.w.wg.Go(func() {
		time.Sleep(hold)
		_ = lease.Release(ctx)
	})
	if of.checkpoint == nil && rng.IntN(2) == 0 {
		if err := p.store.Revive(ctx, of.id); err != nil {
			return err
		}
		if p.store.HasLayer(ctx, of.id) {
			p.n.w.note("%s has %.8s back", p.n.name, of.id.Encoded())
			return nil
		}
	}
	p.takeOver(ctx, of)
	d, err := p.store.Draft(ctx, of.id, lease.Token())
	if err != nil {
		return err
	}
	p.n.w.note("%s brings %.8s", p.n.name, of.id.Encoded())
	if err = p.copy(ctx, of, d, rng); err == nil {
		rec := pop.Layer{Size: int64(len(of.data)), Image: "registry/image", Cost: 1, Checkpoint: of.checkpoint}
		if of.upper != nil {
			rec.Upper = of.upper.id
		}
		err = d.Publish(ctx, rec, of.table)
		p.n.w.note("%s publishes %.8s: %v", p.n.name, of.id.Encoded(), err)
	}
	if err != nil && rng.IntN(2) == 0 {
		_ = d.Abandon(ctx)
	}
	_ = d.Close()
	return err
}

var errEnough = errors.New("enough")

// copy writes the layer in pieces; now and then it gives up.
func (p *process) copy(ctx context.Context, of *content, d *pop.Draft, rng *rand.Rand) error {
	for int(d.At()) < len(of.data) {
		k := min(int(d.At())+1+rng.IntN(1000), len(of.data))
		if _, err := d.Write(of.data[d.At():k]); err != nil {
			return err
		}
		if rng.IntN(3) == 0 {
			if err := d.Checkpoint(ctx, []byte(fmt.Sprintf(`{"at":%d}`, d.At()))); err != nil {
				return err
			}
		}
		if rng.IntN(25) == 0 && !p.n.w.stopped() {
			return errEnough
		}
		time.Sleep(time.Duration(rng.Int64N(int64(2 * time.Second))))
	}
	return nil
}

// takeOver looks at where another has come: what a checkpoint has is right.
func (p *process) takeOver(ctx context.Context, of *content) {
	c, err := p.store.Checkpoint(ctx, of.id)
	if errors.Is(err, pop.ErrDamaged) {
		p.n.w.violated("%s: %v", p.n.name, err)
	}
	if err != nil {
		return
	}
	defer c.Close()
	b, err := io.ReadAll(c.Data)
	damaged := false
	p.n.w.disk.Look(func() {
		for name := range p.n.w.flipped {
			damaged = damaged || bytes.Contains([]byte(name), []byte(of.id.Encoded()))
		}
	})
	if err == nil && !damaged && (c.Size > int64(len(of.data)) || !bytes.Equal(b, of.data[:c.Size])) {
		p.n.w.violated("%s: the checkpoint of %s has other bytes: %d of %d", p.n.name, of.id, len(b), c.Size)
	}
	if string(c.Record) != fmt.Sprintf(`{"at":%d}`, c.Size) {
		p.n.w.violated("%s: the checkpoint of %s says %s at %d", p.n.name, of.id, c.Record, c.Size)
	}
}

// verify compares a layer with what was published, and takes it out of sight if it differs.
func (p *process) verify(ctx context.Context, of *content) {
	l, err := p.store.Record(ctx, of.id)
	if err != nil {
		return
	}
	var before, after bool
	look := func() bool { return p.n.w.flipped[l.Data()] }
	p.n.w.disk.Look(func() { before = look() })
	err = p.store.Verify(ctx, l, 0)
	p.n.w.disk.Look(func() { after = look() })
	switch {
	case err == nil && before && l.Size > 16:
		p.n.w.violated("%s: the damage of %s is not found", p.n.name, l.Data())
	case errors.Is(err, pop.ErrDamaged) && !after:
		p.n.w.violated("%s: %s is visible, and %v", p.n.name, l.Data(), err)
	case errors.Is(err, pop.ErrDamaged):
		_ = p.store.Quarantine(ctx, l)
	}
}
