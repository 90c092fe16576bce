package web

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/webtest"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
)

// names are the accessible names of the page's parts with a role.
func names(t *testing.T, ctx context.Context, role string) (out []string) {
	t.Helper()
	var nodes []*accessibility.Node
	webtest.Do(t, ctx, chromedp.ActionFunc(func(ctx context.Context) (err error) {
		nodes, err = accessibility.GetFullAXTree().Do(ctx)
		return err
	}))
	for _, n := range nodes {
		if !n.Ignored && n.Role != nil && n.Name != nil && strings.Trim(string(n.Role.Value), `"`) == role {
			out = append(out, strings.Trim(string(n.Name.Value), `"`))
		}
	}
	return out
}

func stage(name, stage string, at float64) spec.Event {
	return spec.Event{Kind: spec.EventStage, Name: name, Image: "team/web:1", Stage: stage, At: at}
}

func record(name string, stages map[string]float64, fail string) spec.Event {
	r := spec.Record{Name: name, Image: "team/web:1", Node: "n1", Stages: stages, Error: fail,
		Bytes: spec.Bytes{Registry: 3_900_000},
		Way:   spec.Way{Pull: "lazy", Start: "boot", Why: []string{"restore: no checkpoint fits"}}}
	return spec.Event{Kind: spec.EventRecord, Name: name, Image: r.Image, Record: &r}
}

// withSpans adds steps to a record's event.
func withSpans(e spec.Event) spec.Event {
	e.Record.Spans = []spec.Span{{Name: "resolve", To: 0.02}, {Name: "create", From: 0.13, To: 0.18},
		{Name: "create/snapshot", From: 0.13, To: 0.14},
		{Name: "create/network", From: 0.13, To: 0.16}, {Name: "create/task", From: 0.16, To: 0.18},
		{Name: "start", From: 0.18, To: 0.24}}
	return e
}

// What a person sees of a node at work: what runs, how it came, what comes, and what fails.
func TestPage(t *testing.T) {
	testkit.Long(t)
	f := newFake()
	ctx := webtest.Open(t, serve(t, f).URL)
	webtest.Sees(t, ctx, "header", "Dewpoint n1", "containerd v2.4.2", "live")
	webtest.Sees(t, ctx, "main", "None yet.", "Every layer is whole, and none is being fetched.")

	f.add(stage("web", "resolved", 0.02), stage("web", "mounted", 0.13))
	webtest.Sees(t, ctx, "#deployment-table tbody tr.running", "web", "team/web:1")
	f.add(stage("web", "created", 0.18), stage("web", "started", 0.24), stage("web", "ready", 0.31),
		withSpans(record("web",
			map[string]float64{"resolved": 0.02, "mounted": 0.13, "created": 0.18, "started": 0.24, "ready": 0.31},
			"")))
	webtest.Do(t, ctx, chromedp.Click("summary", chromedp.ByQuery))
	webtest.Sees(t, ctx, "#deployment-table tbody tr:not(.running)", "web", "0.31 s", "lazy, boot",
		"no checkpoint fits", "3.9 MB")
	if got := strings.Join(names(t, ctx, "image"), "\n"); !strings.Contains(got,
		"container created at 0.18 s") || !strings.Contains(got, "serving at 0.31 s") {
		t.Errorf("a screen reader is told %q of the waterfall", got)
	}
	var shares []float64
	webtest.Do(t, ctx, chromedp.Evaluate(`(() => { const b = document.querySelector(".bar"); return [...b.children].map((c) => c.getBoundingClientRect().width / b.clientWidth) })()`, &shares))
	if len(shares) != 5 || shares[1] < 0.3 || shares[1] > 0.4 {
		t.Errorf("the waterfall's parts take %v of it; mounting took 0.11 of 0.31 s", shares)
	}

	f.add(stage("bad", "resolved", 0.02),
		record("bad", map[string]float64{"resolved": 0.02}, "no such command: <b>x</b>"))
	webtest.Sees(t, ctx, "#deployment-table tbody tr:first-child", "bad", "failed", "no such command: <b>x</b>")
	webtest.Sees(t, ctx, "#said", "no such command")

	present := make([]float64, parts)
	for i := range parts / 2 {
		present[i] = 1
	}
	f.set(func(f *fake) {
		f.layers = []spec.LayerMap{{DiffID: "sha256:0123456789abcdef", Image: "team/web:1", Size: 80_000_000,
			Present: present,
			Waited:  201, Waits: []spec.LayerWait{{At: 0.5, Begun: time.Now().Add(-time.Hour), Took: 2},
				{At: 0.75, Begun: time.Now(), Took: 0.1}}},
			{DiffID: "sha256:fedcba9876543210", Image: "team/next:2", Size: 30_000_000, Present: present[:parts/2],
				Pulled: true}}
		f.containers = []spec.Container{{Name: "web", Image: "team/web:1", Status: spec.StatusRunning,
			IP: "10.88.0.2", Created: time.Now(),
			Ports: []spec.Port{{Host: 8080, Container: 80, Protocol: "tcp"}}}}
		f.pop = &spec.PoP{Name: "edge", Node: "n1",
			Store:       spec.PoPStore{State: spec.PoPOK, Path: "/mnt/pop", Bytes: 9e9, Free: 1e9, Total: 1e10},
			Coordinator: spec.PoPCoordinator{Kind: "redis", State: spec.PoPSettled},
			Nodes: []spec.PoPNode{{Name: "n1", Address: "10.0.0.1:7117", Local: spec.PoPHits{Layers: 2},
				Store: spec.PoPHits{Layers: 1}, Registry: spec.PoPHits{Layers: 1}}}}
	})
	webtest.Sees(t, ctx, "#layers li:nth-child(2)", "team/next:2", "100 % of 30 MB fetched")
	webtest.Sees(t, ctx, "#layers li", "team/web:1", "50 % of 80 MB here", "201 waited for", "the last 2 times")
	if got := strings.Join(names(t, ctx, "image"), "\n"); !strings.Contains(got,
		"50 % of 80 MB here, 201 waited for") {
		t.Errorf("a screen reader is told %q of the layers", got)
	}
	webtest.Do(t, ctx, chromedp.Focus("#layers summary", chromedp.ByQuery), chromedp.KeyEvent("\r"))
	webtest.Sees(t, ctx, "#layers .waits li:first-child", "at 60 MB of 80 MB", "for 0.10 s")
	webtest.Sees(t, ctx, "#layers .waits li:last-child", "at 40 MB of 80 MB", "360", "s ago, for 2.00 s")
	webtest.Sees(t, ctx, "#container-table", "web", "running", "10.88.0.2", "8080→80/tcp")
	f.set(func(f *fake) {
		for i, why := range []string{spec.WaitsMemory, spec.WaitsTurn} {
			f.waiting = append(f.waiting,
				spec.Deployment{ID: why, Name: fmt.Sprint("web-", 8+i), Image: "team/web:1", State: spec.StateQueued,
					Position: i + 1, Waits: why, Caller: "token:ci", Asked: time.Now().Add(-time.Second)})
		}
	})
	webtest.Sees(t, ctx, "#queue-table", "web-8", "memory", "web-9", "its turn")
	webtest.Sees(t, ctx, "#pop-section", "edge", "/mnt/pop", "n1", "75 %")
	contrast(t, ctx, "light")
	contrast(t, ctx, "dark")

	f.set(func(f *fake) { f.away = fmt.Errorf("containerd is away") })
	webtest.Sees(t, ctx, "#link.cut", "does not answer", "containerd is away")
	f.set(func(f *fake) { f.away, f.layers, f.waiting = nil, nil, nil })
	webtest.Sees(t, ctx, "#link:not(.cut)", "live")
	webtest.Sees(t, ctx, "main", "Every layer is whole, and none is being fetched.")
}

