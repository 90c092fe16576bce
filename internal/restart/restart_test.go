package restart

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"dewpoint/internal/engine"
	"dewpoint/internal/spec"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errFull = errors.New("no space")

// node is an engine in memory. A container lives for its life, 0 is without end, and ends with its status.
type node struct {
	mu     sync.Mutex
	all    map[string]*engine.Info // by name
	made   map[string]time.Time
	life   map[string]time.Duration
	status int
	starts map[string][]time.Time
	events chan engine.Event
	silent bool  // of ends nobody is told
	full   bool  // labels cannot be changed
	broken error // of starts
}

func newNode() *node {
	return &node{all: map[string]*engine.Info{}, made: map[string]time.Time{}, life: map[string]time.Duration{},
		status: 1, starts: map[string][]time.Time{}, events: make(chan engine.Event, 1000)}
}

// add adds a container that has a policy and has ended; nil is that nobody knows how.
func (n *node) add(name, policy string, s state, exit *engine.Exit) {
	n.mu.Lock()
	defer n.mu.Unlock()
	i := &engine.Info{Name: name, Created: time.Now(), Status: engine.Stopped, Exit: exit,
		Labels: map[string]string{LabelPolicy: policy}}
	maps.Copy(i.Labels, s.labels())
	n.all[name] = i
}

func (n *node) List(context.Context) (all []*engine.Info, _ error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, i := range n.all {
		c := *i
		all = append(all, &c)
	}
	return all, nil
}

func (n *node) Inspect(_ context.Context, id string) (*engine.Info, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	i := n.all[engine.Name(id)]
	if i == nil {
		return nil, engine.ErrNotFound
	}
	c := *i
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

func (n *node) Relabel(_ context.Context, id string, labels map[string]string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.relabel(n.all[engine.Name(id)], labels)
}

func (n *node) relabel(i *engine.Info, labels map[string]string) error {
	switch {
	case i == nil:
		return engine.ErrNotFound
	case n.full:
		return errFull
	}
	i.Labels = maps.Clone(i.Labels)
	for k, v := range labels {
		if i.Labels[k] = v; v == "" {
			delete(i.Labels, k)
		}
	}
	return nil
}

func (n *node) start(_ context.Context, c *engine.Info, labels map[string]string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	i := n.all[c.Name]
	switch {
	case i == nil:
		return engine.ErrNotFound
	case i.Status == engine.Running:
		return engine.ErrRunning
	case n.broken != nil:
		return n.broken
	}
	if err := n.relabel(i, labels); err != nil {
		return err
	}
	i.Status, i.Exit, n.made[i.Name] = engine.Running, nil, time.Now()
	n.starts[i.Name] = append(n.starts[i.Name], time.Now())
	if d := n.life[i.Name]; d > 0 {
		time.AfterFunc(d, func() { n.ended(i.Name, n.status) })
	}
	return nil
}

func (n *node) ended(name string, status int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if i := n.all[name]; i != nil && i.Status == engine.Running {
		i.Status, i.Exit = engine.Stopped, &engine.Exit{Status: status, At: time.Now()}
		if !n.silent {
			n.events <- engine.Event{Kind: engine.EventExited, Name: name, Exit: status}
		}
	}
}

func (n *node) Stop(_ context.Context, id string, _ time.Duration) error {
	n.ended(engine.Name(id), 143)
	return nil
}

func (n *node) Kill(_ context.Context, id string, sig unix.Signal) error {
	i, err := n.Inspect(context.Background(), id)
	switch {
	case err != nil:
		return err
	case i.Status != engine.Running:
		return engine.ErrNotRunning
	case sig != unix.SIGHUP:
		n.ended(i.Name, 128+int(sig))
	}
	return nil
}

func (n *node) Remove(ctx context.Context, id string, force bool) error {
	if i, err := n.Inspect(ctx, id); err == nil && i.Status == engine.Running && !force {
		return engine.ErrRunning
	}
	n.ended(engine.Name(id), 137)
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.all, engine.Name(id))
	return nil
}

func (n *node) TaskMade(name string) time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.made[name]
}

// count is how often a container was started.
func (n *node) count(name string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.starts[name])
}

func (n *node) kept(name string) state {
	n.mu.Lock()
	defer n.mu.Unlock()
	return stateOf(n.all[name].Labels)
}

func (n *node) view(s *Supervisor, name string) (c spec.Container) {
	if i, err := n.Inspect(context.Background(), name); err == nil {
		s.Describe(i, &c)
	}
	return c
}

