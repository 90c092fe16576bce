package redis

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/session"
	"dewpoint/testkit"
	"dewpoint/testkit/poptest"
)

// Through TLS and as a user with the documented rights only.
func TestContract(t *testing.T) {
	poptest.Run(t, func(t *testing.T) poptest.Bed { return newBed(t, true) })
}

// line is a server without a session, by way of the address.
func line(t *testing.T, address string, cfg pop.Config) *server {
	t.Helper()
	cfg, err := session.Defaults(cfg)
	must(t, err)
	opt, err := options(Config{URL: "redis://" + address})
	must(t, err)
	s := newServer(cfg, "dewpoint:{server}:")
	s.rdb = redis.NewClient(opt)
	t.Cleanup(func() { s.Close() })
	return s
}

func TestServer(t *testing.T) {
	t.Parallel()
	b := newBed(t, false)
	poptest.RunServer(t,
		line(t, "127.0.0.1:"+b.port, pop.Config{Node: "a", TTL: time.Hour, Timeout: 10 * time.Second}))
}

// A connection for events that a partition swallowed is given up, though nothing says so.
func TestSilentConnection(t *testing.T) {
	t.Parallel()
	b := newBed(t, false)
	p := newProxy(t, "127.0.0.1:"+b.port)
	s := line(t, p.addr(), pop.Config{Node: "a", TTL: time.Second, Timeout: 10 * time.Second})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := s.Listen(ctx, func() { p.set(true) }, func(pop.Event) {}); err == nil || ctx.Err() != nil {
		t.Errorf("listened on: %v", err)
	}
}

func acquire(t *testing.T, c pop.Coordinator, key string) (l pop.Lease) {
	t.Helper()
	testkit.Retry(t, "acquire "+key, func() (err error) { l, err = c.Acquire(t.Context(), key, 0); return err })
	return l
}

// The machine's clock jumps: what the scripts remember of it is moved instead.
func TestClockJumps(t *testing.T) {
	testkit.Long(t)
	t.Parallel()
	for name, hours := range map[string]int64{"forward": 1000, "back": -1000} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, false)
			a, other := b.Join(t, "a"), b.Join(t, "b")
			l := acquire(t, a, "k")
			testkit.Retry(t, "use", func() error { return a.Use(t.Context(), "x") })
			jump := -(time.Duration(hours) * time.Hour).Microseconds()
			must(t, b.admin.HIncrBy(t.Context(), "dewpoint:{"+testPoP+"}:clock", "last", jump).Err())
			var held *pop.HeldError
			if _, err := other.Acquire(t.Context(), "k", 0); !errors.As(err, &held) {
				t.Errorf("after the jump: %v", err)
			}
			if users, err := other.Users(t.Context(), "x"); err != nil || len(users) != 1 {
				t.Errorf("after the jump: users %v, %v", users, err)
			}
			b.Cut(t, "a", true)
			testkit.Retry(t, "the lease expires", func() (err error) {
				_, err = other.Acquire(t.Context(), "k", 0)
				return err
			})
			select {
			case <-l.Lost():
			default:
				t.Error("the lease was another's before its holder knew")
			}
		})
	}
}

// The clock went back and the memory is lost: the node that begins the epoch knows
// the tokens, and else the store does.
func TestTokensAfterClockWentBack(t *testing.T) {
	t.Parallel()
	b := newBed(t, false)
	a := b.Join(t, "a")
	future := uint64(time.Now().Add(10000 * time.Hour).UnixMicro())
	l, err := a.Acquire(t.Context(), "k", future)
	must(t, err)
	must(t, l.Release(t.Context()))
	b.Forget(t)
	if next := acquire(t, a, "k"); next.Token() <= l.Token() {
		t.Errorf("token %d after %d", next.Token(), l.Token())
	}
}

// A server that was started with what it saved earlier has an old memory: a new epoch.
func TestOldMemory(t *testing.T) {
	t.Parallel()
	b := newBed(t, false)
	a, c := b.Join(t, "a"), b.Join(t, "b")
	old := acquire(t, a, "k")
	testkit.Retry(t, "use", func() error { return a.Use(t.Context(), "dropped", "kept") })
	must(t, b.admin.Save(t.Context()).Err())
	must(t, old.Release(t.Context()))
	must(t, a.Drop(t.Context(), "dropped"))
	must(t, a.Use(t.Context(), "added"))
	l := acquire(t, c, "k")
	testkit.Retry(t, "the epoch settles", func() error { return settled(t, c) })
	b.Restart(t)
	testkit.Retry(t, "the server is back", func() error { _, err := c.Members(t.Context()); return err })
	if settled(t, c) == nil {
		t.Error("an old memory is settled")
	}
	testkit.Retry(t, "what was so is so again", func() error {
		users, err := c.Users(t.Context(), "dropped", "kept", "added")
		if err == nil && (len(users) != 2 || users["dropped"] != nil) {
			err = errors.New("not yet")
		}
		return err
	})
	testkit.Retry(t, "b holds the lease", func() error {
		h, _, err := c.Holder(t.Context(), "k")
		if err == nil && (h.Holder.Node != "b" || h.Token != l.Token()) {
			err = errors.New("not yet")
		}
		return err
	})
	select {
	case <-l.Lost():
		t.Error("an earlier lease took away a later one")
	default:
	}
}

