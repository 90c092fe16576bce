package cli

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/spec"
)

const (
	frame  = 100 * time.Millisecond // between two pictures on a terminal
	report = 5 * time.Second        // between two lines elsewhere
)

// progress shows on standard error how a pull goes on: a bar per layer on a
// terminal, lines elsewhere. Its methods are safe for concurrent use.
type progress struct {
	screen // guarded by mu
	title  string
	born   time.Time

	mu     sync.Mutex
	layers []spec.LayerProgress // guarded by mu, in order of appearance
	at     map[string]int       // guarded by mu
	over   bool                 // guarded by mu: nothing more is shown
	stage  string               // guarded by mu: the last that was reached
	stop   chan struct{}        // guarded by mu: ends the ticker; nil if none runs
	ticker sync.WaitGroup
}

func (c *call) progress(title string) *progress {
	return &progress{screen: c.screen(), title: title, born: time.Now(), at: map[string]int{}, over: c.opt.quiet}
}

func (p *progress) watch() spec.Watch {
	return spec.Watch{Layer: p.layer, Reached: p.reached}
}

func (p *progress) reached(_, stage string, _ float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stage = stage
	if p.term == nil && !p.over {
		p.begin()
	}
}

func (p *progress) layer(l spec.LayerProgress) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		return
	}
	if i, ok := p.at[l.Digest]; ok {
		if p.term == nil && l.State == spec.StateComplete && p.layers[i].State != spec.StateComplete {
			fmt.Fprintf(p.w, "%s: layer %s complete, %s\n", p.title, short(l.Digest), size(l.Size))
		}
		p.layers[i] = l
	} else {
		p.at[l.Digest] = len(p.layers)
		p.layers = append(p.layers, l)
	}
	p.begin()
}

// begin has what goes on shown from now on. It is called with mu held.
func (p *progress) begin() {
	if p.stop == nil {
		p.stop = make(chan struct{})
		p.ticker.Add(1)
		go p.tick(p.stop)
	}
}

func (p *progress) tick(stop <-chan struct{}) {
	defer p.ticker.Done()
	every := report
	if p.term != nil {
		every = frame
	}
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		select {
		case <-stop:
			return
		case <-t.C:
		}
		p.mu.Lock()
		if !p.over {
			p.show()
		}
		p.mu.Unlock()
	}
}

// show is called with mu held.
func (p *progress) show() {
	if p.term != nil {
		p.draw(p.lines())
		return
	}
	var total spec.LayerProgress
	for _, l := range p.layers {
		total.Size += l.Size
		total.Fetched += l.Fetched
		total.Rate += l.Rate
	}
	if total.Fetched < total.Size {
		fmt.Fprintf(p.w, "%s: %s of %s, %s/s%s\n", p.title, size(total.Fetched), size(total.Size),
			size(int64(total.Rate)), prefixed(", ", left(total), " left"))
		return
	}
	stage := p.stage
	if stage == spec.Started || stage == spec.Restored {
		stage += ", not ready yet"
	}
	if stage != "" && stage != spec.Ready {
		fmt.Fprintf(p.w, "%s: %s, %.0f s\n", p.title, stage, time.Since(p.born).Seconds())
	}
}

func prefixed(before, s, after string) string {
	if s == "" {
		return ""
	}
	return before + s + after
}

// lines are the picture, no wider and no higher than the terminal. It is
// called with mu held.
func (p *progress) lines() []string {
	width, height := p.size()
	var lines []string
	hidden := 0
	for i, l := range p.layers {
		// Finished layers make room first.
		if len(p.layers)-hidden > height-4 && l.State == spec.StateComplete && i < len(p.layers)-1 {
			hidden++
			continue
		}
		lines = append(lines, bar(l, width-1))
	}
	if most := max(1, height-4); len(lines) > most {
		hidden += len(lines) - most
		lines = lines[:most]
	}
	if hidden > 0 {
		lines = append(lines, clip(fmt.Sprintf("and %d more layers", hidden), width-1))
	}
	if p.stage == spec.Started || p.stage == spec.Restored {
		lines = append(lines, clip("started, not ready yet", width-1))
	}
	return lines
}