// supervised runs f beside a Supervisor of n, in a time of its own.
func supervised(t *testing.T, n *node, cfg Config, f func(t *testing.T, s *Supervisor)) {
	t.Helper()
	cfg.Engine, cfg.Start, cfg.Log = n, n.start, slog.New(slog.DiscardHandler)
	if cfg.Deploying == nil {
		cfg.Deploying = func(*engine.Info) bool { return false }
	}
	if cfg.Told == nil {
		cfg.Told = func(*engine.Info, int, error) {}
	}
	s := New(cfg)
	ctx, cancel := context.WithCancel(t.Context())
	var run sync.WaitGroup
	run.Go(func() {
		if err := s.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	synctest.Wait()
	f(t, s)
	cancel()
	run.Wait()
	s.Close()
}

func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestNext(t *testing.T) {
	const long = 11 * time.Second
	fails := ending{known: true, status: 1}
	for _, c := range []struct {
		what, policy string
		state        state
		end          ending
		want         state
		again        bool
		wait         time.Duration
	}{
		{"no policy", "no", state{}, fails, state{}, false, 0},
		{"the first end", "always", state{}, ending{known: true}, state{1, 1, ""}, true, firstWait},
		{"the second in a row", "always", state{1, 1, ""}, fails, state{2, 2, ""}, true, 2 * firstWait},
		{"the tenth", "unless-stopped", state{9, 9, ""}, fails, state{10, 10, ""}, true, 51200 * time.Millisecond},
		{"the eleventh", "always", state{10, 10, ""}, fails, state{11, 11, ""}, true, longestWait},
		{"the thousandth", "always", state{999, 999, ""}, fails, state{1000, 1000, ""}, true, longestWait},
		{"after a long run", "always", state{9, 9, ""}, ending{known: true, ran: long}, state{10, 1, ""}, true, firstWait},
		{"it failed", "on-failure", state{}, fails, state{1, 1, ""}, true, firstWait},
		{"it ended well", "on-failure", state{}, ending{known: true}, state{Mark: over}, false, 0},
		{"and a boot comes", "on-failure", state{Mark: over}, ending{boot: true}, state{Mark: over}, false, 0},
		{"it failed too often", "on-failure:2", state{2, 1, ""}, fails, state{2, 1, over}, false, 0},
		{"not yet", "on-failure:3", state{2, 2, ""}, fails, state{3, 3, ""}, true, 4 * firstWait},
		{"nobody knows how", "on-failure", state{}, ending{}, state{1, 1, ""}, true, firstWait},
		{"it was stopped", "always", state{Mark: stopped}, fails, state{Mark: stopped}, false, 0},
		{"and dewd starts", "always", state{3, 3, stopped}, ending{boot: true}, state{3, 3, ""}, true, 0},
		{"and dewd starts", "unless-stopped", state{Mark: stopped}, ending{boot: true}, state{Mark: stopped}, false, 0},
		{"and dewd starts", "on-failure", state{Mark: stopped}, ending{boot: true}, state{Mark: stopped}, false, 0},
		{"the machine stopped", "unless-stopped", state{2, 0, ""}, ending{boot: true}, state{2, 0, ""}, true, 0},
		{"the machine stopped", "on-failure:1", state{1, 1, ""}, ending{boot: true}, state{1, 1, ""}, true, 0},
		{"it ended while no dewd ran", "always", state{}, ending{known: true, boot: true}, state{1, 1, ""}, true,
			firstWait},
		{"its deployment failed", "always", state{Mark: failed}, ending{boot: true}, state{Mark: failed}, false, 0},
		{"it is not well", "on-failure:2", state{1, 1, ill}, ending{known: true, ran: long}, state{2, 1, ""}, true,
			firstWait},
		{"and dewd was killed", "on-failure", state{1, 1, ill}, ending{known: true, boot: true}, state{1, 1, ""},
			true, 0},
		{"somebody restarts it", "always", state{Mark: turning}, fails, state{Mark: turning}, false, 0},
		{"and dewd was killed", "on-failure", state{Mark: turning}, ending{known: true, boot: true}, state{}, true, 0},
	} {
		p, err := spec.ParseRestart(c.policy)
		if err != nil {
			t.Fatal(err)
		}
		got, again, wait := next(p, c.state, c.end)
		if got != c.want || again != c.again || wait != c.wait {
			t.Errorf("%s, %s: %+v, %v after %v; want %+v, %v after %v", c.policy, c.what, got, again, wait, c.want,
				c.again, c.wait)
		}
	}
}

// A container that ends at once starts ever more seldom, and is in a crash loop; one that then runs is not.
func TestCrashLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		n.life["web"] = time.Millisecond
		n.add("web", "always", state{}, &engine.Exit{Status: 1, At: time.Now()})
		supervised(t, n, Config{}, func(t *testing.T, s *Supervisor) {
			if v := n.view(s, "web"); v.CrashLoop || v.Restarts != 1 || !v.NextStart.Equal(time.Now().Add(firstWait)) {
				t.Errorf("after the first end: %+v", v)
			}
			pass(10 * time.Minute)
			starts := n.starts["web"]
			for k := 1; k < len(starts); k++ {
				want := min(firstWait<<min(k, 20), longestWait) + time.Millisecond
				if gap := starts[k].Sub(starts[k-1]); gap != want {
					t.Errorf("between the starts %d and %d are %v, not %v", k, k+1, gap, want)
				}
			}
			if v := n.view(s, "web"); !v.CrashLoop || v.Restarts != len(starts)+1 || v.NextStart.IsZero() {
				t.Errorf("after %d starts: %+v", len(starts), v)
			}
			if k := n.kept("web"); k.Restarts != len(starts) || k.Streak != len(starts) {
				t.Errorf("its label after %d starts: %+v", len(starts), k)
			}
			n.mu.Lock()
			n.life["web"] = 0
			n.mu.Unlock()
			pass(time.Until(n.view(s, "web").NextStart) + time.Second)
			if v := n.view(s, "web"); !v.CrashLoop || !v.NextStart.IsZero() {
				t.Errorf("it has just started: %+v", v)
			}
			pass(steady)
			if v := n.view(s, "web"); v.CrashLoop {
				t.Errorf("it runs: %+v", v)
			}
			before := n.count("web")
			n.ended("web", 1)
			pass(firstWait)
			if n.count("web") != before+1 || n.kept("web").Streak != 1 {
				t.Errorf("after a long run: %d starts, %+v", n.count("web")-before, n.kept("web"))
			}
		})
	})
}

