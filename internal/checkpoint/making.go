package checkpoint

import (
	"context"
	"sync"

	"github.com/opencontainers/go-digest"
)

// making knows what checkpoints are being made, and what became of the last tries. It forgets with the
// daemon. It is safe for concurrent use.
type making struct {
	mu       sync.Mutex
	declined map[string]int           // by ID, how often a checkpoint was, for it was slow; guarded by mu
	refused  map[string]string        // why the last checkpoint of a kind was not made; guarded by mu
	kinds    map[string]int           // that checkpoints are being made of, and how many; guarded by mu
	dumping  map[string]chan struct{} // containers that are being dumped, closed when they were; guarded by mu
	adding   map[digest.Digest]int    // writable layers of records to come; guarded by mu
}

func newMaking() *making {
	return &making{declined: map[string]int{}, refused: map[string]string{}, kinds: map[string]int{},
		dumping: map[string]chan struct{}{}, adding: map[digest.Digest]int{}}
}

// begin notes that a checkpoint of a kind is being made, until done.
func (k *making) begin(kind string) (done func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.beginLocked(kind)
}

// beginAlone is begin if nobody makes one of this kind already.
func (k *making) beginAlone(kind string) (done func(), alone bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.kinds[kind] > 0 {
		return nil, false
	}
	return k.beginLocked(kind), true
}

func (k *making) beginLocked(kind string) (done func()) {
	k.kinds[kind]++
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.kinds[kind]--; k.kinds[kind] == 0 {
			delete(k.kinds, kind)
		}
	}
}

// underway reports whether a checkpoint of a kind is being made.
func (k *making) underway(kind string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.kinds[kind] > 0
}

// turn waits until nobody else dumps the container: one dump would let the processes go on
// in the middle of another.
func (k *making) turn(ctx context.Context, name string) (done func(), err error) {
	for {
		k.mu.Lock()
		other := k.dumping[name]
		if other == nil {
			mine := make(chan struct{})
			k.dumping[name] = mine
			k.mu.Unlock()
			return func() {
				k.mu.Lock()
				delete(k.dumping, name)
				k.mu.Unlock()
				close(mine)
			}, nil
		}
		k.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// hold keeps a layer until a record names it: n is 1, and -1 behind that.
func (k *making) hold(id digest.Digest, n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.adding[id] += n; k.adding[id] == 0 {
		delete(k.adding, id)
	}
}

// holds reports whether a record is about to name the layer.
func (k *making) holds(id digest.Digest) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.adding[id] > 0
}

// decline counts that a checkpoint was declined since it was slow, and returns how often it was.
func (k *making) decline(id string) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.declined[id]++
	return k.declined[id]
}

// maxRefused bounds of how many kinds of containers it is remembered why none was saved.
const maxRefused = 256

// refuse remembers why the last checkpoint of a kind was not made.
func (k *making) refuse(kind string, why error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.refused) >= maxRefused {
		clear(k.refused)
	}
	k.refused[kind] = why.Error()
}

// refusal is what refuse was given last for a kind; "" is nothing.
func (k *making) refusal(kind string) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.refused[kind]
}
