package fetch

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/layer"
	"dewpoint/internal/spec"

	"github.com/opencontainers/go-digest"
)

const (
	keepWaits = 2000 // of all layers
	showWaits = 200  // of one layer
)

// waits is what readers have waited for, the newest. It is safe for concurrent use.
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

// waitsOf returns the newest waits for a layer, the earliest of them first, and how many are known.
func (w *waits) waitsOf(id digest.Digest, size int64) (out []spec.LayerWait, known int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range slices.Backward(w.ring) {
		if l.layer != id || size == 0 {
			continue
		}
		if known++; known <= showWaits {
			out = append(out, spec.LayerWait{At: float64(l.from) / float64(size), Begun: l.begun,
				Took: l.took.Seconds()})
		}
	}
	slices.Reverse(out)
	return out, known
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
	w := p.pulls.waits
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.ring {
		if !l.begun.Before(since) && p.Image.HasLayer(l.layer) {
			out = append(out, Wait{l.layer, l.from, l.begun, l.took})
		}
	}
	return out
}

// Arriving describes the layers that are not whole, each with how much is here of so many equal
// parts of it: first those that containers run with already, then those of pulls that wait
// for them, the earliest begun first.
func (d *demand) Arriving(parts int) []spec.LayerMap {
	all := d.cfg.Layers.Partials()
	slices.SortFunc(all, func(a, b *layer.Partial) int { return cmp.Compare(b.Age(), a.Age()) })
	out, known := []spec.LayerMap{}, map[digest.Digest]bool{}
	for _, l := range all {
		known[l.Layer.DiffID] = true
		m := spec.LayerMap{DiffID: l.Layer.DiffID.String(), Image: l.Origin.Ref, Size: l.Size,
			Present: shape(l, parts)}
		m.Waits, m.Waited = d.waits.waitsOf(l.Layer.DiffID, l.Size)
		out = append(out, m)
	}
	return append(out, d.pulled(parts, known)...)
}

// pulled describes the layers that are being pulled, but for those that are known.
func (d *demand) pulled(parts int, known map[digest.Digest]bool) (out []spec.LayerMap) {
	fills := d.cfg.Layers.Fills()
	slices.SortFunc(fills, func(a, b *layer.Fill) int {
		return cmp.Or(a.Progress().Begun.Compare(b.Progress().Begun), cmp.Compare(a.Layer.Digest, b.Layer.Digest))
	})
	for _, f := range fills {
		now := f.Progress()
		b, ours := f.Source().(*blob)
		if !ours || known[b.l.DiffID] || now.State.Usable() || now.State == layer.Failed {
			continue
		}
		o := originsOf(f, now)
		share := float64(o.Local+o.PoP+o.Registry) / float64(max(1, f.Layer.Size))
		m := spec.LayerMap{DiffID: b.l.DiffID.String(), Image: b.img.Ref.String(), Size: f.Layer.Size,
			Present: make([]float64, parts), Pulled: true}
		for i := range m.Present {
			m.Present[i] = min(1, max(0, share*float64(parts)-float64(i)))
		}
		out = append(out, m)
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
