package simulate

import (
	"bytes"
	"cmp"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"dewpoint/internal/evict"

	"dewpoint/testkit/pulltrace"
)

func traceOf(t testing.TB, z pulltrace.Zone, scale float64) string {
	t.Helper()
	var b bytes.Buffer
	if err := pulltrace.Generate(&b, z, scale, 1); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), z.Name+".json")
	if err := os.WriteFile(name, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// within fails if got is farther from want than tolerance, a share of want.
func within(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if math.Abs(got/want-1) > tolerance {
		t.Errorf("%s is %g, published %g, tolerance %g %%", what, got, want, 100*tolerance)
	}
}

// The calibration: each published number, with its tolerance, at a scale that runs in seconds. At a fiftieth
// the smallest zones have a dozen images and some fifty blobs, and their bytes come in steps of an image: 15
// %. At scale 1 it is 1 %.
func TestCalibration(t *testing.T) {
	const scale = 0.02
	var all Result
	var top, pulls, distinct float64
	for _, z := range pulltrace.Zones() {
		src, err := pulltrace.NewReader(traceOf(t, z, scale))
		if err != nil {
			t.Fatal(err)
		}
		defer src.Close()
		counts := &pullCounter{Reader: src, pulls: map[string]int{}}
		res, err := Replay(counts, Config{})
		if err != nil {
			t.Fatal(err)
		}
		if !res.Synthetic {
			t.Errorf("%s is not labelled", z.Name)
		}
		within(t, z.Name+": pulls", float64(res.Manifests), scale*float64(z.Pulls), 0.001)
		within(t, z.Name+": clients", float64(res.Clients), max(5, scale*float64(z.Clients)), 0.05)
		within(t, z.Name+": distinct bytes", float64(res.UniqueBytes), scale*z.Bytes, 0.15)
		within(t, z.Name+": days", res.To.Sub(res.From).Hours()/24, pulltrace.Days, 0.02)
		all.Blobs, all.BlobBytes, all.Large, all.LargeBytes = all.Blobs+res.Blobs, all.BlobBytes+res.BlobBytes,
			all.Large+res.Large, all.LargeBytes+res.LargeBytes
		all.UniqueBytes += res.UniqueBytes
		top, pulls, distinct = top+counts.top(), pulls+float64(res.Manifests), distinct+scale*z.Bytes
	}
	within(t, "distinct bytes", float64(all.UniqueBytes), distinct, 0.02)
	within(t, "reads of blobs", float64(all.Blobs), scale*pulltrace.BlobReads, 0.005)
	within(t, "mean blob", float64(all.BlobBytes)/float64(all.Blobs), pulltrace.MeanBlob, 0.005)
	within(t, "share of large reads", ratio(all.Large, all.Blobs), pulltrace.LargeReads, 0.02)
	within(t, "their share of the bytes", ratio(all.LargeBytes, all.BlobBytes), pulltrace.LargeBytes, 0.02)
	within(t, "pulls of the top tenth", top/pulls, pulltrace.TopPulls, 0.04)
}

// pullCounter counts the pulls of each image that is read.
type pullCounter struct {
	*pulltrace.Reader
	pulls map[string]int
}

func (c *pullCounter) Read() (pulltrace.Request, error) {
	q, err := c.Reader.Read()
	if err == nil && !q.Blob {
		c.pulls[q.Image]++
	}
	return q, err
}

// top is the pulls of the most popular tenth of the images.
func (c *pullCounter) top() (n float64) {
	sorted := slices.SortedFunc(maps.Values(c.pulls), func(a, b int) int { return cmp.Compare(b, a) })
	for _, pulls := range sorted[:max(1, int(math.Round(pulltrace.TopImages*float64(len(sorted)))))] {
		n += float64(pulls)
	}
	return n
}

func TestGeneratedTracesLookLikeRegistries(t *testing.T) {
	z, err := pulltrace.ZoneNamed("stg")
	if err != nil {
		t.Fatal(err)
	}
	requests, r := readAll(t, traceOf(t, z, 0.03))
	images := map[string]map[string]bool{} // of each blob
	manifests := map[string]map[string]bool{}
	var hours [24]int
	last := time.Time{}
	for _, q := range requests {
		if q.Time.Before(last) {
			t.Fatal("times go back")
		}
		last = q.Time
		if !q.Blob {
			hours[q.Time.Hour()]++
			add(manifests, q.Image, q.ID)
		} else {
			add(images, q.ID, q.Image)
		}
	}
	shared, versions := 0, 0
	for _, m := range images {
		if len(m) > 1 {
			shared++
		}
	}
	for _, m := range manifests {
		versions += len(m)
	}
	if shared < len(images)/100 {
		t.Errorf("%d of %d blobs are of several images", shared, len(images))
	}
	if versions < 2*len(manifests) {
		t.Errorf("%d images have %d versions", len(manifests), versions)
	}
	if day, night := hours[14]+hours[15]+hours[16], hours[2]+hours[3]+hours[4]; day < 2*night {
		t.Errorf("%d pulls by day, %d by night", day, night)
	}
	for _, reason := range []string{"not a GET", "not successful"} {
		if r.Reasons[reason] == 0 {
			t.Errorf("nothing is %s", reason)
		}
	}
}

func add(m map[string]map[string]bool, k, v string) {
	if m[k] == nil {
		m[k] = map[string]bool{}
	}
	m[k][v] = true
}

func TestGenerateIsDeterministic(t *testing.T) {
	z, _ := pulltrace.ZoneNamed("dev")
	var a, b, other bytes.Buffer
	for w, seed := range map[*bytes.Buffer]uint64{&a: 1, &b: 1, &other: 2} {
		if err := pulltrace.Generate(w, z, 0.02, seed); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(a.Bytes(), b.Bytes()) {
		t.Error("the same seed made two traces")
	}
	if bytes.Equal(a.Bytes(), other.Bytes()) {
		t.Error("two seeds made the same trace")
	}
	for _, scale := range []float64{0, -1, math.NaN(), 11} {
		if err := pulltrace.Generate(&a, z, scale, 1); err == nil {
			t.Errorf("scale %g is accepted", scale)
		}
	}
}

// The default policy's byte hit ratio is above LRU's where the working set is far from fitting, and nowhere
// below it by more than counts as a tie; with cost in bytes and in seconds, on traces whose seed no policy
// was tuned on.
func TestDefaultPolicyBeatsLRU(t *testing.T) {
	const scale = 0.02
	for _, name := range []string{"dal", "stg", "dev"} {
		z, err := pulltrace.ZoneNamed(name)
		if err != nil {
			t.Fatal(err)
		}
		z, scale := z, max(scale, 3000/float64(z.Pulls))
		shares := []float64{0.01, 0.05, 0.1, 0.4, 0.8}
		var capacities []capacity
		for _, s := range shares {
			capacities = append(capacities, capacity{share: s})
		}
		trace := filepath.Join(t.TempDir(), name+".json")
		if err := writeFile(trace, func(w io.Writer) error {
			return pulltrace.Generate(w, z, scale, lookedSeed+1)
		}); err != nil {
			t.Fatal(err)
		}
		for _, cost := range []string{"bytes", "seconds"} {
			res, err := replayFiles(Config{Cost: cost,
				Setups: sweep([]string{"lru", evict.Default}, capacities, int64(z.Bytes*scale), 0)}, trace)
			if err != nil {
				t.Fatal(err)
			}
			lru, ours := res.of("lru", 0), res.of(evict.Default, 0)
			for i, share := range shares {
				gain := 100 * (ours[i].ByteHitRatio - lru[i].ByteHitRatio)
				t.Logf("%s, cost in %s, %g %%: %+.2f points", name, cost, 100*share, gain)
				if gain < -studyTie || share <= 0.05 && gain <= studyTie {
					t.Errorf("%s, cost in %s, at %g %%: %+.2f points", name, cost, 100*share, gain)
				}
			}
		}
	}
}
