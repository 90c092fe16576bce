package simtest

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/local"

	"github.com/opencontainers/go-digest"
)

// The periods of the simulated PoP. What a node sees late is seen within half of
// the grace, as the store demands.
const (
	ttl    = 15 * time.Second
	grace  = 30 * time.Second
	lag    = 14 * time.Second
	forget = 8 * time.Minute
	busy   = 3 * time.Minute // of actions and faults
)

// A content is a layer as it should be, or a checkpoint.
type content struct {
	id    digest.Digest
	data  []byte
	table []byte
	top   uint64 // the greatest token of its lease so far
	// A checkpoint's record, nil for a layer, and the layer that it stands on, nil for none.
	checkpoint []byte
	upper      *content
}

// A container stands on a layer that the store gave to its node. What reads a
// checkpoint is one too, and ends with its process.
type container struct {
	node  *node
	of    *content
	name  string // of the data
	file  int    // its identity
	table string // the name of what describes the data
}

// world is one schedule. The disk's lock guards what is below it.
type world struct {
	t      *testing.T
	seed   uint64
	disk   *Disk
	hub    *local.Hub
	nodes  []*node
	layers []*content
	images [][]*content // some of them each, which are deployed together

	// What a schedule has more of than others.
	faults  Faults
	weights [5]int        // of a node's actions: deploy, unuse, evict, verify, sweep
	stay    time.Duration // of containers, at most

	running map[*container]bool
	flipped map[string]bool // files that were damaged on purpose

	story  sync.Mutex // guards what follows; never held while the clock goes
	broken bool
	heard  hash.Hash64
	lines  []string

	wg   sync.WaitGroup
	stop bool // the world calms down
}

// wrong is by how much clocks may be wrong: one has no battery, and begins in 1970.
var wrong = []time.Duration{0, time.Millisecond, -time.Second, ttl, -grace, time.Hour, -24 * time.Hour,
	100 * 365 * 24 * time.Hour, -30 * 365 * 24 * time.Hour}

func newWorld(t *testing.T, seed uint64) *world {
	rng := rand.New(rand.NewPCG(seed, 0))
	w := &world{t: t, seed: seed, disk: NewDisk(1<<30, lag), hub: local.NewHub(),
		running: map[*container]bool{}, flipped: map[string]bool{}, heard: fnv.New64a()}
	w.disk.Changed = w.changed
	often := func() float64 { return []float64{0, 0.001, 0.005, 0.02}[rng.IntN(4)] }
	w.faults = Faults{Before: often(), After: often(), Late: often(), Pause: often() / 2, Still: 2 * grace,
		Stale: rng.Float64()}
	for i := range w.weights {
		w.weights[i] = 1 + rng.IntN(4)
	}
	w.weights[0] *= 2
	w.weights[1] *= 2
	w.weights[2] *= 2
	w.stay = []time.Duration{time.Second, 10 * time.Second, time.Minute, 3 * time.Minute}[rng.IntN(4)]
	for i := range 3 + rng.IntN(5) {
		b := make([]byte, rng.IntN(1500)+i)
		for k := range b {
			b[k] = byte(rng.Uint32() | 1) // no zeros: those are holes
		}
		w.layers = append(w.layers,
			&content{id: digest.FromBytes(b), data: b, table: []byte(fmt.Sprint("table of ", i))})
	}
	clocks := rand.New(rand.NewPCG(seed, 9))
	w.disk.Tick = []time.Duration{1, time.Second, 5 * time.Second}[clocks.IntN(3)]
	w.disk.Clocks = map[string]time.Duration{}
	for i := range rng.IntN(3) { // the last are checkpoints
		c := w.layers[len(w.layers)-1-i]
		c.table, c.checkpoint = nil, []byte(`{"of":"tests"}`)
		if rng.IntN(4) > 0 {
			c.upper = w.layers[0]
		}
	}
	for range 2 + rng.IntN(3) {
		img := slices.Clone(w.layers)
		rng.Shuffle(len(img), func(i, k int) { img[i], img[k] = img[k], img[i] })
		w.images = append(w.images, img[:1+rng.IntN(len(img))])
	}
	for i := range 2 + rng.IntN(4) {
		w.disk.Clocks[fmt.Sprintf("n%d", i)] = wrong[clocks.IntN(len(wrong))]
		w.nodes = append(w.nodes, newNode(w, fmt.Sprintf("n%d", i), rng.Uint64()))
	}
	return w
}

// capacity has room for about two thirds of the layers.
func (w *world) capacity() int64 {
	var sum int64
	for _, l := range w.layers {
		sum += int64(len(l.data))
	}
	return sum * 2 / 3
}

// note adds to the story of the schedule. Nonces are left out: they are not of the seed.
func (w *world) note(format string, args ...any) {
	w.story.Lock()
	defer w.story.Unlock()
	if *tell || *one != 0 {
		w.lines = append(w.lines, fmt.Sprintf("%12v ", time.Since(epoch))+fmt.Sprintf(format, args...))
	}
	_, _ = w.heard.Write(binary.LittleEndian.AppendUint64(nil, uint64(time.Since(epoch))))
}

// epoch is when a bubble's clock begins.
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// violated reports that the protocol is broken, once.
func (w *world) violated(format string, args ...any) {
	w.note("VIOLATED: "+format, args...)
	w.story.Lock()
	defer w.story.Unlock()
	if w.broken {
		return
	}
	w.broken = true
	w.t.Errorf("%sseed %d: "+format+"\n%s",
		append(append([]any{strings.Join(append(w.lines, ""), "\n"), w.seed}, args...), again(w.seed))...)
}

