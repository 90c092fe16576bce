package bench

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"dewpoint/testkit/demo"
)

// The experiment on containerd by both of its ways: ctr, and the client library in a process of its own.
func TestDeployContainerd(t *testing.T) {
	o := testOptions(t)
	o.bin = t.TempDir()
	build(t, o.bin, "dewpoint/lab/bench/ctrclient")
	o.engines = []string{"containerd-overlayfs"}
	var out bytes.Buffer
	b := &deployBench{o: &o, self: os.Args[:1], net: "none", threads: []int{1, 3}, containers: 3, trials: 1,
		commands: []string{"sleep 60"},
		stdout:   &out, stderr: io.Discard}
	if err := b.run(t.Context(), []string{"throughput"}); err != nil {
		t.Fatal(err)
	}
	var said struct{ Samples []deploySample }
	raw, err := os.ReadFile(o.out + "-throughput.json")
	if err == nil {
		err = json.Unmarshal(raw, &said)
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(said.Samples) != 4 {
		t.Fatalf("%d trials, want two ways at two numbers of threads", len(said.Samples))
	}
	for _, s := range said.Samples {
		if s.Failed > 0 || len(s.Latencies) != 3 || s.Seconds <= 0 || slices.Max(s.Latencies) > s.Seconds ||
			s.CPU < 0.05 || s.ClientCPU <= 0 || s.ClientCPU > s.CPU {
			t.Errorf("implausible: %+v", s)
		}
	}
	rows, err := csv.NewReader(mustOpen(t, o.out+"-throughput.csv")).ReadAll()
	if err != nil || len(rows) != 5 {
		t.Errorf("%d rows, %v", len(rows), err)
	}
	for _, file := range []string{".md", ".svg", "-figures.csv"} {
		if info, err := os.Stat(o.out + "-throughput" + file); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", file, err)
		}
	}
	if !strings.Contains(out.String(), "containerd-api") {
		t.Errorf("the report: %s", out.String())
	}
	checkNoMountBelow(t, o.dir)
}

func mustOpen(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func checkNoMountBelow(t *testing.T, dir string) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), dir) {
		t.Errorf("a mount is left below %s", dir)
	}
}

func TestDeployImagesAreKnown(t *testing.T) {
	built := demo.Names()
	for _, image := range demo.ManyNames() {
		if !slices.Contains(built, image) {
			t.Errorf("%s is not built", image)
		}
	}
}

// Ratios are taken trial by trial, and held against the targets.
func TestDeployVerdicts(t *testing.T) {
	o := testOptions(t)
	var out bytes.Buffer
	b := &deployBench{o: &o, net: "none", threads: []int{24}, containers: 2, trials: 2, commands: []string{"ls"}}
	b.report = newReport(&out, io.Discard, "deploy", o.out)
	for trial, slow := range []float64{1, 3} { // the machine was busy in the second
		for way, seconds := range map[string]float64{"dewd-api": 1, "docker-api": 5, "containerd-api": 1.5} {
			b.samples = append(b.samples,
				deploySample{Way: way, Image: o.images[0], Command: "ls", Threads: 24, Trial: trial,
					Seconds:   seconds * slow,
					Latencies: []float64{seconds * slow, seconds * slow / 2}})
		}
	}
	b.throughputReport(&deployLineup{b: b})
	for _, want := range []string{"dewd-api over docker-api: 5.00, trial by trial (5.00 to 5.00); target at least 4 times: met",
		"dewd-api over containerd-api: 1.50, trial by trial (1.50 to 1.50); target at least 2 times: not met",
		"dewd-api over docker-api: 0.20, trial by trial (0.20 to 0.20); target at most 1/4 of: met"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("want %q in\n%s", want, out.String())
		}
	}
	f := figuresOf(b.of("docker-api", o.images[0], "ls", 24))
	if f.median != 5 || f.p90 != 7.5 || f.rate != (2./5+2./15)/2 {
		t.Errorf("figures %+v", f)
	}
}

// Calls that fail are counted and told, and one that is never answered is no fast one.
func TestCallsUnderLoad(t *testing.T) {
	b := &deployBench{}
	var list, logs calledTimes
	for i := range 5 {
		list.add(t.Context(), func(context.Context) error {
			if i == 3 {
				return errors.New("busy")
			}
			return nil
		})
		logs.add(t.Context(), func(context.Context) error { return errors.New("gone") })
	}
	well := map[string]calledTimes{"List": {seconds: []float64{0.001, 0.003}}}
	rows, worst, err := b.loadRows("dewd", well,
		map[string]calledTimes{"List": {seconds: []float64{0.010, 0.040}}}, "7")
	if err != nil || worst != quantile([]float64{0.010, 0.040}, 0.99) || len(rows) != 1 || rows[0][3] != "0" ||
		rows[0][9] != "7" {
		t.Errorf("all well: %q, %v, %v", rows, worst, err)
	}
	rows, _, err = b.loadRows("dewd", well, map[string]calledTimes{"List": list})
	if err == nil || err.Error() != "dewd List: busy" || rows[0][2] != "4" || rows[0][3] != "1" {
		t.Errorf("one of five fails: %q, %v", rows, err)
	}
	if rows, worst, err = b.loadRows("dewd", nil, map[string]calledTimes{"Logs": logs}); err == nil ||
		!math.IsInf(worst, 1) || rows[0][3] != "5" {
		t.Errorf("all fail: %q, %v, %v", rows, worst, err)
	}
}

func TestGrown(t *testing.T) {
	before := footprint{Processes: 3, Mounts: 30, Descriptors: 40, Goroutines: 50}
	after := before
	after.Descriptors, after.Goroutines = 44, 57
	if got := grown(before, after); got != "nothing: met" {
		t.Errorf("a few descriptors: %s", got)
	}
	after.Mounts, after.Descriptors = 31, 45
	if got := grown(before,
		after); got != "mounts 31 instead of 30, descriptors of dewd 45 instead of 40: not met" {
		t.Errorf("a mount and five descriptors: %s", got)
	}
}

// scripted ends what it is given in a set order.
type scripted struct{ order []int }

func (scripted) name() string { return "scripted-many" }
func (scripted) deploy(context.Context, toDeploy) (time.Duration, error) {
	return 0, errors.New("one by one is not asked for")
}

func (s scripted) deployMany(_ context.Context, _ []toDeploy, _ int, ended func(int, error)) error {
	for _, i := range s.order {
		time.Sleep(20 * time.Millisecond)
		if i == 2 {
			ended(i, errors.New("no room"))
			continue
		}
		ended(i, nil)
	}
	return nil
}

// Of many in one call, the latency counts from when a thread would have been free.
func TestDeployManyLatency(t *testing.T) {
	var s deploySample
	all := []toDeploy{{name: "a"}, {name: "b"}, {name: "c"}, {name: "d"}}
	done := s.deployMany(t.Context(), scripted{order: []int{1, 0, 2, 3}}, all, 2)
	if !slices.Equal(done, []string{"b", "a", "d"}) || s.Failed != 1 || s.Error != "no room" ||
		len(s.Latencies) != 3 {
		t.Fatalf("done %v, %+v", done, s)
	}
	// a has waited for b, too; d could begin when a had ended, two before it.
	if a, b, d := s.Latencies[0], s.Latencies[1], s.Latencies[2]; a < 0.04 || b < 0.02 || b > a || d < 0.04 {
		t.Errorf("latencies %v", s.Latencies)
	}
}
