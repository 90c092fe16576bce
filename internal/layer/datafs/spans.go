package datafs

import (
	"slices"

	"dewpoint/internal/layer/presence"
)

// span is the bytes [from, to) of a layer's data.
type span struct{ from, to int64 }

func (s span) touches(o span) bool { return s.from < o.to && o.from < s.to }

// spans are ascending and do not touch each other.
type spans []span

// add joins s to the spans.
func (l spans) add(s span) spans {
	if s.from >= s.to {
		return l
	}
	i := 0
	for i < len(l) && l[i].to < s.from {
		i++
	}
	j := i
	for j < len(l) && l[j].from <= s.to {
		s = span{min(s.from, l[j].from), max(s.to, l[j].to)}
		j++
	}
	return slices.Replace(l, i, j, s)
}

// without returns the spans but for what lies in s. It may write to l.
func (l spans) without(s span) spans {
	if !l.touches(s) {
		return l
	}
	var out spans
	for _, have := range l {
		if !have.touches(s) {
			out = append(out, have)
			continue
		}
		if have.from < s.from {
			out = append(out, span{have.from, s.from})
		}
		if s.to < have.to {
			out = append(out, span{s.to, have.to})
		}
	}
	return out
}

func (l spans) touches(s span) bool {
	return slices.ContainsFunc(l, s.touches)
}

// missing returns the parts of s that the spans do not cover.
func (l spans) missing(s span) spans {
	out := spans{s}
	for _, have := range l {
		out = out.without(have)
	}
	return out
}

// absent adds to the spans the absent pages that s touches.
func absent(out spans, m *presence.Map, s span) spans {
	to := min(s.to, m.Size())
	for from := max(s.from, 0); from < to; {
		a, b := m.Absent(from, to)
		if a >= to {
			break
		}
		out = out.add(span{a, b})
		from = b
	}
	return out
}

// settle returns the wants without what of them lies in s and has come.
func settle(wants spans, m *presence.Map, s span) spans {
	out := slices.Clone(wants)
	for _, w := range wants {
		if !w.touches(s) {
			continue
		}
		part := span{max(w.from, s.from), min(w.to, s.to)}
		out = out.without(part)
		for _, still := range absent(nil, m, part) {
			out = out.add(still)
		}
	}
	return out
}
