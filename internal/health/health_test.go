package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"dewpoint/internal/engine"
	"dewpoint/internal/spec"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// node is an engine in memory with one container, c.
type node struct {
	events chan engine.Event

	mu      sync.Mutex
	info    engine.Info
	gone    bool
	made    time.Time
	status  int           // of its check
	err     error         // of its check
	takes   time.Duration // its check
	waits   bool          // containerd, which is starting, for its check to begin
	execs   int
	running int // checks, now
}

func newNode(check spec.Health) *node {
	return &node{events: make(chan engine.Event, 100), made: time.Now(), info: engine.Info{Name: "c",
		Status: engine.Running, Created: time.Unix(1, 0), Labels: Keep(nil, &check)}}
}

func (n *node) set(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
}

func (n *node) List(ctx context.Context) ([]*engine.Info, error) {
	i, err := n.Inspect(ctx, "c")
	if err != nil {
		return nil, nil
	}
	return []*engine.Info{i}, nil
}

func (n *node) Inspect(context.Context, string) (*engine.Info, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gone {
		return nil, engine.ErrNotFound
	}
	c := n.info
	return &c, nil
}

func (n *node) Events(ctx context.Context, fn func(engine.Event)) error {
	for {
		select {
		case ev := <-n.events:
			fn(ev)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (n *node) Relabel(_ context.Context, _ string, labels map[string]string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.info.Labels = maps.Clone(n.info.Labels)
	maps.Copy(n.info.Labels, labels)
	return nil
}

func (n *node) Exec(ctx context.Context, _ string, s engine.ExecSpec) (int, error) {
	n.mu.Lock()
	n.execs++
	n.running++
	takes, status, err, waits := n.takes, n.status, n.err, n.waits
	n.mu.Unlock()
	defer n.set(func() { n.running-- })
	if !waits && s.Started != nil {
		s.Started()
	}
	select {
	case <-time.After(takes):
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	if s.Stdout != nil {
		fmt.Fprintf(s.Stdout, "%s\n says %s", s.Args[len(s.Args)-1], strings.Repeat("x", 2*sayBytes))
	}
	return status, err
}

// checks are how many there were, and how many run.
func (n *node) checks() (execs, running int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.execs, n.running
}

func (n *node) TaskMade(string) time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.made
}

// bed is a Monitor that checks a node, with what it tells, and how often it calls that unhealthy.
type bed struct {
	*Monitor
	stop      func()
	mu        sync.Mutex
	told      []string
	why       string
	ill       int
	deploying bool
}

func start(t *testing.T, n *node) *bed {
	b := &bed{}
	b.Monitor = New(Config{Engine: n, Log: slog.New(slog.DiscardHandler),
		Deploying: func(*engine.Info) bool { b.mu.Lock(); defer b.mu.Unlock(); return b.deploying },
		Told: func(_ *engine.Info, now, why string) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.told, b.why = append(b.told, now), why
		},
		Unhealthy: func(context.Context, *engine.Info) { b.mu.Lock(); defer b.mu.Unlock(); b.ill++ }})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = b.Run(ctx) }()
	b.stop = sync.OnceFunc(func() { cancel(); <-done; b.Close() })
	t.Cleanup(b.stop)
	return b
}

// is compares what a Monitor has told, and what it says now.
func (b *bed) is(t *testing.T, n *node, told string, now string) {
	t.Helper()
	synctest.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	if got := strings.Join(b.told, " "); got != told {
		t.Errorf("told %q, want %q", got, told)
	}
	i, _ := n.Inspect(t.Context(), "c")
	var out spec.Container
	if b.Describe(i, &out); out.Health != now {
		t.Errorf("it is %q, want %q", out.Health, now)
	}
}

var shell = spec.Health{Test: []string{"CMD-SHELL", "check"}, Interval: 10 * time.Second,
	Timeout: 2 * time.Second}

// A container is healthy after one success, unhealthy after three failures in a row, and what does not
// succeed in its start period does not count.
func TestHealth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		early := shell
		early.StartPeriod = 29 * time.Second
		n := newNode(early)
		n.status = 1
		b := start(t, n)
		b.is(t, n, "", spec.HealthStarting)
		time.Sleep(28 * time.Second)
		b.is(t, n, "", spec.HealthStarting)
		if n.execs != 5 { // 5, 10, 15, 20, 25
			t.Errorf("%d checks in the start period", n.execs)
		}
		n.set(func() { n.status = 0 })
		time.Sleep(3 * time.Second)
		b.is(t, n, "healthy", spec.HealthHealthy)
		n.set(func() { n.status = 3 })
		time.Sleep(20 * time.Second)
		b.is(t, n, "healthy", spec.HealthHealthy)
		time.Sleep(10 * time.Second)
		b.is(t, n, "healthy unhealthy", spec.HealthUnhealthy)
		if want := "status 3: check says xx"; !strings.HasPrefix(b.why, want) || len(b.why) > sayBytes+20 {
			t.Errorf("why: %q, want %q", b.why, want)
		}
		n.set(func() { n.status = 0 })
		time.Sleep(10 * time.Second)
		b.is(t, n, "healthy unhealthy healthy", spec.HealthHealthy)
		if b.ill != 1 {
			t.Errorf("called ill %d times", b.ill)
		}
	})
}

