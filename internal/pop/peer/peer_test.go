package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"dewpoint/testkit"

	"github.com/opencontainers/go-digest"
)

func TestRefuses(t *testing.T) {
	auth := newAuth(t)
	c, err := NewClient(Config{Auth: auth})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if c.Refuses(t.Context(), l.Addr().String()) {
		t.Error("a listener refuses")
	}
	l.Close()
	if !c.Refuses(t.Context(), l.Addr().String()) {
		t.Error("a port without a listener does not refuse")
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if c.Refuses(over, l.Addr().String()) {
		t.Error("a refusal that nobody has seen")
	}
}

func TestGivesWhatItHas(t *testing.T) {
	n := newNode()
	id, data := n.whole(3<<20 + 17)
	c, addr := pair(t, n, Config{})
	ctx := t.Context()
	for _, off := range []int64{0, 1, 3 << 20, int64(len(data))} {
		r, size, err := c.Follow(ctx, addr, id, off)
		same(t, readAll(t, r, err), data[off:])
		if size != int64(len(data)) {
			t.Error("size", size)
		}
	}
	for _, r := range [][2]int64{{0, 1}, {0, int64(len(data))}, {4095, 4097}, {1 << 20, 2 << 20},
		{int64(len(data)) - 1, int64(len(data))}, {5, 5}} {
		body, err := c.Range(ctx, addr, id, r[0], r[1])
		same(t, readAll(t, body, err), data[r[0]:r[1]])
	}
	table, err := c.Table(ctx, addr, id)
	check(t, err)
	same(t, table, data)
	r, err := c.Pack(ctx, addr, id)
	same(t, readAll(t, r, err), data)
	records, err := c.Records(ctx, addr, id)
	check(t, err)
	same(t, records, data)
	r, err = c.Data(ctx, addr, id, int64(len(data)))
	same(t, readAll(t, r, err), data)
	if n.open != 0 {
		t.Error(n.open, "readers are open")
	}
}

func TestErrorsOfContent(t *testing.T) {
	n := newNode()
	id, data := n.whole(100)
	c, addr := pair(t, n, Config{})
	asked := func(id digest.Digest) []error {
		_, _, err1 := c.Follow(t.Context(), addr, id, 0)
		_, err2 := c.Range(t.Context(), addr, id, 0, 50)
		_, err3 := c.Table(t.Context(), addr, id)
		_, err4 := c.Pack(t.Context(), addr, id)
		_, err5 := c.Records(t.Context(), addr, id)
		_, err6 := c.Data(t.Context(), addr, id, 100)
		return []error{err1, err2, err3, err4, err5, err6}
	}
	all := func(id digest.Digest, want error) {
		t.Helper()
		for _, err := range asked(id) {
			wants(t, err, want)
		}
	}
	all(digest.FromString("other"), ErrUnknown)
	all("sha256:../../etc", digest.ErrDigestInvalidLength)
	all(digest.SHA512.FromString("x"), digest.ErrDigestUnsupported)
	n.fail = errors.New("disk on\nfire")
	all(id, ErrFailed)
	n.fail = fmt.Errorf("fetching: %w", ErrBusy)
	all(id, ErrBusy)
	n.fail = nil
	_, err := c.Range(t.Context(), addr, id, 50, int64(len(data))+1)
	wants(t, err, ErrFailed)
	_, _, err = c.Follow(t.Context(), addr, id, int64(len(data))+1)
	wants(t, err, ErrProtocol)
	for _, r := range [][2]int64{{-1, 5}, {5, 4}, {0, MaxLayer + 1}} {
		if _, err := c.Range(t.Context(), addr, id, r[0], r[1]); err == nil {
			t.Error("there is no range", r)
		}
	}
	_, err = c.Data(t.Context(), addr, id, int64(len(data))+1)
	wants(t, err, ErrProtocol)
	if _, _, err := c.Follow(t.Context(), addr, id, -1); err == nil {
		t.Error("there is no offset -1")
	}
}

func TestFollowsAGrowingLayer(t *testing.T) {
	for _, size := range []int64{-1, 5000} {
		n := newNode()
		id := n.growing(size)
		c, addr := pair(t, n, Config{Stall: time.Second, Quiet: 20 * time.Millisecond})
		r, told, err := c.Follow(t.Context(), addr, id, 0)
		check(t, err)
		defer r.Close()
		if told != size {
			t.Error("size", told)
		}
		data := noise(5000)
		buf := make([]byte, 1000)
		for i := range int64(5) {
			part := data[i*1000 : (i+1)*1000] // each is read before the next is there
			asked := c.Stats().Requests
			go func() {
				for i == 3 && c.Stats().Requests < asked+2 { // it stands still: the reader comes back by itself
					time.Sleep(time.Millisecond)
				}
				n.add(id, part)
			}()
			_, err := io.ReadFull(r, buf)
			check(t, err)
			same(t, buf, part)
		}
		n.end(id)
		if m, err := r.Read(buf); m != 0 || err != io.EOF {
			t.Error("at the end:", m, err)
		}
	}
}

func TestAFollowerHasPatienceAndNoMore(t *testing.T) {
	n := newNode()
	id := n.growing(-1)
	c, addr := pair(t, n,
		Config{Stall: time.Second, Quiet: 20 * time.Millisecond, Patience: 300 * time.Millisecond})
	r, _, err := c.Follow(t.Context(), addr, id, 0)
	check(t, err)
	defer r.Close()
	_, err = r.Read(make([]byte, 10))
	wants(t, err, ErrAway, io.ErrUnexpectedEOF)
	if got := c.Stats().Requests; got < 3 {
		t.Error("it asked", got, "times")
	}
}

// Content that does not even open the layer in time has its follower wait as well.
func TestAFollowerWaitsForContent(t *testing.T) {
	n := newNode()
	id, data := n.whole(1000)
	slow := &slowOpen{node: n, first: make(chan struct{})}
	auth := newAuth(t)
	_, addr := serve(t, Config{Auth: auth, Content: slow, Stall: time.Second, Quiet: 20 * time.Millisecond})
	c := client(t, Config{Auth: auth})
	r, size, err := c.Follow(t.Context(), addr, id, 0)
	if size != -1 {
		t.Error("size", size)
	}
	close(slow.first)
	same(t, readAll(t, r, err), data)
}

type slowOpen struct {
	*node
	first chan struct{}
}

func (s *slowOpen) Follow(ctx context.Context, id digest.Digest, off int64) (io.ReadCloser, int64, error) {
	select {
	case <-s.first:
		return s.node.Follow(ctx, id, off)
	case <-ctx.Done():
		return nil, 0, ctx.Err()
	}
}

func TestALayerThatEndsEarlyIsNoEnd(t *testing.T) {
	n := newNode()
	id := n.growing(1000)
	n.add(id, noise(900))
	n.end(id)
	c, addr := pair(t, n, Config{})
	read := func(r io.ReadCloser, err error) {
		t.Helper()
		check(t, err)
		defer r.Close()
		b, err := io.ReadAll(r)
		wants(t, err, io.ErrUnexpectedEOF)
		same(t, b, noise(900)[:len(b)])
	}
	r, _, err := c.Follow(t.Context(), addr, id, 0)
	read(r, err)
	r, err = c.Range(t.Context(), addr, id, 0, 950)
	read(r, err)
}

func TestClosingTheServerCutsStreams(t *testing.T) {
	n := newNode()
	id := n.growing(-1)
	n.add(id, noise(1000))
	auth := newAuth(t)
	s, addr := serve(t, Config{Auth: auth, Content: n})
	c := client(t, Config{Auth: auth})
	f, _, err := c.Follow(t.Context(), addr, id, 0)
	check(t, err)
	defer f.Close()
	p, err := c.Pack(t.Context(), addr, id)
	check(t, err)
	defer p.Close()
	for _, r := range []io.Reader{f, p} {
		_, err := io.ReadFull(r, make([]byte, 1000))
		check(t, err)
	}
	check(t, s.Close())
	if n.open != 0 {
		t.Error("Close returned, and", n.open, "readers are open")
	}
	for _, r := range []io.Reader{f, p} {
		_, err := r.Read(make([]byte, 1))
		wants(t, err, io.ErrUnexpectedEOF)
	}
	_, _, err = c.Follow(t.Context(), addr, id, 0)
	wants(t, err, ErrAway)
}

func TestAStreamEndsWithItsContext(t *testing.T) {
	n := newNode()
	id := n.growing(-1)
	n.add(id, noise(1000))
	c, addr := pair(t, n, Config{})
	why := errors.New("the deployment was cancelled")
	ctx, cancel := context.WithCancelCause(t.Context())
	r, _, err := c.Follow(ctx, addr, id, 0)
	check(t, err)
	defer r.Close()
	_, err = io.ReadFull(r, make([]byte, 1000))
	check(t, err)
	time.AfterFunc(10*time.Millisecond, func() { cancel(why) })
	_, err = r.Read(make([]byte, 1))
	wants(t, err, why)
	if errors.Is(err, ErrAway) {
		t.Error("the node is not away:", err)
	}
	_, _, err = c.Follow(ctx, addr, id, 0)
	wants(t, err, why)
	testkit.Eventually(t, "the other side ends", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.open == 0 })
}

