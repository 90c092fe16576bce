package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Store is the PoP's store, nil if this node has none or it is away.
func (p *Puller) Store() *pop.Store {
	if p.site == nil {
		return nil
	}
	return p.site.usable()
}

// Saved is a layer that no registry has: what a container has written. Its
// blob is its tar.
func Saved(id digest.Digest, size int64) image.Layer {
	return image.Layer{Digest: id, DiffID: id, Size: size, MediaType: ocispec.MediaTypeImageLayer}
}

// Keep makes the tar that src gives a layer of this node, and returns when it
// would survive a power cut, and the other nodes of the PoP are told.
func (p *Puller) Keep(ctx context.Context, l image.Layer, src layer.Source) error {
	_, err := p.cfg.Layers.Fill(ctx, l, src).WaitComplete(ctx)
	if err == nil && p.site != nil {
		p.site.has(ctx, l.DiffID) // before the checkpoint is known that stands on it
	}
	return err
}

// Give puts a layer of this node into the PoP's store. It returns an error that
// wraps pop.ErrStoreAway if there is none.
func (p *Puller) Give(ctx context.Context, id digest.Digest) error {
	if p.Store() == nil {
		return pop.ErrStoreAway
	}
	have, err := p.cfg.Layers.Peek(id)
	if err != nil {
		return err
	}
	if have.At != "" {
		return nil
	}
	p.holds.Give(id, 1)
	defer p.holds.Give(id, -1)
	return p.site.republish(ctx, have)
}

// Take makes a layer known that is here or in the PoP's store. While there is no such store, it is
// copied from another node.
func (p *Puller) Take(ctx context.Context, l image.Layer) error {
	st := p.Store()
	have, err := p.cfg.Layers.Get(l.DiffID)
	if err == nil && (have.At == "" || p.reachable(ctx, have)) {
		return nil
	}
	if st == nil {
		return p.takeFromPeer(ctx, l)
	}
	if err := p.site.attachLayer(ctx, st, l); err != nil {
		return fmt.Errorf("layer %s of the PoP's store: %w", l.DiffID, err)
	}
	return nil
}

// takeFromPeer copies a layer from another node that has it whole, verified.
func (p *Puller) takeFromPeer(ctx context.Context, l image.Layer) error {
	givers := p.site.givers(ctx, hasKey(l.DiffID))
	if len(givers) == 0 {
		return fmt.Errorf("layer %s is not here, and no node gives it: %w", l.DiffID,
			errors.Join(layer.ErrUnknown, pop.ErrStoreAway))
	}
	err := p.Keep(ctx, l, &peerTar{p.site, givers})
	if err == nil {
		p.site.count(func(h *pop.Hits) { h.Peer++; h.PeerBytes += l.Size })
	}
	return err
}

// givers are the other nodes that say that they have something, if they can be asked. While the
// coordinator is away, nobody is known.
func (s *site) givers(ctx context.Context, key string) []pop.Member {
	if s == nil || s.cfg.Peers == nil {
		return nil
	}
	s.mu.Lock()
	away := s.away
	s.mu.Unlock()
	if away != nil {
		return nil
	}
	users, err := s.cfg.Coord.Users(ctx, key)
	if err != nil || len(users[key]) == 0 {
		return nil
	}
	members, err := s.cfg.Coord.Members(ctx)
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(members, func(m pop.Member) bool {
		return m.Node == s.cfg.Node || m.Address == "" || !slices.Contains(users[key], m.Node)
	})
}

// peerTar is the source of a layer that no registry has: the tar, as another node has it.
type peerTar struct {
	s    *site
	from []pop.Member
}

// Open implements layer.Source. Who could not be asked is not asked again.
func (t *peerTar) Open(ctx context.Context, f *layer.Fill, offset int64) (io.ReadCloser, error) {
	var errs error
	for len(t.from) > 0 {
		m := t.from[0]
		t.from = t.from[1:]
		r, _, err := t.s.cfg.Peers.Follow(ctx, m.Address, f.Layer.DiffID, offset)
		if err == nil {
			return r, nil
		}
		errs = errors.Join(errs, fmt.Errorf("from %s: %w", m.Node, err))
	}
	return nil, errors.Join(errs, layer.ErrUnknown)
}

// Savers are the other nodes, as those that checkpoints are taken from while there is no store in
// which they are found.
type Savers struct{ p *Puller }

// Savers returns them.
func (p *Puller) Savers() *Savers { return &Savers{p} }

// savedKey is what a node is said to use that gives checkpoints of an image.
func savedKey(manifest digest.Digest) string { return "saved/" + manifest.String() }

// saversPatience is how long a deployment waits for what other nodes have saved.
const saversPatience = time.Second

// Records implements store.Peers: what nodes give that say they have some, by their addresses.
func (v *Savers) Records(ctx context.Context, manifest digest.Digest) map[string][]byte {
	s := v.p.site
	if s == nil || s.usable() != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, saversPatience)
	defer cancel()
	all := map[string][]byte{}
	var mu sync.Mutex
	var asked sync.WaitGroup
	for _, m := range s.givers(ctx, savedKey(manifest)) {
		asked.Go(func() {
			b, err := s.cfg.Peers.Records(ctx, m.Address, manifest)
			if err != nil {
				s.log.Debug("what a node has saved is not known", "node", m.Node, "image", manifest, "err", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			all[m.Address] = b
		})
	}
	asked.Wait()
	return all
}

// Data implements store.Peers.
func (v *Savers) Data(ctx context.Context, from string, id digest.Digest, size int64) (io.ReadCloser, error) {
	if v.p.site == nil || v.p.site.cfg.Peers == nil {
		return nil, fmt.Errorf("checkpoint %s: %w", id, ErrNoPoP)
	}
	return v.p.site.cfg.Peers.Data(ctx, from, id, size)
}
