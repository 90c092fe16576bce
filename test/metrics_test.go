package test

import (
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"golang.org/x/sys/unix"
)

// measured makes the node, which is not started, serve its metrics, and returns what Prometheus gets.
func (m *machine) measured(t *testing.T) (scrape func() metrics) {
	t.Helper()
	at := net.JoinHostPort("127.0.0.1", freePort(t))
	m.args = append(m.args, "--http", at)
	return func() metrics {
		m.t.Helper()
		testkit.Eventually(m.t, "the metrics", func() bool { // dewd may serve them a moment after its socket
			c, err := net.Dial("tcp", at)
			if err == nil {
				c.Close()
			}
			return err == nil
		})
		return parseMetrics(t, get(t, "http://"+at+"/metrics"))
	}
}

// /healthz says that dewd answers, /readyz that a container could start: not while containerd stands still.
func TestReadyz(t *testing.T) {
	t.Parallel()
	m := newMachine(t, registrytest.New(t))
	at := net.JoinHostPort("127.0.0.1", freePort(t))
	m.args = append(m.args, "--http", at)
	m.start()
	status := func(path string) int {
		r, err := http.Get("http://" + at + path)
		if err != nil {
			return 0
		}
		r.Body.Close()
		return r.StatusCode
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		m.eventually(path+" is 200", func() bool { return status(path) == http.StatusOK })
	}
	containerd := m.privateContainerd()
	if err := unix.Kill(containerd, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Kill(containerd, unix.SIGCONT) })
	m.eventually("/readyz is 503", func() bool { return status("/readyz") == http.StatusServiceUnavailable })
	if got := status("/healthz"); got != http.StatusOK {
		t.Errorf("/healthz of it is %d", got)
	}
	if err := unix.Kill(containerd, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	m.eventually("/readyz is 200 again", func() bool { return status("/readyz") == http.StatusOK })
}

// metrics are what was scraped, by name.
type metrics map[string]*dto.MetricFamily

func parseMetrics(t *testing.T, text string) metrics {
	t.Helper()
	p := expfmt.NewTextParser(model.UTF8Validation)
	all, err := p.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatalf("the metrics: %v", err)
	}
	return all
}

// series is a metric, and labels that it has: "a=b c=d".
type series struct{ name, labels string }

