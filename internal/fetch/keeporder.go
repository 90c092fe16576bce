package fetch

import (
	"cmp"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/evict"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"

	"github.com/opencontainers/go-digest"
)

// CacheConfig says in which order a node lets go of layers that nothing uses.
type CacheConfig struct {
	Policy   string // one of evict.Names; "" is lru
	Capacity int64  // bytes that the cache may take, for policies that ask
	// Path is the file in which the policy outlives the process; "" is none. It is
	// written when a layer has gone and by Close: a process that is killed begins with how long
	// ago each layer was used.
	Path string
}

// order is the policy of a node's own cache. It learns of uses in two ways: deployments tell it at
// once, and before it names a victim it looks what other clients of containerd have
// used. It is safe for concurrent use.
type order struct {
	cfg CacheConfig
	log *slog.Logger

	saving sync.Mutex // one at a time writes the file
	mu     sync.Mutex
	policy evict.Policy
	// of the layers that the policy knows, when a use of them was counted last
	seen map[digest.Digest]time.Time
}

// useGap is how much later a layer must have been asked for so that this is another use: one
// deployment asks several times.
const useGap = time.Minute

func newOrder(cfg CacheConfig, log *slog.Logger) *order {
	cfg.Policy = cmp.Or(cfg.Policy, "lru")
	o := &order{cfg: cfg, log: log, seen: map[digest.Digest]time.Time{}}
	var saved []byte
	var err error
	if cfg.Path != "" {
		if saved, err = os.ReadFile(cfg.Path); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err == nil {
		o.policy, err = evict.New(cfg.Policy, saved, cfg.Capacity)
	}
	if err != nil {
		log.Info("the order in which unused layers go begins anew", "policy", cfg.Policy, "why", err)
		if o.policy, err = evict.New(cfg.Policy, nil, cfg.Capacity); err != nil {
			o.policy, _ = evict.New(evict.Default, nil, cfg.Capacity) // who configures checks the name
		}
	}
	return o
}

// used tells that an image is deployed. Of its layers, those that are here count as used.
func (o *order) used(layers []image.Layer, have func(digest.Digest) (*layer.Layer, error)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, l := range layers {
		if here, err := have(l.DiffID); err == nil {
			o.count(here, 0)
		}
	}
}

// count counts a use of a layer that is here, of so many images; 0 is not known.
func (o *order) count(l *layer.Layer, images int) {
	key := l.DiffID.String()
	if _, known := o.policy.Get(key); known {
		o.policy.Hit(key)
	} else {
		o.describe(l, images)
	}
	o.seen[l.DiffID] = time.Now()
}

// describe tells the policy what a layer takes here, and what it would cost to
// bring again: over the link, or, if it lies in the PoP's store, next to nothing.
func (o *order) describe(l *layer.Layer, images int) {
	obj := evict.Object{Key: l.DiffID.String(), Size: l.DiskUse(), Cost: float64(l.BlobSz), Images: images}
	if l.At != "" {
		obj.Cost = float64(obj.Size)
	}
	o.policy.Add(obj)
}

// look takes note of what is here, and of what was used without a deployment.
func (o *order) look(here []*layer.Layer, images map[digest.Digest]int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	there := make(map[digest.Digest]bool, len(here))
	slices.SortFunc(here, func(a, b *layer.Layer) int {
		return cmp.Or(a.Used().Compare(b.Used()), cmp.Compare(a.DiffID, b.DiffID))
	})
	for _, l := range here {
		there[l.DiffID] = true
		seen, counted := o.seen[l.DiffID]
		_, known := o.policy.Get(l.DiffID.String())
		switch {
		case !known, counted && l.Used().Sub(seen) > useGap:
			o.count(l, images[l.DiffID])
		case !counted: // the policy has it from an earlier process
			o.seen[l.DiffID] = l.Used()
		}
		o.describe(l, images[l.DiffID]) // what it takes may be another by now
	}
	for id := range o.seen {
		if !there[id] {
			o.policy.Remove(id.String())
			delete(o.seen, id)
		}
	}
}

// next is the layer that is to go first, of those that are not kept, and false if there is none.
func (o *order) next(kept map[digest.Digest]bool) (digest.Digest, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	key, ok := o.policy.Victim(func(key string) bool { return !kept[digest.Digest(key)] })
	return digest.Digest(key), ok
}

// dropLayer tells that a layer has gone.
func (o *order) dropLayer(id digest.Digest) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.policy.Remove(id.String())
	delete(o.seen, id)
}

// save writes down what the policy knows.
func (o *order) save() error {
	if o.cfg.Path == "" {
		return nil
	}
	o.saving.Lock()
	defer o.saving.Unlock()
	o.mu.Lock()
	b, err := o.policy.Snapshot()
	o.mu.Unlock()
	if err == nil {
		err = durable.WriteFile(o.cfg.Path, b, 0o600)
	}
	return err
}
