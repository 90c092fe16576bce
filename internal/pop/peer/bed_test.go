package peer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/opencontainers/go-digest"
)

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wants(t testing.TB, err error, targets ...error) {
	t.Helper()
	for _, target := range targets {
		if !errors.Is(err, target) {
			t.Fatalf("%v, where %q is wanted", err, target)
		}
	}
}

// node is a Content in memory. Its layers grow by add and end by end.
type node struct {
	mu     sync.Mutex
	layers map[digest.Digest]*layer
	open   int // readers that were not closed
	fail   error
}

type layer struct {
	data    []byte
	size    int64         // as Follow tells, -1 while unknown
	ended   bool          // no more data comes
	changed chan struct{} // closed at each change
}

func newNode() *node { return &node{layers: map[digest.Digest]*layer{}} }

// whole makes a complete layer of n bytes.
func (n *node) whole(size int) (digest.Digest, []byte) {
	data := noise(size)
	id := digest.FromBytes(data)
	n.layers[id] = &layer{data: data, size: int64(size), ended: true, changed: make(chan struct{})}
	return id, data
}

// growing makes a layer that has no bytes yet.
func (n *node) growing(size int64) digest.Digest {
	id := digest.FromString(fmt.Sprint(size, rand.Uint64()))
	n.layers[id] = &layer{size: size, changed: make(chan struct{})}
	return id
}

func noise(size int) []byte {
	b := make([]byte, size)
	r := rand.NewChaCha8([32]byte{1})
	r.Read(b)
	return b
}

func (n *node) change(id digest.Digest, fn func(*layer)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.layers[id]
	fn(l)
	close(l.changed)
	l.changed = make(chan struct{})
}

func (n *node) add(id digest.Digest, b []byte) {
	n.change(id, func(l *layer) { l.data = append(l.data, b...) })
}

func (n *node) end(id digest.Digest) { n.change(id, func(l *layer) { l.ended = true }) }

func (n *node) get(id digest.Digest) (*layer, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fail != nil {
		return nil, n.fail
	}
	l := n.layers[id]
	if l == nil {
		return nil, fmt.Errorf("layer %s: %w", id, ErrUnknown)
	}
	return l, nil
}

func (n *node) Follow(ctx context.Context, id digest.Digest, off int64) (io.ReadCloser, int64, error) {
	l, err := n.get(id)
	if err != nil {
		return nil, 0, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.open++
	return &reader{n: n, l: l, ctx: ctx, pos: off}, l.size, nil
}

type reader struct {
	n   *node
	l   *layer
	ctx context.Context
	pos int64
}

func (r *reader) Read(p []byte) (int, error) {
	for {
		r.n.mu.Lock()
		m := 0
		if r.pos < int64(len(r.l.data)) {
			m = copy(p, r.l.data[r.pos:])
		}
		ended, changed := r.l.ended, r.l.changed
		r.n.mu.Unlock()
		r.pos += int64(m)
		if m > 0 {
			return m, nil
		}
		if ended {
			return 0, io.EOF
		}
		select {
		case <-changed:
		case <-r.ctx.Done():
			return 0, r.ctx.Err()
		}
	}
}

func (r *reader) Close() error {
	r.n.mu.Lock()
	defer r.n.mu.Unlock()
	r.n.open--
	return nil
}

func (n *node) Range(ctx context.Context, id digest.Digest, from, to int64) (io.ReadCloser, error) {
	l, err := n.get(id)
	if err != nil {
		return nil, err
	}
	if l.size >= 0 && to > l.size {
		return nil, fmt.Errorf("%d is outside of %s", to, id)
	}
	r, _, err := n.Follow(ctx, id, from)
	return r, err
}

func (n *node) Progress(_ context.Context, id digest.Digest) ([]byte, error) {
	if _, err := n.get(id); err != nil {
		return nil, err
	}
	return []byte("of " + id.String()), nil
}

func (n *node) Table(_ context.Context, id digest.Digest) ([]byte, error) {
	l, err := n.get(id)
	if err != nil {
		return nil, err
	}
	return l.data, nil
}

func (n *node) Pack(ctx context.Context, id digest.Digest) (io.ReadCloser, error) {
	r, _, err := n.Follow(ctx, id, 0)
	return r, err
}

// Records implements Checkpoints: a layer's data.
func (n *node) Records(ctx context.Context, id digest.Digest) ([]byte, error) {
	return n.Table(ctx, id)
}

// Data implements Checkpoints: a layer's.
func (n *node) Data(ctx context.Context, id digest.Digest) (io.ReadCloser, int64, error) {
	return n.Follow(ctx, id, 0)
}

func keyFile(t testing.TB) string {
	path := filepath.Join(t.TempDir(), "pop.key")
	check(t, NewKey(path))
	return path
}

func newAuth(t testing.TB) *Auth {
	a, err := ReadKey(keyFile(t))
	check(t, err)
	return a
}

// serve starts a server and returns its address.
func serve(t testing.TB, cfg Config) (*Server, string) {
	t.Helper()
	s, err := NewServer(cfg)
	check(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Close()
		if err := <-done; err != nil {
			t.Error("serve:", err)
		}
	})
	return s, l.Addr().String()
}

func client(t testing.TB, cfg Config) *Client {
	t.Helper()
	c, err := NewClient(cfg)
	check(t, err)
	t.Cleanup(c.Close)
	return c
}

// pair is a server of n and a client of the same key.
func pair(t testing.TB, n *node, cfg Config) (*Client, string) {
	t.Helper()
	cfg.Auth, cfg.Content, cfg.Checkpoints = newAuth(t), n, n
	_, addr := serve(t, cfg)
	return client(t, cfg), addr
}

// raw is a TCP server that does what it is told with each connection.
func raw(t testing.TB, do func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	var conns sync.WaitGroup
	var mu sync.Mutex
	var open []net.Conn
	conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open = append(open, c)
			mu.Unlock()
			conns.Go(func() { defer c.Close(); do(c) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for _, c := range open {
			c.Close()
		}
		mu.Unlock()
		conns.Wait()
	})
	return l.Addr().String()
}

func readAll(t testing.TB, r io.ReadCloser, err error) []byte {
	t.Helper()
	check(t, err)
	defer r.Close()
	b, err := io.ReadAll(r)
	check(t, err)
	return b
}

func same(t testing.TB, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) {
		t.Fatalf("%d bytes that are not the %d wanted", len(got), len(want))
	}
}

func writeFile(t testing.TB, name, text string, mode os.FileMode) string {
	path := filepath.Join(t.TempDir(), name)
	check(t, os.WriteFile(path, []byte(text), mode))
	check(t, os.Chmod(path, mode))
	return path
}
