package test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"
	"dewpoint/testkit/tracetest"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
)

// watchedBed is a node whose traces and metrics are looked at.
type watchedBed struct {
	*machine
	t   *testing.T
	c   *tracetest.Collector
	url string // of the metrics
}

// scrape is what Prometheus gets.
func (b *watchedBed) scrape() metrics {
	b.t.Helper()
	return parseMetrics(b.t, get(b.t, b.url))
}

func newWatchedBed(t *testing.T, reg *registrytest.Server) *watchedBed {
	t.Helper()
	address := testkit.FreeAddress(t)
	b := &watchedBed{machine: newMachine(t, reg), t: t, c: tracetest.New(t),
		url: "http://" + address + "/metrics"}
	b.config += fmt.Sprintf("[trace]\nendpoint = %q\n", b.c.URL)
	b.args = append(b.args, "--http", address)
	b.start()
	b.eventually("the metrics", func() bool { // dewd may serve them a moment after its socket
		c, err := net.Dial("tcp", address)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	return b
}

// rounded is what two times of one moment may differ by: they are made of seconds in floating point.
const rounded = time.Microsecond

// counted waits until each was counted once, and not more.
func (b *watchedBed) counted(want ...series) metrics {
	b.t.Helper()
	var all metrics
	testkit.Retry(b.t, "all are counted once", func() error {
		all = b.scrape()
		missing := slices.DeleteFunc(slices.Clone(want), func(s series) bool { return all.count(s) == 1 })
		if len(missing) > 0 {
			return fmt.Errorf("these are not: %+v", missing)
		}
		return nil
	})
	return all
}

const (
	callerTrace = "4bf92f3577b34da6a3ce929d0e0e4736"
	callerSpan  = "00f067aa0ba902b7"
)

// A deployment's spans say where all of its time went, to the record and to the collector
// alike, below the span of who asked for it; metrics can be scraped meanwhile and count it.
func TestTraceOfDeployment(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("team/app:1", appLayers(t, 2<<20), appOptions("serve", "80"))
	b := newWatchedBed(t, reg)
	b.scrape()
	port := freePort(t)
	cmd := exec.Command(filepath.Join(programs, "dew"), "-H", "unix://"+b.state+"/dewd.sock", "--json",
		"run", "-d", "--name", "web", "--ready", "http:"+port+"/", img.Ref, "serve", port)
	cmd.Env = append(os.Environ(), "TRACEPARENT=00-"+callerTrace+"-"+callerSpan+"-01")
	out := make(chan result, 1)
	go func() { out <- b.run(cmd) }()
	var r result
	for meanwhile := true; meanwhile; {
		select {
		case r = <-out:
			meanwhile = false
		default:
			resp, err := http.Get(b.url)
			if err != nil || resp.StatusCode != http.StatusOK {
				t.Errorf("a scrape while a deployment goes on: %v, %v", resp, err)
			}
			if err == nil {
				resp.Body.Close()
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	var rec spec.Record
	if err := json.Unmarshal([]byte(r.out), &rec); err != nil {
		t.Fatalf("%+v: %v", r, err)
	}
	checkSpans(t, rec, "admit", "resolve", "mount", "create", "start", "ready")
	for _, name := range []string{"register", "register/layer", "create/snapshot", "create/network",
		"create/record", "create/task", "resolve/registry", "fill"} {
		if !slices.ContainsFunc(rec.Spans, func(s spec.Span) bool { return s.Name == name }) {
			t.Errorf("no span is called %s: %+v", name, rec.Spans)
		}
	}
	// and complete
	got := b.c.Await(t, "container", "web", func(all []tracetest.Span) bool { return len(all) > len(rec.Spans) })
	checkSent(t, got, rec)
	all := b.counted(
		series{"deployment_seconds", "kind=deploy outcome=ok pull=whole start=boot"},
		series{"deployment_stage_seconds", "stage=ready outcome=ok pull=whole start=boot"},
		series{"deployment_stage_seconds", "stage=complete outcome=ok pull=whole start=boot"},
		series{"api_call_seconds", "method=Deploy code=ok"},
		series{"queue_admitted_total", ""},
	)
	if n, came := all.count(series{"deployment_bytes_total", "source=registry"}),
		all.count(series{"registry_bytes_total", ""}); n < 2<<20 || n > came {
		t.Errorf("%v bytes of layers came from the registry, %v in all", n, came)
	}
	checkLint(t, b)
	b.must("rm", "-f", "web")
}

func checkLint(t *testing.T, b *watchedBed) {
	t.Helper()
	problems, err := promlint.New(strings.NewReader(get(t, b.url))).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// checkSpans asserts that the stages' spans follow each other without a gap from the instruction to the
// end, sum to the stages of the record, and that all others lie within what they belong to.
func checkSpans(t *testing.T, rec spec.Record, stages ...string) {
	t.Helper()
	const equal = 1e-6 // seconds: both are floating-point numbers of the same moments
	by := map[string]spec.Span{}
	for _, s := range rec.Spans {
		by[s.Name] = s
	}
	at := 0.0
	for _, name := range stages {
		s, ok := by[name]
		if !ok || math.Abs(s.From-at) > equal || s.To < s.From {
			t.Errorf("%s is %+v, the one before ends at %v", name, s, at)
		}
		at = s.To
	}
	if ready := rec.Stages[spec.Ready]; math.Abs(at-ready) > equal || math.Abs(by["deploy"].To-ready) > equal ||
		by["deploy"].From != 0 {
		t.Errorf("the stages' spans end at %v, the root is %+v, ready was at %v", at, by["deploy"], ready)
	}
	for _, s := range rec.Spans {
		above := "deploy"
		if i := strings.LastIndexByte(s.Name, '/'); i > 0 {
			above = s.Name[:i]
		}
		if s.From < by[above].From-equal || s.To > by[above].To+equal && s.Name != "fill" {
			t.Errorf("%+v is not within %+v", s, by[above])
		}
	}
}

// checkSent asserts that the collector got the record's spans, as one tree below the caller's span.
func checkSent(t *testing.T, got []tracetest.Span, rec spec.Record) {
	t.Helper()
	ids, names := map[string]tracetest.Span{}, map[string]int{}
	for _, s := range got {
		ids[s.ID] = s
		names[s.Name]++
	}
	for _, s := range rec.Spans {
		names[s.Name[strings.LastIndexByte(s.Name, '/')+1:]]--
	}
	delete(names, "complete") // which the record has got since
	for name, n := range names {
		if n != 0 {
			t.Errorf("the collector has %d more spans called %s than the record", n, name)
		}
	}
	for _, s := range got {
		parent, ok := ids[s.Parent]
		switch {
		case s.Trace != callerTrace || s.Resource["host.name"] != "n1":
			t.Errorf("%+v", s)
		case s.Name == "deploy":
			if s.Parent != callerSpan || s.Attributes["start"] != rec.Way.Start || s.Attributes["image"] != rec.Image {
				t.Errorf("the root is %+v", s)
			}
		case !ok:
			t.Errorf("%+v has no parent", s)
		case s.From.Before(parent.From.Add(-rounded)) ||
			s.To.After(parent.To.Add(rounded)) && s.Name != "complete" && s.Name != "fill":
			t.Errorf("%+v is not within %+v", s, parent)
		}
	}
}

// A deployment that fails says where and why, and is counted by its code.
func TestTraceOfFailure(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	b := newWatchedBed(t, reg)
	if r := b.dew("run", "-d", "--name", "web", reg.Host()+"/team/nothing:1"); r.code == 0 {
		t.Fatalf("%+v", r)
	}
	got := b.c.Await(t, "container", "web", func(all []tracetest.Span) bool {
		return slices.ContainsFunc(all, func(s tracetest.Span) bool { return s.Name == "deploy" })
	})
	for _, s := range got {
		if failed := s.Error != ""; (s.Name == "deploy" || s.Name == "resolve") != failed && s.Name != "registry" {
			t.Errorf("%+v", s)
		}
	}
	b.counted(
		series{"deployment_seconds", "kind=deploy outcome=failed"},
		series{"deployment_stage_seconds", "stage=resolved outcome=failed"},
		series{"deployment_failures_total", "code=not_found"},
		series{"api_call_seconds", "method=Deploy code=not_found"},
	)
}

// A container that is restored has its own stages.
func TestTraceOfRestore(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := slowApp(t, reg, nil)
	b := newWatchedBed(t, reg)
	b.boot(t, "first", img.Ref)
	b.must("checkpoint", "first")
	b.must("rm", "-f", "first")
	rec, _ := b.boot(t, "clone", img.Ref, "--restore", "always")
	stages := slices.SortedFunc(slices.Values(rec.Spans), func(a, b spec.Span) int {
		return cmp.Compare(a.From, b.From)
	})
	var names []string
	for _, s := range stages {
		names = append(names, s.Name)
	}
	checkSpans(t, rec, "admit", "resolve", "mount", "create", "restore", "ready")
	if !slices.Contains(names, "checkpoint") || !slices.Contains(names, "create/task") {
		t.Errorf("spans are %v", names)
	}
	b.counted(
		series{"deployment_seconds", "kind=deploy outcome=ok pull=local start=restore"},
		series{"deployment_stage_seconds", "stage=restored outcome=ok start=restore"},
		series{"restores_total", "outcome=restored"},
	)
	b.must("rm", "-f", "clone")

	// What differs from its checkpoint boots, and what cannot be restored.
	b.boot(t, "other", img.Ref, "-e", "EXTRA=1")
	o := appOptions("slow", "80")
	o.Config.Labels = map[string]string{"dewpoint.restore.after": "/app exit 3"}
	bad := reg.PushImage("team/bad:1", appLayers(t, 0), o)
	b.boot(t, "origin", bad.Ref)
	b.must("checkpoint", "origin")
	if rec, _ := b.boot(t, "failing", bad.Ref); rec.Way.Start != "boot" {
		t.Errorf("what fails to be restored was started by %s", rec.Way.Start)
	}
	becomes(t, b.scrape,
		map[series]float64{{"restores_total", "outcome=restored"}: 1, {"restores_total", "outcome=failed"}: 1,
			{"restores_total", "outcome=booted reason=unfit"}:              1,
			{"restores_total", "outcome=booted reason=slower"}:             0,
			{"deployment_seconds", "kind=deploy outcome=ok start=restore"}: 1})
	b.must("rm", "-f", "other", "origin", "failing")
}
