package simulate

import (
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"dewpoint/internal/evict"

	"dewpoint/testkit/pulltrace"
)

// Setup is one way to cache that a trace is replayed against.
type Setup struct {
	Policy string `json:"policy"`
	// Size is the bytes of each cache: of the one that all nodes share, or of each node's own.
	Size int64 `json:"size"`
	// Nodes is how many nodes have a cache of their own; 0 is one shared cache.
	Nodes int `json:"nodes,omitempty"`
}

// Link is what a layer comes over.
type Link struct {
	Bandwidth float64       `json:"bandwidth"` // bits per second
	RTT       time.Duration `json:"rtt"`       // nanoseconds, once per layer
}

func (l Link) seconds(bytes int64) float64 {
	return l.RTT.Seconds() + float64(bytes)*8/l.Bandwidth
}

// Config of a replay.
type Config struct {
	Setups []Setup
	// WAN is the link to the registry, LAN the one to the shared cache. A hit in a node's own cache takes no
	// transfer. The defaults are 100 Mbit/s with 40 ms, and 1 Gbit/s with 1 ms.
	WAN, LAN Link
	// Start is what a deployment takes when nothing has to be moved; 1 s by default (0.99 s in the thesis's
	// table 4.4).
	Start time.Duration
	// Reads is the share of a layer's bytes that a start reads from the shared cache, where the layer is
	// mounted, not copied; 0.13 by default, which is what a start of Python with numpy reads of its image.
	Reads float64
	// Cost is what policies are told that a refetch costs: "bytes", the default, or "seconds".
	Cost string
	// ByClient gives each client a node. Otherwise deployments go to the nodes in turn, as in the thesis.
	ByClient bool
	// Deployments ends the replay after so many; 0 replays all.
	Deployments int
	// Bin is how many deployments make a point of the results' series; 0 makes none.
	Bin int
}

func (c Config) withDefaults() (Config, error) {
	if c.WAN == (Link{}) {
		c.WAN = Link{Bandwidth: 100e6, RTT: 40 * time.Millisecond}
	}
	if c.LAN == (Link{}) {
		c.LAN = Link{Bandwidth: 1e9, RTT: time.Millisecond}
	}
	if c.Start == 0 {
		c.Start = time.Second
	}
	if c.Reads == 0 {
		c.Reads = 0.13
	}
	if c.Cost == "" {
		c.Cost = "bytes"
	}
	switch {
	case !(c.WAN.Bandwidth > 0) || !(c.LAN.Bandwidth > 0) || c.WAN.RTT < 0 || c.LAN.RTT < 0 || c.Start < 0:
		return c, errors.New("a link needs a bandwidth above 0 and no negative time")
	case !(c.Reads > 0) || c.Reads > 1:
		return c, fmt.Errorf("a start reads %g of a layer", c.Reads)
	case c.Cost != "seconds" && c.Cost != "bytes":
		return c, fmt.Errorf("cost %q is neither seconds nor bytes", c.Cost)
	case c.Deployments < 0 || c.Bin < 0:
		return c, errors.New("a number of deployments is negative")
	}
	for _, s := range c.Setups {
		if s.Size <= 0 || s.Nodes < 0 {
			return c, fmt.Errorf("a cache of %d bytes on %d nodes", s.Size, s.Nodes)
		}
	}
	return c, nil
}

// Totals is what came of a setup.
type Totals struct {
	Setup
	HitBytes        int64   `json:"hit_bytes"`
	Hits            int64   `json:"hits"`
	WholeHits       int64   `json:"whole_hits"` // deployments all of whose layers were there
	HitRatio        float64 `json:"hit_ratio"`
	ByteHitRatio    float64 `json:"byte_hit_ratio"`
	WholeHitRatio   float64 `json:"whole_hit_ratio"`
	DeploySeconds   float64 `json:"deploy_seconds"`   // mean
	DeployDeviation float64 `json:"deploy_deviation"` // standard deviation
	Series          []Point `json:"series,omitempty"`

	sum, squares float64
}

// Point is one bin of deployments.
type Point struct {
	Deployments int     `json:"deployments"`
	Layers      int     `json:"layers"`
	Hits        int     `json:"hits"`
	Whole       int     `json:"whole"`
	Mean        float64 `json:"mean"`
	Deviation   float64 `json:"deviation"`

	sum, squares float64
}

// Result is what a trace has and what each setup made of it.
type Result struct {
	pulltrace.Skipped
	Synthetic   bool      `json:"synthetic"` // at least one record says that it is
	From        time.Time `json:"from"`
	To          time.Time `json:"to"`
	Manifests   int64     `json:"manifests"`
	Blobs       int64     `json:"blobs"` // requests
	BlobBytes   int64     `json:"blob_bytes"`
	Unique      int64     `json:"unique"`
	UniqueBytes int64     `json:"unique_bytes"` // the working set
	Images      int64     `json:"images"`
	Clients     int64     `json:"clients"`
	Deployments int64     `json:"deployments"` // manifests with at least one blob
	Large       int64     `json:"large"`       // requests of blobs over 64 MiB
	LargeBytes  int64     `json:"large_bytes"`
	Setups      []*Totals `json:"setups"`
}

// Source is a stream of requests that ends with io.EOF. A Reader is one.
type Source interface {
	Read() (pulltrace.Request, error)
}

