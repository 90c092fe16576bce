package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/config"
	"dewpoint/internal/durable"
	"dewpoint/internal/evict"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/local"
	"dewpoint/internal/pop/member"
	"dewpoint/internal/pop/peer"
	"dewpoint/internal/pop/redis"
	"dewpoint/internal/pop/session"
	"dewpoint/internal/spec"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
)

// popName is part of the names of a PoP's keys in Redis.
const popName = "pop"

// popParts is what a node in a PoP has beside the others.
type popParts struct {
	cfg   Config
	node  string          // this node's name, where pop.node gives none
	coord pop.Coordinator // nil: this node is by itself
	peers *peer.Client    // nil: nodes are not asked
	dir   *pop.Dir        // the store's; nil without one
	auth  *peer.Auth
	// nil: this node is by itself; also before there is a puller
	member   *member.Member
	saved    *late[*store.Store] // checkpoints; of nil if there are to be none
	usage    *usage
	room     *room
	partials *partials // knows which containers run with a layer
	log      *slog.Logger
	bg       *sync.WaitGroup // has what goes on in the background
}

// join makes the parts that the configuration asks for. Neither Redis nor
// the store need be there: the node works without until they are.
func (p *popParts) join() (member.Config, error) {
	f := p.cfg.File.PoP
	if f.Store == "" && f.Redis == "" {
		return member.Config{}, nil
	}
	if f.Policy != "" && !evict.Known(f.Policy) {
		return member.Config{}, fmt.Errorf("policy = %q: it is one of %q", f.Policy, evict.Names())
	}
	out := member.Config{Node: cmp.Or(f.Node, p.node), Log: p.log, Audience: p, Saved: p,
		Verify:       defaultVerify,
		Pending:      filepath.Join(p.cfg.Root, "pop.owed"),
		CollectEvery: time.Duration(f.Grace) / 3}
	if err := config.CheckNode(out.Node); err != nil {
		return out, fmt.Errorf("node = %w; give node.name", err)
	}
	var err error
	if p.coord, err = p.coordinator(out.Node); err != nil {
		return out, err
	}
	out.Coord = p.coord
	if p.auth, err = popAuth(f); err != nil {
		return out, err
	}
	tellRevoked(p.log, p.auth, 0)
	if p.auth != nil {
		if p.peers, err = peer.NewClient(peer.Config{Auth: p.auth, Log: p.log}); err != nil {
			return out, err
		}
		out.Peers, out.Address = p.peers, f.Listen
	}
	if f.Store != "" {
		out.Dir = pop.NewDir(filepath.Clean(f.Store), time.Duration(f.Patience))
		p.dir = out.Dir
		if f.Copy != "never" {
			out.Cache = p.room
		}
		out.Prewarm = member.PrewarmConfig{Images: cmp.Or(f.Prepare, defaultPrepare),
			Path: filepath.Join(p.cfg.Root, "pop.prepared"), Engine: p.usage}
		out.Store = storeOpener{p, out}
	}
	return out, nil
}

// storeOpener opens the store of a member.
type storeOpener struct {
	p *popParts
	c member.Config
}

func (o storeOpener) OpenStore(ctx context.Context) (*pop.Store, error) {
	return o.p.openStore(ctx, o.c)
}

// openStore opens the store and remembers which one it is: where a file system is
// not mounted there is a directory, too.
func (p *popParts) openStore(ctx context.Context, c member.Config) (*pop.Store, error) {
	cfg := p.storeConfig(c)
	path := filepath.Join(p.cfg.Root, "pop.store")
	was, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if cfg.ID = string(was); cfg.ID == "" { // the store may have to be made: by one node alone
		lease, err := acquireSoon(ctx, c.Coord, "create")
		if err != nil {
			return nil, err
		}
		defer func() { _ = lease.Release(context.WithoutCancel(ctx)) }() // else it expires
		if cfg.ID, err = storeOfOthers(ctx, c); err != nil {
			return nil, err
		}
	}
	st, err := pop.OpenStore(ctx, cfg)
	switch {
	case errors.Is(err, pop.ErrNotMounted) && len(was) > 0:
		return nil, fmt.Errorf("%w: is the PoP's file system mounted at %s? If the other store is the right one, remove %s", err, c.Dir.Path("."), path)
	case errors.Is(err, pop.ErrNotMounted):
		return nil, fmt.Errorf("%w, and the other nodes share it: is the PoP's file system mounted at %s?", err,
			c.Dir.Path("."))
	}
	if err != nil {
		return nil, err
	}
	if err := p.claimName(ctx, c, st); err != nil || string(was) == st.ID() {
		return st, err
	}
	return st, durable.WriteFile(path, []byte(st.ID()), 0o600)
}

// storeOfOthers is the store that all other nodes share which have one open; "" if there is
// none, or they do not agree.
func storeOfOthers(ctx context.Context, c member.Config) (id string, err error) {
	members, err := c.Coord.Members(ctx)
	for _, m := range members {
		switch {
		case m.Node == c.Node || m.Store == "" || m.Store == id:
		case id == "":
			id = m.Store
		default:
			return "", nil
		}
	}
	return id, err
}

