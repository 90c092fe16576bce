package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"dewpoint/internal/config"
	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/durable"
	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/evict"
	"dewpoint/internal/pop/local"
	"dewpoint/internal/pop/peer"
	"dewpoint/internal/pop/redis"
	"dewpoint/internal/pop/session"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
)

// popParts is what a node in a PoP has beside the others.
type popParts struct {
	coord pop.Coordinator
	peers *peer.Client // nil: nodes are not asked
	dir   *pop.Dir     // the store's; nil without one
	auth  *peer.Auth
}

// joinPoP makes the parts that the configuration asks for. Neither Redis nor
// the store need be there: the node works without until they are.
func (d *Daemon) joinPoP() (fetch.PoPConfig, error) {
	f := d.cfg.File.PoP
	if f.Store == "" && f.Redis == "" {
		return fetch.PoPConfig{}, nil
	}
	if f.Policy != "" && !evict.Known(f.Policy) {
		return fetch.PoPConfig{}, fmt.Errorf("policy = %q: it is one of %q", f.Policy, evict.Names())
	}
	out := fetch.PoPConfig{Node: cmp.Or(f.Node, d.name), Damaged: d.popDamaged, Lost: d.popLost,
		Replaced: d.popReplaced, Verify: cmp.Or(time.Duration(f.Verify), defaultVerify),
		Owed:  filepath.Join(d.cfg.Root, "pop.owed"),
		House: time.Duration(f.Grace) / 3, Saved: d.savedImages, Heard: d.popHeard}
	if err := config.CheckNode(out.Node); err != nil {
		return out, fmt.Errorf("node = %w; give pop.node", err)
	}
	var err error
	d.pop = &popParts{}
	if d.pop.coord, err = d.coordinator(out.Node); err != nil {
		return out, err
	}
	out.Coord = d.pop.coord
	if d.pop.auth, err = popAuth(f); err != nil {
		return out, err
	}
	if d.pop.auth != nil {
		if d.pop.peers, err = peer.NewClient(peer.Config{Auth: d.pop.auth, Log: d.log}); err != nil {
			return out, err
		}
		out.Peers, out.Address = d.pop.peers, cmp.Or(f.Advertise, f.Listen)
	}
	if f.Store != "" {
		out.Dir = pop.NewDir(filepath.Clean(f.Store), time.Duration(f.Patience))
		d.pop.dir = out.Dir
		if f.Copy != "never" {
			out.Room = d.copyRoom
		}
		out.Prepare = fetch.PrepareConfig{Images: cmp.Or(f.Prepare, defaultPrepare),
			Path: filepath.Join(d.cfg.Root, "pop.prepared"), Rest: d.restLayers, Waited: admit.Waited,
			Forget:   d.forgetUnused,
			Register: func(ctx context.Context, img *image.Image) error { return d.engine.Register(ctx, img, nil) }}
		out.Open = func(ctx context.Context) (*pop.Store, error) { return d.openStore(ctx, out) }
	}
	return out, nil
}

// openStore opens the store and remembers which one it is: where a file system is
// not mounted there is a directory, too.
func (d *Daemon) openStore(ctx context.Context, c fetch.PoPConfig) (*pop.Store, error) {
	cfg := d.storeConfig(c)
	path := filepath.Join(d.cfg.Root, "pop.store")
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
	if err := d.claimName(ctx, c, st); err != nil || string(was) == st.ID() {
		return st, err
	}
	return st, durable.WriteFile(path, []byte(st.ID()), 0o600)
}