// What a person stops stays down until he starts it, also when it was about to start by itself.
func TestStopEndsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		for _, name := range []string{"waits", "runs", "killed", "removed", "restarted"} {
			n.add(name, "always", state{}, nil)
		}
		n.life["waits"] = time.Second
		ctx := t.Context()
		supervised(t, n, Config{}, func(t *testing.T, s *Supervisor) {
			pass(time.Second + firstWait/2)
			if err := errors.Join(s.Stop(ctx, "waits", time.Second), s.Stop(ctx, "runs", 0),
				s.Kill(ctx, "killed", unix.SIGHUP), s.Kill(ctx, "killed", unix.SIGKILL), s.Remove(ctx, "removed", true),
				s.Restart(ctx, "restarted", 0)); err != nil {
				t.Fatal(err)
			}
			pass(time.Hour)
			for name, want := range map[string]int{"waits": 1, "runs": 1, "killed": 1, "removed": 1, "restarted": 2} {
				if got := n.count(name); got != want {
					t.Errorf("%s was started %d times, not %d", name, got, want)
				}
			}
			if v := n.view(s, "restarted"); v.Restarts != 0 || n.kept("restarted") != (state{}) {
				t.Errorf("a person's restart counts: %+v, %+v", v, n.kept("restarted"))
			}
			if err := s.Kill(ctx, "runs", unix.SIGTERM); !errors.Is(err, engine.ErrNotRunning) {
				t.Errorf("kill one that does not run: %v", err)
			}
			n.mu.Lock()
			n.life["runs"] = steady
			n.mu.Unlock()
			if err := s.Start(ctx, "runs"); err != nil {
				t.Fatal(err)
			}
			if err := s.Start(ctx, "runs"); !errors.Is(err, engine.ErrRunning) {
				t.Errorf("start one that runs: %v", err)
			}
			pass(steady + firstWait)
			if got := n.count("runs"); got != 3 {
				t.Errorf("after its start by a person and its end: %d starts, want 3", got)
			}
		})
	})
}

