package test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/testkit/registrytest"
)

// onBackends runs a test on each mount backend.
func onBackends(t *testing.T, test func(*testing.T, string)) {
	t.Parallel()
	for _, backend := range backends {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			test(t, backend)
		})
	}
}

// While dewd is dead a container reads what is here, and what is not comes
// with the next dewd: after a crash, and after an orderly end.
func TestLazyDewdDies(t *testing.T) { onBackends(t, testLazyDewdDies) }

func testLazyDewdDies(t *testing.T, backend string) {
	b := newLazyBed(t, backend, off)
	b.run()
	b.reads(file(40))
	near := b.untouched(file(40))
	for n, end := range []func(){b.kill, b.stop} {
		b.hang()
		far := file(10 + 20*n)
		got := b.held(far)
		end()
		b.reads(near, file(40))
		b.waits(far, got)
		b.reg.Heal()
		b.start()
		b.right(far, got)
		b.reads(file(63 - n)) // and what is wanted first from the next dewd
		near = b.untouched(file(40), near, far, file(63-n))
	}
	b.must("rm", "-f", "web")
}

// A datafs that is killed is replaced, also twice while something waits: reads
// complete, and containers start.
func TestLazyDatafsDies(t *testing.T) { onBackends(t, testLazyDatafsDies) }

func testLazyDatafsDies(t *testing.T, backend string) {
	b := newLazyBed(t, backend, off)
	b.run()
	b.reads(file(40))
	near := b.untouched(file(40))
	b.hang()
	got := b.held(file(10))
	for range 2 {
		old := b.killDatafs()
		if old == 0 {
			t.Fatal("there is no datafs")
		}
		b.eventually("another datafs", func() bool { now := b.datafs(); return now != old && now != 0 })
	}
	b.reads(near)
	b.waits(file(10), got)
	b.reg.Heal()
	b.right(file(10), got)
	b.reads(file(60))

	port := freePort(t)
	b.record("run", "-d", "--name", "two", "--ready", "http:"+port+"/", b.li.Ref, "serve", port)
	b.right(file(25), ask(port, file(25)))
	b.must("rm", "-f", "web", "two")
}

// While no datafs can start, reads of absent bytes fail after a while and an event names the container; when
// one can, containers that start are well.
func TestLazyDatafsAway(t *testing.T) {
	t.Parallel()
	b := newLazyBed(t, "erofs", off+noLearn)
	b.run()
	b.reads(file(40))
	b.hang()
	got := b.held(file(10))
	socket := filepath.Join(b.state, "datafs.sock")
	if err := errors.Join(os.Remove(socket), os.MkdirAll(filepath.Join(socket, "taken"), 0o700)); err != nil {
		t.Fatal(err)
	}
	b.killDatafs()
	if a := <-got; len(a.said) == 2*sha256.Size {
		t.Errorf("an absent file reads as %s", a.said)
	}
	if e := b.event(spec.EventLost); e.Name != "web" || !strings.Contains(e.Error, "restart") {
		t.Errorf("event %+v", e)
	}
	b.reads(file(40)) // the kernel has it
	b.reg.Heal()
	if err := os.RemoveAll(socket); err != nil {
		t.Fatal(err)
	}
	b.eventually("another datafs", func() bool { return b.datafs() != 0 })
	b.eventually("files after a restart", func() bool {
		right := false
		if b.dew("restart", "-t", "1", "web").code == 0 {
			for try := 0; try < 50 && !right; try++ { // until it listens
				time.Sleep(100 * time.Millisecond)
				right = (<-b.ask(file(10))).said == b.li.files[file(10)]
			}
		}
		return right
	})
	b.reads(file(25), file(40))
	b.must("rm", "-f", "web")
}

// When dewd and datafs are both killed, nobody has the kernel's requests any
// more: containers get errors, never wrong bytes, and those that start after the
// next dewd are well.
func TestLazyBothDie(t *testing.T) { onBackends(t, testLazyBothDie) }

