package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"dewpoint/testkit/testbed"
)

// leaks deploys on dewd many times in a row, removing each container, and then has
// many alive at once; what dewd and the machine hold is looked at before, during and after.
func (b *deployBench) leaks(ctx context.Context, l *deployLineup) error {
	m, ok := l.engines[0].(*manyDewd)
	if !ok {
		return errors.New("the part alive is about dewd: name it among -engines")
	}
	w := m.ways()[1]
	memory := m.s.group.Watch()
	seen, err := b.leaksOf(ctx, l, m, w)
	memory.Stop()
	b.leaksReport(seen, float64(memory.PerOf["dewd"])/(1<<20))
	raw, merr := json.MarshalIndent(map[string]any{"commit": commit(), "machine": machine(), "seen": seen}, "",
		" ")
	if merr == nil {
		merr = os.WriteFile(b.report.prefix+".json", raw, 0o644)
	}
	return errors.Join(err, merr)
}

// moment is a footprint at a stage of the part alive.
type moment struct {
	Stage string `json:"stage"`
	footprint
}

// The stages of the part alive.
const (
	beforeAll = "before"
	inARow    = "in a row"
	afterRow  = "after the row"
	allAlive  = "alive"
	afterAll  = "after all"
	aliveMore = "alive again"
	afterMore = "after all again"
)

// idleFor is how long nothing is done before what stays is looked at: dewd collects its garbage and gives
// memory back when it has done nothing for three to six seconds.
const idleFor = 8 * time.Second

