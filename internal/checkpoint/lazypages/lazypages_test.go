package lazypages_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dewpoint/internal/checkpoint/lazypages"
	"dewpoint/testkit"
)

// slow is a rate at which next to nothing comes by itself.
const slow = 1 << 20

func TestProcessesGetTheirMemory(t *testing.T) {
	img := dump(t, 64, 2)
	s := img.restore(t, lazypages.Config{})
	img.must(t, "verify")
	if err := s.Wait(); err != nil {
		t.Fatal(err)
	}
	img.must(t, "verify")
	st := s.Stats()
	if st.Processes != 3 || st.Faults == 0 || st.Empty == 0 {
		t.Errorf("%+v", st)
	}
	if got := st.FaultBytes + st.OrderBytes + st.RestBytes; got != img.lazy {
		t.Errorf("%d bytes came, the image has %d: %+v", got, img.lazy, st)
	}
}

// While next to nothing of the memory is there, it is moved, given back,
// unmapped, protected, and forked.
func TestMemoryThatChanges(t *testing.T) {
	img := dump(t, 96, 0)
	for _, cmd := range []string{"churn", "fork"} {
		s := img.restore(t, lazypages.Config{Rate: slow, Guard: guard()})
		if st := s.Stats(); st.RestBytes+st.FaultBytes > img.lazy/4 {
			t.Errorf("before %s: %+v: that is not lazy", cmd, st)
		}
		img.must(t, cmd)
		if st := s.Stats(); cmd == "churn" && st.Forgotten == 0 || cmd == "fork" && st.Forks < 2 {
			t.Errorf("%s: %+v", cmd, st)
		}
		img.kill()
		if err := s.Wait(); err != nil {
			t.Errorf("%s: processes that ended: %v", cmd, err)
		}
	}
}

func TestOrderComesFirst(t *testing.T) {
	img := dump(t, 64, 0)
	pages := []string{"page 4000", "page 9000", "page 12001"}
	run := func(order []lazypages.Page) (lazypages.Stats, []lazypages.Page, *counter) {
		src := &counter{Source: img.pages, asked: map[string]int{}}
		s := img.restore(t, lazypages.Config{Source: src, Rate: slow, Order: order})
		testkit.Eventually(t, "the order has come", func() bool {
			return s.Stats().OrderBytes >= int64(len(order))*lazypages.ChunkSize/2
		})
		for _, p := range pages {
			img.must(t, p)
		}
		defer img.kill()
		return s.Stats(), s.Touched(), src
	}
	st, touched, _ := run(nil)
	if st.OrderBytes != 0 || len(touched) < len(pages) {
		t.Fatalf("%+v, touched %v", st, touched)
	}
	order := touched[len(touched)-len(pages):]
	st, again, src := run(order)
	for _, p := range order {
		if slices.Contains(again, p) {
			t.Errorf("with an order: %+v, touched %v, before %v", st, again, touched)
		}
	}
	src.mu.Lock()
	defer src.mu.Unlock()
	for chunk, n := range src.asked {
		if n > 1 {
			t.Errorf("%s was fetched %d times", chunk, n)
		}
	}
}

func TestTheRestIsHurried(t *testing.T) {
	img := dump(t, 64, 0)
	s := img.restore(t, lazypages.Config{Rate: 1})
	img.must(t, "ping")
	if st := s.Stats(); st.Filled != 0 {
		t.Fatalf("%+v", st)
	}
	s.Hurry()
	s.Hurry()
	if err := s.Wait(); err != nil {
		t.Fatal(err)
	}
	img.must(t, "verify")
}

// The order is fetched before CRIU comes.
func TestOrderIsFetchedAhead(t *testing.T) {
	src := &counter{Source: memory{}, asked: map[string]int{}}
	order := []lazypages.Page{{File: "pages-1.img", Page: 5}, {File: "pages-1.img", Page: 1000},
		{File: "pages-1.img", Page: 6}}
	ctx, cancel := context.WithCancel(t.Context())
	s, err := lazypages.Serve(ctx,
		lazypages.Config{Dir: t.TempDir(), Work: t.TempDir(), Source: src, Order: order})
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "both chunks are asked for", func() bool { return src.total() >= 2 })
	cancel()
	s.Wait()
	if src.total() != 2 {
		t.Errorf("%v", src.asked)
	}
}

// memory is a source of nothing.
type memory struct{}

func (memory) Chunk(context.Context, string, int) ([]byte, error) {
	return make([]byte, lazypages.ChunkSize), nil
}

// counter counts what is asked.
type counter struct {
	lazypages.Source
	mu    sync.Mutex
	asked map[string]int
}

func (c *counter) Chunk(ctx context.Context, file string, chunk int) ([]byte, error) {
	c.mu.Lock()
	c.asked[fmt.Sprintf("chunk %d of %s", chunk, file)]++
	c.mu.Unlock()
	return c.Source.Chunk(ctx, file, chunk)
}

func (c *counter) total() (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range c.asked {
		n += k
	}
	return n
}

// source is an image's pages; after n chunks it does something else.
type source struct {
	lazypages.Source
	left atomic.Int64
	then func(ctx context.Context, chunk int, b []byte) ([]byte, error)
}

func (s *source) Chunk(ctx context.Context, file string, chunk int) ([]byte, error) {
	b, err := s.Source.Chunk(ctx, file, chunk)
	if err != nil || s.left.Add(-1) >= 0 {
		return b, err
	}
	return s.then(ctx, chunk, b)
}

