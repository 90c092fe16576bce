package simulate

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"
	"time"

	"dewpoint/testkit/pulltrace"
)

func play(t *testing.T, cfg Config, elements ...string) *Result {
	t.Helper()
	res, err := replayFiles(cfg, put(t, "t.json", array(elements...)))
	if err != nil {
		t.Fatal(err)
	}
	return res
}

// near fails unless the numbers are the same but for rounding.
func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if math.Abs(got-want) > 1e-9 {
		t.Errorf("%s is %g, not %g", what, got, want)
	}
}

func TestReplayCountsHitsBytesAndTimes(t *testing.T) {
	cfg := Config{
		Setups: []Setup{{Policy: "lru", Size: 1000}, {Policy: "lru", Size: 1000, Nodes: 2},
			{Policy: "lru", Size: 99}},
		WAN:   Link{Bandwidth: 800, RTT: time.Second}, // 100 bytes a second
		LAN:   Link{Bandwidth: 8000, RTT: time.Second / 10},
		Start: 2 * time.Second, Bin: 2, Reads: 0.5,
	}
	res := play(t, cfg,
		blobGet(0, "c0", "n/before", "z", 500), // no manifest came before: still a deployment
		manifestGet(1, "c1", "n/r"), blobGet(1, "c1", "n/r", "a", 100), blobGet(1, "c1", "n/r", "b", 300),
		manifestGet(2, "c2", "n/r"), blobGet(2, "c2", "n/r", "a", 100), blobGet(2, "c2", "n/r", "b", 300),
		manifestGet(3, "c2", "n/r"), // nothing was missing: says nothing
		manifestGet(4, "c1", "n/r"), blobGet(4, "c1", "n/r", "a", 100),
	)
	if res.Deployments != 4 || res.Manifests != 4 || res.Blobs != 6 || res.Unique != 3 ||
		res.UniqueBytes != 900 || res.BlobBytes != 1400 || res.Clients != 3 || res.Images != 2 || res.Synthetic {
		t.Fatalf("%+v", res)
	}
	shared, nodes, small := res.Setups[0], res.Setups[1], res.Setups[2]
	if shared.Hits != 3 || shared.HitBytes != 500 || shared.WholeHits != 2 {
		t.Errorf("shared: %+v", shared)
	}
	// In turn: before on node 0, the second on 1, the third on 0, the fourth, which has a already, on 1.
	if nodes.Hits != 1 || nodes.HitBytes != 100 || nodes.WholeHits != 1 {
		t.Errorf("nodes: %+v", nodes)
	}
	if small.Hits != 0 {
		t.Errorf("a cache that is too small for any hits %d times", small.Hits)
	}
	near(t, "hit ratio", shared.HitRatio, 3.0/6)
	near(t, "byte hit ratio", shared.ByteHitRatio, 500.0/1400)
	near(t, "deployments that hit", shared.WholeHitRatio, 2.0/4)
	// Start and manifest take 3 s; the misses 1+5, and 2+4; of hits half is read: 0.15+0.25, and 0.15.
	near(t, "mean, shared", shared.DeploySeconds, (9+9+3.4+3.15)/4)
	near(t, "mean, nodes", nodes.DeploySeconds, (9+9+9+3.0)/4)
	near(t, "first point", shared.Series[0].Mean, 9)
	near(t, "second point", shared.Series[1].Mean, (3.4+3.15)/2)
	near(t, "its deviation", shared.Series[1].Deviation, 0.125)
	if p := shared.Series[1]; len(shared.Series) != 2 || p.Deployments != 2 || p.Layers != 3 || p.Hits != 3 ||
		p.Whole != 2 {
		t.Errorf("%+v", shared.Series)
	}
}

func TestReplayAssignsByClient(t *testing.T) {
	cfg := Config{Setups: []Setup{{Policy: "lru", Size: 1000, Nodes: 64}}, ByClient: true}
	var in []string
	for i := range 10 {
		in = append(in, manifestGet(i, "c1", "n/r"), blobGet(i, "c1", "n/r", "a", 100))
	}
	if got := play(t, cfg, in...).Setups[0].Hits; got != 9 {
		t.Errorf("one client on one node hits %d times of 10", got)
	}
	cfg.ByClient = false
	if got := play(t, cfg, in...).Setups[0].Hits; got != 0 {
		t.Errorf("ten of 64 nodes in turn hit %d times", got)
	}
}

