// Package fetch brings images to the node: it resolves them, decides what
// crosses the link when (see package link), and fills the layers.
//
// A pull is: manifest and configuration, from the catalog or the registry; a
// fill for each layer that the store lacks, shared with every other pull that
// wants it, from the registry or from a blob that containerd has (Stored); and
// two moments to wait for, when all layers are readable and when all are
// complete. The fills belong to the contexts of those who wait: when the last
// one is gone a fill ends, and its progress stays for the next.
//
// A Puller is put together of parts, each with its state and its lock:
//
//   - pulls brings the layers of an image;
//   - packs knows the startup packs, and which of them are believed;
//   - partials are the layers that are mounted before they are whole;
//   - demand brings what readers of partial layers wait for;
//   - cache decides what leaves a full disk;
//   - clients are programs that ask for one layer after the other.
package fetch

import (
	"context"
	"log/slog"
	"runtime"
	"sync"
	"time"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/layer"
	"dewpoint/internal/registry"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/semaphore"
)

// Config names what a Puller works with. Registry, Layers,
// Catalog and Link are required.
type Config struct {
	Registry *registry.Client
	Layers   *layer.Store
	Catalog  *Catalog
	Link     *link.Link
	Packs    PackConfig
	Lazy     LazyConfig
	Cache    CacheConfig
	Images   Images       // nil: what an image has stays until it is removed
	Stored   Stored       // nil: there are none
	Log      *slog.Logger // nil discards
}

// Puller pulls images. It is safe for concurrent use.
type Puller struct {
	*common
	*packs
	*partials
	*demand
	*cache
	*pulls
	*clients
}

// common is what the parts share: what they work with, and how long.
type common struct {
	cfg   Config
	pop   PoP             // what this node has in common with others
	life  context.Context // of fills that no caller owns
	end   context.CancelFunc
	work  sync.WaitGroup // what goes on behind starts that are over
	stats lazyStats
	// storing bounds the layers of class Background that are filled from stored blobs at once: no link holds
	// them back
	storing *semaphore.Weighted
}

// NewPuller returns a Puller. Close ends what it does in the background.
func NewPuller(cfg Config) *Puller {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Lazy.Audience == nil {
		cfg.Lazy.Audience = deaf{}
	}
	c := &common{cfg: cfg, pop: alone{cfg.Layers}, storing: semaphore.NewWeighted(int64(runtime.GOMAXPROCS(0)))}
	c.life, c.end = context.WithCancel(context.Background())
	p := &Puller{common: c}
	p.packs = &packs{common: c, bad: map[digest.Digest]string{}}
	p.partials = &partials{common: c, packs: p.packs, origins: map[digest.Digest]*origin{},
		slots: newSlots(), hoursEvery: time.Minute}
	p.demand = &demand{common: c, partials: p.partials, wants: map[want]bool{}}
	p.cache = &cache{common: c, packs: p.packs, pulling: newPulling(), holds: newHolds(),
		order: newOrder(cfg.Cache, cfg.Log), fresh: 2 * time.Second}
	p.pulls = &pulls{common: c, packs: p.packs, partials: p.partials, cache: p.cache, waits: &p.demand.waits}
	p.clients = &clients{common: c, pulls: p.pulls, sessions: map[digest.Digest]*session{},
		sessionIdle: time.Minute}
	return p
}

// Join has images and layers come from within a PoP, too. It is called before everything else, once at most.
func (p *Puller) Join(pop PoP) { p.pop = pop }

// Close ends the fills that clients left running.
func (p *Puller) Close() error {
	p.end()
	p.work.Wait()
	p.clients.close()
	return p.order.save()
}
