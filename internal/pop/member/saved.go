package member

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
)

// Store is the PoP's store, nil if this node has none or it is away.
func (s *Member) Store() *pop.Store {
	if s == nil {
		return nil
	}
	return s.usable()
}

// Keep is that of the puller, and tells the other nodes.
func (s *Member) Keep(ctx context.Context, l image.Layer, src layer.Source) error {
	err := s.node.Keep(ctx, l, src)
	if err == nil {
		s.announceLayer(ctx, l.DiffID) // before the checkpoint is known that stands on it
	}
	return err
}

// UploadLayer puts a layer of this node into the PoP's store. It returns an error that
// wraps pop.ErrStoreAway if there is none.
func (s *Member) UploadLayer(ctx context.Context, id digest.Digest) error {
	if s.usable() == nil {
		return pop.ErrStoreAway
	}
	have, err := s.layers.Peek(id)
	if err != nil {
		return err
	}
	if have.At != "" {
		return nil
	}
	s.holds.PinLayer(id, 1)
	defer s.holds.PinLayer(id, -1)
	return s.republish(ctx, have)
}

// BringLayer makes a layer known that is here or in the PoP's store. While there is no such store, it is
// copied from another node.
func (s *Member) BringLayer(ctx context.Context, l image.Layer) error {
	st := s.usable()
	have, err := s.layers.Get(l.DiffID)
	if err == nil && (have.At == "" || s.reachable(ctx, have)) {
		return nil
	}
	if st == nil {
		return s.takeFromPeer(ctx, l)
	}
	if err := s.attachLayer(ctx, st, l); err != nil {
		return fmt.Errorf("layer %s of the PoP's store: %w", l.DiffID, err)
	}
	return nil
}

// takeFromPeer copies a layer from another node that has it whole, verified.
func (s *Member) takeFromPeer(ctx context.Context, l image.Layer) error {
	givers := s.givers(ctx, hasKey(l.DiffID))
	if len(givers) == 0 {
		return fmt.Errorf("layer %s is not here, and no node gives it: %w", l.DiffID,
			errors.Join(layer.ErrUnknown, pop.ErrStoreAway))
	}
	err := s.Keep(ctx, l, &peerTar{s, givers})
	if err == nil {
		s.count(func(h *pop.Hits) { h.Peer++; h.PeerBytes += l.Size })
	}
	return err
}

// givers are the other nodes that say that they have something, if they can be asked. While the
// coordinator is away, nobody is known.
func (s *Member) givers(ctx context.Context, key string) []pop.Member {
	if s.cfg.Peers == nil || s.coordAway() != nil {
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
	s    *Member
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
type Savers struct{ s *Member }

// Savers returns them.
func (s *Member) Savers() *Savers { return &Savers{s} }

// savedKey is what a node is said to use that gives checkpoints of an image.
func savedKey(manifest digest.Digest) string { return "saved/" + manifest.String() }

// saversPatience is how long a deployment waits for what other nodes have saved.
const saversPatience = time.Second

// Records implements store.Peers: what nodes give that say they have some, by their addresses.
func (v *Savers) Records(ctx context.Context, manifest digest.Digest) map[string][]byte {
	s := v.s
	if s.usable() != nil {
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
	if v.s.cfg.Peers == nil {
		return nil, fmt.Errorf("checkpoint %s: %w", id, ErrNoPoP)
	}
	return v.s.cfg.Peers.Data(ctx, from, id, size)
}