func TestReplayEndsAfterDeployments(t *testing.T) {
	res := play(t, Config{Deployments: 2},
		manifestGet(1, "c1", "n/r"), blobGet(1, "c1", "n/r", "a", 1), blobGet(1, "c1", "n/r", "b", 1),
		manifestGet(2, "c1", "n/r"), blobGet(2, "c1", "n/r", "a", 1), blobGet(2, "c1", "n/r", "b", 1),
		manifestGet(3, "c1", "n/r"), blobGet(3, "c1", "n/r", "c", 1))
	if res.Deployments != 2 || res.Blobs != 4 {
		t.Errorf("%d deployments, %d blobs", res.Deployments, res.Blobs)
	}
}

// A layer that a second image asks for is worth more from then on.
func TestReplayTellsPoliciesWhatIsShared(t *testing.T) {
	in := func(other string) []string {
		return []string{
			blobGet(1, "c1", "n/1", "a", 100), blobGet(2, "c2", "n/2", "b", 100), // fill the cache
			blobGet(3, "c3", other, "a", 100), blobGet(4, "c3", "n/2", "b", 100), // each is used once more
			blobGet(5, "c4", "n/4", "c", 100), // one must go
			blobGet(6, "c5", "n/1", "a", 100),
		}
	}
	cfg := Config{Setups: []Setup{{Policy: "gdsf", Size: 200}}}
	if got := play(t, cfg, in("n/1")...).Setups[0].Hits; got != 2 {
		t.Errorf("of two alike, what was used last stayed %d times", got)
	}
	if got := play(t, cfg, in("n/9")...).Setups[0].Hits; got != 3 {
		t.Errorf("a layer of two images hit %d times", got)
	}
}

func TestConfigIsChecked(t *testing.T) {
	for _, cfg := range []Config{
		{WAN: Link{Bandwidth: -1}}, {LAN: Link{Bandwidth: 1, RTT: -1}}, {Cost: "euros"}, {Reads: -1}, {Reads: 1.1},
		{Deployments: -1},
		{Setups: []Setup{{Policy: "lru"}}}, {Setups: []Setup{{Policy: "lru", Size: 1, Nodes: -1}}},
		{Setups: []Setup{{Policy: "none", Size: 1}}},
	} {
		if _, err := Replay(none{}, cfg); err == nil {
			t.Errorf("%+v is accepted", cfg)
		}
	}
}

type none struct{}

func (none) Read() (pulltrace.Request, error) { return pulltrace.Request{}, io.EOF }

func TestReplayOfNothing(t *testing.T) {
	res, err := Replay(none{}, Config{Setups: []Setup{{Policy: "lru", Size: 1}}})
	if err != nil || res.Setups[0].HitRatio != 0 || res.Setups[0].DeploySeconds != 0 {
		t.Fatalf("%+v %v", res, err)
	}
}

func TestChartsAreXMLAndFollowTheTheme(t *testing.T) {
	for name, c := range map[string]chart{
		"empty": {Title: "nothing"},
		"point": {Title: "one", Curves: []curve{{Name: "a", X: []float64{1}, Y: []float64{0}}}},
		"lines": {Title: `<&"`, LogX: true, X: "x", Y: "y",
			Curves: []curve{{Name: "a<b", X: []float64{0.01, 1, 100}, Y: []float64{0, 1, 2},
				Spread: []float64{0, 1, 3}, Dashed: true}}},
		"linear": {YMax: 1, Curves: []curve{{X: []float64{0, 50, 4000}, Y: []float64{0, .5, 1}}}},
	} {
		var b strings.Builder
		if err := c.write(&b); err != nil {
			t.Fatal(err)
		}
		d := xml.NewDecoder(strings.NewReader(b.String()))
		for {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v\n%s", name, err, b.String())
			}
		}
		if strings.Contains(b.String(), "NaN") || strings.Contains(b.String(), "Inf") ||
			strings.Contains(b.String(), "%!") {
			t.Errorf("%s: a number is none:\n%s", name, b.String())
		}
		if !strings.Contains(b.String(), "prefers-color-scheme:dark") {
			t.Errorf("%s is for one theme", name)
		}
		if n := strings.Count(b.String(), "<polyline"); n != len(c.Curves) {
			t.Errorf("%s has %d lines for %d curves", name, n, len(c.Curves))
		}
	}
}

func TestCapacities(t *testing.T) {
	got, err := parseCapacities("10%,32GB,1k")
	if err != nil || fmt.Sprint(got[0].of(500), got[1].of(500), got[2].of(500)) != "50 32000000000 1024" {
		t.Errorf("%v %v", got, err)
	}
	for _, bad := range []string{"", "0%", "-1GB", "x", "1GB,,2GB", "NaN%"} {
		if _, err := parseCapacities(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}
