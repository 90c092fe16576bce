package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"time"

	"dewpoint/lab/simulate"
	"dewpoint/testkit/pulltrace"
)

// script is the deployments of a trace, at the sizes at which they are replayed.
// A deployment's image consists of the layers that the trace has after its manifest.
type script struct {
	synthetic   bool
	sizes       []int64 // of each distinct layer, as the trace has them
	deployments []deployment
}

type deployment struct {
	image  string // name and repository
	layers []int  // numbers of distinct layers, in the trace's order
}

// readScript reads the first n deployments of traces, told apart as package simulate does.
func readScript(n int, paths ...string) (*script, error) {
	r, err := pulltrace.NewReader(paths...)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	s := &script{}
	known, open := map[string]int{}, map[string]*deployment{}
	numbers := map[*deployment]int{}
	for {
		q, err := r.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		d := open[q.Client]
		if d == nil || !q.Blob || d.image != q.Image {
			d = &deployment{image: q.Image}
			open[q.Client] = d
		}
		if !q.Blob {
			continue
		}
		if _, begun := numbers[d]; !begun {
			if len(numbers) == n {
				break
			}
			numbers[d] = len(numbers)
		}
		l, ok := known[q.ID]
		if !ok {
			l = len(s.sizes)
			known[q.ID] = l
			s.sizes = append(s.sizes, q.Size)
		}
		s.synthetic = s.synthetic || q.Synthetic
		d.add(l)
	}
	s.deployments = make([]deployment, len(numbers))
	for d, i := range numbers {
		s.deployments[i] = *d
	}
	if len(s.deployments) < n {
		return nil, fmt.Errorf("the trace has %d deployments, %d were asked for", len(s.deployments), n)
	}
	return s, nil
}

// add appends a layer that the image does not have yet.
func (d *deployment) add(l int) {
	for _, have := range d.layers {
		if have == l {
			return
		}
	}
	d.layers = append(d.layers, l)
}

// synthesize writes the beginning of a zone's synthetic trace, and reads it back.
func synthesize(zone string, scale float64, seed uint64, n int, dir string) (*script, error) {
	z, err := pulltrace.ZoneNamed(zone)
	if err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(dir, zone+"-*.json")
	if err != nil {
		return nil, err
	}
	defer os.Remove(f.Name())
	w := bufio.NewWriter(f)
	// Some pulls fetch nothing, and are no deployments.
	err = pulltrace.GenerateFirst(w, z, scale, seed, 2*n)
	if err = errors.Join(err, w.Flush(), f.Close()); err != nil {
		return nil, err
	}
	return readScript(n, f.Name())
}

func (s *script) bytes() (sum int64) {
	for _, n := range s.sizes {
		sum += n
	}
	return sum
}

// play is the script as a trace again, whose blobs have the given sizes, for the simulator.
type play struct {
	s     *script
	sizes []int64
	next  int // deployment
	at    int // layer of it; -1 is its manifest
}

func (s *script) play(sizes []int64) *play { return &play{s: s, sizes: sizes, at: -1} }

// Read implements simulate.Source.
func (p *play) Read() (pulltrace.Request, error) {
	if p.next == len(p.s.deployments) {
		return pulltrace.Request{}, io.EOF
	}
	d := p.s.deployments[p.next]
	q := pulltrace.Request{Client: "c", Image: d.image, ID: "m", Size: 1}
	if p.at >= 0 {
		l := d.layers[p.at]
		q.Blob, q.ID, q.Size = true, fmt.Sprint(l), p.sizes[l]
	}
	if p.at++; p.at == len(d.layers) {
		p.next, p.at = p.next+1, -1
	}
	return q, nil
}

// expectation is what the simulator says of a cache.
type expectation struct {
	WholeHitRatio, ByteHitRatio float64
	// each deployment's bytes, missed and in all, as the cache counts them; no times
	hits []deployed
}

// expect plays the script against caches of size bytes: one that is shared, or one on each of so many nodes.
func (s *script) expect(ctx context.Context, sizes []int64, policy string, size int64,
	nodes int) (*expectation, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	// Links on which a missed byte takes a second, and all else next to nothing: times are bytes.
	const start = time.Second
	res, err := simulate.Replay(s.play(sizes),
		simulate.Config{Bin: 1, Start: start, WAN: simulate.Link{Bandwidth: 8}, LAN: simulate.Link{Bandwidth: 1e30},
			Setups: []simulate.Setup{{Policy: policy, Size: size, Nodes: nodes}}})
	if err != nil {
		return nil, err
	}
	t := res.Setups[0]
	e := &expectation{WholeHitRatio: t.WholeHitRatio, ByteHitRatio: t.ByteHitRatio}
	for i, p := range t.Series {
		d := deployed{Registry: int64(math.Round(p.Mean - start.Seconds()))}
		for _, l := range s.deployments[i].layers {
			d.Image += sizes[l]
		}
		e.hits = append(e.hits, d)
	}
	return e, nil
}
