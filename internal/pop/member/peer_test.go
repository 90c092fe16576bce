package member

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dewpoint/internal/fetch"
	"dewpoint/internal/layer"
	"dewpoint/internal/pack"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/peer"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"github.com/opencontainers/go-digest"
)

// cutting is what a node gives, of which no layer comes to its end while it is on.
type cutting struct {
	*Given
	on atomic.Bool
}

var errTorn = errors.New("torn")

func (c *cutting) Follow(ctx context.Context, id digest.Digest, off int64) (io.ReadCloser, int64, error) {
	r, size, err := c.Given.Follow(ctx, id, off)
	if err == nil && c.on.Load() {
		r = readCloser{io.MultiReader(io.LimitReader(r, 64<<10), broken{}), r}
	}
	return r, size, err
}

// telling is what a node gives, and how far a layer is that it has said so of.
type telling struct {
	*Given
	size atomic.Int64 // the first time
	said atomic.Int64 // how often
}

func (g *telling) Progress(ctx context.Context, id digest.Digest) ([]byte, error) {
	b, err := g.Given.Progress(ctx, id)
	var said struct{ Point struct{ Out int64 } }
	if err == nil {
		err = json.Unmarshal(b, &said)
	}
	if err == nil {
		g.size.CompareAndSwap(0, said.Point.Out)
		g.said.Add(1)
	}
	return b, err
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errTorn }

// peers is a PoP's key, and what asks with it.
func (s *popBed) peers() (*peer.Auth, *peer.Client) {
	path := filepath.Join(s.t.TempDir(), "key")
	err := peer.NewKey(path)
	var auth *peer.Auth
	if err == nil {
		auth, err = peer.ReadKey(path)
	}
	var c *peer.Client
	if err == nil {
		c, err = peer.NewClient(peer.Config{Auth: auth})
	}
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(c.Close)
	return auth, c
}

// serve has a node give to others what content is, at l.
func (n *popNode) serve(l net.Listener, auth *peer.Auth, content peer.Content) (stop func()) {
	srv, err := peer.NewServer(peer.Config{Auth: auth, Content: content})
	n.must(err)
	var served sync.WaitGroup
	served.Go(func() { n.must(srv.Serve(l)) })
	stop = sync.OnceFunc(func() { srv.Close(); served.Wait() })
	n.t.Cleanup(stop)
	return stop
}

// pair is two nodes, a and b, that give to each other what they have.
func (s *popBed) pair() (a, b *popNode) {
	auth, client := s.peers()
	node := func(name string) *popNode {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			s.t.Fatal(err)
		}
		n := s.node(name, func(c *Config) { c.Address, c.Peers = l.Addr().String(), client })
		n.serve(l, auth, n.member.Given())
		return n
	}
	return node("a"), node("b")
}

// What came from another node counts as such when it has come, and not when it was tried.
func TestTriesOfPeersDoNotCount(t *testing.T) {
	s := newPoPBed(t)
	auth, client := s.peers()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	asks := func(c *Config) { c.Peers = client }
	a := s.node("a", func(c *Config) { c.Address = l.Addr().String() })
	gives := &cutting{Given: a.member.Given()}
	a.serve(l, auth, gives)
	b, c := s.node("b", asks), s.node("c", asks)
	p := a.push("app", 1)
	id := a.bring(p)[0].Layer.DiffID
	a.eventually("a has published it, and says that it has it", func() bool {
		users, err := b.member.cfg.Coord.Users(t.Context(), hasKey(id))
		return err == nil && len(users) > 0 && a.member.usable().HasLayer(t.Context(), id) && !a.member.leads(id)
	})
	a.member.announce(t.Context())
	a.must(s.hide(id))

	b.bring(p)
	if h := b.member.hitsNow(); h.Peer != 1 || h.PeerBytes != size(p) || h.Registry != 0 {
		t.Errorf("it came from a: %+v", h)
	}
	sent := s.served(p)
	gives.on.Store(true)
	if got := c.bring(p); got[0].From.Registry == 0 {
		t.Errorf("a gives no whole layer: %+v", got[0].From)
	}
	if h := c.member.hitsNow(); h.Peer != 0 || h.PeerBytes != 0 || h.Registry != 1 {
		t.Errorf("what a gave came to no end: %+v", h)
	}
	if s.served(p) == sent {
		t.Error("the registry was not asked")
	}
}