func TestCloseEndsARead(t *testing.T) {
	n := newNode()
	id := n.growing(-1)
	c, addr := pair(t, n, Config{})
	r, _, err := c.Follow(t.Context(), addr, id, 0)
	check(t, err)
	time.AfterFunc(10*time.Millisecond, func() { r.Close() })
	_, err = r.Read(make([]byte, 1))
	wants(t, err, ErrClosed)
	_, err = r.Read(make([]byte, 1))
	wants(t, err, ErrClosed)
}

// A follower that does not read is cut, and holds neither the server's reader nor its place.
func TestASlowFollowerIsCut(t *testing.T) {
	testkit.Long(t)
	n := newNode()
	id, data := n.whole(64 << 20) // more than the sockets hold
	auth := newAuth(t)
	s, addr := serve(t, Config{Auth: auth, Content: n, Stall: 200 * time.Millisecond})
	c := client(t, Config{Auth: auth})
	r, _, err := c.Follow(t.Context(), addr, id, 0)
	check(t, err)
	defer r.Close()
	testkit.Eventually(t, "the server gives up", func() bool { return s.Stats().Active == 0 })
	b, err := io.ReadAll(r)
	wants(t, err, io.ErrUnexpectedEOF)
	same(t, b, data[:len(b)])
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.open != 0 {
		t.Error(n.open, "readers are open")
	}
}

