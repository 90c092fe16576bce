package test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"golang.org/x/sync/errgroup"

	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"
	"dewpoint/testkit/webtest"
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
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 1<<20), appOptions())
	m, page := newPage(t, reg)
	webtest.Sees(t, page, "header", "Dewpoint", "containerd", "live")
	rec := m.record("run", "-d", "--name", "web", img.Ref, "sleep", "1h")
	webtest.Sees(t, page, "#deployment-table tbody tr:not(.running)", "web", img.Ref,
		rec.Way.Pull+", "+rec.Way.Start, fmt.Sprintf("%.2f s", rec.Stages["ready"]))
	webtest.Sees(t, page, "#container-table", "web", "running")
	if r := m.dew("run", "--rm", "--name", "bad", "--entrypoint", "/none", img.Ref); r.code != 127 {
		t.Errorf("%+v", r)
	}
	webtest.Sees(t, page, "#deployment-table tbody tr:first-child", "bad", "failed", "/none")
	m.must("rm", "-f", "web")
	webtest.Sees(t, page, "#no-containers", "None.")
}

// While an image comes over a slow link a person sees how far each layer is, who waits for it, and that the
// PoP's store is not there.
func TestPageOfFilling(t *testing.T) {
	t.Parallel()
	const rate = "2Mbit" // the layer takes a minute and a half, of which the test sees the beginning
	reg := registrytest.New(t)
	img := reg.PushImage("app:1",
		append(appLayers(t, 0), registrytest.Layer{Tar: registrytest.RandomTar(7, 16, 32<<20)}), appOptions())
	small := reg.PushImage("small:1", appLayers(t, 0), appOptions())
	at := "127.0.0.1:" + freePort(t)
	m := newMachine(t, reg)
	m.start()
	m.must("run", "-d", "--name", "web", "--net", "none", small.Ref, "sleep", "1h")
	m.stop()
	store := filepath.Join(filepath.Dir(m.root), "pop")
	m.config += fmt.Sprintf("[link]\nlimit = %q\n[pop]\nstore = %q\n", rate, store)
	m.args = append(m.args, "--http", at)
	m.start()
	page := webtest.Open(t, "http://"+at)
	ctx, cancel := context.WithCancel(t.Context())
	var both sync.WaitGroup
	for _, name := range []string{"first", "second"} {
		both.Go(func() {
			_, err := m.client(t).Deploy(ctx,
				spec.Request{Image: img.Ref, Name: name, Net: "none", Lazy: "never", Cmd: []string{"sleep", "1h"}},
				spec.Watch{})
			if err == nil || ctx.Err() == nil {
				t.Errorf("%s ended before it was canceled: %v", name, err)
			}
		})
	}
	webtest.Sees(t, page, "#layers", img.Ref, "fetched")
	webtest.Sees(t, page, "#queue-table", img.Ref, "the link")
	webtest.Sees(t, page, "#pop-section", "n1", store+": away")
	webtest.Sees(t, page, "#container-table", "web", "running")
	share := func() (n float64) {
		webtest.Do(t, page, chromedp.Evaluate(`parseInt(document.querySelector("#layers .note")?.innerText.match(/(\d+) %/)?.[1] ?? "0")`, &n))
		return n
	}
	m.eventually("the page sees the layer grow", func() bool { return share() > 3 })
	if n := share(); n >= 100 {
		t.Errorf("a layer that is not here is at %v %%", n)
	}
	pictures(t, page)
	cancel()
	both.Wait()
	webtest.Sees(t, page, "#no-layers", "Every layer is whole")
	m.must("rm", "-f", "web")
}

// pictures keeps what the page looks like, if DEWPOINT_PICTURES names a directory.
func pictures(t *testing.T, page context.Context) {
	dir := os.Getenv("DEWPOINT_PICTURES")
	if dir == "" {
		return
	}
	for _, name := range []string{"light", "dark"} {
		var png []byte
		webtest.Do(t, page, emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}),
			chromedp.Sleep(1500*time.Millisecond), chromedp.FullScreenshot(&png, 100))
		if err := os.WriteFile(filepath.Join(dir, "page-"+name+".png"), png, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// seen notes which deployments the page has shown while they went on.
const seen = `window.seen = new Set();
new MutationObserver(() => document.querySelectorAll("#deployment-table tr.running th").forEach((c) => seen.add(c.textContent)))
	.observe(document.getElementById("deployment-table"), { subtree: true, childList: true, attributes: true, characterData: true }); true`

// atOnce is how many are deployed at once and looked at.
const atOnce = 24

// 24 containers that are deployed at once, by the command and by the API's two calls, are seen while they
// wait, while they come, when they serve and when they are gone.
func TestPageOfMany(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	m, page := newPage(t, reg)
	webtest.Sees(t, page, "header", "live")
	c := m.client(t)
	for by, deploy := range map[string]func(ref, prefix string) error{
		"command": func(ref, prefix string) error {
			r := m.dew("deploy", "-q", "--count", fmt.Sprint(atOnce), "--parallel", fmt.Sprint(atOnce), "--name",
				prefix, "--net", "none", ref, "sleep", "1h")
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
			err := c.DeployMany(t.Context(),
				spec.Many{Requests: []spec.Request{quiet(ref, prefix, spec.Terms{})}, Count: atOnce, Parallel: atOnce},
				spec.ManyWatch{Ended: func(_ int, r spec.Record, f *spec.Failure) {
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
					_, err := c.Deploy(t.Context(), quiet(ref, name, spec.Terms{}), spec.Watch{})
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

// pageOfMany looks at the page while 24 containers are deployed from an image that the registry holds back,
// and then gives.
func pageOfMany(t *testing.T, m *machine, reg *registrytest.Server, page context.Context, by string,
	deploy func(ref, prefix string) error) {
	img := reg.PushImage(by+":1",
		append(appLayers(t, 0), registrytest.Layer{Tar: registrytest.RandomTar(uint64(len(by)), 16, 1<<20)}),
		appOptions())
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
	testkit.Eventually(t, "all are shown as ready", func() bool { return count(ready) == atOnce })
	for _, name := range all {
		if count(`seen.has("`+name+`") ? 1 : 0`) == 0 {
			t.Errorf("%s was not seen while it went on", name)
		}
	}
	testkit.Eventually(t, "no queue is shown", func() bool {
		return count(`document.getElementById("queue-section").hidden ? 1 : 0`) == 1
	})
	m.must(append([]string{"rm", "-f"}, all...)...)
	webtest.Sees(t, page, "#no-containers", "None.")
}