// A node gives what it fetches itself and what it has, not what passes through it. Two nodes that are said to
// have a layer, and do not, do not wait for each other.
func TestNoneGivesWhatPassesThroughIt(t *testing.T) {
	s := newPoPBed(t)
	a, b := s.pair()
	p := s.reg.PushImage("app", []registrytest.Layer{{Tar: registrytest.RandomTar(1, 4, 4<<20)}},
		registrytest.Options{})
	id := p.Layers[0].DiffID
	for _, n := range []*popNode{a, b} {
		n.member.announceLayer(t.Context(), id)
	}
	s.reg.Fail(registrytest.Fault{Do: registrytest.Slow, At: 2 << 20})
	var both sync.WaitGroup
	both.Go(func() { a.bring(p) })
	both.Go(func() { b.bring(p) })
	fills := func(n *popNode) bool {
		f := n.layers.Filling(id)
		return f != nil && f.Progress().Written > 0
	}
	a.eventually("both get it", func() bool { return fills(a) && fills(b) })
	gives := 0
	for _, n := range []*popNode{a, b} {
		r, _, err := n.member.Given().Follow(t.Context(), id, 0)
		if err == nil {
			r.Close()
		}
		if leads := n.member.leads(id); leads != (err == nil) || err != nil && !errors.Is(err, peer.ErrUnknown) {
			t.Errorf("%s leads %v, and gives %v", n.name, leads, err)
		}
		if err == nil {
			gives++
		}
	}
	if gives != 1 {
		t.Errorf("%d nodes give it", gives)
	}
	both.Wait()
	if h, k := a.member.hitsNow(), b.member.hitsNow(); h.Registry+k.Registry != 1 || h.Peer+k.Peer != 1 {
		t.Errorf("it came to a by %+v, to b by %+v", h, k)
	}
}