// Content that stands still, where nobody follows, is the server's to cut.
func TestContentThatStandsStill(t *testing.T) {
	n := newNode()
	id := n.growing(-1)
	n.add(id, noise(100))
	auth := newAuth(t)
	_, addr := serve(t, Config{Auth: auth, Content: n, Stall: 100 * time.Millisecond})
	c := client(t, Config{Auth: auth})
	r, err := c.Range(t.Context(), addr, id, 0, 200)
	check(t, err)
	defer r.Close()
	b, err := io.ReadAll(r)
	wants(t, err, io.ErrUnexpectedEOF)
	same(t, b, noise(100))
	slow := &slowRange{n}
	_, addr = serve(t, Config{Auth: auth, Content: slow, Stall: 100 * time.Millisecond})
	_, err = c.Range(t.Context(), addr, id, 0, 200)
	wants(t, err, ErrBusy)
}

type slowRange struct{ *node }

func (s *slowRange) Range(ctx context.Context, _ digest.Digest, _, _ int64) (io.ReadCloser, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestManyAtOnce(t *testing.T) {
	n := newNode()
	growing := n.growing(-1)
	id, data := n.whole(300_000)
	auth := newAuth(t)
	s, addr := serve(t, Config{Auth: auth, Content: n})
	c := client(t, Config{Auth: auth, Connect: testkit.Limit})
	other := client(t, Config{Auth: auth, Connect: testkit.Limit})
	var all sync.WaitGroup
	get := func(what func() (io.ReadCloser, error), want []byte) {
		all.Go(func() {
			r, err := what()
			if err != nil {
				t.Error(err)
				return
			}
			defer r.Close()
			if b, err := io.ReadAll(r); err != nil || digest.FromBytes(b) != digest.FromBytes(want) {
				t.Error(len(b), err)
			}
		})
	}
	for i := range int64(8) {
		for _, c := range []*Client{c, other} {
			get(func() (io.ReadCloser, error) {
				r, _, err := c.Follow(t.Context(), addr, growing, i)
				return r, err
			}, data[i:])
			get(func() (io.ReadCloser, error) { return c.Range(t.Context(), addr, id, i, 1000*i+1) }, data[i:1000*i+1])
			get(func() (io.ReadCloser, error) { return c.Pack(t.Context(), addr, id) }, data)
		}
	}
	for at := 0; at < len(data); at += 1000 {
		n.add(growing, data[at:at+1000])
	}
	n.end(growing)
	all.Wait()
	testkit.Eventually(t, "all have left", func() bool { return s.Stats().Active == 0 })
	if st := s.Stats(); st.Requests != 48 || st.Bytes != c.Stats().Bytes+other.Stats().Bytes {
		t.Error(st, c.Stats(), other.Stats())
	}
}

func TestBusy(t *testing.T) {
	n := newNode()
	id := n.growing(-1)
	n.add(id, noise(10))
	for _, cfg := range []Config{{PerPeer: 2}, {Requests: 2}} {
		c, addr := pair(t, n, cfg)
		var held []io.ReadCloser
		for range 2 {
			r, _, err := c.Follow(t.Context(), addr, id, 0)
			check(t, err)
			held = append(held, r)
		}
		_, err := c.Table(t.Context(), addr, id)
		wants(t, err, ErrBusy)
		var busy *Busy
		if !errors.As(err, &busy) || busy.After != time.Second {
			t.Error(err)
		}
		for _, r := range held {
			check(t, r.Close())
		}
		testkit.Eventually(t, "there is room again", func() bool {
			_, err := c.Table(t.Context(), addr, id)
			return err == nil
		})
	}
}

func TestRetryAfterIsBounded(t *testing.T) {
	for s, want := range map[string]time.Duration{"": 1, "x": 1, "-5": 1, "7": 7, "99999999999": 60,
		"999999999999999999999": 1} {
		if got := retryAfter(http.Header{"Retry-After": {s}}); got != want*time.Second {
			t.Errorf("%q: %v", s, got)
		}
	}
}

func TestConfig(t *testing.T) {
	auth := newAuth(t)
	for _, cfg := range []Config{{}, {Auth: auth, Stall: -1}, {Auth: auth, Stall: 1, Quiet: 2},
		{Auth: auth, PerPeer: -1}} {
		if _, err := NewClient(cfg); err == nil {
			t.Errorf("accepted: %+v", cfg)
		}
	}
	if _, err := NewServer(Config{Auth: auth}); err == nil {
		t.Error("a server of nothing")
	}
}
