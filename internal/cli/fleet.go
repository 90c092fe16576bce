package cli

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/spec"
)

// fleet is many deployments of one call as a person sees them: a table that lives on a terminal,
// lines elsewhere. Its methods are safe for concurrent use.
type fleet struct {
	c     *call
	begun time.Time

	mu       sync.Mutex
	screen   screen    // guarded by mu
	rows     []*member // guarded by mu; by index
	said     []string  // guarded by mu: lines to be shown above the picture
	calling  bool      // guarded by mu: what has not ended is being called off
	counted  string    // guarded by mu: the last line of counts that was printed
	over     bool      // guarded by mu
	stop     chan struct{}
	ticker   sync.WaitGroup
	quiet    bool
	separate bool // standard output is not on the terminal that the picture is on
}

// member is one deployment.
type member struct {
	spec.Deployment
	stage   string                        // the last that was reached
	layers  map[string]spec.LayerProgress // by digest
	took    time.Duration                 // until it ended
	record  spec.Record
	failure *spec.Failure
	ended   bool
	known   bool // the node has accepted it
}

func newFleet(c *call, all []spec.Request) *fleet {
	f := &fleet{c: c, screen: c.screen(), stop: make(chan struct{}), quiet: c.opt.quiet}
	f.separate = c.json || f.quiet || f.screen.term == nil || !isTerminal(c.cfg.Stdout)
	for i, r := range all {
		f.rows = append(f.rows,
			&member{Deployment: spec.Deployment{Name: cmp.Or(r.Name, fmt.Sprintf("(%d)", i+1)), Image: r.Image,
				State: spec.StateQueued}})
	}
	return f
}

func (f *fleet) begin() {
	f.begun = time.Now()
	f.ticker.Go(func() {
		every := report
		if f.screen.term != nil {
			every = frame
		}
		t := time.NewTicker(every)
		defer t.Stop()
		for {
			select {
			case <-f.stop:
				return
			case <-t.C:
			}
			f.mu.Lock()
			f.show()
			f.mu.Unlock()
		}
	})
}

// watch is what the client tells.
func (f *fleet) watch() spec.ManyWatch {
	return spec.ManyWatch{Ended: f.ended, Watch: func(i int) spec.Watch {
		m := f.at(i)
		return spec.Watch{
			Deployment: func(d spec.Deployment) { f.stands(m, d) },
			Reached:    func(_, stage string, _ float64) { f.change(func() { m.stage = stage }) },
			Layer: func(l spec.LayerProgress) {
				f.change(func() {
					if m.layers == nil {
						m.layers = map[string]spec.LayerProgress{}
					}
					m.layers[l.Digest] = l
				})
			},
		}
	}}
}

func (f *fleet) change(to func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	to()
}

// at is a row. A node that tells of more than were asked for gets rows for them.
func (f *fleet) at(i int) *member {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.rows) <= i {
		f.rows = append(f.rows, &member{})
	}
	return f.rows[i]
}

// stands takes where a deployment stands. With --detach that is all that comes.
func (f *fleet) stands(m *member, d spec.Deployment) {
	f.mu.Lock()
	defer f.mu.Unlock()
	first := !m.known
	m.Deployment, m.known = d, true
	if first && f.c.opt.detach {
		if f.c.json {
			_ = f.c.print(d)
			return
		}
		fmt.Fprintln(f.c.cfg.Stdout, d.Name)
	}
}

// ended takes a deployment's last word, and prints it where there is no picture.
func (f *fleet) ended(i int, r spec.Record, why *spec.Failure) {
	m := f.at(i)
	f.mu.Lock()
	defer f.mu.Unlock()
	m.ended, m.record, m.failure, m.took = true, r, why, time.Since(f.begun)
	m.Name = cmp.Or(r.Name, m.Name)
	if f.c.opt.detach {
		return
	}
	switch {
	case f.c.json:
		if r.Image == "" { // nothing was begun
			r = spec.Record{ID: m.ID, Name: m.Name, Image: m.Image, Stages: map[string]float64{}}
		}
		if why != nil {
			r.Error = why.Message
		}
		_ = f.c.print(r)
	case f.separate && why == nil:
		fmt.Fprintln(f.c.cfg.Stdout, m.Name)
	}
	if f.screen.term == nil || f.quiet {
		if why != nil {
			fmt.Fprintf(f.c.cfg.Stderr, "%s: %s\n", m.Name, reason(why))
		} else if !f.quiet {
			fmt.Fprintln(f.c.cfg.Stderr, summary(r))
		}
	}
}

// reason is a failure on a line.
func reason(f *spec.Failure) string {
	if f.Remedy == "" || strings.Contains(f.Message, f.Remedy) {
		return f.Message
	}
	return f.Message + "; " + f.Remedy
}

// cancelling says that what has not ended is called off, and which deployments that are.
func (f *fleet) cancelling() (ids []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calling = true
	for _, m := range f.rows {
		if m.known && !m.ended {
			ids = append(ids, m.ID)
		}
	}
	return ids
}

// say shows a line that stays.
func (f *fleet) say(line string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.said = append(f.said, line)
}

// finish shows the last picture, a table of all, and gives the error of the whole: err, that of
// the call, or how many have failed.
func (f *fleet) finish(err error, detached bool) error {
	close(f.stop)
	f.ticker.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.over = true
	if f.screen.term != nil && !f.quiet {
		f.screen.draw(nil)
		if !detached && slices.ContainsFunc(f.rows, func(m *member) bool { return m.known }) {
			_ = table(f.screen.w, "NAME STATE SECONDS REGISTRY POP WAY", f.table())
		}
	}
	for _, line := range f.said {
		fmt.Fprintln(f.c.cfg.Stderr, line)
	}
	if err != nil {
		return err
	}
	return f.sum()
}

// table is how all have ended. It is called with mu held.
func (f *fleet) table() (rows [][]string) {
	for _, m := range f.rows {
		state, way := m.state(),
			strings.Join(slices.DeleteFunc([]string{m.record.Way.Pull, m.record.Way.Start}, func(s string) bool {
				return s == ""
			}), ", ")
		if m.failure != nil {
			way = reason(m.failure)
		}
		rows = append(rows, []string{m.Name, state, fmt.Sprintf("%.2f", m.seconds(f.begun)),
			size(m.record.Bytes.Registry), size(m.record.Bytes.PoP), dash(way)})
	}
	return rows
}

// state is one word, or a few while it waits.
func (m *member) state() string {
	switch {
	case m.ended && m.failure == nil:
		return spec.Ready
	case m.ended && m.failure.Code == "canceled":
		return spec.StateCanceled
	case m.ended:
		return spec.StateFailed
	case m.State == spec.StateQueued && m.Position > 0:
		return strings.TrimSuffix(fmt.Sprintf("queued %d, %s", m.Position, m.Waits), ", ")
	case m.State == spec.StateDeploying && m.stage != "":
		return m.stage
	}
	return m.State
}

// seconds since the instruction: until it was ready, by the node's clock, or until now.
func (m *member) seconds(begun time.Time) float64 {
	if at, ok := m.record.Stages[spec.Ready]; ok && m.failure == nil {
		return at
	}
	if m.ended {
		return m.took.Seconds()
	}
	return time.Since(begun).Seconds()
}

// bytes are those of its layers, as one.
func (m *member) bytes() (all spec.LayerProgress) {
	for _, l := range m.layers {
		all.Size += l.Size
		all.Fetched += l.Fetched
		all.Rate += l.Rate
	}
	return all
}