// When dewd starts, containers do that the machine took down, or that always run, and no others.
func TestBoot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		n.add("plain", "", state{}, nil)
		n.add("always", "always", state{Mark: stopped}, nil)
		n.add("stopped", "unless-stopped", state{Mark: stopped}, nil)
		n.add("up", "unless-stopped", state{Restarts: 3}, nil)
		n.add("job", "on-failure", state{Mark: over}, nil)
		n.add("failed", "always", state{Mark: failed}, nil)
		supervised(t, n, Config{}, func(t *testing.T, s *Supervisor) {
			pass(time.Minute)
			for name, want := range map[string]int{"plain": 0, "always": 1, "stopped": 0, "up": 1, "job": 0,
				"failed": 0} {
				if got := n.count(name); got != want {
					t.Errorf("%s was started %d times, not %d", name, got, want)
				}
			}
			if k := n.kept("up"); k.Restarts != 3 || n.view(s, "up").Restarts != 3 {
				t.Errorf("a start of the machine counts: %+v", k)
			}
		})
	})
}

// While a deployment goes on, an end is its business.
func TestDeploying(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		n.add("web", "always", state{}, &engine.Exit{})
		n.add("bad", "always", state{}, &engine.Exit{})
		var mu sync.Mutex
		deploying := true
		cfg := Config{Deploying: func(*engine.Info) bool { mu.Lock(); defer mu.Unlock(); return deploying }}
		supervised(t, n, cfg, func(t *testing.T, s *Supervisor) {
			pass(time.Minute)
			if n.count("web") > 0 || n.count("bad") > 0 {
				t.Error("they were started while they are deployed")
			}
			if err := n.Relabel(t.Context(), "bad", Failed()); err != nil {
				t.Fatal(err)
			}
			mu.Lock()
			deploying = false
			mu.Unlock()
			pass(time.Second)
			if n.count("web") != 1 || n.count("bad") != 0 {
				t.Errorf("web, which is deployed, was started %d times, bad, which has failed, %d", n.count("web"),
					n.count("bad"))
			}
		})
	})
}

// A start that fails, and a full disk, are got over.
func TestTroubles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		n.add("web", "on-failure", state{}, nil)
		n.add("db", "unless-stopped", state{}, nil)
		n.add("few", "on-failure:2", state{}, &engine.Exit{Status: 1})
		n.broken = errors.New("no mount")
		var mu sync.Mutex
		told := map[string]int{}
		cfg := Config{Told: func(i *engine.Info, _ int, err error) {
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				told[i.Name]++
			}
		}}
		ctx := t.Context()
		supervised(t, n, cfg, func(t *testing.T, s *Supervisor) {
			pass(time.Hour)
			if told["web"] < 60 || told["few"] != 2 || n.kept("few").Mark != over {
				t.Errorf("failures told: %v; of few is kept %+v", told, n.kept("few"))
			}
			n.mu.Lock()
			n.broken, n.full = nil, true
			n.mu.Unlock()
			pass(5 * time.Minute)
			if n.count("web") != 0 {
				t.Error("it was started, and its label was not changed")
			}
			if err := s.Stop(ctx, "db", 0); !errors.Is(err, errFull) {
				t.Errorf("stopped, which is not kept: %v", err)
			}
			n.mu.Lock()
			n.full = false
			n.mu.Unlock()
			pass(5 * time.Minute)
			if n.count("web") != 1 || n.count("db") != 0 || n.kept("db").Mark != stopped {
				t.Errorf("web was started %d times, db, which is stopped, %d: %+v", n.count("web"), n.count("db"),
					n.kept("db"))
			}
		})
	})
}

func TestNoEventTells(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		n.add("web", "always", state{}, nil)
		supervised(t, n, Config{}, func(t *testing.T, _ *Supervisor) {
			pass(time.Second)
			n.mu.Lock()
			n.silent = true
			n.mu.Unlock()
			n.ended("web", 1)
			pass(lookEvery + firstWait)
			if n.count("web") != 2 {
				t.Errorf("%d starts", n.count("web"))
			}
		})
	})
}

// A dewd that was killed may leave a container that is made and does not run, and marks of what it was about
// to do to one that runs on.
func TestKilledBetween(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		n.add("made", "always", state{}, nil)
		n.all["made"].Status = engine.Created
		n.add("turned", "unless-stopped", state{Mark: turning}, nil)
		n.add("held", "unless-stopped", state{Mark: stopped}, nil)
		n.all["turned"].Status, n.all["held"].Status = engine.Running, engine.Running
		supervised(t, n, Config{}, func(t *testing.T, _ *Supervisor) {
			pass(time.Second)
			if n.count("made") != 1 {
				t.Errorf("what was made was started %d times", n.count("made"))
			}
			for _, name := range []string{"turned", "held"} {
				if k := n.kept(name); k.Mark != "" {
					t.Errorf("%s runs, and is marked %s", name, k.Mark)
				}
				n.ended(name, 1)
				pass(time.Second)
				if n.count(name) != 1 {
					t.Errorf("%s has ended, and was started %d times", name, n.count(name))
				}
			}
		})
	})
}

