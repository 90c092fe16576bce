package api

import (
	"sync"
	"time"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

// layerInterval is the least time between two tellings of layers, so that a
// reader costs a fast pull nothing.
const layerInterval = 100 * time.Millisecond

// feed keeps what a spec.Watch is told until the one sender takes it: every
// stage, and of each layer the newest state. It never blocks who tells.
type feed struct {
	wake chan struct{} // has one element when there is something to take
	told func()        // called when there is something to take; by default it fills wake

	mu     sync.Mutex
	stages []*pb.Stage          // guarded by mu
	layers []spec.LayerProgress // guarded by mu; changed since the last take
	at     map[string]int       // guarded by mu; a layer's place in layers
	armed  bool                 // guarded by mu; layers will be announced
	state  *spec.Deployment     // guarded by mu; changed since the last take
}

func newFeed() *feed {
	f := &feed{wake: make(chan struct{}, 1), at: map[string]int{}}
	f.told = func() { signal(f.wake) }
	return f
}

func (f *feed) deployment(d spec.Deployment) {
	f.mu.Lock()
	f.state = &d
	f.mu.Unlock()
	f.told()
}

func (f *feed) reached(name, stage string, at float64) {
	f.mu.Lock()
	f.stages = append(f.stages, &pb.Stage{Name: name, Stage: stage, At: at})
	f.mu.Unlock()
	f.told()
}

func (f *feed) layer(l spec.LayerProgress) {
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
		time.AfterFunc(layerInterval, f.told)
	}
}

// signal fills a channel of one element, unless it is full.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// news is what a feed was told.
type news struct {
	deployment *pb.Deployment // nil if it has not changed
	stages     []*pb.Stage
	layers     []*pb.LayerProgress
}

// drain returns what came since the last take.
func (f *feed) drain() news {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := news{stages: f.stages, layers: each(f.layers, layerOf)}
	if f.state != nil {
		n.deployment = deploymentOf(*f.state)
	}
	f.stages, f.layers, f.armed, f.state = nil, nil, false, nil
	clear(f.at)
	return n
}
