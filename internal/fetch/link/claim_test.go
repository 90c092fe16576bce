package link

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
		l := New(Config{})
		ctx, cancel := context.WithCancel(t.Context())
		back := l.Enter(Entry{Host: "a", Size: 1 << 20, Class: Background, Stats: still})
		r, err := back.Open(ctx, func() (io.ReadCloser, error) { return endless(), nil })
		if err != nil || blocked(r) {
			t.Fatalf("alone: %v", err)
		}
		pack := l.Claim(Startup)
		if !blocked(r) {
			t.Error("the background does not yield to a pack")
		}
		p := pack.Reader(ctx, endless())
		if blocked(p) {
			t.Error("a pack waits though nothing is before it")
		}
		miss := l.Claim(Demand)
		if !blocked(p) {
			t.Error("a pack does not yield to who waits for a page")
		}
		if blocked(miss.Reader(ctx, endless())) {
			t.Error("what is first waits")
		}
		// Silent for a second: it holds nobody up.
		time.Sleep(2 * Silence)
		synctest.Wait()
		if blocked(p) {
			t.Error("a silent transfer holds others up")
		}
		miss.Release()
		pack.Release()
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
		l := New(Config{Order: Layers})
		enter := func(c Class) *Turn { return l.Enter(Entry{Host: "a", Size: 1 << 20, Class: c, Stats: still}) }
		first, second := enter(Background), enter(Background)
		urgent := enter(Startup)
		begun := func(t *Turn) bool {
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
		second.Raise(Demand)
		if !begun(second) {
			t.Error("a layer that was raised does not begin")
		}
		for _, x := range []*Turn{first, second, urgent} {
			l.leave(x)
		}
		time.Sleep(time.Second)
	})
}

// The background keeps to its share.
func TestBackgroundLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New(Config{Background: 1000})
		turn := l.Enter(Entry{Host: "a", Size: 1 << 20, Class: Background, Stats: still})
		r, err := turn.Open(t.Context(), func() (io.ReadCloser, error) { return endless(), nil })
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
		l := New(Config{})
		turn := l.Enter(Entry{Host: "a", Size: 1 << 40, Class: Background, Stats: func() layer.Progress {
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

// A pack's transfer tells the link's rate, and so how much the background may
// have under way, before any layer has moved.
func TestClaimsAreMeasured(t *testing.T) {
	l := New(Config{})
	now := time.Now()
	l.clock = func() time.Time { return now }
	if got := l.Window(0); got < 1<<20 {
		t.Errorf("a window of %d bytes on a link that nobody has measured", got)
	}
	k := l.Claim(Startup)
	defer k.Release()
	for range 40 { // 1 Mbit/s
		now = now.Add(100 * time.Millisecond)
		l.mu.Lock()
		k.carried(12500, now)
		l.mu.Unlock()
	}
	if rate := l.Fastest(); rate < 100e3 || rate > 150e3 {
		t.Errorf("%.0f bytes a second", rate)
	}
	if got := l.Window(0); got != leastWindow {
		t.Errorf("a window of %d bytes", got)
	}
}
