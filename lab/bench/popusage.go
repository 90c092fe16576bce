package bench

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"dewpoint/testkit/popbed"
	"dewpoint/testkit/testbed"
)

// spent is what groups of programs have used.
type spent struct {
	CPU  float64 // seconds
	Peak int64   // bytes, resident at one moment; the largest of the groups' sums
	Dewd int64   // bytes: the high-water mark of the process dewd
}

// popUsage is what a deployment cost the PoP.
type popUsage struct {
	Seconds float64
	// of the nodes that deployed: dewd, containerd, container; the store's client; its servers
	Nodes, Client, Servers spent
	LAN                    popbed.Traffic // of the nodes that deployed
	WAN                    popbed.Traffic
	Busy                   float64 // of the machine's processors, whoever it was for
	Line                   timeline
}

// popWatch looks on while nodes deploy.
type popWatch struct {
	p        *pop
	nodes    []*popbed.Node
	groups   [3][]*testbed.Group
	memory   [3][]*testbed.Memory
	start    popTotals
	line     timeline
	stopLine chan struct{}
	wait     sync.WaitGroup
}

// popTotals are running totals.
type popTotals struct {
	at         time.Time
	cpu        [3]time.Duration
	lan, wan   popbed.Traffic
	idle, busy float64
}

// watch begins to look at the first n nodes, or at those of first on.
func (p *pop) watch(first, n int) (*popWatch, error) {
	w := &popWatch{p: p, nodes: p.Nodes[first : first+n], stopLine: make(chan struct{})}
	for _, m := range w.nodes {
		w.groups[0] = append(w.groups[0], m.Group())
		w.groups[1] = append(w.groups[1], m.StoreClient())
	}
	w.groups[2] = p.StoreServers()
	for i, groups := range w.groups {
		for _, g := range groups {
			w.memory[i] = append(w.memory[i], g.Watch())
		}
	}
	var err error
	if w.start, err = w.totals(); err != nil {
		w.endMemory()
		return nil, err
	}
	w.line.engine = string(p.kind)
	if p.kind == popbed.None {
		w.line.engine = "none"
	}
	w.wait.Go(w.sample)
	return w, nil
}

// stop ends it and tells what was used.
func (w *popWatch) stop() (popUsage, error) {
	close(w.stopLine)
	w.wait.Wait()
	now, err := w.totals()
	peaks := w.endMemory()
	d := now.since(w.start)
	u := popUsage{Seconds: d.at, LAN: d.lan, WAN: d.wan, Busy: d.busy, Line: w.line, Nodes: peaks[0],
		Client: peaks[1], Servers: peaks[2]}
	u.Nodes.CPU, u.Client.CPU, u.Servers.CPU = d.cpu[0], d.cpu[1], d.cpu[2]
	return u, err
}

func (w *popWatch) endMemory() (all [3]spent) {
	for i, memories := range w.memory {
		for _, m := range memories {
			m.Stop()
			all[i].Peak = max(all[i].Peak, m.Peak)
			all[i].Dewd = max(all[i].Dewd, m.PerOf["dewd"])
		}
	}
	return all
}

func (w *popWatch) totals() (t popTotals, err error) {
	t.at = time.Now()
	for i, groups := range w.groups {
		for _, g := range groups {
			used, gerr := g.CPU()
			t.cpu[i], err = t.cpu[i]+used, errors.Join(err, gerr)
		}
	}
	for _, n := range w.nodes {
		lan, lerr := w.p.LAN(n.Index)
		t.lan.In, t.lan.Out, err = t.lan.In+lan.In, t.lan.Out+lan.Out, errors.Join(err, lerr)
	}
	wan, werr := w.p.WAN()
	t.wan = wan
	t.idle, t.busy = processors()
	return t, errors.Join(err, werr)
}

// popDelta is the difference of two totals.
type popDelta struct {
	at       float64 // seconds
	cpu      [3]float64
	lan, wan popbed.Traffic
	busy     float64
}

func (t popTotals) since(s popTotals) (d popDelta) {
	d.at = t.at.Sub(s.at).Seconds()
	for i := range t.cpu {
		d.cpu[i] = (t.cpu[i] - s.cpu[i]).Seconds()
	}
	d.lan = popbed.Traffic{In: t.lan.In - s.lan.In, Out: t.lan.Out - s.lan.Out}
	d.wan = popbed.Traffic{In: t.wan.In - s.wan.In, Out: t.wan.Out - s.wan.Out}
	if all := t.idle + t.busy - s.idle - s.busy; all > 0 {
		d.busy = (t.busy - s.busy) / all
	}
	return d
}

// processors is the machine's time idle (waiting for disks included) and busy, in ticks.
func processors() (idle, busy float64) {
	raw, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(raw), "\n")
	for i, f := range strings.Fields(line) {
		v, err := strconv.ParseFloat(f, 64)
		switch {
		case err != nil || i > 8: // the name; guests' time is counted already
		case i == 4 || i == 5:
			idle += v
		default:
			busy += v
		}
	}
	return idle, busy
}

// sample draws the line of figures 4.4 and 4.5: the nodes and their store's client.
func (w *popWatch) sample() {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for last := w.start; ; {
		select {
		case <-w.stopLine:
			return
		case <-ticker.C:
		}
		now, err := w.totals()
		if err != nil {
			return // stop says it
		}
		d := now.since(last)
		var resident int64
		for _, g := range append(w.groups[0][:len(w.groups[0]):len(w.groups[0])], w.groups[1]...) {
			resident += g.Resident()
		}
		w.line.instants = append(w.line.instants,
			instant{t: now.at.Sub(w.start.at).Seconds(), network: float64(d.lan.In) * 8 / 1e6 / d.at,
				upload: float64(d.lan.Out) * 8 / 1e6 / d.at, cpu: (d.cpu[0] + d.cpu[1]) / d.at,
				memory: float64(resident) / 1e6})
		last = now
	}
}