// The page is worked with the keyboard: its first stop leads to the deployments, and the
// next ones are their waterfalls.
func TestKeyboard(t *testing.T) {
	testkit.Long(t)
	f := newFake()
	f.add(stage("web", "ready", 1))
	ctx := webtest.Open(t, serve(t, f).URL)
	webtest.Sees(t, ctx, "#deployment-table", "1.00 s")
	focused := func() (what string) {
		webtest.Do(t, ctx, chromedp.Evaluate(`document.activeElement.className || document.activeElement.id`,
			&what))
		return what
	}
	webtest.Do(t, ctx, chromedp.KeyEvent("\t"))
	if got := focused(); got != "skip" {
		t.Errorf("the first stop is %q", got)
	}
	webtest.Do(t, ctx, chromedp.KeyEvent("\r"))
	if got := focused(); got != "deployments" {
		t.Errorf("it leads to %q", got)
	}
	webtest.Do(t, ctx, chromedp.KeyEvent("\t"))
	if got := focused(); got != "bar" {
		t.Errorf("the next stop is %q", got)
	}
}

// A person sees who waits for what, and can open the steps of a deployment with the keyboard.
func TestQueueAndSteps(t *testing.T) {
	testkit.Long(t)
	f := newFake()
	for i := range 60 { // the last first: the page goes by positions
		f.waiting = append(f.waiting,
			spec.Deployment{ID: fmt.Sprint("d", i), Name: fmt.Sprint("many-", 60-i), Image: "team/web:1",
				State: spec.StateQueued, Position: 60 - i,
				Waits: spec.WaitsMemory, Caller: "token:ci", Asked: time.Now()})
	}
	f.waiting = append(f.waiting, spec.Deployment{ID: "now", Name: "under-way", State: spec.StateDeploying})
	r := record("web", map[string]float64{"admitted": 0.1, "resolved": 0.12, "mounted": 0.2, "created": 0.3,
		"started": 0.35, "ready": 0.4}, "")
	r.Record.Spans = []spec.Span{{Name: "create", From: 0.2, To: 0.3},
		{Name: "create/network", From: 0.21, To: 0.26, Attributes: map[string]string{"kind": "bridge"}}}
	f.add(stage("web", "admitted", 0.1), r)
	ctx := webtest.Open(t, serve(t, f).URL)
	webtest.Sees(t, ctx, "#queue-section", "60 wait, the first 50 are shown")
	webtest.Sees(t, ctx, "#queue-table tbody tr:first-child", "1", "many-1", "team/web:1", "memory", "token:ci")
	webtest.Sees(t, ctx, "#queue-table tbody tr:nth-child(50)", "many-50")
	var under bool
	webtest.Do(t, ctx, chromedp.Evaluate(`document.querySelector("#queue-table").innerText.includes("under-way")`, &under))
	if under {
		t.Error("what is under way is shown as waiting")
	}
	webtest.Sees(t, ctx, "#deployment-table tbody tr", "web", "0.40 s", "2 steps")
	if got := strings.Join(names(t, ctx, "image"), "\n"); !strings.Contains(got,
		"waited for its turn at 0.10 s, manifest read at 0.12 s") {
		t.Errorf("a screen reader is told %q", got)
	}
	webtest.Do(t, ctx, chromedp.Focus("summary", chromedp.ByQuery), chromedp.KeyEvent("\r"))
	webtest.Sees(t, ctx, ".steps li:nth-child(2)", "network", "50.0 ms")
	var at []float64
	webtest.Do(t, ctx, chromedp.Evaluate(`[...document.querySelectorAll(".steps .track")].flatMap((t) => { const p = t.firstChild.getBoundingClientRect(), b = t.getBoundingClientRect(); return [(p.left - b.left) / b.width, p.width / b.width] })`, &at))
	want := []float64{0.667, 0.333, 0.7, 0.167}
	for i, w := range want {
		if i >= len(at) || at[i] < w-0.02 || at[i] > w+0.02 {
			t.Fatalf("the steps stand at %v, want %v", at, want)
		}
	}
	// How this one went on was missed, for dewd was started anew: it is not shown as if it went on.
	f.add(stage("cut", "resolved", 0.1))
	webtest.Sees(t, ctx, "#deployment-table tbody tr.running", "cut")
	f.add(spec.Event{Kind: spec.EventResync})
	f.add(stage("after", "ready", 0.2))
	webtest.Sees(t, ctx, "#deployment-table", "after", "web")
	var cut bool
	webtest.Do(t, ctx, chromedp.Evaluate(`document.querySelector("#deployment-table").innerText.includes("cut")`,
		&cut))
	if cut {
		t.Error("what was under way before some events were missed is shown for ever")
	}
	f.set(func(f *fake) { f.waiting = nil })
	testkit.Eventually(t, "an empty queue is hidden", func() (hidden bool) {
		webtest.Do(t, ctx, chromedp.Evaluate(`document.getElementById("queue-section").hidden`, &hidden))
		return hidden
	})
}