func (l *deployLineup) rest(ctx context.Context) error {
	select {
	case <-time.After(idleFor):
		return l.settle(ctx)
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (b *deployBench) leaksOf(ctx context.Context, l *deployLineup, m *manyDewd, w deployer) (seen []moment,
	err error) {
	look := func(stage string, deployments, alive int) error {
		f, err := m.take(ctx)
		f.Deployments, f.Alive = deployments, alive
		seen = append(seen, moment{stage, f})
		fmt.Fprintf(b.stderr, "%-14s %+v\n", stage, f)
		return err
	}
	// What dewd prepares ahead and keeps is there afterwards.
	if _, err := l.trial(ctx, w, b.o.images[0], b.commands[0], b.containers, b.containers); err != nil {
		return nil, err
	}
	if err := errors.Join(l.rest(ctx), look(beforeAll, 0, 0)); err != nil {
		return seen, err
	}
	start := time.Now()
	for i := range b.inARow {
		c := b.sleeper(l)
		if _, err := w.deploy(ctx, c); err != nil {
			return seen, fmt.Errorf("deployment %d: %w", i+1, err)
		}
		if err := m.remove(ctx, c.name); err != nil {
			return seen, fmt.Errorf("removal %d: %w", i+1, err)
		}
		if (i+1)%max(1, b.inARow/10) == 0 {
			if err := look(inARow, i+1, 0); err != nil {
				return seen, err
			}
		}
	}
	b.figure("dewd", "deployments and removals in a row", "per second",
		float64(b.inARow)/time.Since(start).Seconds())
	if err := errors.Join(l.rest(ctx), look(afterRow, b.inARow, 0)); err != nil {
		return seen, err
	}
	// what stays of the first is there for the second
	for _, stage := range [][2]string{{allAlive, afterAll}, {aliveMore, afterMore}} {
		var s deploySample
		var all []toDeploy
		for range b.alive {
			all = append(all, b.sleeper(l))
		}
		done := s.deployAll(ctx, w, all, b.containers)
		err = errors.Join(l.settle(ctx), look(stage[0], b.inARow, len(done)))
		if _, inContainers := containerGroups(); stage[0] == allAlive {
			b.isolation(inContainers, len(done))
		}
		if s.Failed > 0 {
			err = errors.Join(err, fmt.Errorf("%d of %d failed: %s", s.Failed, b.alive, s.Error))
		}
		if err = errors.Join(err, removeAll(ctx, m, done), l.rest(ctx), look(stage[1], b.inARow, 0)); err != nil {
			return seen, err
		}
	}
	return seen, nil
}

// isolation says how many namespaces and cgroups containers have among them, of which
// each has to have its own.
func (b *deployBench) isolation(pids []int, containers int) {
	own := map[string]map[string]bool{}
	for _, pid := range pids {
		for _, kind := range isolated {
			var what string
			if kind == "cgroup" {
				raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
				what = string(raw)
			} else {
				what, _ = os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
			}
			if own[kind] == nil {
				own[kind] = map[string]bool{}
			}
			own[kind][what] = true
		}
	}
	enough, said := true, []string(nil)
	for _, kind := range isolated {
		said = append(said, fmt.Sprintf("%s %d", kind, len(own[kind])))
		enough = enough && (len(own[kind]) == containers || kind == "net" && b.net == "host")
	}
	b.report.note(fmt.Sprintf("\n%d containers alive have of their own: %s: %s\n", containers,
		strings.Join(said, ", "), met(enough)))
}

// isolated are the kinds of namespaces that a container has, and its cgroup.
var isolated = []string{"mnt", "pid", "net", "ipc", "uts", "cgroup"}

// sleeper is a container that stays.
func (b *deployBench) sleeper(l *deployLineup) toDeploy {
	return toDeploy{name: l.name(), image: testbed.Address + "/" + b.o.images[0],
		args: strings.Fields("sleep 3600"), net: b.net}
}

func (b *deployBench) leaksReport(seen []moment, peak float64) {
	head := []string{"", "deployments", "alive", "processes", "mounts", "network namespaces", "cgroups",
		"dewd's descriptors", "goroutines", "RSS, MiB", "without files", "Go heap", "containerd's descriptors",
		"RSS, MiB", "without files"}
	var rows [][]string
	at := map[string]footprint{}
	var row []footprint
	for _, s := range seen {
		at[s.Stage] = s.footprint
		if s.Stage == inARow {
			row = append(row, s.footprint)
		}
		cells := []string{s.Stage}
		for _, n := range []int{s.Deployments, s.Alive, s.Processes, s.Mounts, s.Namespaces, s.Cgroups,
			s.Descriptors, s.Goroutines} {
			cells = append(cells, strconv.Itoa(n))
		}
		rows = append(rows, append(cells, mebi(s.RSS), mebi(s.Anon), mebi(s.Heap), strconv.Itoa(s.Containerd),
			mebi(s.EngineRSS), mebi(s.EngineAnon)))
	}
	b.report.markdown(b.title(fmt.Sprintf("%d deployments in a row, each removed, then %d alive, twice",
		b.inARow, b.alive)), head, rows)
	if _, ended := at[afterMore]; !ended {
		return
	}
	for _, stage := range []string{afterRow, afterAll, afterMore} {
		b.report.note(fmt.Sprintf("\nLeft %s: %s\n", stage, grown(at[beforeAll], at[stage])))
	}
	flat := "too few samples"
	if n := len(row); n >= 6 {
		early, late := meanRSS(row[1:n/2]), meanRSS(row[n/2:])
		flat = fmt.Sprintf("%.3f (%.1f to %.1f MiB); target within 5 %%: %s", late/early, early/1024, late/1024,
			met(late/early <= 1.05))
		b.figure("dewd", "RSS, second half of the row over the first", "ratio", late/early)
	}
	b.report.note(fmt.Sprintf("\ndewd's memory, second half of the row over the first (its first tenth left out): %s\n\ndewd's largest memory: %.1f MiB; target below 96: %s\n",
		flat, peak, met(peak < 96)))
	b.figure("dewd", "largest RSS", "MiB", peak)
	again := float64(at[afterMore].RSS) / float64(at[afterAll].RSS)
	b.report.note(fmt.Sprintf("\ndewd's memory after the second %d alive over that after the first: %.3f, its Go heap %.1f and %.1f MiB; target within 5 %%: %s\n",
		b.alive, again, float64(at[afterAll].Heap)/1024, float64(at[afterMore].Heap)/1024, met(again <= 1.05)))
	b.figure("dewd", "RSS after the second alive over after the first", "ratio", again)
}

func mebi(kib int) string { return fmt.Sprintf("%.1f", float64(kib)/1024) }

func meanRSS(row []footprint) (sum float64) {
	for _, f := range row {
		sum += float64(f.RSS) / float64(len(row))
	}
	return sum
}

// grown says what is more than before. A few descriptors and goroutines come and go with connections.
func grown(before, after footprint) string {
	var more []string
	for _, c := range []struct {
		what    string
		was, is int
		slack   int
	}{
		{"processes", before.Processes, after.Processes, 0},
		{"mounts", before.Mounts, after.Mounts, 0},
		{"network namespaces", before.Namespaces, after.Namespaces, 0},
		{"cgroups", before.Cgroups, after.Cgroups, 0},
		{"descriptors of dewd", before.Descriptors, after.Descriptors, 4},
		{"descriptors of containerd", before.Containerd, after.Containerd, 4},
		{"goroutines", before.Goroutines, after.Goroutines, 8},
	} {
		if c.is > c.was+c.slack {
			more = append(more, fmt.Sprintf("%s %d instead of %d", c.what, c.is, c.was))
		}
	}
	if len(more) == 0 {
		return "nothing: met"
	}
	return strings.Join(more, ", ") + ": not met"
}
