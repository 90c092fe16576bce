package store_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"dewpoint/internal/checkpoint/image"
	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/peer"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
)

// giver is a node that others ask for its checkpoints, over TLS.
type giver struct {
	*store.Store
	lacks   bool                   // it lacks the upper layers
	records func(b []byte) []byte  // changes what it says
	data    func(io.Reader) []byte // changes what it gives
	asked   atomic.Int32           // for data
}

func (g *giver) Records(_ context.Context, manifest digest.Digest) ([]byte, error) {
	b, err := g.OfferRecords(manifest, func(digest.Digest) bool { return !g.lacks })
	if g.records != nil {
		b = g.records(b)
	}
	return b, err
}

func (g *giver) Data(_ context.Context, id digest.Digest) (io.ReadCloser, int64, error) {
	g.asked.Add(1)
	d, err := g.GiveData(id)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %w", peer.ErrUnknown, err)
	}
	var r io.Reader = io.NewSectionReader(d, 0, d.Size)
	if g.data != nil {
		r = strings.NewReader(string(g.data(r)))
	}
	return struct {
		io.Reader
		io.Closer
	}{r, d}, d.Size, nil
}

// circle is nodes without a store in common. It implements store.Peers for one more.
type circle struct {
	t       *testing.T
	auth    *peer.Auth
	client  *peer.Client
	mu      sync.Mutex
	asked   int      // for records
	address []string // of the others
}

func newCircle(t *testing.T) *circle {
	t.Helper()
	key := filepath.Join(t.TempDir(), "key")
	err := peer.NewKey(key)
	c := &circle{t: t}
	if err == nil {
		c.auth, err = peer.ReadKey(key)
	}
	if err == nil {
		c.client, err = peer.NewClient(peer.Config{Auth: c.auth})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.client.Close)
	return c
}

// giver adds a node.
func (c *circle) giver(name string) *giver {
	c.t.Helper()
	g := &giver{Store: open(c.t, store.Config{Dir: c.t.TempDir(), Node: name})}
	s, err := peer.NewServer(peer.Config{Auth: c.auth, Content: nothing{}, Checkpoints: g})
	if err != nil {
		c.t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		c.t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := s.Serve(l); err != nil {
			c.t.Error(err)
		}
	})
	c.t.Cleanup(func() { s.Close(); serving.Wait() })
	c.address = append(c.address, l.Addr().String())
	return g
}

// nothing is a node's layers.
type nothing struct{ peer.Content }

func (c *circle) Records(ctx context.Context, manifest digest.Digest) map[string][]byte {
	c.mu.Lock()
	c.asked++
	c.mu.Unlock()
	all := map[string][]byte{}
	for _, a := range c.address {
		if b, err := c.client.Records(ctx, a, manifest); err == nil {
			all[a] = b
		}
	}
	return all
}

func (c *circle) Data(ctx context.Context, from string, id digest.Digest, size int64) (io.ReadCloser, error) {
	return c.client.Data(ctx, from, id, size)
}

func ofManifest(r *store.Record) { r.Manifest = digest.FromString("manifest").String() }

// listed is the checkpoint of that manifest that the store knows; the zero value if there is none.
func listed(t *testing.T, s *store.Store) store.Listed {
	t.Helper()
	all, err := s.List(t.Context(), digest.FromString("manifest").String())
	if err != nil || len(all) > 1 {
		t.Fatalf("%+v, %v", all, err)
	}
	if len(all) == 0 {
		return store.Listed{}
	}
	return all[0]
}

