package server

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/fetch"
	"dewpoint/internal/layer"
	"dewpoint/internal/registry"
	"dewpoint/internal/server/metrics"
	"dewpoint/internal/spec"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

// measured has all the metrics that there are, each with values.
func measured(t *testing.T) *meters {
	t.Helper()
	d := &meters{set: metrics.New("1"), checkpoints: &checkpoint.Manager{}}
	var err error
	if d.registry, err = registry.New(registry.Config{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.registry.Close() })
	if d.layers, err = layer.Open(layer.Config{Dir: filepath.Join(t.TempDir(), "layers")}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.layers.Close() })
	d.puller = fetch.NewPuller(fetch.Config{})
	t.Cleanup(func() { d.puller.Close() })
	d.measureNode()
	d.set.Queue(func() admit.Stats { return admit.Stats{Waiting: map[string]int{spec.WaitsTurn: 0}} })
	d.measureLazy()
	d.measurePoP()
	d.measureCheckpoints()
	d.set.Ended(spec.Record{Name: "web", Way: spec.Way{Start: "boot", Pull: "whole"},
		Spans: []spec.Span{{Name: "deploy", To: 1}, {Name: "resolve", To: 1}}}, nil, "")
	d.set.Ended(spec.Record{Name: "web"}, errors.New("x"), "internal")
	d.set.Settled(spec.Record{Name: "web"})
	d.set.Call("/dewpoint.v1.Node/List", "ok", time.Millisecond)
	return d
}

// Names and types are as Prometheus wants them.
func TestMetricsLint(t *testing.T) {
	problems, err := testutil.GatherAndLint(measured(t).set.Registry())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

var (
	listed = regexp.MustCompile("(?m)^\\| `(dewpoint_[a-z_]+)` \\| ([a-z]+) \\|([^|]*)\\|")
	quoted = regexp.MustCompile("`([a-z_]+)`")
)

// docs/operate/metrics.md lists the metrics that there are, with their types and labels.
func TestMetricsAreDocumented(t *testing.T) {
	b, err := os.ReadFile("../../docs/operate/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	docs := map[string]string{}
	for _, m := range listed.FindAllStringSubmatch(string(b), -1) {
		var labels []string
		for _, l := range quoted.FindAllStringSubmatch(m[3], -1) {
			labels = append(labels, l[1])
		}
		slices.Sort(labels)
		docs[m[1]] = m[2] + " " + strings.Join(labels, " ")
	}
	families, err := measured(t).set.Registry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "dewpoint_") {
			continue
		}
		var labels []string
		for _, l := range f.Metric[0].Label {
			labels = append(labels, l.GetName())
		}
		slices.Sort(labels)
		is := strings.ToLower(f.GetType().String()) + " " + strings.Join(labels, " ")
		if docs[f.GetName()] != is {
			t.Errorf("%s is a %q, the docs say %q", f.GetName(), is, docs[f.GetName()])
		}
		delete(docs, f.GetName())
	}
	for name := range docs {
		t.Errorf("%s is documented and not there", name)
	}
}

// A deployment's stages, outcome and error are counted where they belong.
func TestEndedIsMeasured(t *testing.T) {
	s := metrics.New("1")
	d := &news{metrics: s}
	spans := func(fail string) []spec.Span {
		return []spec.Span{{Name: "deploy", To: 3, Attributes: map[string]string{"error": fail}},
			{Name: "resolve", To: 1},
			{Name: "mount", From: 1, To: 3, Attributes: map[string]string{"error": fail}},
			{Name: "mount/attach", From: 1, To: 2}, {Name: "fill", From: 1, To: 2}}
	}
	d.Ended(spec.Record{Name: "a", Way: spec.Way{Pull: "whole"}, Spans: spans("no space")},
		errors.New("something"))
	d.Ended(spec.Record{Name: "a", Way: spec.Way{Pull: "whole"}, Spans: spans("gone")}, context.Canceled)
	d.Ended(spec.Record{Name: "a", Way: spec.Way{Pull: "lazy", Start: "boot"}, Spans: spans("")}, nil)
	got := map[string]float64{}
	families, err := s.Registry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.Metric {
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			key := strings.TrimPrefix(f.GetName(), "dewpoint_") + " " + strings.Join(labels, " ")
			got[key] = m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	for want, n := range map[string]float64{
		"deployment_seconds kind=deploy outcome=failed pull=whole start=none":           1,
		"deployment_seconds kind=deploy outcome=canceled pull=whole start=none":         1,
		"deployment_seconds kind=deploy outcome=ok pull=lazy start=boot":                1,
		"deployment_stage_seconds outcome=ok pull=whole stage=resolved start=none":      2,
		"deployment_stage_seconds outcome=failed pull=whole stage=mounted start=none":   1,
		"deployment_stage_seconds outcome=canceled pull=whole stage=mounted start=none": 1,
		"deployment_stage_seconds outcome=ok pull=lazy stage=mounted start=boot":        1,
		"deployment_stage_seconds outcome=ok pull=lazy stage=resolved start=boot":       1,
		"deployment_failures_total code=internal":                                       1,
		"deployment_failures_total code=canceled":                                       1,
	} {
		if got[want] != n {
			t.Errorf("%s is %v, want %v", want, got[want], n)
		}
		delete(got, want)
	}
	for other, n := range got {
		if strings.HasPrefix(other, "deployment_") {
			t.Errorf("%s is %v", other, n)
		}
	}
}
