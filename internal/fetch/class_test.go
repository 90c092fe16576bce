package fetch

import (
	"bytes"
	"context"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"dewpoint/internal/layer"
)

// body gives a byte for each read, at once.
type body struct{ io.Reader }

func (body) Close() error { return nil }

func endless() body { return body{bytes.NewReader(make([]byte, 1<<20))} }

func still() layer.Progress { return layer.Progress{} }

// blocked reports whether a read of r waits.
func blocked(r io.Reader) bool {
	done := make(chan struct{})
	go func() {
		r.Read(make([]byte, 1))
		close(done)
	}()
	synctest.Wait()
	select {
	case <-done:
		return false
	default:
		return true
	}
}

// What somebody waits for holds what nobody waits for, for as long as it moves.
func TestClassesYield(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLink(LinkConfig{})
		ctx, cancel := context.WithCancel(t.Context())
		back := l.enter(entry{host: "a", size: 1 << 20, class: Background, stats: still})
		r, err := back.open(ctx, func() (io.ReadCloser, error) { return endless(), nil })
		if err != nil || blocked(r) {
			t.Fatalf("alone: %v", err)
		}
		pack := l.claim(Startup)
		if !blocked(r) {
			t.Error("the background does not yield to a pack")
		}
		p := pack.reader(ctx, endless())
		if blocked(p) {
			t.Error("a pack waits though nothing is before it")
		}
		miss := l.claim(Demand)
		if !blocked(p) {
			t.Error("a pack does not yield to who waits for a page")
		}
		if blocked(miss.reader(ctx, endless())) {
			t.Error("what is first waits")
		}
		// Silent for a second: it holds nobody up.
		time.Sleep(2 * silence)
		synctest.Wait()
		if blocked(p) {
			t.Error("a silent transfer holds others up")
		}
		miss.release()
		pack.release()
		time.Sleep(2 * recheck)
		synctest.Wait()
		if blocked(r) {
			t.Error("the background waits for nobody")
		}
		cancel()
		r.Close()
		time.Sleep(time.Second)
	})
}

// A layer that a deployment waits for starts at once, though one that nobody
// waits for is under way, and overtakes those in the queue.
func TestStartupOvertakesBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLink(LinkConfig{Order: Layers})
		enter := func(c Class) *turn { return l.enter(entry{host: "a", size: 1 << 20, class: c, stats: still}) }
		first, second := enter(Background), enter(Background)
		urgent := enter(Startup)
		begun := func(t *turn) bool {
			select {
			case <-t.start:
				return true
			default:
				return false
			}
		}
		if !begun(first) || begun(second) || !begun(urgent) {
			t.Errorf("begun: %v %v, and of who is waited for %v", begun(first), begun(second), begun(urgent))
		}
		l.raise(second, Demand)
		if !begun(second) {
			t.Error("a layer that was raised does not begin")
		}
		for _, x := range []*turn{first, second, urgent} {
			l.leave(x)
		}
		time.Sleep(time.Second)
	})
}

// The background keeps to its share.
func TestBackgroundLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLink(LinkConfig{Background: 1000})
		turn := l.enter(entry{host: "a", size: 1 << 20, class: Background, stats: still})
		r, err := turn.open(t.Context(), func() (io.ReadCloser, error) { return endless(), nil })
		if err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		if _, err := io.CopyN(io.Discard, r, 5000); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took < 4*time.Second || took > 6*time.Second {
			t.Errorf("5,000 bytes at 1,000 a second took %v", took)
		}
		r.Close()
		time.Sleep(time.Second)
	})
}

// What has gathered in a connection while its turn yielded, and comes at once,
// says nothing of the link.
func TestFastestIsNoBurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got int64
		var mu sync.Mutex
		l := NewLink(LinkConfig{})
		turn := l.enter(entry{host: "a", size: 1 << 40, class: Background, stats: func() layer.Progress {
			mu.Lock()
			defer mu.Unlock()
			return layer.Progress{Received: got}
		}})
		come := func(n int64, during time.Duration) {
			for range during / tick {
				mu.Lock()
				got += n * int64(tick) / int64(time.Second)
				mu.Unlock()
				time.Sleep(tick)
			}
		}
		come(2_000_000, 3*time.Second)
		if r := l.Fastest(); r < 1.8e6 || r > 2.2e6 {
			t.Errorf("a link of 2 MB/s has carried %.1f MB/s", r/1e6)
		}
		turn.yielding.Store(true)
		time.Sleep(time.Second)
		turn.yielding.Store(false)
		come(100_000_000, 50*time.Millisecond)
		come(2_000_000, 4*time.Second)
		if r := l.Fastest(); r < 1.8e6 || r > 2.2e6 {
			t.Errorf("after a pause, a link of 2 MB/s has carried %.1f MB/s", r/1e6)
		}
		l.leave(turn)
		time.Sleep(time.Second)
	})
}

// A layer moves in the class of whoever waits for it most urgently, until the
// last of them has gone.
func TestWaitsAreCounted(t *testing.T) {
	b := &blob{p: &Puller{cfg: Config{Link: NewLink(LinkConfig{})}}, class: Background, base: Background,
		gate: make(chan struct{})}
	want := func(c Class) {
		t.Helper()
		if got := b.classNow(); got != c {
			t.Errorf("class %d, not %d", got, c)
		}
	}
	first, second := b.wait(Demand), b.wait(Demand)
	want(Demand)
	if b.gate != nil {
		t.Error("who waits stands at the gate")
	}
	first()
	want(Demand)
	b.raise(Startup, true)
	want(Demand)
	second()
	want(Startup)
}

// A pack's transfer tells the link's rate, and so how much the background may
// have under way, before any layer has moved.
func TestClaimsAreMeasured(t *testing.T) {
	l := NewLink(LinkConfig{})
	now := time.Now()
	l.clock = func() time.Time { return now }
	if got := l.window(0); got < 1<<20 {
		t.Errorf("a window of %d bytes on a link that nobody has measured", got)
	}
	k := l.claim(Startup)
	defer k.release()
	for range 40 { // 1 Mbit/s
		now = now.Add(100 * time.Millisecond)
		l.mu.Lock()
		k.carried(12500, now)
		l.mu.Unlock()
	}
	if rate := l.Fastest(); rate < 100e3 || rate > 150e3 {
		t.Errorf("%.0f bytes a second", rate)
	}
	if got := l.window(0); got != leastWindow {
		t.Errorf("a window of %d bytes", got)
	}
}
