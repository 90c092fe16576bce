package bench

import (
	"archive/tar"
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"dewpoint/lab/simulate"
	"dewpoint/testkit/demo"
	"dewpoint/testkit/pulltrace"

	"github.com/klauspost/compress/gzip"
)

// A short replay on five nodes with GlusterFS: nothing fails, what is unique crosses the WAN once where the
// cache is shared, and hits are those that the simulator expects.
func TestPoPReplay(t *testing.T) {
	dir := t.TempDir()
	build(t, dir, "dewpoint/cmd/dewd")
	var out strings.Builder
	prefix, report := filepath.Join(dir, "out"), filepath.Join(dir, "report.md")
	const deployments = 60
	err := comparePoP(t.Context(),
		[]string{"-parts", "replay", "-zones", "fra", "-deployments", "60", "-working", "30e6", "-rates", "0",
			"-prepare", "0",
			"-report", report, "-bin", dir, "-tools", toolsDir(), "-out", prefix}, &out, os.Stderr, os.Args[:1])
	t.Log(out.String())
	if err != nil {
		t.Fatal(err)
	}
	var said struct{ Figures []figure }
	raw, err := os.ReadFile(prefix + "-replay-figures.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, &said); err != nil {
		t.Fatal(err)
	}
	of := func(way, what string) float64 {
		f := find(said.Figures, "fra 60 all", way, what)
		if f == nil {
			t.Fatalf("%s: no %s", way, what)
		}
		return f.median()
	}
	for way, tolerance := range map[string]float64{sharedCache: 0.02, separateCache: 0.1} {
		if n := of(way, "failed"); n != 0 {
			t.Errorf("%s: %g deployments failed", way, n)
		}
		for _, what := range []string{"hit ratio", "byte hit ratio"} {
			if got, want := of(way, what), of(way, what+", simulated"); math.Abs(got-want) > tolerance {
				t.Errorf("%s: %s is %.3f, the simulator expects %.3f", way, what, got, want)
			}
		}
	}
	// The working set fits. Manifests, configurations and what surrounds them are more than 2 % of so little: 16
	// KiB are allowed for each deployment.
	unique := float64(of(sharedCache, "unique"))
	if got := of(sharedCache, "registry bytes / unique bytes"); got > 1.0001 {
		t.Errorf("%.4f of the unique bytes came from the registry", got)
	}
	if got := of(sharedCache, "WAN / unique bytes") * unique; got > 1.02*unique+deployments*16<<10 {
		t.Errorf("%.0f bytes crossed the WAN, %.0f are unique", got, unique)
	}
	if got := of(sharedCache, "dewd peak"); got >= 64 {
		t.Errorf("dewd took %.1f MiB", got)
	}
	if got := of(separateCache, "largest cache of a node / its bound, at the end"); got < 0.5 || got > 1.05 {
		t.Errorf("the fullest cache of a node has %.2f of its bound", got)
	}
	if of(separateCache, "registry bytes / unique bytes") < 1.1 {
		t.Error("nodes with caches of their own fetched nothing twice")
	}
	for _, name := range []string{"-replay-fra-60-all.json", "-replay.csv"} {
		if _, err := os.Stat(prefix + name); err != nil {
			t.Error(err)
		}
	}
	raw, err = os.ReadFile(report)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"A synthetic trace of fra",
		"| fra 60 all: WAN bytes over unique bytes | at most 1.02 |", "(report/fra-60-all.svg)"} {
		if !strings.Contains(string(raw), part) {
			t.Errorf("the report lacks %q:\n%s", part, raw)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "report", "fra-60-all.svg")); err != nil {
		t.Error(err)
	}
	if strings.Contains(string(raw), dir) {
		t.Errorf("the report names a place of this machine:\n%s", raw)
	}
}

func TestWhatABenchOfAPoPCannotBeIsRefused(t *testing.T) {
	for _, args := range []string{"-parts nothing", "-stores tape", "-nodes 11", "-nodes x", "-zones lon",
		"-zones fra -deployments 2", "-deployments 9", "-zones fra:9", "-zones fra:9:1e3:20",
		"-zones fra:9:1e8:20:x", "-zones fra:9:1e8:20,fra:9:1e9:20", "-parallel 0", "-replays 0",
		"-rates fast", "-report nowhere/x.md", "-report x.txt"} {
		if err := comparePoP(t.Context(), strings.Fields(args), io.Discard, io.Discard, os.Args[:1]); err == nil {
			t.Errorf("%q is taken", args)
		}
	}
}

