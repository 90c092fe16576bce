package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"syscall"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/config"
	"dewpoint/internal/deploy"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/member"
	"dewpoint/internal/pop/peer"
	"dewpoint/internal/spec"

	"github.com/opencontainers/go-digest"
)

// defaultVerify is the time in which every layer of the PoP's store is verified once.
const defaultVerify = 168 * time.Hour

// defaultPrepare is how many images are prewarmed that other nodes of the PoP deploy.
const defaultPrepare = 16

// pops implements api.PoPs.
type pops struct {
	member *member.Member // nil: this node is by itself
	cfg    config.PoP
	peers  *peer.Client // nil: nodes are not asked
	dir    *pop.Dir     // the store's; nil without one
	log    *slog.Logger
}

// PoPStatus implements api.PoPs.
func (s *pops) PoPStatus(ctx context.Context) (spec.PoP, error) {
	p, err := s.member.Status(ctx)
	if p == nil {
		return spec.PoP{}, popProblem(errors.Join(err, member.ErrNoPoP))
	}
	if err != nil {
		s.log.Warn("the PoP's status lacks something", "err", err)
	}
	out := spec.PoP{Name: popName, Node: p.Node, Store: popStore(p),
		Coordinator: spec.PoPCoordinator{Kind: s.coordinatorKind(), State: spec.PoPSettled},
		Nodes:       []spec.PoPNode{}, Layers: []spec.PoPLayer{}}
	switch {
	case p.Lost != nil:
		out.Coordinator.State, out.Coordinator.Why = spec.PoPAway, p.Lost.Error()
	case !p.Settled:
		out.Coordinator.State = spec.PoPUnsettled
	}
	members := p.Members
	if len(members) == 0 { // this one is there
		members = []pop.Member{{Node: p.Node, Hits: p.Hits}}
	}
	for _, m := range members {
		out.Nodes = append(out.Nodes, popNode(m))
	}
	for _, l := range p.Layers {
		out.Layers = append(out.Layers,
			spec.PoPLayer{DiffID: l.DiffID.String(), Size: l.Size, BlobSize: l.BlobSize, Image: l.Image, Node: l.Node,
				Users: p.Users[l.DiffID.String()]})
	}
	slices.SortFunc(out.Layers, func(a, b spec.PoPLayer) int {
		return cmp.Or(cmp.Compare(a.Image, b.Image), cmp.Compare(a.DiffID, b.DiffID))
	})
	return out, nil
}

func (s *pops) coordinatorKind() string {
	if s.cfg.Redis != "" {
		return "redis"
	}
	return "local"
}

func popStore(p *member.Status) spec.PoPStore {
	s := spec.PoPStore{Path: p.Path, ID: p.Store, State: spec.PoPOK, Total: p.Total, Free: p.Free,
		Trash: p.Trash, Capacity: p.Most}
	switch {
	case !p.Shared:
		s.State = spec.PoPNone
	case p.Away != nil:
		s.State, s.Why = spec.PoPAway, oneLine(p.Away)
	}
	if others := apart(p); len(others) > 0 && s.State == spec.PoPOK {
		var names []string
		for _, m := range others {
			names = append(names, m.Node)
		}
		s.Why = "another store than this one is that of " + strings.Join(names, ", ")
	}
	for _, l := range p.Layers {
		s.Bytes += l.Size
	}
	for _, q := range p.Quotas {
		s.Quotas = append(s.Quotas, spec.PoPQuota(q))
	}
	return s
}

// oneLine is what an error says, of which joined ones have a line each.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", ": ") }

func popNode(m pop.Member) spec.PoPNode {
	h := m.Hits
	n := spec.PoPNode{Name: m.Node, Address: m.Address, Cache: m.Used, Capacity: m.Capacity,
		Local:    spec.PoPHits{Layers: h.Local, Bytes: h.LocalBytes},
		Store:    spec.PoPHits{Layers: h.Store, Bytes: h.StoreBytes},
		Peer:     spec.PoPHits{Layers: h.Peer, Bytes: h.PeerBytes},
		Registry: spec.PoPHits{Layers: h.Registry, Bytes: h.RegistryBytes}}
	for _, f := range m.Fetching {
		n.Fetching = append(n.Fetching, spec.PoPFetch{Layer: f.Key, Done: f.Done, Size: f.Size})
	}
	return n
}

