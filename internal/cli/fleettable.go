package cli

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"dewpoint/internal/spec"
)

// show is called with mu held.
func (f *fleet) show() {
	if f.over || f.quiet {
		return
	}
	if f.screen.term != nil {
		f.screen.draw(f.lines())
		return
	}
	if now := f.counts(); now != f.counted {
		f.counted = now
		fmt.Fprintln(f.screen.w, now)
	}
}

// rank orders what is worth a line when there are more deployments than lines: what is under
// way, what has failed, who is next in the queue, and what is ready, the latest first.
func (m *member) rank() (class, place int) {
	switch {
	case !m.ended && m.State == spec.StateDeploying:
		return 0, 0
	case m.ended && m.failure != nil:
		return 1, -int(m.took)
	case !m.ended:
		return 2, m.Position
	}
	return 3, -int(m.took)
}

// lines are the picture, no wider and no higher than the terminal, in the order of the
// deployments. It is called with mu held.
func (f *fleet) lines() []string {
	width, height := f.screen.size()
	room := max(0, height-2) // a line for the counts, and the one that the cursor is on
	shown := make([]int, len(f.rows))
	for i := range shown {
		shown[i] = i
	}
	if len(shown) > room {
		slices.SortStableFunc(shown, func(a, b int) int {
			ca, pa := f.rows[a].rank()
			cb, pb := f.rows[b].rank()
			if ca != cb {
				return ca - cb
			}
			return pa - pb
		})
		shown = shown[:max(0, room)]
		slices.Sort(shown)
	}
	longest := 4
	for _, i := range shown {
		longest = max(longest, len(f.rows[i].Name))
	}
	var lines []string
	for _, i := range shown {
		lines = append(lines, f.rows[i].line(f.begun, min(longest, max(8, width/4)), width-1))
	}
	last := f.counts()
	if hidden := len(f.rows) - len(shown); hidden > 0 {
		last = fmt.Sprintf("%d more; %s", hidden, last)
	}
	return append(lines, clip(last, width-1))
}

// line is one deployment on at most width characters, its name on at most so many.
func (m *member) line(begun time.Time, name, width int) string {
	head := fmt.Sprintf("%-*s  %-18s %7.2f s", name, clip(m.Name, name), m.state(), m.seconds(begun))
	if m.failure != nil {
		return clip(head+"  "+reason(m.failure), width)
	}
	all := m.bytes()
	if all.Size == 0 {
		return clip(strings.TrimRight(head, " "), width)
	}
	tail := fmt.Sprintf("%8s /%8s", size(all.Fetched), size(all.Size))
	room := min(30, width-len(head)-len(tail)-6)
	if room < 4 {
		return clip(head+"  "+tail, width)
	}
	return head + "  [" + gauge(all, room) + "]  " + tail
}

// counts is how many stand where. It is called with mu held.
func (f *fleet) counts() string {
	var n struct{ ready, deploying, queued, failed, canceled int }
	for _, m := range f.rows {
		switch {
		case m.ended && m.failure == nil:
			n.ready++
		case m.ended && m.failure.Code == "canceled":
			n.canceled++
		case m.ended:
			n.failed++
		case m.State == spec.StateDeploying:
			n.deploying++
		default:
			n.queued++
		}
	}
	words := []string{fmt.Sprintf("%d of %d ready", n.ready, len(f.rows))}
	for _, w := range []struct {
		n    int
		what string
	}{{n.deploying, "deploying"}, {n.queued, "queued"}, {n.failed, "failed"}, {n.canceled, "canceled"}} {
		if w.n > 0 {
			words = append(words, fmt.Sprintf("%d %s", w.n, w.what))
		}
	}
	s := strings.Join(words, ", ")
	if f.calling {
		s += "; canceling what is not ready, again to leave at once"
	}
	return s
}
