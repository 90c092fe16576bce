package api

import (
	"sync"
	"time"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/node"
)

// layerInterval is the least time between two tellings of layers, so that a
// reader costs a fast pull nothing.
const layerInterval = 100 * time.Millisecond

// feed keeps what a node.Watch is told until the one sender takes it: every
// stage, and of each layer the newest state. It never blocks who tells.
type feed struct {
	wake chan struct{} // has one element when there is something to take

	mu     sync.Mutex
	stages []*pb.Stage          // guarded by mu
	layers []node.LayerProgress // guarded by mu; changed since the last take
	at     map[string]int       // guarded by mu; a layer's place in layers
	armed  bool                 // guarded by mu; layers will be announced
}

func newFeed() *feed {
	return &feed{wake: make(chan struct{}, 1), at: map[string]int{}}
}

func (f *feed) reached(name, stage string, at float64) {
	f.mu.Lock()
	f.stages = append(f.stages, &pb.Stage{Name: name, Stage: stage, At: at})
	f.mu.Unlock()
	f.announce()
}

func (f *feed) layer(l node.LayerProgress) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if i, ok := f.at[l.Digest]; ok {
		f.layers[i] = l
	} else {
		f.at[l.Digest] = len(f.layers)
		f.layers = append(f.layers, l)
	}
	if !f.armed {
		f.armed = true
		time.AfterFunc(layerInterval, f.announce)
	}
}

func (f *feed) announce() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// take returns what came since the last take.
func (f *feed) take() ([]*pb.Stage, []*pb.LayerProgress) {
	f.mu.Lock()
	defer f.mu.Unlock()
	stages, layers := f.stages, f.layers
	f.stages, f.layers, f.armed = nil, nil, false
	clear(f.at)
	return stages, each(layers, layerOf)
}
