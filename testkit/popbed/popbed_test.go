package popbed

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dewpoint/testkit"
	"dewpoint/testkit/testbed"

	"go.uber.org/goleak"
)

// The registry that StartRegistry starts here is this program: "registry DIR".
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "registry" {
		l, err := net.Listen("tcp", Registry)
		if err == nil {
			err = testbed.Serve(context.Background(), os.Args[2], os.Args[2], l)
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	testkit.RequireRoot(m, "they make network namespaces, mounts and containers")
	goleak.VerifyTestMain(m)
}

// newBed makes a bed that is closed, and looked for leftovers, when the test ends.
func newBed(t testing.TB, cfg Config) *Bed {
	t.Helper()
	if cfg.Nodes == 0 {
		cfg.Nodes = 3
	}
	if cfg.StoreBytes == 0 {
		cfg.StoreBytes = 512 << 20
	}
	start := time.Now()
	b, err := New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("a bed with store %q is up after %.1fs", cfg.Store, time.Since(start).Seconds())
	t.Cleanup(func() {
		if t.Failed() {
			tellLogs(t, b.cfg.Dir)
		}
		if err := b.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		if left := b.Leftovers(); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
	return b
}

// tellLogs shows the ends of the bed's logs.
func tellLogs(t testing.TB, dir string) {
	for _, pattern := range []string{"*.log", "*.said", "n*/*.log", "ceph/*.said"} {
		logs, _ := filepath.Glob(filepath.Join(dir, pattern))
		for _, path := range logs {
			raw, _ := os.ReadFile(path)
			t.Logf("%s:\n%s", path, raw[max(0, len(raw)-1500):])
		}
	}
}

func (b *Bed) write(t testing.TB, i int, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(b.Nodes[i].Store, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// reads asserts that node i reads text, at once or soon.
func (b *Bed) reads(t testing.TB, i int, name, text string) {
	t.Helper()
	err := until(t.Context(), 20*time.Second, func() error {
		got, err := os.ReadFile(filepath.Join(b.Nodes[i].Store, name))
		if err == nil && string(got) != text {
			err = fmt.Errorf("%d bytes, not %d", len(got), len(text))
		}
		return err
	})
	if err != nil {
		t.Errorf("%s on n%d: %v", name, i+1, err)
	}
}

// serveNoise answers every request on the registry's machine with so many bytes.
func serveNoise(t *testing.T, b *Bed, size int) {
	t.Helper()
	l, err := b.Listen(wan, Registry)
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(size))
		io.CopyN(w, zeros{}, int64(size))
	})}
	done := make(chan struct{})
	go func() { defer close(done); s.Serve(l) }()
	t.Cleanup(func() { s.Close(); <-done })
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// download gets all bytes on node i.
func (b *Bed) download(ctx context.Context, i int, from string) (n int64, err error) {
	tr := &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			return b.Dial(ctx, i, address)
		}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+from+"/v2/", nil)
	if err != nil {
		return 0, err
	}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	return io.Copy(io.Discard, resp.Body)
}

