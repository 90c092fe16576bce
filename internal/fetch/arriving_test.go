package fetch

import (
	"context"
	"testing"
	"time"

	"dewpoint/testkit/registrytest"

	"github.com/opencontainers/go-digest"
)

// A layer that is pulled is shown as far as it has come, until it is readable.
func TestArrivingPulled(t *testing.T) {
	b := newBed(t)
	p := b.push("team/app:1", 1)
	// each try brings an eighth
	b.reg.Fail(registrytest.Fault{Do: registrytest.Stall, At: p.Layers[0].Size / 8, Digest: p.Layers[0].Digest})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	pull, err := b.Pull(ctx, b.ref(p.Ref), Options{})
	b.must(err)
	b.eventually("a part of the layer", func() bool {
		for _, l := range b.Arriving(4) {
			if l.DiffID != p.Layers[0].DiffID.String() || l.Image != p.Ref || !l.Pulled || l.Size != p.Layers[0].Size {
				t.Fatalf("%+v", l)
			}
			if l.Present[0] > 0 {
				return true
			}
		}
		return false
	})
	b.reg.Heal()
	b.must(pull.WaitComplete(ctx))
	if all := b.Arriving(4); len(all) > 0 {
		t.Errorf("a layer that is whole is shown: %+v", all)
	}
}

// What was waited for is known while it is among the newest, the earliest first.
func TestWaitsAreBounded(t *testing.T) {
	var w waits
	a, other := digest.FromString("a"), digest.FromString("other")
	for i := range 2 * keepWaits {
		w.add(layerWait{layer: a, from: int64(i), begun: time.Now().Add(-time.Hour), took: time.Second})
	}
	w.add(layerWait{layer: other})
	list, known := w.waitsOf(a, 2*keepWaits)
	if len(list) != showWaits || known != keepWaits-1 || len(w.ring) != keepWaits {
		t.Fatalf("%d are shown of %d, of %d in all", len(list), known, len(w.ring))
	}
	if last := list[showWaits-1]; last.At != 1-1.0/(2*keepWaits) || list[0].At >= last.At || last.Took != 1 {
		t.Errorf("%+v to %+v", list[0], last)
	}
}