// claimName makes sure that no other machine has this node's name in the PoP.
func (p *popParts) claimName(ctx context.Context, c member.Config, st *pop.Store) error {
	path := filepath.Join(p.cfg.Root, "pop.machine")
	me, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		me = []byte(rand.Text())
		err = durable.WriteFile(path, me, 0o600)
	}
	if err != nil {
		return err
	}
	if err = st.Claim(ctx, string(me)); errors.Is(err, pop.ErrTaken) {
		return fmt.Errorf("%w; give one of them another node.name. If there is only this one, installed anew, remove %s",
			err, c.Dir.Path(filepath.Join("nodes", c.Node+".owner")))
	}
	return err
}

// acquireSoon takes a lease that others hold for a moment.
func acquireSoon(ctx context.Context, c pop.Leases, key string) (pop.Lease, error) {
	for {
		lease, err := c.Acquire(ctx, key, 0)
		var held *pop.HeldError
		if !errors.As(err, &held) {
			return lease, err
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return nil, err
		}
	}
}

func (p *popParts) storeConfig(c member.Config) pop.StoreConfig {
	f := p.cfg.File.PoP
	quota := map[string]int64{}
	for prefix, n := range f.Quota {
		quota[prefix] = int64(n)
	}
	return pop.StoreConfig{FS: c.Dir, Coord: c.Coord, Node: c.Node, Grace: time.Duration(f.Grace),
		Capacity: int64(f.Capacity), High: f.High, Low: f.Low, Quota: quota, Policy: f.Policy, Log: p.log}
}

// coordinator is Redis, or, for one node, this process.
func (p *popParts) coordinator(node string) (pop.Coordinator, error) {
	f := p.cfg.File.PoP
	common := pop.Config{Node: node, TTL: time.Duration(f.Lease), Log: p.log}
	var s *session.Session
	var err error
	if f.Redis == "" {
		s, err = local.New(common)
	} else {
		s, err = redis.New(redis.Config{Config: common, URL: f.Redis, CA: f.RedisCA, PoP: popName})
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

func popAuth(f config.PoP) (*peer.Auth, error) {
	switch {
	case f.Key != "":
		return peer.ReadKey(f.Key)
	case f.Cert != "":
		return peer.ReadCertificates(f.CA, f.Cert, f.TLSKey)
	}
	return nil, nil
}

// serve answers the other nodes and keeps up this node's part of the PoP.
func (p *popParts) serve(ctx context.Context, given peer.Checkpoints) error {
	if p.coord == nil {
		return nil
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.member.Run(ctx, p.usage.inUse) })
	g.Go(func() error { p.member.VerifyInBackground(ctx); return nil })
	if listen := p.cfg.File.PoP.Listen; listen != "" {
		g.Go(func() error {
			return p.servePeers(ctx, listen, peer.Config{Auth: p.auth, Content: p.member.Given(), Checkpoints: given,
				Log: p.log})
		})
	}
	return g.Wait()
}

func (p *popParts) servePeers(ctx context.Context, addr string, cfg peer.Config) error {
	s, err := peer.NewServer(cfg)
	if err != nil {
		return err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("pop.listen: %w", err)
	}
	unhook := context.AfterFunc(ctx, func() { s.Close() })
	defer unhook()
	return s.Serve(l)
}

// leave tells the other nodes that this one stops. What its containers use
// stays marked in the store.
func (p *popParts) leave() {
	if p.peers != nil {
		p.peers.Close()
	}
	if p.coord == nil {
		return
	}
	if err := p.coord.Close(); err != nil && !errors.Is(err, pop.ErrAway) {
		p.log.Warn("leave the PoP", "err", err)
	}
}

// Damaged tells the event stream of a layer of the store that is not what was published.
func (p *popParts) Damaged(id digest.Digest, why error) {
	p.usage.events.add(spec.Event{Kind: spec.EventDamaged, Layer: id.String(), Error: why.Error()})
}

// Replaced tells it of one that is in the store again.
func (p *popParts) Replaced(id digest.Digest) {
	p.usage.events.add(spec.Event{Kind: spec.EventReplaced, Layer: id.String()})
}

// LetGo tells which containers run on with the files of a layer that has left the store.
func (p *popParts) LetGo(id digest.Digest, why string) {
	p.partials.onceOpen(func() { p.bg.Go(func() { p.partials.tellLeft(id, why) }) })
}

// Lost has a checkpoint of this node's that was damaged in the store put there again.
func (p *popParts) Lost(id digest.Digest) {
	if saved, _ := p.saved.get(); saved != nil {
		p.bg.Go(func() { saved.Lost(id) })
	}
}

// Manifests are the manifests of images that this node gives checkpoints of.
func (p *popParts) Manifests() []digest.Digest {
	saved, _ := p.saved.get()
	if saved == nil {
		return nil
	}
	return saved.Manifests()
}

// Heard is told of what happens in the PoP.
func (p *popParts) Heard(e pop.Event) {
	if saved, _ := p.saved.get(); saved != nil {
		saved.Heard(e)
	}
}