func TestTheWANIsSharedAndCounted(t *testing.T) {
	const size = 2 << 20
	b := newBed(t, Config{Mbit: 16}) // 2 MB a second
	serveNoise(t, b, size)
	fetch := func(nodes ...int) (time.Duration, Traffic) {
		t.Helper()
		before, err := b.WAN()
		if err != nil {
			t.Fatal(err)
		}
		start, ends := time.Now(), make(chan error, len(nodes))
		for _, i := range nodes {
			go func() {
				n, err := b.download(t.Context(), i, Registry)
				if err == nil && n != size {
					err = fmt.Errorf("%d bytes", n)
				}
				ends <- err
			}()
		}
		for range nodes {
			if err := <-ends; err != nil {
				t.Error(err)
			}
		}
		after, err := b.WAN()
		if err != nil {
			t.Fatal(err)
		}
		return time.Since(start), Traffic{after.In - before.In, after.Out - before.Out}
	}
	one, traffic := fetch(0)
	if traffic.In < size || traffic.In > size*102/100 || traffic.Out <= 0 || traffic.Out > size/10 {
		t.Errorf("%+v was counted for %d bytes", traffic, size)
	}
	two, traffic := fetch(1, 2)
	if two < one*3/2 || two > one*3 || traffic.In < 2*size {
		t.Errorf("one node took %s, two together %s with %+v", one, two, traffic)
	}
	if err := b.Rate(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if free, _ := fetch(0); free > one/2 {
		t.Errorf("%s with a limit, %s without", one, free)
	}
}

func TestRedisGoesAndComesBack(t *testing.T) {
	b := newBed(t, Config{Redis: true})
	ask := func(i int, port, command, want string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		c, err := b.Dial(ctx, i, redisIP+port)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(2 * time.Second))
		fmt.Fprintf(c, "%s\r\n", command)
		buf := make([]byte, 100)
		n, err := c.Read(buf)
		if got := strings.TrimSpace(string(buf[:n])); err == nil && !strings.Contains(got, want) {
			err = fmt.Errorf("%s: %q, not %q", command, got, want)
		}
		return err
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	must(ask(0, ":6379", "SET k v", "OK"))

	must(b.PartitionRedis(0))
	if ask(0, ":6379", "GET k", "v") == nil {
		t.Error("n1 reaches Redis, from which it is parted")
	}
	must(ask(1, ":6379", "GET k", "v"))
	must(b.HealRedis(0))
	must(ask(0, ":6379", "GET k", "v"))

	b.SlowRedis(400 * time.Millisecond)
	start := time.Now()
	must(ask(0, ":6380", "GET k", "v"))
	if took := time.Since(start); took < 400*time.Millisecond {
		t.Errorf("slow Redis answers in %s", took)
	}

	must(b.StopRedis(t.Context()))
	if ask(0, ":6379", "GET k", "v") == nil {
		t.Error("Redis was stopped and answers")
	}
	must(b.StartRedis(t.Context(), false))
	must(ask(0, ":6379", "GET k", "v"))
	must(b.HangRedis(true))
	if ask(0, ":6379", "GET k", "v") == nil {
		t.Error("Redis hangs and answers")
	}
	must(b.HangRedis(false))
	must(b.KillRedis())
	must(b.StartRedis(t.Context(), true))
	must(ask(0, ":6379", "GET k", "$-1"))
}

func TestARegistryGoesAndComesBack(t *testing.T) {
	b := newBed(t, Config{Nodes: 1, RTT: 300 * time.Millisecond})
	images := t.TempDir()
	if err := os.WriteFile(filepath.Join(images, "index.json"), []byte(`{"schemaVersion":2,"manifests":[]}`),
		0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := b.StartRegistry(t.Context(), os.Args[0], "registry", images); err != nil {
			t.Fatal(err)
		}
		for address, least := range map[string]time.Duration{Registry: 0, FarRegistry: 600 * time.Millisecond} {
			begin := time.Now()
			if _, err := b.download(t.Context(), 0, address); err != nil {
				t.Error(err)
			}
			if took := time.Since(begin); took < least {
				t.Errorf("%s answers after %s", address, took)
			}
		}
		if err := b.StopRegistry(); err != nil {
			t.Fatal(err)
		}
		if _, err := b.download(t.Context(), 0, Registry); err == nil {
			t.Error("the registry was stopped and answers")
		}
	}
}

func TestTwoBedsBesideEachOther(t *testing.T) {
	one, two := newBed(t, Config{Store: Dir, Redis: true}), newBed(t, Config{Store: Dir, Redis: true})
	one.write(t, 0, "f", "one")
	two.write(t, 0, "f", "two")
	if err := one.Close(); err != nil {
		t.Error(err)
	}
	if left := one.Leftovers(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if left := two.Leftovers(); len(left) < 10 {
		t.Errorf("a bed is made of no more than %q", left)
	}
	two.reads(t, 1, "f", "two")
	if err := two.pingRedis(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestWhatCannotBeIsRefused(t *testing.T) {
	for _, cfg := range []Config{{Nodes: 11}, {Nodes: 2, Store: Gluster}, {Store: "nfs"}, {Template: "{{"}} {
		if b, err := New(t.Context(), cfg); err == nil {
			b.Close()
			t.Errorf("%+v is accepted", cfg)
		}
	}
}

// A bed whose making fails, or is given up, leaves nothing.
func TestWhatIsGivenUpLeavesNothing(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	before := beds.Load()
	b, err := New(ctx, Config{Nodes: 3, Store: Gluster3, Redis: true, StoreBytes: 512 << 20})
	if err == nil { // this machine is fast
		b.Close()
	}
	gone := &Bed{name: fmt.Sprintf("dwp%dp%d", os.Getpid(), before+1)}
	gone.cfg.Dir = filepath.Join("/var/tmp", gone.name)
	if left := gone.Leftovers(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