// A process never sees memory that is not its own: it is killed before.
func TestSourceThatFails(t *testing.T) {
	img := dump(t, 64, 2)
	wrong := errors.New("chunk has another digest")
	for name, c := range map[string]struct {
		then func(ctx context.Context, chunk int, b []byte) ([]byte, error)
		says string
		wait time.Duration
	}{
		"error": {func(context.Context, int, []byte) ([]byte, error) { return nil, wrong }, wrong.Error(), 0},
		"short": {func(_ context.Context, _ int, b []byte) ([]byte, error) {
			return b[:5000], nil
		}, "too short", 0},
		"stuck": {func(ctx context.Context, _ int, _ []byte) ([]byte, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}, "a process waited 300ms", 300 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			src := &source{Source: img.pages, then: c.then}
			src.left.Store(100)
			var killed atomic.Int64
			s, err := img.tryRestore(t, lazypages.Config{Source: src, Rate: slow, Wait: c.wait,
				Kill: func(err error) {
					if err == nil || killed.Add(1) > 1 {
						t.Errorf("killed again, by %v", err)
					}
				}})
			if err != nil {
				t.Fatal(err)
			}
			if got, err := img.ask("verify"); err == nil && got != "" {
				t.Errorf("answered %q", got)
			}
			if err := s.Wait(); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("the server says %v", err)
			}
			if killed.Load() != 1 {
				t.Error("Kill was not called")
			}
			if left := img.alive(); len(left) > 0 {
				t.Errorf("processes %v live", left)
			}
			img.kill()
		})
	}
}

// What is stuck while nobody waits for it is no reason to end a process.
func TestSourceThatComesBack(t *testing.T) {
	img := dump(t, 32, 0)
	var back atomic.Bool
	var bounds atomic.Int64
	src := &source{Source: img.pages}
	src.then = func(ctx context.Context, chunk int, b []byte) ([]byte, error) {
		if back.Load() || chunk < 40 || chunk > 60 { // these belong to the big mapping, which nobody reads yet
			return b, nil
		}
		<-ctx.Done()
		bounds.Add(1)
		return nil, ctx.Err()
	}
	s := img.restore(t, lazypages.Config{Source: src, Wait: time.Second})
	testkit.Eventually(t, "it waits twice", func() bool { return bounds.Load() >= 2 || s.Err() != nil })
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	back.Store(true)
	if err := s.Wait(); err != nil {
		t.Fatal(err)
	}
	img.must(t, "verify")
}

func TestTheRestoreIsGivenUp(t *testing.T) {
	img := dump(t, 32, 1)
	t.Run("before CRIU came", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		s, err := lazypages.Serve(ctx, lazypages.Config{Dir: img.dir, Work: t.TempDir(), Source: img.pages})
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		if err := s.Wait(); !errors.Is(err, context.Canceled) {
			t.Errorf("the server says %v; %+v", err, s.Stats())
		}
	})
	t.Run("CRIU ends early", func(t *testing.T) {
		work := t.TempDir()
		s, err := lazypages.Serve(t.Context(), lazypages.Config{Dir: img.dir, Work: work, Source: img.pages})
		if err != nil {
			t.Fatal(err)
		}
		conn, err := net.Dial("unix", filepath.Join(work, lazypages.SocketName))
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
		if err := s.Wait(); !errors.Is(err, lazypages.ErrUnfinished) {
			t.Errorf("the server says %v", err)
		}
		if left, _ := os.ReadDir(work); len(left) > 0 {
			t.Errorf("%v is left behind", left)
		}
	})
	t.Run("while the processes run", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		s := img.restoreIn(t, ctx, lazypages.Config{Rate: 1})
		img.must(t, "ping")
		cancel()
		if err := s.Wait(); !errors.Is(err, context.Canceled) {
			t.Errorf("the server says %v; %+v", err, s.Stats())
		}
		if left := img.alive(); len(left) > 0 {
			t.Errorf("processes %v live", left)
		}
	})
}

func TestRestoresAtOnce(t *testing.T) {
	images := []dumped{dump(t, 32, 1), dump(t, 32, 0), dump(t, 32, 2)}
	var servers []*lazypages.Server
	for i := range images {
		servers = append(servers, images[i].restore(t, lazypages.Config{}))
	}
	for i := range images {
		images[i].must(t, "verify")
		if err := servers[i].Wait(); err != nil {
			t.Error(err)
		}
	}
}

// The server dies while most of the memory is still to come: nobody may see empty
// pages instead.
func TestServerIsKilled(t *testing.T) {
	img := dump(t, 64, 2)
	work := t.TempDir()
	server := exec.Command("/proc/self/exe", "server", img.dir, work, string(img.pages))
	server.Stderr = os.Stderr
	out, err := server.StdoutPipe()
	if err == nil {
		err = server.Start()
	}
	if err == nil {
		_, err = out.Read(make([]byte, 16))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(img.kill)
	if err := criu(t, work, "restore", "-d", "-D", img.dir, "--lazy-pages"); err != nil {
		t.Fatal(err)
	}
	img.must(t, "ping")
	answer := make(chan string)
	go func() {
		for {
			got, err := img.ask("verify")
			if err != nil || got != "ok" {
				answer <- got
				return
			}
		}
	}()
	server.Process.Kill()
	server.Wait()
	if got := <-answer; got != "" {
		t.Errorf("without a server the processes say %q", got)
	}
	testkit.Eventually(t, "the processes end", func() bool { return len(img.alive()) == 0 })
}