// A layer whose fetcher was killed is not waited for until its lease ends: nobody listens where it was.
func TestKilledFetcher(t *testing.T) {
	s := newPoPBed(t)
	_, client := s.peers()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ghost, err := s.hub.Join(pop.Config{Node: "ghost", TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	defer ghost.Close()
	b := s.node("b", func(c *Config) { c.Peers = client })
	b.must(ghost.Announce(t.Context(), pop.Member{Node: "ghost", Address: l.Addr().String()}))
	p := b.push("app", 1)
	id := p.Layers[0].DiffID
	lease, err := ghost.Acquire(t.Context(), pop.LayerLease(id), 0)
	b.must(err)
	b.must(l.Close())
	b.bring(p)
	if h := b.member.hitsNow(); h.Registry != 1 {
		t.Errorf("it did not come by b's lease: %+v", h)
	}
	b.published(id)
	b.must(lease.Release(t.Context())) // which is nobody's any more
}

// Who follows a layer goes on from there when its fetcher is killed, also where no store keeps what it had.
func TestKilledFetcherWithoutStore(t *testing.T) {
	testkit.Long(t)
	t.Parallel()
	s := newPoPBed(t)
	s.every = 128 << 10
	auth, client := s.peers()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	away := opener(func(context.Context) (*pop.Store, error) { return nil, pop.ErrStoreAway })
	a := s.boot("a", func(c *Config) { c.Store, c.Address, c.Peers = away, l.Addr().String(), client })
	b := s.boot("b", func(c *Config) { c.Store, c.Peers = away, client })
	gives := &telling{Given: a.member.Given()}
	stop := a.serve(l, auth, gives)
	p := s.reg.PushImage("app", []registrytest.Layer{{Tar: registrytest.RandomTar(1, 4, 4<<20)}},
		registrytest.Options{})
	blob, id := p.Layers[0].Digest, p.Layers[0].DiffID
	s.reg.Fail(registrytest.Fault{Do: registrytest.Slow, At: 256 << 10, Digest: blob})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err = a.Pull(ctx, a.ref(p.Ref), fetch.Options{})
	a.must(err)
	a.eventually("a fetches it", func() bool { return a.member.leads(id) && len(s.reg.Ranges(blob)) > 0 })
	var ended sync.WaitGroup
	defer ended.Wait()
	ended.Go(func() { b.bring(p) })
	b.eventually("b has what a says that it has come to", func() bool {
		f := b.layers.Filling(id)
		return f != nil && gives.said.Load() > 1 && f.Progress().Written >= gives.size.Load()
	})
	asked := len(s.reg.Ranges(blob))
	stop()
	s.reg.Heal()
	ended.Wait()
	ranges := s.reg.Ranges(blob)[asked:]
	if !b.HasLayer(id) || len(ranges) == 0 || ranges[0] == "" || strings.HasPrefix(ranges[0], "bytes=0-") {
		t.Errorf("b asks the registry for %q", ranges)
	}
}

// A pack crosses the link once, however long the registry lets its first node wait, and whatever happens to
// layers meanwhile.
func TestSlowPackComesOnce(t *testing.T) {
	s := newPoPBed(t)
	s.packs = true
	a, b := s.pair()
	content := bytes.Repeat([]byte("pack"), 64<<10)
	var opened atomic.Int32
	begins := make(chan struct{})
	size := int64(len(content))
	open := func(context.Context, pack.Span) (io.ReadCloser, error) {
		if opened.Add(1) == 1 {
			<-begins
		}
		return io.NopCloser(bytes.NewReader(content)), nil
	}
	manifest := digest.FromString("image")
	read := func(n *popNode) {
		pass, _ := n.member.Pass(manifest, size, open)
		r, err := pass(t.Context(), pack.Span{Length: size})
		n.must(err)
		got, err := io.ReadAll(r)
		n.must(err)
		n.must(r.Close())
		if !bytes.Equal(got, content) {
			t.Errorf("%s reads something else", n.name)
		}
	}
	var both sync.WaitGroup
	both.Go(func() { read(a) })
	a.eventually("a asks the registry", func() bool { return opened.Load() == 1 })
	both.Go(func() { read(b) })
	for range 100 {
		b.member.wake()
		time.Sleep(15 * time.Millisecond)
	}
	close(begins)
	both.Wait()
	if n := opened.Load(); n != 1 {
		t.Errorf("the registry gave it %d times", n)
	}
}

// A node that copies layers whole out of the store, as one without EROFS does, takes out what is not the
// layer, and gets that from the registry.
func TestWrongTarOfTheStore(t *testing.T) {
	testkit.NeedRoot(t, "files of a tree get their owners")
	s := newPoPBed(t)
	a := s.node("a", nil)
	p := a.push("app", 1)
	id := a.bring(p)[0].Layer.DiffID
	s.flip(s.data(a.published(id)))
	s.tree = true
	b := s.node("b", nil)
	sent := s.served(p)
	b.bring(p)
	if !b.HasLayer(id) || s.served(p) == sent {
		t.Errorf("b has it: %v; the registry has sent %d bytes, of %d before", b.HasLayer(id), s.served(p), sent)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !slices.Contains(b.damaged, id) {
		t.Error("it is not reported")
	}
	if h := b.member.hitsNow(); h.Store != 0 || h.Registry != 1 {
		t.Errorf("it counts as %+v", h)
	}
}

// wayTo is a source whose layer lies elsewhere.
type wayTo struct {
	layer.Source
	e *layer.Elsewhere
}

func (w wayTo) Prepare(context.Context, *layer.Fill) (layer.Way, error) {
	return layer.Way{Elsewhere: w.e}, nil
}

// Who follows a layer that was attached from the store in the end is not told that it was empty.
func TestFollowedLayerIsAttached(t *testing.T) {
	s := newPoPBed(t)
	a := s.node("a", nil)
	p := a.push("app", 1)
	l := a.bring(p)[0].Layer
	rec := a.published(l.DiffID)
	b, err := layer.Open(layer.Config{Dir: t.TempDir()})
	a.must(err)
	t.Cleanup(func() { a.must(b.Close()) })
	e, err := a.member.described(t.Context(), a.member.usable(), rec, l)
	a.must(err)
	f := b.Fill(t.Context(), l, wayTo{e: e})
	_, err = f.WaitComplete(t.Context())
	a.must(err)
	file, err := os.Open(e.Data)
	a.must(err)
	g := &growing{ctx: t.Context(), f: f, file: file}
	defer g.Close()
	if n, err := g.Read(make([]byte, 10)); n != 0 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("it gives %d bytes, and %v", n, err)
	}
}

// A layer that the store has no room for is not copied there while it arrives.
func TestNoCopyWithoutRoom(t *testing.T) {
	testkit.Long(t)
	t.Parallel()
	for name, capacity := range map[string]int64{"room": 0, "no room": 1 << 20} {
		t.Run(name, func(t *testing.T) {
			s := newPoPBed(t)
			s.every = 128 << 10
			a := s.node("a", func(c *Config) {
				c.Store = opener(func(ctx context.Context) (*pop.Store, error) {
					return pop.OpenStore(ctx, pop.StoreConfig{FS: c.Dir, Coord: c.Coord, Node: c.Node, Capacity: capacity})
				})
			})
			p := s.reg.PushImage("app", []registrytest.Layer{{Tar: registrytest.RandomTar(1, 4, 4<<20)}},
				registrytest.Options{})
			s.reg.Fail(registrytest.Fault{Do: registrytest.Slow, At: 256 << 10})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			pull, err := a.Pull(ctx, a.ref(p.Ref), fetch.Options{})
			a.must(err)
			f := a.layers.Filling(pull.Image.Layers[0].DiffID)
			a.eventually("there is something to copy", func() bool {
				if !a.member.leads(f.Layer.DiffID) || f.Runs() == 0 {
					return false
				}
				_, err := f.Checkpoint()
				return err == nil
			})
			a.member.routes.mu.Lock()
			lease := a.member.leading[f.Layer.DiffID]
			a.member.routes.mu.Unlock()
			l := &leader{copier: copier{s: a.member.uploads, id: f.Layer.DiffID, lease: lease}, f: f}
			l.checkpoint(t.Context())
			if (l.draft != nil) != (capacity == 0) || errors.Is(l.err, pop.ErrFull) != (capacity != 0) {
				t.Errorf("it is copied: %t, %v", l.draft != nil, l.err)
			}
			a.must(l.drop(t.Context()))
		})
	}
}
