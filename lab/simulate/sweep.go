package simulate

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"dewpoint/internal/config"

	"dewpoint/testkit/pulltrace"
)

// capacity is a cache's size: bytes, or a share of the trace's working set.
type capacity struct {
	bytes int64
	share float64
}

func (c capacity) of(workingSet int64) int64 {
	if c.share > 0 {
		return max(1, int64(c.share*float64(workingSet)))
	}
	return c.bytes
}

// parseCapacities reads a list as "1%,10%,32GB".
func parseCapacities(s string) ([]capacity, error) {
	var out []capacity
	for _, word := range strings.Split(s, ",") {
		if p, ok := strings.CutSuffix(word, "%"); ok {
			v, err := strconv.ParseFloat(p, 64)
			if err != nil || !(v > 0) || v > 1e6 {
				return nil, fmt.Errorf("%q is no share of the working set", word)
			}
			out = append(out, capacity{share: v / 100})
			continue
		}
		n, err := config.ParseSize(word)
		if err != nil || n <= 0 {
			return nil, fmt.Errorf("%q is no size of a cache", word)
		}
		out = append(out, capacity{bytes: n})
	}
	return out, nil
}

// sweep is every policy with every capacity, shared; and, if there are nodes, the same capacity divided
// between them.
func sweep(policies []string, capacities []capacity, workingSet int64, nodes int) []Setup {
	var out []Setup
	for _, p := range policies {
		for _, c := range capacities {
			out = append(out, Setup{Policy: p, Size: c.of(workingSet)})
		}
		for _, c := range capacities {
			if nodes > 0 {
				out = append(out, Setup{Policy: p, Size: max(1, c.of(workingSet)/int64(nodes)), Nodes: nodes})
			}
		}
	}
	return out
}

// replayFiles replays files against the setups.
func replayFiles(cfg Config, files ...string) (*Result, error) {
	r, err := pulltrace.NewReader(files...)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return Replay(r, cfg)
}

// sweepFiles replays files against a sweep. If a capacity is a share, the trace is read once more, first, for
// its working set.
func sweepFiles(cfg Config, policies []string, capacities []capacity, nodes int, files ...string) (*Result,
	error) {
	var working int64
	for _, c := range capacities {
		if c.share > 0 {
			whole := cfg
			whole.Setups = nil
			res, err := replayFiles(whole, files...)
			if err != nil {
				return nil, err
			}
			working = res.UniqueBytes
			break
		}
	}
	cfg.Setups = sweep(policies, capacities, working, nodes)
	return replayFiles(cfg, files...)
}

// Total is the bytes of all the setup's caches.
func (s Setup) Total() int64 { return s.Size * int64(max(1, s.Nodes)) }

// kind names the setup in a legend.
func (s Setup) kind() string {
	if s.Nodes == 0 {
		return s.Policy
	}
	return fmt.Sprintf("%s, %d nodes", s.Policy, s.Nodes)
}

// curves draws a number of each setup over the setups' total capacity in GB, divided by scale.
func (r *Result) curves(scale float64, y func(*Totals) float64) []curve {
	var out []curve
	for _, t := range r.Setups {
		name := t.kind()
		if len(out) == 0 || out[len(out)-1].Name != name {
			out = append(out, curve{Name: name, Dashed: t.Nodes > 0})
		}
		c := &out[len(out)-1]
		c.X = append(c.X, float64(t.Total())/1e9/scale)
		c.Y = append(c.Y, y(t))
	}
	return out
}

// title marks what is synthetic, on every plot.
func (r *Result) title(s string) string {
	if r.Synthetic {
		return s + " (synthetic trace)"
	}
	return s
}

// plot writes the sweep's three charts into dir.
func (r *Result) plot(dir, prefix string, scale float64) error {
	const size = "cache, GB in all"
	charts := map[string]chart{
		"hit-ratio": {Title: "Hit ratio by requests", Y: "hit ratio", YMax: 1,
			Curves: r.curves(scale, func(t *Totals) float64 { return t.HitRatio })},
		"byte-ratio": {Title: "Hit ratio by bytes", Y: "byte hit ratio", YMax: 1,
			Curves: r.curves(scale, func(t *Totals) float64 { return t.ByteHitRatio })},
		"deployment": {Title: "Expected deployment time", Y: "seconds, mean",
			Curves: r.curves(scale, func(t *Totals) float64 { return t.DeploySeconds })},
	}
	for name, c := range charts {
		c.Title, c.X, c.LogX = r.title(prefix+c.Title), size, true
		if err := c.save(filepath.Join(dir, name+".svg")); err != nil {
			return err
		}
	}
	return r.plotSeries(dir, prefix)
}

// plotSeries writes hit ratio and deployment time over the deployments, if they were recorded.
func (r *Result) plotSeries(dir, prefix string) error {
	var hits, times []curve
	for _, t := range r.Setups {
		if len(t.Series) == 0 {
			return nil
		}
		h := curve{Name: fmt.Sprintf("%s %s", t.kind(), gigabytes(t.Size)), Dashed: t.Nodes > 0}
		s, n := h, 0
		for _, p := range t.Series {
			n += p.Deployments
			h.X, s.X = append(h.X, float64(n)), append(s.X, float64(n))
			h.Y = append(h.Y, ratio(int64(p.Whole), int64(p.Deployments)))
			s.Y, s.Spread = append(s.Y, p.Mean), append(s.Spread, p.Deviation)
		}
		hits, times = append(hits, h), append(times, s)
	}
	c := chart{Title: r.title(prefix + "Deployments that found all layers"), X: "deployments", Y: "hit ratio",
		YMax: 1, Curves: hits}
	if err := c.save(filepath.Join(dir, "series-hits.svg")); err != nil {
		return err
	}
	c = chart{Title: r.title(prefix + "Deployment time, mean and standard deviation"), X: "deployments",
		Y: "seconds", Curves: times}
	return c.save(filepath.Join(dir, "series-deployment.svg"))
}

func (c chart) save(name string) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	if err := c.write(f); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}

func gigabytes(n int64) string {
	switch {
	case n >= 10e9:
		return fmt.Sprintf("%.0f GB", float64(n)/1e9)
	case n >= 100e6:
		return fmt.Sprintf("%.2f GB", float64(n)/1e9)
	}
	return fmt.Sprintf("%.1f MB", float64(n)/1e6)
}

// printTrace says what a trace is.
func (r *Result) printTrace(w io.Writer) {
	if r.Synthetic {
		fmt.Fprintln(w, "This trace is synthetic: dewlab simulate --generate made it.")
	}
	fmt.Fprintf(w, "%d records, %d manifests and %d blobs read by %d clients from %d images, %s to %s\n",
		r.Records, r.Manifests, r.Blobs, r.Clients, r.Images, r.From.UTC().Format("2006-01-02 15:04"),
		r.To.UTC().Format("2006-01-02 15:04"))
	if reasons := r.List(); len(reasons) > 0 {
		fmt.Fprintf(w, "not counted: %s\n", strings.Join(reasons, ", "))
	}
	fmt.Fprintf(w, "%s read, %s of %d distinct blobs; %d deployments; blobs over 64 MiB: %.1f %% of the reads, %.1f %% of the bytes\n",
		gigabytes(r.BlobBytes), gigabytes(r.UniqueBytes), r.Unique, r.Deployments, 100*ratio(r.Large, r.Blobs),
		100*ratio(r.LargeBytes, r.BlobBytes))
}