// Replay reads the trace once and plays it against all setups. Memory is taken for each distinct blob, image
// and client, and for nothing that grows with the number of requests but the series.
func Replay(src Source, cfg Config) (*Result, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	r := &replay{cfg: cfg, blobs: make(map[string]*blob), images: make(map[string]struct{}),
		open: make(map[string]*deployment)}
	for _, s := range cfg.Setups {
		sim := &sim{Totals: Totals{Setup: s}}
		for range max(1, s.Nodes) {
			c, err := newCache(s.Policy, s.Size)
			if err != nil {
				return nil, err
			}
			sim.caches = append(sim.caches, c)
		}
		r.sims = append(r.sims, sim)
	}
	for {
		q, err := src.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if !r.play(q) {
			break
		}
	}
	res := r.finish()
	if read, ok := src.(*pulltrace.Reader); ok {
		res.Skipped = read.Skipped
	}
	return res, nil
}

type replay struct {
	cfg    Config
	res    Result
	blobs  map[string]*blob
	images map[string]struct{}
	open   map[string]*deployment // by client
	sims   []*sim
}

// sim is a setup in the making.
type sim struct {
	Totals
	caches []*cache
}

// deployment is a manifest and the blobs that the same client reads after it, until its next manifest.
type deployment struct {
	image   string
	number  int // from 0; -1 until its first blob
	layers  int
	seconds []float64 // for each setup
	hits    []int
}

// play reports whether to go on.
func (r *replay) play(q pulltrace.Request) bool {
	if r.res.From.IsZero() {
		r.res.From = q.Time
	}
	d := r.open[q.Client]
	if d == nil {
		d = &deployment{number: -1, image: q.Image, seconds: make([]float64, len(r.sims)),
			hits: make([]int, len(r.sims))}
		r.open[q.Client] = d
	}
	if !q.Blob || d.image != q.Image {
		r.end(d)
		d.image = q.Image
	}
	if q.Blob && d.number < 0 {
		if r.cfg.Deployments > 0 && r.res.Deployments == int64(r.cfg.Deployments) {
			return false
		}
		d.number = int(r.res.Deployments)
		r.res.Deployments++
	}
	r.res.To = q.Time
	r.res.Synthetic = r.res.Synthetic || q.Synthetic
	r.images[q.Image] = struct{}{}
	if !q.Blob {
		r.res.Manifests++
		return true
	}
	r.layer(d, q)
	return true
}

func (r *replay) layer(d *deployment, q pulltrace.Request) {
	r.res.Blobs++
	r.res.BlobBytes += q.Size
	if q.Size > pulltrace.Large {
		r.res.Large++
		r.res.LargeBytes += q.Size
	}
	b, known := r.blobs[q.ID]
	if !known {
		b = &blob{Object: evict.Object{Key: q.ID, Size: q.Size, Cost: float64(q.Size)}}
		if r.cfg.Cost == "seconds" {
			b.Cost = r.cfg.WAN.seconds(q.Size)
		}
		r.blobs[q.ID] = b
		r.res.Unique++
		r.res.UniqueBytes += q.Size
	}
	grown := b.askedBy(q.Image)
	d.layers++
	for i, s := range r.sims {
		node := d.number % len(s.caches)
		if r.cfg.ByClient {
			node = int(hash(q.Client)) % len(s.caches)
		}
		if grown {
			for _, c := range s.caches {
				c.describe(b.Object)
			}
		}
		if !s.caches[node].get(b.Object) {
			d.seconds[i] += r.cfg.WAN.seconds(b.Size)
			continue
		}
		d.hits[i]++
		s.Hits++
		s.HitBytes += b.Size
		if s.Nodes == 0 {
			d.seconds[i] += r.cfg.LAN.seconds(int64(r.cfg.Reads * float64(b.Size)))
		}
	}
}

// end counts a deployment, and makes room for the client's next.
func (r *replay) end(d *deployment) {
	if d.number >= 0 {
		for i, s := range r.sims {
			s.count(d, i, r.cfg)
		}
	}
	d.number, d.layers = -1, 0
	clear(d.seconds)
	clear(d.hits)
}

func (s *sim) count(d *deployment, i int, cfg Config) {
	t := cfg.Start.Seconds() + cfg.WAN.RTT.Seconds() + d.seconds[i] // the manifest is asked for in any case
	whole := d.hits[i] == d.layers
	s.sum += t
	s.squares += t * t
	if whole {
		s.WholeHits++
	}
	if cfg.Bin == 0 {
		return
	}
	bin := d.number / cfg.Bin
	for len(s.Series) <= bin {
		s.Series = append(s.Series, Point{})
	}
	p := &s.Series[bin]
	p.Deployments++
	p.Layers += d.layers
	p.Hits += d.hits[i]
	p.sum += t
	p.squares += t * t
	if whole {
		p.Whole++
	}
}

func (r *replay) finish() *Result {
	for _, d := range r.open {
		r.end(d)
	}
	r.res.Images, r.res.Clients = int64(len(r.images)), int64(len(r.open))
	for _, s := range r.sims {
		t := s.Totals
		t.HitRatio = ratio(t.Hits, r.res.Blobs)
		t.ByteHitRatio = ratio(t.HitBytes, r.res.BlobBytes)
		t.WholeHitRatio = ratio(t.WholeHits, r.res.Deployments)
		t.DeploySeconds, t.DeployDeviation = moments(t.sum, t.squares, float64(r.res.Deployments))
		for i := range t.Series {
			p := &t.Series[i]
			p.Mean, p.Deviation = moments(p.sum, p.squares, float64(p.Deployments))
		}
		r.res.Setups = append(r.res.Setups, &t)
	}
	return &r.res
}

func ratio(a, b int64) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

// moments is mean and standard deviation of n numbers.
func moments(sum, squares, n float64) (mean, deviation float64) {
	if n == 0 {
		return 0, 0
	}
	mean = sum / n
	return mean, math.Sqrt(max(0, squares/n-mean*mean))
}