func testLazyBothDie(t *testing.T, backend string) {
	b := newLazyBed(t, backend, off+noLearn)
	b.run()
	b.reads(file(40))
	near := b.untouched(file(40))
	b.hang()
	got := b.held(file(10))
	b.kill()
	b.killDatafs()
	failed := func(path string, got <-chan answer) { // to read, or with a program of which a page was absent
		if a := <-got; len(a.said) == 2*sha256.Size {
			t.Errorf("%s reads as %s", path, a.said)
		}
	}
	failed(file(10), got)
	for _, path := range []string{file(50), near} {
		failed(path, b.ask(path))
	}
	b.reg.Heal()
	b.start()
	port := freePort(t)
	b.runAfterRestart("two", port)
	for _, path := range []string{file(25), near, file(40)} {
		b.right(path, ask(port, path))
	}
	b.must("rm", "-f", "web", "two")
	b.must("rmi", b.li.Ref)
	b.eventually("layers are not filled any more, and go", func() bool {
		b.must("prune")
		left, _ := filepath.Glob(filepath.Join(b.root, "layers", "*", "*"))
		return len(left) == 0
	})
	checkNothingLeft(t, b.machine)
}

// Without its registry, or without the right to it, a container reads what is
// here, waits for the rest as long as it is told to, gets an error, lives on and
// reads again when it can. Containers start from what is here.
func TestLazyRegistryAway(t *testing.T) { onBackends(t, testLazyRegistryAway) }

func testLazyRegistryAway(t *testing.T, backend string) {
	b := newStillBed(t, backend, off+"wait = \"2s\"\n")
	scrape := b.measured(t)
	b.start()
	b.run()
	b.reads(file(40))
	becomes(t, scrape, map[series]float64{{"lazy_starts_total", ""}: 1, {"lazy_failed_waits_total", ""}: 0,
		{"lazy_lies_total", ""}: 0, {"deployment_seconds", "pull=lazy outcome=ok"}: 1})
	reaches(t, scrape, map[series]float64{{"lazy_wait_seconds", ""}: 1, {"lazy_pack_bytes_total", ""}: 1,
		{"lazy_demand_bytes_total", ""}: 1})
	before := scrape().count(series{"lazy_wait_seconds", ""})
	for n, away := range []struct {
		begin, end func()
		says       string
	}{
		{b.reg.Close, func() { b.reg.Up() }, "err="},
		{func() { b.reg.Require(registrytest.Auth{Mode: registrytest.Basic, User: "u", Password: "p"}) },
			func() { b.reg.Require(registrytest.Auth{}) }, "401"},
	} {
		away.begin()
		far := file(10 + 20*n)
		got := b.ask(far)
		b.reads(b.untouched(file(40)))
		if took := b.errs(far, got); took < 2*time.Second || took > 10*time.Second { // the kernel's layers each ask
			t.Errorf("the error came after %s", took)
		}
		b.eventually("dewd's word on it", func() bool {
			return b.says("level=ERROR", "bytes that a container waits for", away.says)
		})
		if b.says("err=<nil>") {
			t.Error("dewd does not say why bytes do not come")
		}
		if out := b.must("ps"); !strings.Contains(out, "web") {
			t.Errorf("the container has not survived:\n%s", out)
		}
		port := freePort(t)
		b.must("run", "-d", "--name", "two", "--ready", "http:"+port+"/", b.li.Ref, "serve", port)
		b.right(file(40), ask(port, file(40)))
		b.must("rm", "-f", "two")
		away.end()
		b.recovers(far)
	}
	reaches(t, scrape, map[series]float64{{"lazy_failed_waits_total", ""}: 2,
		{"lazy_wait_seconds", ""}: before + 2})
	b.must("rm", "-f", "web")
}