// storeOfOthers is the store that all other nodes share which have one open; "" if there is
// none, or they do not agree.
func storeOfOthers(ctx context.Context, c fetch.PoPConfig) (id string, err error) {
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
func (d *Daemon) claimName(ctx context.Context, c fetch.PoPConfig, st *pop.Store) error {
	path := filepath.Join(d.cfg.Root, "pop.machine")
	me, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		me = []byte(rand.Text())
		err = durable.WriteFile(path, me, 0o600)
	}
	if err != nil {
		return err
	}
	if err = st.Claim(ctx, string(me)); errors.Is(err, pop.ErrTaken) {
		return fmt.Errorf("%w; give one of them another pop.node. If there is only this one, installed anew, remove %s",
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

func (d *Daemon) storeConfig(c fetch.PoPConfig) pop.StoreConfig {
	f := d.cfg.File.PoP
	quota := map[string]int64{}
	for prefix, n := range f.Quota {
		quota[prefix] = int64(n)
	}
	return pop.StoreConfig{FS: c.Dir, Coord: c.Coord, Node: c.Node, Grace: time.Duration(f.Grace),
		Forget:   time.Duration(f.Forget),
		Capacity: int64(f.Capacity), High: f.High, Low: f.Low, Quota: quota, Policy: f.Policy, Log: d.log}
}

// restLayers unmounts layers that nothing needs mounted, and returns the others.
func (d *Daemon) restLayers(ctx context.Context, ids ...digest.Digest) (busy []digest.Digest, err error) {
	var free []digest.Digest
	for _, id := range ids {
		if d.checkpoints != nil && d.checkpoints.Holds(id) {
			busy = append(busy, id)
		} else {
			free = append(free, id)
		}
	}
	mounted, err := d.snaps.Rest(ctx, free...)
	return append(busy, mounted...), err
}

// forgetUnused forgets an image, unless a container uses it.
func (d *Daemon) forgetUnused(ctx context.Context, ref image.Reference) error {
	users, err := d.usersOf(ctx, ref.String())
	if err == nil && len(users) > 0 {
		err = fmt.Errorf("image %s: %w: %v", ref, errImageInUse, users)
	}
	if err != nil {
		return err
	}
	err = d.engine.RemoveImage(ctx, ref.String(), false)
	if errdefs.IsNotFound(err) { // it was being made ready, or somebody removed it
		err = nil
	}
	return errors.Join(err, d.catalog.Forget(ref))
}

// copyRoom reports whether a copy of a layer of the store fits into the cache.
func (d *Daemon) copyRoom(bytes int64) bool { return d.excess()+bytes <= 0 }

// coordinator is Redis, or, for one node, this process.
func (d *Daemon) coordinator(node string) (pop.Coordinator, error) {
	f := d.cfg.File.PoP
	common := pop.Config{Node: node, TTL: time.Duration(f.Lease), Log: d.log}
	var s *session.Session
	var err error
	if f.Redis == "" {
		s, err = local.New(common)
	} else {
		s, err = redis.New(redis.Config{Config: common, URL: f.Redis, CA: f.RedisCA, PoP: cmp.Or(f.Name, "pop")})
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

// servePoP answers the other nodes and keeps up this node's part of the PoP.
func (d *Daemon) servePoP(ctx context.Context) error {
	if d.pop == nil {
		return nil
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.puller.KeepPoP(ctx, d.inUse) })
	g.Go(func() error { d.puller.VerifyInBackground(ctx); return nil })
	if listen := d.cfg.File.PoP.Listen; listen != "" {
		g.Go(func() error { return d.servePeers(ctx, listen) })
	}
	return g.Wait()
}

func (d *Daemon) servePeers(ctx context.Context, addr string) error {
	s, err := peer.NewServer(peer.Config{Auth: d.pop.auth, Content: d.puller.Given(),
		Checkpoints: d.givenCheckpoints(), Log: d.log})
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

// leavePoP tells the other nodes that this one stops. What its containers use
// stays marked in the store.
func (d *Daemon) leavePoP() {
	if d.pop == nil {
		return
	}
	if d.pop.peers != nil {
		d.pop.peers.Close()
	}
	if d.pop.coord == nil {
		return
	}
	if err := d.pop.coord.Close(); err != nil && !errors.Is(err, pop.ErrAway) {
		d.log.Warn("leave the PoP", "err", err)
	}
}
