package fetch

import (
	"fmt"
	"math"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/pack"
)

// outlook is what is known when it is to be decided whether an image starts
// lazily or is pulled whole. The times that follow from it are those until all
// that a start needs is here; what both ways have in common is left out.
//
//	whole: absent/rate + one round trip
//	lazy:  pack/rate + one round trip + what the node does more for it
//	       + misses × (missTrips round trips + segment/rate)
//
// It favours whole: its streams begin at full speed, and the layers' requests
// overlap.
type outlook struct {
	rate    float64       // bytes a second that the link carries
	guessed bool          // nobody has measured rate
	rtt     time.Duration // from a request to its answer; 0 if it is not known
	absent  int64         // compressed bytes of the layers that are not here
	pack    int64         // bytes of the pack that have yet to cross the link
	trips   int           // round trips before the pack comes: 0 or 1
	misses  float64       // pages that the pack lacks and the start reads, each in another segment
	segment int64         // compressed bytes that come for one
}

const (
	// quickPull is how long a whole pull may take that is not worth a lazy start.
	quickPull = 150 * time.Millisecond
	// lazyCost is what a lazy start costs the node more than a whole one: indexes,
	// and reads that go through datafs.
	lazyCost = 50 * time.Millisecond
	// worthwhile is the most of a whole pull's time that a lazy start may be
	// expected to take: the misses are a guess.
	worthwhile = 0.8
	// missTrips is how many round trips a miss takes: the layer's points, or
	// another connection, and the segment.
	missTrips = 2
	// missShare of the segments that a start reads from are missed in, after a
	// profile of one run.
	missShare = 0.05
	// fewSegments is the size of images that have so few segments that a pack with
	// more than denseShare of them is about one program, any page of which may be
	// read: all of the segments are missed in.
	fewSegments = 8 << 20
	denseShare  = 0.15
	// denseSegment is the compressed bytes of a segment of such an image, about.
	denseSegment = 1 << 20
	// segmentData is how much of a layer's tar lies between two restart points.
	segmentData = 2 << 20
)

// outlook is what is known of an image before its pack is.
func (p *partials) outlook(img *image.Image, o Options, absent int64) outlook {
	w := outlook{absent: absent, rtt: p.cfg.Registry.RoundTrip(img.Ref.Host), trips: 1}
	w.rate, w.guessed = p.cfg.Link.Expect()
	return w
}

// carry is the time in which n bytes cross the link.
func (w outlook) carry(n int64) time.Duration {
	return time.Duration(float64(n) / w.rate * float64(time.Second))
}

func (w outlook) whole() time.Duration { return w.carry(w.absent) + w.rtt }

func (w outlook) lazy() time.Duration {
	miss := missTrips*w.rtt + w.carry(w.segment)
	return lazyCost + w.carry(w.pack) + time.Duration(w.trips)*w.rtt + time.Duration(w.misses*float64(miss))
}

// lazily reports whether the image is to start lazily.
func (w outlook) lazily() bool {
	return w.whole() > quickPull && float64(w.lazy()) <= worthwhile*float64(w.whole())
}

// String says what was expected of either way, and from what.
func (w outlook) String() string {
	known := ""
	if w.guessed {
		known = " (a guess)"
	}
	s := fmt.Sprintf("expected %.2f s whole, %.2f s lazily: %.1f MB absent, %.1f MB of pack to come, %.0f Mbit/s%s, round trip %d ms",
		w.whole().Seconds(), w.lazy().Seconds(), float64(w.absent)/1e6, float64(w.pack)/1e6, w.rate*8/1e6, known,
		w.rtt.Milliseconds())
	if w.misses > 0 {
		s += fmt.Sprintf(", %.1f misses of %.1f MB", w.misses, float64(w.segment)/1e6)
	}
	return s
}

// sized is w for a pack of which only the size is known.
func (w outlook) sized(f *packFile) outlook {
	if f.local {
		w.pack, w.trips = 0, 0
		return w
	}
	w.pack = f.size
	if w.dense(f.size) { // the header would say the same, a round trip later
		w.segment = denseSegment
		w.misses = float64(w.absent) / denseSegment
	}
	return w
}

// dense reports whether a pack, or what of it a start waits for, is so much of a
// small image that any page of that may be read.
func (w outlook) dense(pack int64) bool {
	return w.absent < fewSegments && float64(pack) > denseShare*float64(w.absent)
}

// opened is w for a pack whose header is here: what lies before its restart
// points is yet to come, and where the profile reads it may miss.
func (w outlook) opened(h *pack.Header, local bool) outlook {
	w.trips, w.pack = 0, 0
	if !local {
		w.pack = startBytes(h)
	}
	touched, bytes := touches(h)
	if touched == 0 {
		w.misses = 0
		return w
	}
	w.segment = bytes / int64(touched)
	w.misses = math.Max(missed(h.Profile), missed(h.Profile)*missShare*float64(touched))
	if w.dense(startBytes(h)) {
		w.misses = float64(touched)
	}
	return w
}

// missed is how many misses are expected where a profile of one run lets one be.
func missed(about pack.About) float64 {
	m := 1 / float64(max(about.Runs, 1))
	if about.Exercised { // it has read more than a start does
		m /= 2
	}
	return m
}

// startBytes is the bytes of the tables and chunks.
func startBytes(h *pack.Header) int64 {
	var n int64
	for i, l := range h.Layers {
		if l.Table != nil {
			n += h.TableSpan(i).Length
		}
	}
	for k := range h.Chunks {
		n += h.ChunkSpan(k).Length
	}
	return n
}

// touches is how many segments the ranges lie in, and what they have together,
// compressed. Of a layer that cannot be entered half comes for a miss.
func touches(h *pack.Header) (segments int, bytes int64) {
	type segment struct {
		layer int
		n     int64
	}
	seen := map[segment]bool{}
	see := func(r pack.Range) {
		for n := r.Offset / segmentData; n <= (r.Offset+r.Length-1)/segmentData; n++ {
			seen[segment{r.Layer, n}] = true
		}
	}
	for _, c := range h.Chunks {
		for _, r := range c.Ranges {
			see(r)
		}
		for _, r := range c.Copies {
			see(r.Range)
		}
	}
	for s := range seen {
		l := &h.Layers[s.layer]
		if l.Points == nil {
			bytes += l.BlobSize / 2
			continue
		}
		bytes += int64(float64(l.BlobSize) * math.Min(1, segmentData/float64(max(l.Size, 1))))
	}
	return len(seen), bytes
}