// Who asks for the containers, or for what is wrong with the node, hears that
// reads fail, of which containers, and what to do.
func TestLazyFailedReadsAreShown(t *testing.T) {
	t.Parallel()
	b := newLazyBed(t, "erofs", off+"wait = \"1s\"\n")
	other := b.reg.PushImage("other:1", appLayers(t, 0), appOptions())
	b.run()
	b.must("run", "-d", "--name", "well", other.Ref, "sleep", "1h")
	b.reads(file(40))
	shown := func() map[string]string {
		var all []spec.Container
		b.json(&all, "ps")
		out := map[string]string{}
		for _, c := range all {
			out[c.Name] = c.ReadError
		}
		return out
	}
	if got := shown(); got["web"] != "" || strings.Contains(b.must("ps"), "reads fail") {
		t.Errorf("nothing has failed: %q", got)
	}
	if out := b.must("doctor"); !strings.Contains(out, "none has failed") {
		t.Errorf("doctor of a node that is well:\n%s", out)
	}
	b.reg.Close()
	b.errs(file(10), b.ask(file(10)))
	b.eventually("ps says that reads fail", func() bool {
		return strings.Contains(shown()["web"], "connection refused")
	})
	for line := range strings.Lines(b.must("ps")) {
		if marked := strings.Contains(line, "running (reads fail)"); marked != strings.HasPrefix(line, "web ") {
			t.Errorf("of ps: %s", line)
		}
	}
	r := b.dew("doctor")
	for _, want := range []string{"lazy reads", b.li.Ref, "connection refused",
		"the registry " + b.reg.Host() + " can be reached"} {
		if !strings.Contains(r.out, want) {
			t.Errorf("doctor does not say %q:\n%s", want, r.out)
		}
	}
	if r.code == 0 {
		t.Error("doctor finds nothing bad")
	}
	b.reg.Up()
	b.recovers(file(10))
	b.must("rm", "-f", "web", "well")
}

// Wrong bytes never become visible, whichever way a registry sends them: who
// reads gets the right ones by another way, or an error.
func TestLazyTampered(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]registrytest.Fault{
		"beginning": {Do: registrytest.WrongBytes}, "moved": {Do: registrytest.LieRange, At: 1000},
		"short":     {Do: registrytest.Short, At: 1000},
		"no ranges": {Do: registrytest.IgnoreRange}, "flipped": {Do: registrytest.Flip, At: 200_000},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newLazyBed(t, "erofs", off+"wait = \"1s\"\n")
			b.run()
			b.reads(file(40)) // the pack's points are here, which are not the fault's
			fault.Digest = b.big()
			if fault.Do == registrytest.Flip {
				fault.At += b.askedAt(file(10))
			}
			b.reg.Fail(fault)
			before := len(b.reg.Ranges(b.big()))
			for n := 6; n < 16; n += 2 { // what is fetched with the file, too
				path := file(n)
				if a := <-b.ask(path); a.said != b.li.files[path] && !strings.Contains(a.said, "input/output error") {
					t.Errorf("%s reads %q", path, a.said)
				}
			}
			if len(b.reg.Ranges(b.big())) == before {
				t.Error("the registry was not asked")
			}
			b.reg.Heal()
			for n := 6; n < 16; n += 2 {
				b.recovers(file(n))
			}
			b.must("rm", "-f", "web")
		})
	}
}

// askedAt is where in the big layer's blob the node looks for a file. The
// file's read fails.
func (b *lazyBed) askedAt(path string) int64 {
	b.t.Helper()
	b.reg.Fail(registrytest.Fault{Do: registrytest.Status, Status: 500, Digest: b.big()})
	b.errs(path, b.ask(path))
	b.reg.Heal()
	ranges := b.reg.Ranges(b.big())
	var at int64
	if _, err := fmt.Sscanf(ranges[len(ranges)-1], "bytes=%d-", &at); err != nil {
		b.t.Fatalf("a range %q: %v", ranges[len(ranges)-1], err)
	}
	return at
}