// changed checks after every change of the disk that no file has two writers, but for signs
// of life, and that what containers stand on is there and right.
func (w *world) changed(op, name string) {
	w.note("  disk: %s %s", op, name)
	if t, ok := w.disk.Peek(name); ok && t.Writers > 1 && !strings.HasPrefix(name, "nodes/") {
		w.violated("%s was written by %d", name, t.Writers)
	}
	for c := range w.running {
		w.check(c, op+" "+name)
	}
}

func (w *world) check(c *container, after string) {
	switch t, ok := w.disk.Peek(c.name); {
	case !ok:
		w.violated("%s: a container runs and %s is gone after %s", c.node.name, c.name, after)
	case t.ID != c.file:
		w.violated("%s: a container runs and %s is another file after %s", c.node.name, c.name, after)
	case !w.flipped[c.name] && !bytes.Equal(t.Data, c.of.data):
		w.violated("%s: a container reads wrong bytes of %s after %s", c.node.name, c.name, after)
	case !t.Synced:
		w.violated("%s: a container runs on %s, which is not durable", c.node.name, c.name)
	}
	if t, ok := w.disk.Peek(c.table); !ok || !t.Synced {
		w.violated("%s: a container runs on %s, and %s is gone or not durable after %s", c.node.name, c.name, c.table,
			after)
	}
}

// run starts a container on what Use has just given.
func (w *world) run(n *node, of *content, l *pop.Layer) *container {
	c := &container{node: n, of: of, name: l.Data()}
	w.disk.Look(func() {
		t, _ := w.disk.Peek(c.name)
		c.file = t.ID
		w.note("%s runs a container on %s", n.name, c.name)
		c.table = strings.TrimSuffix(c.name, ".data") + ".table"
		w.check(c, "it was given")
		w.running[c] = true
	})
	if sum := sha256.Sum256(of.data); int64(len(of.data)) != l.Size ||
		len(of.data) > 0 && !bytes.Equal(l.Sums, sum[:]) {
		w.violated("%s: the record is not that of the layer: %+v", n.name, l)
	}
	return c
}

func (w *world) end(c *container) {
	w.disk.Look(func() {
		w.note("%s ends a container on %s", c.node.name, c.name)
		delete(w.running, c)
	})
}

// granted checks that tokens grow.
func (w *world) granted(of *content, token uint64) {
	w.disk.Look(func() {
		if token <= of.top {
			w.violated("a token of %d after %d", token, of.top)
		}
		of.top = token
	})
}

func (w *world) stopped() (stop bool) {
	w.disk.Look(func() { stop = w.stop })
	return stop
}

// trouble hurts the world until it is to calm down.
func (w *world) trouble(rng *rand.Rand) {
	for !w.stopped() {
		time.Sleep(time.Duration(rng.Int64N(int64(40 * time.Second))))
		n := w.nodes[rng.IntN(len(w.nodes))]
		span := time.Duration(rng.Int64N(int64(80 * time.Second)))
		switch rng.IntN(9) {
		case 0:
			w.note("the coordinator loses its memory")
			w.hub.Forget()
		case 1:
			w.hub.Disconnect()
		case 2:
			w.cut(span, func(cut bool) {
				w.hub.Cut(n.name, cut)
				w.note("%s and the coordinator: cut %v", n.name, cut)
			})
		case 3:
			w.cut(span, func(cut bool) { n.cut(cut); w.note("%s and the store: cut %v", n.name, cut) })
		case 4:
			w.note("%s stands still for %v", n.name, span)
			n.stand(span)
		case 5, 6:
			off := rng.IntN(2) == 0
			w.wg.Go(func() { n.crash(off, span) })
		case 7:
			w.flip(rng)
		case 8:
			w.powerCut(n, rng)
		}
	}
}

func (w *world) cut(span time.Duration, set func(bool)) {
	set(true)
	w.wg.Go(func() {
		time.Sleep(span)
		set(false)
	})
}

// powerCut is a power cut on the servers. The coordinator may be on one of them, or one node may not reach
// it: then nothing but its references in the store protects what it uses. What a cut takes of a layer that is
// being published is not tried here.
func (w *world) powerCut(n *node, rng *rand.Rand) {
	if rng.IntN(2) == 0 {
		w.cut(ttl+2*grace, func(cut bool) {
			w.hub.Cut(n.name, cut)
			w.note("%s and the coordinator: cut %v", n.name, cut)
		})
		time.Sleep(time.Duration(rng.Int64N(int64(ttl))))
	}
	w.note("the servers lose power")
	w.disk.PowerCut("refs", func() bool { return rng.IntN(4) > 0 })
	w.disk.PowerCut("nodes", func() bool { return rng.IntN(4) > 0 })
	if rng.IntN(2) == 0 {
		w.hub.Forget()
	}
}

// flip damages a layer in the store.
func (w *world) flip(rng *rand.Rand) {
	if rng.IntN(3) > 0 {
		return
	}
	var data []string
	for _, name := range w.disk.Names() {
		if strings.HasPrefix(name, "layers/") && strings.HasSuffix(name, ".data") {
			data = append(data, name)
		}
	}
	if len(data) == 0 {
		return
	}
	name := data[rng.IntN(len(data))]
	w.disk.Look(func() {
		if !w.flipped[name] && w.disk.flip(name, rng.IntN(16)) { // twice would heal it
			w.flipped[name] = true
			w.note("%s is damaged", name)
		}
	})
}
