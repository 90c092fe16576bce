package test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"dewpoint/internal/registry/registrytest"
	"dewpoint/internal/web/webtest"
)

// newPage starts a node that serves its page, and opens it.
func newPage(t *testing.T, reg *registrytest.Server) (*machine, context.Context) {
	at := "127.0.0.1:" + freePort(t)
	m := newMachine(t, reg)
	m.args = append(m.args, "--http", at)
	m.start()
	return m, webtest.Open(t, "http://"+at)
}

// A person sees a deployment on the node's page while it goes on and when it serves.
func TestPage(t *testing.T) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 1<<20), appOptions())
	m, page := newPage(t, reg)
	webtest.Sees(t, page, "header", "Dewpoint", "containerd", "live")
	rec := m.record("run", "-d", "--name", "web", img.Ref, "sleep", "1h")
	webtest.Sees(t, page, "#deployment-table tbody tr:not(.running)", "web", img.Ref, rec.Way.Pull+", "+rec.Way.Start, fmt.Sprintf("%.2f s", rec.Stages["ready"]))
	webtest.Sees(t, page, "#container-table", "web", "running")
	m.must("rm", "-f", "web")
	webtest.Sees(t, page, "#no-containers", "None.")
}

// seen notes which deployments the page has shown while they went on.
const seen = `window.seen = new Set();
new MutationObserver(() => document.querySelectorAll("#deployment-table tr.running th").forEach((c) => seen.add(c.textContent)))
	.observe(document.getElementById("deployment-table"), { subtree: true, childList: true, attributes: true, characterData: true }); true`

// 24 containers that are deployed at once are seen while they come, when they serve and when they are gone.
func TestPageOfMany(t *testing.T) {
	const many = 24
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 1<<20), appOptions())
	m, page := newPage(t, reg)
	webtest.Sees(t, page, "header", "live")
	var ok bool
	webtest.Do(t, page, chromedp.Evaluate(seen, &ok))
	out := m.must("deploy", "-q", "--count", fmt.Sprint(many), "--parallel", fmt.Sprint(many), "--name", "many", "--net", "none", img.Ref, "sleep", "1h")
	var names []string
	for i := range many {
		names = append(names, fmt.Sprintf("many-%d", i+1))
		if !strings.Contains(out, names[i]+"\n") {
			t.Errorf("%s is not among %q", names[i], out)
		}
	}
	webtest.Sees(t, page, "#container-table", append(names, "running")...)
	count := func(expression string) (n int) {
		webtest.Do(t, page, chromedp.Evaluate(expression, &n))
		return n
	}
	ready := `[...document.querySelectorAll("#deployment-table tbody tr:not(.running)")].filter((r) => / s$/.test(r.children[3].textContent)).length`
	for deadline := time.Now().Add(30 * time.Second); count(ready) < many; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d deployments are shown as ready, want %d", count(ready), many)
		}
	}
	if n := count(`seen.size`); n != many {
		t.Errorf("%d deployments were seen while they went on, want %d", n, many)
	}
	m.must(append([]string{"rm", "-f"}, names...)...)
	webtest.Sees(t, page, "#no-containers", "None.")
}