// TestFromAnotherNode takes what another node gives, once for all who want it at once, and keeps it.
func TestFromAnotherNode(t *testing.T) {
	c, ctx := newCircle(t), t.Context()
	x := c.giver("x")
	dir := t.TempDir()
	y := open(t, store.Config{Dir: dir, Node: "y", Peers: c})
	r := put(t, x.Store, "text", func(r *store.Record) {
		ofManifest(r)
		r.Upper = &store.Layer{DiffID: digest.FromString("upper"), Size: 5}
	})
	if got := x.Manifests(); !slices.Equal(got, []digest.Digest{digest.Digest(r.Manifest)}) {
		t.Errorf("x has checkpoints of %v", got)
	}
	l := listed(t, y)
	if l.ID != r.ID || l.Local || l.PoP || !l.Peer || l.Node != "x" || !y.HasUpper(ctx, l) {
		t.Fatalf("%+v", l)
	}
	var g errgroup.Group
	for range 3 {
		g.Go(func() error {
			dir, release, err := y.Unpacked(ctx, l.Record)
			if err == nil {
				release()
				if !slices.Contains(files(t, dir), "pages-1.img") {
					err = errors.New("there is no memory")
				}
			}
			return err
		})
		g.Go(func() error {
			_, _, release, err := y.Meta(ctx, l.Record, nil)
			if err == nil {
				release(nil)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if got := listed(t, y); !got.Local || got.Peer || got.Node != "x" || got.ID != r.ID ||
		!got.Created.Equal(r.Created) || x.asked.Load() != 1 {
		t.Errorf("%+v; it was asked for %d times", got, x.asked.Load())
	}
	if err := y.Verify(ctx, r.ID); err != nil {
		t.Error(err)
	}
	files(t, dir) // their modes
	if again := open(t, store.Config{Dir: dir, Node: "y"}); !listed(t, again).Local {
		t.Error("it is gone after a restart")
	}
	if c.asked != 1 {
		t.Errorf("%d looks within a moment", c.asked)
	}
}

// TestLies takes nothing from nodes that give something else than they say, and the rest from one that does
// not.
func TestLies(t *testing.T) {
	cut := func(r io.Reader) []byte { b, _ := io.ReadAll(r); return b[:len(b)-1] }
	flipped := func(r io.Reader) []byte { b, _ := io.ReadAll(r); b[len(b)/2]++; return b }
	for name, lie := range map[string]*giver{
		"other bytes": {data: flipped},
		"too few":     {data: cut},
		"no JSON":     {records: func([]byte) []byte { return []byte("{") }},
		"another manifest": {records: func(b []byte) []byte {
			return []byte(strings.ReplaceAll(string(b), digest.FromString("manifest").String(), "sha256:m"))
		}},
		"another size": {records: func(b []byte) []byte {
			return []byte(strings.ReplaceAll(string(b), `"pages"`, `"size":7,"pages"`))
		}},
		"no upper layer": {lacks: true},
	} {
		t.Run(name, func(t *testing.T) {
			c, ctx := newCircle(t), t.Context()
			x := c.giver("x")
			x.records, x.data, x.lacks = lie.records, lie.data, lie.lacks
			change := func(r *store.Record) {
				ofManifest(r)
				r.Upper = &store.Layer{DiffID: digest.FromString("upper"), Size: 5}
			}
			r := put(t, x.Store, "text", change)
			dir := t.TempDir()
			y := open(t, store.Config{Dir: dir, Node: "y", Peers: c})
			said := r
			if l := listed(t, y); l.ID != "" {
				said = l.Record
			}
			if _, _, err := y.Unpacked(ctx, said); !errors.Is(err, store.ErrUnknown) {
				t.Errorf("%v", err)
			}
			if left := files(t, dir); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
			put(t, c.giver("z").Store, "text", change)
			y = open(t, store.Config{Dir: dir, Node: "y", Peers: c})
			if l := listed(t, y); l.ID != r.ID {
				t.Fatalf("%+v", l)
			}
			_, release, err := y.Unpacked(ctx, r)
			if err != nil {
				t.Fatal(err)
			}
			release()
			if err := y.Verify(ctx, r.ID); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestStoreBeforePeers asks no node while there is a store to look in.
func TestStoreBeforePeers(t *testing.T) {
	c := newCircle(t)
	put(t, c.giver("x").Store, "text", ofManifest)
	st := newPoP(t).shared("y", nil)
	var away atomic.Bool
	y := open(t, store.Config{Dir: t.TempDir(), Node: "y", Peers: c, PoP: func() *pop.Store {
		if away.Load() {
			return nil
		}
		return st
	}})
	if l := listed(t, y); l.ID != "" || c.asked != 0 {
		t.Errorf("%+v; others were asked %d times", l, c.asked)
	}
	away.Store(true)
	l := listed(t, y)
	if !l.Peer {
		t.Fatalf("%+v", l)
	}
	away.Store(false)
	if _, _, err := y.Unpacked(t.Context(), l.Record); !errors.Is(err, store.ErrUnknown) ||
		errors.Is(err, image.ErrDamaged) {
		t.Errorf("what only others have: %v", err)
	}
}