// A script has the deployments that package simulate counts, and plays as the trace did.
func TestScriptIsTheTrace(t *testing.T) {
	const n = 300
	name := filepath.Join(t.TempDir(), "fra.json")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	z, err := pulltrace.ZoneNamed("fra")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(pulltrace.GenerateFirst(f, z, 0.02, 1, 2*n), f.Close()); err != nil {
		t.Fatal(err)
	}
	s, err := readScript(n, name)
	if err != nil {
		t.Fatal(err)
	}
	size := s.bytes() / 3
	r, err := pulltrace.NewReader(name)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	want, err := simulate.Replay(r,
		simulate.Config{Deployments: n,
			Setups: []simulate.Setup{{Policy: "lru", Size: size}, {Policy: "lru", Size: size / 5, Nodes: 5}}})
	if err != nil {
		t.Fatal(err)
	}
	if int64(len(s.sizes)) != want.Unique || s.bytes() != want.UniqueBytes || !s.synthetic {
		t.Errorf("%d layers of %d bytes, the simulator has %d of %d", len(s.sizes), s.bytes(), want.Unique,
			want.UniqueBytes)
	}
	for i, nodes := range []int{0, 5} {
		got, err := s.expect(t.Context(), s.sizes, "lru", want.Setups[i].Size, nodes)
		if err != nil {
			t.Fatal(err)
		}
		all := tallyOf(got.hits)
		w := want.Setups[i]
		if got.WholeHitRatio != w.WholeHitRatio || got.ByteHitRatio != w.ByteHitRatio ||
			math.Abs(all.hitRatio()-w.WholeHitRatio) > 1e-9 || math.Abs(all.byteRatio()-w.ByteHitRatio) > 1e-6 {
			t.Errorf("%d nodes: hits %g and %g of bytes, by deployment %g and %g, the simulator has %g and %g", nodes,
				got.WholeHitRatio, got.ByteHitRatio,
				all.hitRatio(), all.byteRatio(), w.WholeHitRatio, w.ByteHitRatio)
		}
	}
	if _, err := readScript(100*n, name); err == nil {
		t.Error("a trace that is too short is replayed")
	}
}

// Layers that are made up have the sizes asked for, compress to about half, and hold a program that waits.
func TestMadeLayers(t *testing.T) {
	dir := t.TempDir()
	s := &script{sizes: []int64{1 << 20, 100, 1 << 20},
		deployments: []deployment{{"a/b", []int{0, 1}}, {"a/c", []int{2}}, {"a/b", []int{0, 1}}}}
	names, layers, err := makeLayout(t.Context(), dir, s, 0.5, 1)
	if err != nil {
		t.Fatal(err)
	}
	if names[0] != names[2] || names[0] == names[1] {
		t.Errorf("images are called %q", names)
	}
	if l := layers[0]; l.size < 512<<10 || l.size > 520<<10 || l.desc.Size < l.size*45/100 ||
		l.desc.Size > l.size*60/100 {
		t.Errorf("a layer of %d bytes, %d compressed", l.size, l.desc.Size)
	}
	if layers[0].diffID == layers[2].diffID {
		t.Error("two layers are the same")
	}
	m, err := demo.Manifest(dir, names[1])
	if err != nil || len(m.Layers) != 1 || m.Layers[0].Digest != layers[2].desc.Digest {
		t.Fatalf("manifest %+v, %v", m, err)
	}
	f, err := os.Open(demo.Blob(dir, m.Layers[0].Digest))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	tr := tar.NewReader(z)
	h, err := tr.Next()
	if err != nil || h.Name != "wait" {
		t.Fatalf("%+v, %v", h, err)
	}
	program := filepath.Join(dir, "wait")
	body, err := io.ReadAll(tr)
	if err := errors.Join(err, os.WriteFile(program, body, 0o755)); err != nil {
		t.Fatal(err)
	}
	if e, err := elf.Open(program); err != nil || len(e.Progs) != 1 || e.Entry != e.Progs[0].Vaddr+120 {
		t.Errorf("the program is %+v, %v", e, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := exec.CommandContext(ctx, program).Run(); ctx.Err() == nil {
		t.Errorf("the program ends: %v", err)
	}
}

// A prediction from misses alone is exact where time is nothing but misses.
func TestPrediction(t *testing.T) {
	run := func(hits, misses int) tally {
		return tallyOf(slices.Concat(slices.Repeat([]deployed{{Seconds: 1, Image: 10}}, hits),
			slices.Repeat([]deployed{{Seconds: 5, Registry: 8, Image: 10}}, misses)))
	}
	shared, separate := run(8, 2), run(5, 5)
	want := 1 - shared.mean()/separate.mean()
	for _, misses := range []func(tally) float64{tally.missed, func(t tally) float64 {
		return 1 - t.hitRatio()
	}} {
		if got := predicted(shared, separate, misses); math.Abs(got-want) > 1e-9 {
			t.Errorf("%g is predicted, it is %g", got, want)
		}
	}
}

// What hits, misses and their bytes cost is found where time is the sum of these, and a shared cache that
// misses seldom but much is predicted.
func TestModelOfTime(t *testing.T) {
	took := func(mb int64) deployed {
		d := deployed{Seconds: 1, Registry: mb * 1e6, Image: 1e8}
		if mb > 0 {
			d.Seconds += 2 + 0.5*float64(mb)
		}
		return d
	}
	separate := []deployed{took(0), took(0), took(1), took(4), took(9), {Seconds: 100, Failed: true}}
	if m := modelOf(separate); math.Abs(m.hit-1) > 1e-9 || math.Abs(m.miss-2) > 1e-9 ||
		math.Abs(m.byte-0.5e-6) > 1e-15 {
		t.Errorf("%+v", m)
	}
	shared := []deployed{took(0), took(0), took(0), took(20)}
	want := 1 - tallyOf(shared).mean()/tallyOf(separate).mean()
	if got := predictedByBoth(tallyOf(shared), separate); math.Abs(got-want) > 1e-9 {
		t.Errorf("%g is predicted, it is %g", got, want)
	}
}
