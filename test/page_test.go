package test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"golang.org/x/sync/errgroup"

	"dewpoint/internal/node"
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

// atOnce is how many are deployed at once and looked at.
const atOnce = 24

// 24 containers that are deployed at once, by the command and by the API's two calls, are seen while they wait,
// while they come, when they serve and when they are gone.
func TestPageOfMany(t *testing.T) {
	reg := registrytest.New(t)
	m, page := newPage(t, reg)
	webtest.Sees(t, page, "header", "live")
	c := m.client(t)
	for by, deploy := range map[string]func(ref, prefix string) error{
		"command": func(ref, prefix string) error {
			r := m.dew("deploy", "-q", "--count", fmt.Sprint(atOnce), "--parallel", fmt.Sprint(atOnce), "--name", prefix, "--net", "none", ref, "sleep", "1h")
			if r.code != 0 {
				return errors.New(r.err)
			}
			for _, name := range names(prefix, atOnce) {
				if !strings.Contains(r.out, name+"\n") {
					return fmt.Errorf("%s is not among %q", name, r.out)
				}
			}
			return nil
		},
		"many": func(ref, prefix string) error {
			var failed []string
			err := c.DeployMany(t.Context(), node.Many{Requests: []node.Request{quiet(ref, prefix, node.Terms{})}, Count: atOnce, Parallel: atOnce},
				node.ManyWatch{Ended: func(_ int, r node.Record, f *node.Failure) {
					if f != nil {
						failed = append(failed, r.Name+": "+f.Message)
					}
				}})
			if err == nil && len(failed) > 0 {
				err = fmt.Errorf("failed: %q", failed)
			}
			return err
		},
		"calls": func(ref, prefix string) error {
			var g errgroup.Group
			for _, name := range names(prefix, atOnce) {
				g.Go(func() error {
					_, err := c.Deploy(t.Context(), quiet(ref, name, node.Terms{}), node.Watch{})
					return err
				})
			}
			return g.Wait()
		},
	} {
		t.Run(by, func(t *testing.T) {
			m.t = t
			pageOfMany(t, m, reg, page, by, deploy)
		})
	}
	m.t = t
}

// pageOfMany looks at the page while 24 containers are deployed from an image that the registry holds back, and then gives.
func pageOfMany(t *testing.T, m *machine, reg *registrytest.Server, page context.Context, by string, deploy func(ref, prefix string) error) {
	img := reg.PushImage(by+":1", append(appLayers(t, 0), registrytest.Layer{Tar: registrytest.RandomTar(uint64(len(by)), 16, 1<<20)}), appOptions())
	all := names(by, atOnce)
	count := func(expression string) (n int) {
		t.Helper()
		webtest.Do(t, page, chromedp.Evaluate(expression, &n))
		return n
	}
	var ok bool
	webtest.Do(t, page, chromedp.Evaluate(seen, &ok))
	reg.Fail(registrytest.Fault{Do: registrytest.Hang, Path: "/manifests/"})
	over := make(chan error, 1)
	go func() { over <- deploy(img.Ref, by) }()
	// One of them fetches the image, all others wait for it.
	webtest.Sees(t, page, "#queue-section", fmt.Sprint(atOnce-1, " wait"))
	webtest.Sees(t, page, "#queue-table tbody tr:first-child", "1", img.Ref, "the link")
	shown := `[...document.querySelectorAll("#queue-table tbody tr th, #queue-table tbody tr td:nth-child(2)")].filter((c) => c.textContent.startsWith("` + by + `-")).length`
	if n := count(shown); n != atOnce-1 {
		t.Errorf("%d of them are shown in the queue, want %d", n, atOnce-1)
	}
	reg.Heal()
	if err := <-over; err != nil {
		t.Fatal(err)
	}
	webtest.Sees(t, page, "#container-table", append(all, "running")...)
	ready := `[...document.querySelectorAll("#deployment-table tbody tr:not(.running)")].filter((r) => r.children[0].textContent.startsWith("` + by + `-") && / s$/.test(r.children[3].textContent)).length`
	eventually(t, "all are shown as ready", func() bool { return count(ready) == atOnce })
	for _, name := range all {
		if count(`seen.has("`+name+`") ? 1 : 0`) == 0 {
			t.Errorf("%s was not seen while it went on", name)
		}
	}
	eventually(t, "no queue is shown", func() bool { return count(`document.getElementById("queue-section").hidden ? 1 : 0`) == 1 })
	m.must(append([]string{"rm", "-f"}, all...)...)
	webtest.Sees(t, page, "#no-containers", "None.")
}
