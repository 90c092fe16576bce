package fetch

import (
	"slices"
	"sync"
	"time"

	"dewpoint/internal/layer"
	"dewpoint/internal/node"

	"github.com/opencontainers/go-digest"
)

const (
	keepWaits = 2000        // of all layers
	waitsAge  = time.Minute // how long a wait is known
)

// waits is what readers have waited for lately. It is safe for concurrent use.
type waits struct {
	mu   sync.Mutex
	ring []layerWait
}

type layerWait struct {
	layer digest.Digest
	from  int64
	begun time.Time
	took  time.Duration
}

func (w *waits) add(l layerWait) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.ring) == keepWaits {
		w.ring = append(w.ring[:0], w.ring[1:]...)
	}
	w.ring = append(w.ring, l)
}

// of returns what was waited for of a layer, the earliest first.
func (w *waits) of(id digest.Digest, size int64) (out []node.LayerWait) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.ring {
		if l.layer == id && size > 0 && time.Since(l.begun) < waitsAge {
			out = append(out, node.LayerWait{At: float64(l.from) / float64(size), Begun: l.begun, Took: l.took.Seconds()})
		}
	}
	return out
}

// Wait is a stretch of a layer that a reader waited for.
type Wait struct {
	Layer digest.Digest // its diffID
	From  int64         // byte of its tar
	Begun time.Time
	Took  time.Duration
}

// Waits is what readers of the image's layers, in whatever container, have waited for since a moment and is
// still known, the earliest ended first.
func (p *Pull) Waits(since time.Time) (out []Wait) {
	w := &p.puller.waits
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.ring {
		if !l.begun.Before(since) && p.Image.Has(l.layer) {
			out = append(out, Wait{l.layer, l.from, l.begun, l.took})
		}
	}
	return out
}

// Arriving describes the layers that containers run with before they are whole, each with
// how much is here of so many equal parts of it, the earliest begun first.
func (p *Puller) Arriving(parts int) []node.LayerMap {
	all := p.cfg.Layers.Partials()
	slices.SortFunc(all, func(a, b *layer.Partial) int { return int(b.Age() - a.Age()) })
	out := []node.LayerMap{}
	for _, l := range all {
		out = append(out, node.LayerMap{DiffID: l.Layer.DiffID.String(), Image: l.Origin.Ref, Size: l.Size,
			Present: shape(l, parts), Waits: p.waits.of(l.Layer.DiffID, l.Size)})
	}
	return out
}

// shape is the share of each of the parts that is here, from 0 to 1.
func shape(l *layer.Partial, parts int) []float64 {
	out := make([]float64, parts)
	for i := range out {
		from, to := l.Size*int64(i)/int64(parts), l.Size*int64(i+1)/int64(parts)
		if from == to {
			out[i] = 1
			continue
		}
		var absent int64
		for at := from; at < to; {
			a, b := l.Absent(at, to)
			if a = max(a, at); a >= to {
				break
			}
			b = min(b, to)
			absent += b - a
			at = b
		}
		out[i] = 1 - float64(absent)/float64(to-from)
	}
	return out
}
