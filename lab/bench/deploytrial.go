package bench

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"dewpoint/testkit/testbed"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// deploySample is one trial: a number of containers, some at once.
type deploySample struct {
	Way       string    `json:"way"`
	Image     string    `json:"image"`
	Command   string    `json:"command"`
	Net       string    `json:"net"`
	Threads   int       `json:"threads"`
	Trial     int       `json:"trial"`
	Latencies []float64 `json:"latencies"`  // seconds of each deployment, from its instruction, as they ended
	Seconds   float64   `json:"seconds"`    // from the first instruction to the last container
	CPU       float64   `json:"cpu"`        // seconds: the engine, its clients, this program
	ClientCPU float64   `json:"client_cpu"` // of these, spawned clients or, by API, the client's process
	Failed    int       `json:"failed"`
	Error     string    `json:"error,omitempty"` // of the first that failed
}

func (s deploySample) rate() float64 { return float64(len(s.Latencies)) / s.Seconds }

// trial deploys so many containers by so many threads, and removes them.
func (l *deployLineup) trial(ctx context.Context, w deployer, image, command string, threads,
	containers int) (deploySample, error) {
	s := deploySample{Way: w.name(), Image: image, Command: command, Net: l.b.net, Threads: threads}
	m := l.of(w.name())
	all := make([]toDeploy, containers)
	for i := range all {
		all[i] = toDeploy{name: l.name(), image: testbed.Address + "/" + image, args: strings.Fields(command),
			net: l.b.net}
	}
	if err := l.settle(ctx); err != nil {
		return s, err
	}
	before, err := usageOf(m)
	if err != nil {
		return s, err
	}
	start := time.Now()
	deploy := s.deployAll
	if _, ok := w.(manyDeployer); ok {
		deploy = s.deployMany
	}
	done := deploy(ctx, w, all, threads)
	s.Seconds = time.Since(start).Seconds()
	after, err := usageOf(m)
	if err != nil {
		return s, err
	}
	s.CPU = (after.engine + after.self - before.engine - before.self).Seconds()
	if !strings.HasSuffix(w.name(), "-cli") {
		s.ClientCPU = (after.self + after.lib - before.self - before.lib).Seconds()
	}
	return s, errors.Join(ctx.Err(), removeAll(ctx, m, done))
}

// deployAll gives each thread one container after the other, and returns the names of those that were made.
func (s *deploySample) deployAll(ctx context.Context, w deployer, all []toDeploy,
	threads int) (done []string) {
	var mu sync.Mutex
	var running sync.WaitGroup
	next := make(chan toDeploy, len(all))
	for _, c := range all {
		next <- c
	}
	close(next)
	for range threads {
		running.Go(func() {
			for c := range next {
				start := time.Now()
				client, err := w.deploy(ctx, c)
				took := time.Since(start).Seconds()
				mu.Lock()
				s.ClientCPU += client.Seconds()
				if err == nil {
					s.Latencies = append(s.Latencies, took)
					done = append(done, c.name)
				} else if s.Failed++; s.Failed == 1 {
					s.Error = err.Error()
				}
				mu.Unlock()
			}
		})
	}
	running.Wait()
	return done
}

// deployMany gives all in one call. The latency of each counts from the moment at
// which a thread would have taken it: at once, or when so many others had ended
// that one was free.
func (s *deploySample) deployMany(ctx context.Context, w deployer, all []toDeploy,
	threads int) (done []string) {
	var ends []float64 // as they ended
	at := make([]float64, len(all))
	start := time.Now()
	err := w.(manyDeployer).deployMany(ctx, all, threads, func(i int, err error) {
		at[i] = time.Since(start).Seconds()
		ends = append(ends, at[i])
		if err == nil {
			done = append(done, all[i].name)
		} else if s.Failed++; s.Failed == 1 {
			s.Error = err.Error()
		}
	})
	if err != nil {
		s.Failed += len(all) - len(ends)
		s.Error = err.Error()
	}
	for i, end := range at {
		if !slices.Contains(done, all[i].name) {
			continue
		}
		if i >= threads {
			end -= ends[i-threads]
		}
		s.Latencies = append(s.Latencies, max(0, end))
	}
	return done
}

// removeAll removes containers, eight at once.
func removeAll(ctx context.Context, m manyEngine, names []string) error {
	var g errgroup.Group
	g.SetLimit(8)
	for _, name := range names {
		g.Go(func() error { return m.remove(ctx, name) })
	}
	return g.Wait()
}

// usage is CPU time so far: of an engine's group, of this program, and of the
// process of a client library within the group.
type usage struct{ engine, self, lib time.Duration }

func usageOf(m manyEngine) (u usage, err error) {
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		return u, err
	}
	u.self = time.Duration(r.Utime.Nano() + r.Stime.Nano())
	if c, ok := m.(*manyContainerd); ok {
		u.lib = processCPU(c.lib.Process.Pid)
	}
	u.engine, err = m.session().group.CPU()
	return u, err
}

// settle waits until the engines have done what follows a trial: until none of them has taken a twentieth of
// a processor for a second, at most ten seconds. dewd makes fewer containers at once while others press the
// processors; what another engine leaves behind is none of its trial.
func (l *deployLineup) settle(ctx context.Context) error {
	const (
		look  = 100 * time.Millisecond
		quiet = 10 // looks
	)
	last := make([]time.Duration, len(l.engines))
	still := 0
	for until := time.Now().Add(10 * time.Second); time.Now().Before(until); {
		idle := true
		for i, m := range l.engines {
			now, err := m.session().group.CPU()
			if err != nil {
				return err
			}
			idle = idle && now-last[i] < look/20
			last[i] = now
		}
		if still++; !idle {
			still = 0
		}
		if still == quiet {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(look):
		}
	}
	return nil
}