// scheme has the browser prefer light or dark.
func scheme(t *testing.T, ctx context.Context, name string) {
	t.Helper()
	webtest.Do(t, ctx, emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}))
}

// contrast asserts that the page is light or dark as the scheme says, and that its text has the contrast of
// WCAG 2.2, success criterion 1.4.3, to what is behind it.
func contrast(t *testing.T, ctx context.Context, name string) {
	t.Helper()
	scheme(t, ctx, name)
	var got struct {
		Body   float64
		Ratios map[string]float64
	}
	webtest.Do(t, ctx, chromedp.Evaluate(`(() => {
		const parse = (c) => c.match(/\d+(\.\d+)?/g).map(Number);
		const light = (c) => parse(c).slice(0, 3).map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4).reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
		const behind = (e) => { const c = getComputedStyle(e).backgroundColor; return !e.parentElement || parse(c)[3] !== 0 ? c : behind(e.parentElement); };
		const ratios = {};
		for (const q of ["td", "th", ".note", "td.bad", "h1", "h2", "#about", "summary", ".empty", "#legend li", "#layers li", ".waits li"]) {
			const e = document.querySelector(q), l = light(getComputedStyle(e).color), back = light(behind(e));
			ratios[q] = (Math.max(l, back) + 0.05) / (Math.min(l, back) + 0.05);
		}
		return { Body: light(getComputedStyle(document.body).backgroundColor), Ratios: ratios };
	})()`, &got))
	if dark := name == "dark"; dark && got.Body > 0.2 || !dark && got.Body < 0.8 {
		t.Errorf("%s: the page has a luminance of %.2f", name, got.Body)
	}
	for q, r := range got.Ratios {
		if r < 4.5 {
			t.Errorf("%s: %s has a contrast of %.1f", name, q, r)
		}
	}
}