// silence takes the picture off the screen and shows nothing more.
func (p *progress) silence() {
	p.mu.Lock()
	if p.term != nil && len(p.shown) > 0 {
		p.draw(nil)
	}
	p.end()
}

// end is called with mu held, and releases it.
func (p *progress) end() {
	p.over = true
	stop := p.stop
	p.stop = nil
	p.mu.Unlock()
	if stop != nil {
		close(stop)
	}
	p.ticker.Wait()
}

// finish shows the last picture and the stage times, unless there was silence.
// An error leaves an empty screen for its message.
func (p *progress) finish(r spec.Record, err error) {
	if err != nil {
		p.silence()
		return
	}
	p.mu.Lock()
	if !p.over {
		if p.term != nil && len(p.layers) > 0 {
			p.draw(p.lines())
		}
		fmt.Fprintln(p.w, summary(r))
	}
	p.end()
}

// bar is one layer on a line of at most width characters.
func bar(l spec.LayerProgress, width int) string {
	var tail string
	switch {
	case l.State == spec.StateFilling:
		tail = fmt.Sprintf("%8s /%8s  %8s/s %7s", size(l.Fetched), size(l.Size), size(int64(l.Rate)), left(l))
	default:
		tail = fmt.Sprintf("%8s /%8s  %-18s", size(l.Fetched), size(l.Size), l.State)
	}
	id := short(l.Digest)
	room := min(40, width-len(id)-len(tail)-6)
	if room < 4 {
		return clip(id+"  "+tail, width)
	}
	return id + "  [" + gauge(l, room) + "]  " + tail
}

func gauge(l spec.LayerProgress, room int) string {
	full := 0
	if l.Size > 0 {
		full = int(float64(room) * min(1, max(0, float64(l.Fetched)/float64(l.Size))))
	} else if l.State == spec.StateComplete {
		full = room
	}
	s := strings.Repeat("=", full)
	if full > 0 && full < room {
		s = s[:full-1] + ">"
	}
	return s + strings.Repeat(" ", room-full)
}

// left is the time until a layer is here, "" if that is not known.
func left(l spec.LayerProgress) string {
	if l.Rate <= 0 || l.Size <= l.Fetched {
		return ""
	}
	seconds := float64(l.Size-l.Fetched) / l.Rate
	switch s := int(seconds + 0.999); {
	case seconds >= 100*3600:
		return "days"
	case s >= 3600:
		return fmt.Sprintf("%dh%02dm", s/3600, s/60%60)
	case s >= 60:
		return fmt.Sprintf("%dm%02ds", s/60, s%60)
	default:
		return fmt.Sprintf("%ds", s)
	}
}

var stages = []string{
	spec.Admitted, spec.Resolved, spec.Tables, spec.Mounted, spec.Created, spec.Started, spec.Restored,
	spec.Ready, spec.Complete,
}

// summary is a record on a line: the stage that was awaited, and the way there.
func summary(r spec.Record) string {
	var way []string
	last, at := "", 0.0
	for _, s := range stages {
		v, ok := r.Stages[s]
		if !ok {
			continue
		}
		way = append(way, fmt.Sprintf("%s %.2f", s, v))
		if last != spec.Ready {
			last, at = s, v
		}
	}
	name := r.Name
	if name == "" {
		name = r.Image
	}
	if r.Error != "" {
		return name + ": " + r.Error
	}
	s := name + ": "
	if last != "" {
		s += fmt.Sprintf("%s in %.2f s", last, at)
	}
	if len(way) > 1 {
		s += " (" + strings.Join(way, ", ") + ")"
	}
	if r.Bytes.Registry > 0 {
		s += ", " + size(r.Bytes.Registry) + " from the registry"
	}
	if r.Bytes.PoP > 0 {
		s += ", " + size(r.Bytes.PoP) + " out of the PoP"
	}
	return s
}