func settled(t *testing.T, c pop.Coordinator) error {
	ok, err := c.Settled(t.Context())
	if err == nil && !ok {
		err = errors.New("not settled")
	}
	return err
}

// Nothing of one PoP is seen in another one.
func TestTwoPoPs(t *testing.T) {
	t.Parallel()
	b := newBed(t, false)
	a := b.Join(t, "a")
	other, err := New(Config{Config: pop.Config{Node: "a", TTL: poptest.TTL}, URL: b.url("a"), PoP: "other"})
	must(t, err)
	defer other.Close()
	acquire(t, a, "k")
	acquire(t, other, "k")
	must(t, a.Announce(t.Context(), pop.Member{}))
	if all, err := other.Members(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("members %v, %v", all, err)
	}
	if n := len(b.admin.Keys(t.Context(), "*").Val()); n == 0 {
		t.Error("no keys")
	}
	for _, key := range b.admin.Keys(t.Context(), "*").Val() {
		if !strings.HasPrefix(key, "dewpoint:{"+testPoP+"}:") && !strings.HasPrefix(key, "dewpoint:{other}:") {
			t.Errorf("key %s", key)
		}
	}
}

// What expired is deleted, so that keys that were used once do not pile up.
func TestNothingPilesUp(t *testing.T) {
	testkit.Long(t)
	t.Parallel()
	b := newBed(t, false)
	a, c := b.Join(t, "a"), b.Join(t, "b")
	acquire(t, a, "dead")
	acquire(t, c, "released").Release(t.Context())
	testkit.Retry(t, "use", func() error { return a.Use(t.Context(), "x") })
	b.Cut(t, "a", true)
	testkit.Retry(t, "all of a is deleted", func() error {
		for _, key := range b.admin.Keys(t.Context(), "*").Val() {
			if strings.Contains(key, ":lease:") || strings.Contains(key, "refs:") || strings.Contains(key, "node:a/") {
				return errors.New(key)
			}
		}
		return b.admin.Ping(t.Context()).Err()
	})
}

// A user without the rights, a wrong password and a wrong CA: the coordinator is away, with the reason.
func TestRefused(t *testing.T) {
	t.Parallel()
	b := newBed(t, true)
	good := b.Join(t, "a")
	acquire(t, good, "k")
	otherCA := certificatesIn(t, t.TempDir())
	for name, cfg := range map[string]Config{
		"WRONGPASS":   {URL: strings.Replace(b.url("a"), "w%2Fd", "w", 1), CA: b.ca},
		"certificate": {URL: b.url("a"), CA: otherCA},
		"NOPERM":      {URL: b.url("a"), CA: b.ca, PoP: "another"},
	} {
		cfg.Config = pop.Config{Node: "n", TTL: poptest.TTL, Timeout: 5 * time.Second}
		if cfg.PoP == "" {
			cfg.PoP = testPoP
		}
		c, err := New(cfg)
		must(t, err)
		_, err = c.Members(t.Context())
		if !errors.Is(err, pop.ErrAway) ||
			!strings.Contains(err.Error(), name) &&
				!(name == "NOPERM" && strings.Contains(err.Error(), "permission")) {
			t.Errorf("%s: %v", name, err)
		}
		must(t, c.Close())
	}
}

func TestConfig(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	must(t, os.WriteFile(empty, nil, 0o600))
	node := pop.Config{Node: "n"}
	for name, cfg := range map[string]Config{
		"no node":         {URL: "redis://h:1", PoP: "p"},
		"no PoP":          {Config: node, URL: "redis://h:1"},
		"a pattern":       {Config: node, URL: "redis://h:1", PoP: "a*"},
		"no URL":          {Config: node, PoP: "p"},
		"another scheme":  {Config: node, URL: "http://u:secret@h:1", PoP: "p"},
		"not an URL":      {Config: node, URL: "redis://u:secret@h:port", PoP: "p"},
		"CA without TLS":  {Config: node, URL: "redis://h:1", PoP: "p", CA: empty},
		"CA without text": {Config: node, URL: "rediss://h:1", PoP: "p", CA: empty},
		"no CA there":     {Config: node, URL: "rediss://h:1", PoP: "p", CA: empty + "x"},
	} {
		c, err := New(cfg)
		if err == nil {
			c.Close()
			t.Errorf("%s: no error", name)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the password is in %v", name, err)
		}
	}
}

func BenchmarkAcquire(b *testing.B) {
	bench(b, func(ctx context.Context, c pop.Coordinator) error {
		l, err := c.Acquire(ctx, "k", 0)
		if err != nil {
			return err
		}
		return l.Release(ctx)
	})
}

func BenchmarkUsers(b *testing.B) {
	keys := make([]string, 1000)
	for i := range keys {
		keys[i] = strings.Repeat("k", i%64+1)
	}
	bench(b, func(ctx context.Context, c pop.Coordinator) error { _, err := c.Users(ctx, keys...); return err })
}
