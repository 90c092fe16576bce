package bench

import (
	"fmt"
	"html"
	"math"
	"strings"
	"sync"
	"time"
)

// instant is what a node does at one moment of a pull.
type instant struct {
	t       float64 // seconds from the instruction
	network float64 // Mbit/s received
	cpu     float64 // processors used
	disk    float64 // MB/s written and read
	memory  float64 // MB resident
	upload  float64 // Mbit/s sent
	hits    float64 // share of deployments that found all layers
	seconds float64 // mean of the deployments' times, or their median
	rate    float64 // deployments a second
}

// timeline samples a session every tenth of a second.
type timeline struct {
	engine   string
	instants []instant
}

const tick = 100 * time.Millisecond

// counters are running totals; an instant is the difference of two.
type counters struct {
	at         time.Time
	wire, disk int64
	cpu        time.Duration
}

func look(s *session) counters {
	c := counters{at: time.Now()}
	c.wire, _ = s.bed.Received()
	read, written := s.bed.Disk()
	c.disk = read + written
	c.cpu, _ = s.group.CPU()
	return c
}

func (c counters) since(p counters) instant {
	dt := c.at.Sub(p.at).Seconds()
	return instant{
		network: float64(c.wire-p.wire) * 8 / 1e6 / dt,
		cpu:     (c.cpu - p.cpu).Seconds() / dt,
		disk:    float64(c.disk-p.disk) / 1e6 / dt,
	}
}

// watch is a watcher.
func (l *timeline) watch(s *session) (stop func()) {
	end := make(chan struct{})
	var wait sync.WaitGroup
	start := look(s)
	wait.Go(func() {
		ticker := time.NewTicker(tick)
		defer ticker.Stop()
		for last := start; ; {
			select {
			case <-end:
				return
			case <-ticker.C:
			}
			now := look(s)
			i := now.since(last)
			i.t, i.memory = now.at.Sub(start.at).Seconds(), float64(s.group.Resident())/1e6
			l.instants, last = append(l.instants, i), now
		}
	})
	return func() { close(end); wait.Wait() }
}

// --- the plot ---------------------------------------------------------------

// panel shows one quantity.
type panel struct {
	title string
	of    func(instant) float64
}

var panels = []panel{
	{"network, Mbit/s", func(i instant) float64 { return i.network }},
	{"processors", func(i instant) float64 { return i.cpu }},
	{"disk, MB/s", func(i instant) float64 { return i.disk }},
	{"memory, MB", func(i instant) float64 { return i.memory }},
}

var colours = []string{"#0b6", "#c33", "#36c", "#b80", "#849", "#555"}

const (
	plotWidth, panelHeight = 720.0, 130.0
	marginLeft, marginTop  = 60.0, 40.0
	panelGap               = 34.0
)

// plot draws the timelines of several engines, one panel for each quantity, as SVG.
func plot(title string, lines []timeline) string { return plotPanels(title, "%.1f s", panels, lines) }

// plotPanels draws those panels; unit formats the end of their axis.
func plotPanels(title, unit string, panels []panel, lines []timeline) string {
	var b strings.Builder
	height := marginTop + float64(len(panels))*(panelHeight+panelGap)
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%g" height="%g" font-family="sans-serif" font-size="11">`+"\n",
		marginLeft+plotWidth+20, height)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="white"/><text x="%g" y="16" font-size="13">%s</text>`+"\n", marginLeft, html.EscapeString(title))
	for i, l := range lines {
		fmt.Fprintf(&b, `<text x="%g" y="32" fill="%s">%s</text>`+"\n", marginLeft+float64(i)*170,
			colours[i%len(colours)], html.EscapeString(l.engine))
	}
	end := largest(lines, func(i instant) float64 { return i.t })
	for i, p := range panels {
		drawPanel(&b, marginTop+float64(i)*(panelHeight+panelGap), end, fmt.Sprintf(unit, end), p, lines)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

func drawPanel(b *strings.Builder, top, end float64, endLabel string, p panel, lines []timeline) {
	high := largest(lines, p.of)
	fmt.Fprintf(b, `<text x="%g" y="%g">%s</text>`+"\n", marginLeft, top+12, p.title)
	top += 16
	fmt.Fprintf(b, `<rect x="%g" y="%g" width="%g" height="%g" fill="none" stroke="#ccc"/>`+"\n", marginLeft,
		top, plotWidth, panelHeight)
	fmt.Fprintf(b, `<text x="%g" y="%g" text-anchor="end">%.3g</text><text x="%g" y="%g" text-anchor="end">0</text>`+"\n",
		marginLeft-4, top+9, high, marginLeft-4, top+panelHeight)
	fmt.Fprintf(b, `<text x="%g" y="%g" text-anchor="end">%s</text>`+"\n", marginLeft+plotWidth,
		top+panelHeight+13, endLabel)
	for i, l := range lines {
		fmt.Fprintf(b, `<polyline fill="none" stroke-width="1.3" stroke="%s" points="`, colours[i%len(colours)])
		for _, at := range l.instants {
			if math.IsNaN(p.of(at)) {
				continue
			}
			fmt.Fprintf(b, "%.1f,%.1f ", marginLeft+at.t/end*plotWidth, top+panelHeight*(1-p.of(at)/high))
		}
		b.WriteString(`"/>` + "\n")
	}
}

// largest is never 0, so that it can divide.
func largest(lines []timeline, of func(instant) float64) float64 {
	high := 1e-9
	for _, l := range lines {
		for _, i := range l.instants {
			if v := of(i); v > high { // not if it is unknown
				high = v
			}
		}
	}
	return high
}