// PoPVerify implements api.PoPs.
func (s *pops) PoPVerify(ctx context.Context, layers []string, emit func(spec.PoPVerified) error) error {
	var ids []digest.Digest
	for _, l := range layers {
		id, err := digest.Parse(l)
		if err != nil {
			return fmt.Errorf("%w: layer %q: %w", deploy.ErrRequest, l, err)
		}
		ids = append(ids, id)
	}
	return popProblem(s.member.Verify(ctx, ids, func(v member.Verified) error { return emit(popVerified(v)) }))
}

func popVerified(v member.Verified) spec.PoPVerified {
	out := spec.PoPVerified{DiffID: v.DiffID.String(), Image: v.Image, Size: v.Size, State: spec.PoPWhole}
	switch {
	case v.Gone:
		out.State = spec.PoPGone
	case v.Replaced:
		out.State = spec.PoPReplaced
	case v.Damage != nil:
		out.State = spec.PoPDamaged
	}
	if v.Damage != nil {
		out.Error = v.Damage.Error()
	}
	return out
}

// PoPForget implements api.PoPs.
func (s *pops) PoPForget(ctx context.Context, name string) error {
	err := s.member.Forget(ctx, name)
	if err == nil {
		s.log.Info("an operator had a node of the PoP forgotten", "node", name)
	}
	return popProblem(err)
}

// prune evicts from the store what no node uses.
func (s *pops) prune(ctx context.Context, u *usage, r *spec.PruneReport) error {
	done, err := s.member.Prune(ctx, u.inUse)
	for _, id := range done.Layers {
		r.PoPLayers = append(r.PoPLayers, id.String())
	}
	r.PoPBytes, r.PoPWhy = done.Bytes, done.Why
	return popProblem(err)
}

// popProblem says what to do about what goes wrong in a PoP.
func popProblem(err error) error {
	if err == nil {
		return nil
	}
	for _, k := range []struct {
		err    error
		code   api.Code
		remedy string
	}{
		{member.ErrNoPoP, api.Unsupported, "give store, and redis, in the [pop] section of its configuration"},
		{pop.ErrLives, api.InUse, "only a node that is gone for good is to be forgotten"},
		{pop.ErrTaken, api.Unsupported, takenRemedy},
		{pop.ErrNotStore, api.Unsupported, notStoreRemedy},
		{pop.ErrNotMounted, api.Unsupported, storeRemedy},
		{pop.ErrStoreAway, api.Unsupported, storeRemedy},
		{pop.ErrAway, api.Unsupported, redisRemedy},
		{syscall.EROFS, api.Unsupported, fullRemedy},
		{pop.ErrUnknown, api.NotFound, "\"dew pop status --layers\" lists what is there, and who uses it"},
	} {
		if errors.Is(err, k.err) {
			e := api.Of(k.code, err)
			e.Remedy = k.remedy
			return e
		}
	}
	return err
}

const (
	takenRemedy    = "give each node of the PoP a name of its own (node.name); until then this one works with what is here and the registry"
	notStoreRemedy = "pop.store has to be an empty directory, or one that is a store; until then this node works with what is here and the registry"
	fullRemedy     = "make room on the PoP's file system, or see why it cannot be written: \"dew prune --pop\" evicts what no node uses; until then what this node fetches it has for itself"
	storeRemedy    = "see that the PoP's file system is mounted and answers (ls of pop.store); until then the node works with what is here and the registry, and it comes back by itself"
	redisRemedy    = "see that Redis runs and can be reached (pop.redis); until then each node fetches for itself and nothing is evicted, and it comes back by itself"
)