// A check that takes too long, or whose command is missing, has failed; one that could not be run has not.
func TestWhatCounts(t *testing.T) {
	for name, c := range map[string]struct {
		set  func(n *node)
		told string
	}{
		"too long":         {func(n *node) { n.takes = time.Hour }, "unhealthy"},
		"missing":          {func(n *node) { n.err = fmt.Errorf("x: %w", engine.ErrNoCommand) }, "unhealthy"},
		"containerd waits": {func(n *node) { n.takes, n.waits = time.Hour, true }, ""},
		"containerd away":  {func(n *node) { n.err = errors.New("unavailable") }, ""},
		"not running":      {func(n *node) { n.err = engine.ErrNotRunning }, ""},
		"paused":           {func(n *node) { n.status, n.info.Status = 1, engine.Paused }, ""},
		"not known":        {func(n *node) { n.status, n.info.Status = 1, engine.Unknown }, ""},
		"has ended":        {func(n *node) { n.status, n.info.Status = 1, engine.Stopped }, ""},
		"there is no such": {func(n *node) { n.status, n.gone = 1, true }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(shell)
				b := start(t, n)
				synctest.Wait()
				n.set(func() { c.set(n) })
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				if got := strings.Join(b.told, " "); got != c.told {
					t.Errorf("told %q, want %q", got, c.told)
				}
			})
		})
	}
}

// One that is started anew while its check runs, or is paused then, has not failed.
func TestChangesBesideACheck(t *testing.T) {
	for name, change := range map[string]func(n *node){
		"started anew": func(n *node) { n.made = time.Now() },
		"paused":       func(n *node) { n.info.Status = engine.Paused },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				once := shell
				once.Retries = 1
				n := newNode(once)
				n.status, n.takes = 1, time.Second
				b := start(t, n)
				time.Sleep(5500 * time.Millisecond)
				n.set(func() { change(n) })
				time.Sleep(time.Second)
				b.is(t, n, "", spec.HealthStarting)
			})
		})
	}
}

// No check runs while a container is held, or its deployment goes on; who holds it waits for the check.
func TestHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(shell)
		n.takes = time.Second
		b := start(t, n)
		b.mu.Lock()
		b.deploying = true
		b.mu.Unlock()
		time.Sleep(time.Minute)
		if execs, _ := n.checks(); execs != 0 {
			t.Fatalf("%d checks while it is deployed", execs)
		}
		b.mu.Lock()
		b.deploying = false
		b.mu.Unlock()
		for _, running := n.checks(); running == 0; _, running = n.checks() {
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
		}
		i, _ := n.Inspect(t.Context(), "c")
		short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if _, err := b.Hold(short, i.ID()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("held beside a check: %v", err)
		}
		release, err := b.Hold(t.Context(), i.ID())
		if _, running := n.checks(); err != nil || running != 0 {
			t.Fatalf("%v, %d checks run", err, running)
		}
		time.Sleep(time.Minute)
		if execs, _ := n.checks(); execs != 1 {
			t.Errorf("%d checks while it is held", execs)
		}
		release()
		release()
		time.Sleep(2 * time.Second)
		b.is(t, n, "healthy", spec.HealthHealthy)
		if execs, _ := n.checks(); execs != 2 {
			t.Errorf("%d checks", execs)
		}
		n.set(func() { n.info.Status = engine.Stopped })
		time.Sleep(time.Minute)
		b.Monitor.mu.Lock()
		if len(b.all) != 0 {
			t.Errorf("%d containers are followed", len(b.all))
		}
		b.Monitor.mu.Unlock()
		if release, err = b.Hold(t.Context(), i.ID()); err != nil { // also of one that is not followed
			t.Fatal(err)
		}
		release()
	})
}

// The next daemon knows how a container is, and one that was started anew meanwhile begins anew.
func TestTakenOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(shell)
		n.status = 1
		b := start(t, n)
		time.Sleep(time.Minute)
		b.is(t, n, "unhealthy", spec.HealthUnhealthy)
		b.stop()
		b = start(t, n)
		b.is(t, n, "", spec.HealthUnhealthy)
		time.Sleep(5 * time.Second)
		if b.is(t, n, "", spec.HealthUnhealthy); b.ill != 1 { // what the first may not have come to
			t.Errorf("called ill %d times", b.ill)
		}
		b.stop()
		n.set(func() { n.made, n.status = time.Now(), 0 })
		b = start(t, n)
		b.is(t, n, "", spec.HealthStarting)
		time.Sleep(5 * time.Second)
		b.is(t, n, "healthy", spec.HealthHealthy)
		n.set(func() { n.made, n.status, n.info.Status = time.Now(), 1, engine.Stopped })
		time.Sleep(20 * time.Second)
		b.is(t, n, "healthy", "")
		n.set(func() { n.made, n.info.Status = time.Now(), engine.Running })
		n.events <- engine.Event{Kind: engine.EventStarted, Name: "c"}
		b.is(t, n, "healthy", spec.HealthStarting)
		time.Sleep(time.Minute)
		b.is(t, n, "healthy unhealthy", spec.HealthUnhealthy)
	})
}

// A clock that is set does not put checks off.
func TestClockIsSet(t *testing.T) {
	c := shell.Defaults()
	for name, made := range map[string]time.Time{"back": time.Now().Add(1000 * time.Hour),
		"ahead": time.Unix(1000, 0), "unknown": {}} {
		if due := begin(made).due(c, state{}); time.Until(due) > c.StartInterval {
			t.Errorf("%s: the first check comes in %v", name, time.Until(due))
		}
	}
}

// One that is started anew is not what it was, and is checked as one that has just started.
func TestStartedAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rare := shell
		rare.Interval = time.Hour
		n := newNode(rare)
		b := start(t, n)
		time.Sleep(10 * time.Second)
		b.is(t, n, "healthy", spec.HealthHealthy)
		n.set(func() { n.made = time.Now() })
		b.is(t, n, "healthy", spec.HealthStarting)
		n.events <- engine.Event{Kind: engine.EventStarted, Name: "c"}
		time.Sleep(10 * time.Second)
		b.is(t, n, "healthy healthy", spec.HealthHealthy)
	})
}