// count is how often something was observed or counted, or what there is of it, under these labels together.
func (all metrics) count(s series) float64 {
	var n float64
	for _, m := range all["dewpoint_"+s.name].GetMetric() {
		var have []string
		for _, l := range m.Label {
			have = append(have, l.GetName()+"="+l.GetValue())
		}
		if !slices.ContainsFunc(strings.Fields(s.labels), func(want string) bool {
			return !slices.Contains(have, want)
		}) {
			n += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return n
}

// atLeast asserts that each was counted so often or more.
func (all metrics) atLeast(t *testing.T, want map[series]float64) {
	t.Helper()
	for s, n := range want {
		if got := all.count(s); got < n {
			t.Errorf("%s{%s} is %v, want at least %v", s.name, s.labels, got, n)
		}
	}
}

// exactly asserts that each is that.
func (all metrics) exactly(t *testing.T, want map[series]float64) {
	t.Helper()
	for s, n := range want {
		if got := all.count(s); got != n {
			t.Errorf("%s{%s} is %v, want %v", s.name, s.labels, got, n)
		}
	}
}

// What nothing uses goes when the cache is beyond its bound, and is counted; what a container uses stays.
func TestCacheIsBounded(t *testing.T) {
	t.Parallel()
	const noise = 16 << 20
	reg := registrytest.New(t)
	push := func(name string, seed uint64) registrytest.Pushed {
		return reg.PushImage(name+":1",
			append(appLayers(t, 0), registrytest.Layer{Tar: registrytest.RandomTar(seed, 4, noise)}), appOptions())
	}
	used, unused := push("used", 1), push("unused", 2)
	m := newMachine(t, reg).onTmpfs("300m")
	m.config += "[cache]\nmax_bytes = \"24MiB\"\n"
	scrape := m.measured(t)
	m.start()
	m.must("run", "-d", "--net", "none", "--name", "web", used.Ref, "sleep", "1h")
	if n := scrape().count(series{"cache_evicted_layers_total", ""}); n != 0 {
		t.Errorf("%v layers are gone from a cache within its bound", n)
	}
	m.must("pull", unused.Ref)
	m.must("rmi", unused.Ref)
	// after work is done; until then containerd may have it yet
	testkit.Eventually(t, "the layer that nothing uses is evicted", func() bool {
		m.must("run", "--rm", "--net", "none", used.Ref, "cat", "/etc/motd")
		return scrape().count(series{"cache_evicted_layers_total", ""}) > 0
	})
	all := scrape()
	all.exactly(t, map[series]float64{{"cache_evicted_layers_total", ""}: 1, {"layers", ""}: 3})
	all.atLeast(t, map[series]float64{{"cache_evicted_bytes_total", ""}: noise})
	if out := m.must("exec", "web", "/app", "cat", "/etc/motd"); out != "above\n" {
		t.Errorf("the container that runs reads %q", out)
	}
	m.must("rm", "-f", "web")
}

// Images that no container has go when the cache is beyond its bound, the one that was used least lately
// first, with the layers that no other image needs; what a container has stays, also a stopped one. They
// start again as if they had never been here.
func TestIdleImagesLeaveAFullCache(t *testing.T) {
	t.Parallel()
	const noise = 12 << 20
	reg := registrytest.New(t)
	refs := map[string]string{}
	for seed, name := range []string{"stopped", "old", "new"} {
		refs[name] = reg.PushImage(name+":1",
			append(appLayers(t, 0), registrytest.Layer{Tar: registrytest.RandomTar(uint64(seed+1), 4, noise)}),
			appOptions()).Ref
	}
	m := newMachine(t, reg).onTmpfs("300m")
	m.config += "[cache]\nmax_bytes = \"36MiB\"\n"
	scrape := m.measured(t)
	m.start()
	m.must("run", "-d", "--net", "none", "--name", "web", refs["stopped"], "sleep", "1h")
	m.must("stop", "web")
	m.must("run", "--rm", "--net", "none", refs["old"], "cat", "/etc/motd")
	m.must("run", "--rm", "--net", "none", refs["new"], "cat", "/etc/motd")
	testkit.Eventually(t, "the image that nothing uses is evicted", func() bool {
		return scrape().count(series{"cache_evicted_layers_total", ""}) > 0
	})
	images := m.must("images")
	for name, stays := range map[string]bool{"stopped": true, "old": false, "new": true} {
		if strings.Contains(images, refs[name]) != stays {
			t.Errorf("image %s: want it here: %t:\n%s", name, stays, images)
		}
	}
	scrape().exactly(t, map[series]float64{{"cache_evicted_layers_total", ""}: 1})
	if out := m.must("run", "--rm", "--net", "none", refs["old"], "cat", "/etc/motd"); out != "above\n" {
		t.Errorf("the image that had left reads %q", out)
	}
	m.must("rm", "-f", "web")
}

// becomes polls the metrics until each is that: some are counted a moment after what they tell of is seen.
func becomes(t *testing.T, scrape func() metrics, want map[series]float64) {
	t.Helper()
	all := awaited(scrape, want, func(got, want float64) bool { return got == want })
	all.exactly(t, want)
}

// reaches polls the metrics until each is that or more.
func reaches(t *testing.T, scrape func() metrics, want map[series]float64) {
	t.Helper()
	all := awaited(scrape, want, func(got, want float64) bool { return got >= want })
	all.atLeast(t, want)
}

// awaited is the first scrape in which all are well, or the last one.
func awaited(scrape func() metrics, want map[series]float64, well func(got, want float64) bool) metrics {
	for deadline := time.Now().Add(testkit.Limit); ; time.Sleep(50 * time.Millisecond) {
		all := scrape()
		ok := true
		for s, n := range want {
			ok = ok && well(all.count(s), n)
		}
		if ok || time.Now().After(deadline) {
			return all
		}
	}
}