// One that is not well starts again, as an end that counts, unless its policy would not start it, or a person
// wants it down.
func TestUnhealthy(t *testing.T) {
	for _, c := range []struct {
		policy   string
		state    state
		restarts int
		runs     bool
	}{
		{"always", state{}, 1, true},
		{"on-failure", state{}, 1, true},
		{"on-failure:2", state{Restarts: 2}, 2, true}, // as it was
		{"no", state{}, 0, true},
		{"always", state{Mark: stopped}, 0, true}, // about to be stopped
	} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode()
			n.add("web", c.policy, c.state, nil)
			n.all["web"].Status, n.made["web"] = engine.Running, time.Now()
			supervised(t, n, Config{}, func(t *testing.T, s *Supervisor) {
				if c.state.Mark != "" { // one that runs on is taken for one that is not stopped
					s.mu.Lock()
					s.entry(n.all["web"]).state.Mark = c.state.Mark
					s.mu.Unlock()
				}
				i, _ := n.Inspect(t.Context(), "web")
				if err := s.Unhealthy(t.Context(), i, time.Second); err != nil {
					t.Error(err)
				}
				pass(time.Second)
				i, _ = n.Inspect(t.Context(), "web")
				if got := n.view(s, "web"); got.Restarts != c.restarts || (i.Status == engine.Running) != c.runs {
					t.Errorf("%s, %+v: %+v, %s", c.policy, c.state, got, i.Status)
				}
				if want := c.restarts - c.state.Restarts; n.count("web") != want {
					t.Errorf("%s: %d starts, want %d", c.policy, n.count("web"), want)
				}
			})
		})
	}
}

// Another policy holds from now on: one that has ended stays down until a person starts it.
func TestSetPolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		n.add("web", "no", state{}, &engine.Exit{Status: 1, At: time.Now()})
		supervised(t, n, Config{}, func(t *testing.T, s *Supervisor) {
			set := func(policy string) {
				t.Helper()
				i, _ := n.Inspect(t.Context(), "web")
				if err := s.SetPolicy(t.Context(), i, policy); err != nil {
					t.Error(err)
				}
			}
			set("always")
			pass(time.Minute)
			if n.count("web") != 0 || n.view(s, "web").Restart != "always" {
				t.Errorf("%d starts, %+v", n.count("web"), n.view(s, "web"))
			}
			if err := s.Start(t.Context(), "web"); err != nil {
				t.Error(err)
			}
			n.ended("web", 1)
			pass(time.Second)
			if n.count("web") != 2 {
				t.Errorf("%d starts by its policy", n.count("web"))
			}
			n.ended("web", 1)
			synctest.Wait()
			set("no")
			pass(time.Minute)
			if n.count("web") != 2 || n.view(s, "web").Restart != "" {
				t.Errorf("%d starts without a policy, %+v", n.count("web"), n.view(s, "web"))
			}
			i, _ := n.Inspect(t.Context(), "web")
			if err := s.SetPolicy(t.Context(), i, "sometimes"); err == nil {
				t.Error("a policy that there is not is taken")
			}
		})
	})
}

// What was said of a container while it had a policy does not count when it gets one again; and what is to
// end for its health starts again, though the dewd that stopped it was killed meanwhile.
func TestMarksOfEarlier(t *testing.T) {
	for name, c := range map[string]struct {
		policy string
		mark   mark
		set    string
	}{
		"a policy again":      {"no", stopped, "always"},
		"killed as it stops":  {"on-failure", ill, ""},
		"a policy after over": {"no", over, "on-failure"},
	} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode()
			n.add("web", c.policy, state{Mark: c.mark}, nil)
			n.all["web"].Status, n.made["web"] = engine.Running, time.Now()
			supervised(t, n, Config{}, func(t *testing.T, s *Supervisor) {
				i, _ := n.Inspect(t.Context(), "web")
				status := 0
				if c.set != "" {
					if err := s.SetPolicy(t.Context(), i, c.set); err != nil {
						t.Error(err)
					}
					status = 1
				}
				n.ended("web", status)
				pass(time.Second)
				if n.count("web") != 1 {
					t.Errorf("%s: %d starts", name, n.count("web"))
				}
			})
		})
	}
}
