package api_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/apitest"
)

var nginx = spec.Image{
	Name: "nginx:1", Digest: "sha256:" + strings.Repeat("ab", 32), Size: 3000, Disk: 9000,
	Created: time.Unix(1700000000, 5).UTC(),
	Layers: []spec.Layer{
		{Digest: "sha256:" + strings.Repeat("01", 32), DiffID: "sha256:" + strings.Repeat("02", 32), Size: 1000,
			Disk: 3000, State: spec.StateComplete},
		{Digest: "sha256:" + strings.Repeat("03", 32), DiffID: "sha256:" + strings.Repeat("04", 32), Size: 2000,
			Disk: 6000, State: spec.StateComplete},
	},
}

// newNode is a node with one image, its server and a client.
func newNode(t *testing.T) (*apitest.Node, *apitest.Server, *api.Client) {
	t.Helper()
	n := &apitest.Node{}
	n.Add(nginx)
	t.Cleanup(n.Close)
	s := apitest.Serve(t, n)
	return n, s, s.Dial(t)
}

func wantCode(t *testing.T, err error, code api.Code, exit int) {
	t.Helper()
	var e *api.Error
	if !errors.As(err, &e) {
		t.Fatalf("error %v, want an api.Error", err)
	}
	if e.Code != code || e.Exit != exit {
		t.Fatalf("error %q of code %s, exit %d; want %s, exit %d", e, e.Code, e.Exit, code, exit)
	}
}

// transcript is what a client is told, in order.
type transcript struct {
	mu     sync.Mutex
	stages []string
	layers map[string]spec.LayerProgress
	states []string
	out    bytes.Buffer
}

func (s *transcript) watch() spec.Watch {
	return spec.Watch{
		Reached: func(name, stage string, _ float64) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.stages = append(s.stages, stage)
		},
		Layer: func(l spec.LayerProgress) {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.layers == nil {
				s.layers = map[string]spec.LayerProgress{}
			}
			s.layers[l.Digest] = l
			s.states = append(s.states, l.State)
		},
	}
}

func (s *transcript) emit(c spec.LogChunk) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(&s.out, "%s:%s", c.Stream, c.Data)
	return nil
}

func TestDeployStreamsStagesAndTheNewestOfEachLayer(t *testing.T) {
	_, _, c := newNode(t)
	var seen transcript
	r, err := c.Deploy(t.Context(), spec.Request{Image: "nginx:1", Name: "web", Cmd: []string{"sleep"}},
		seen.watch())
	if err != nil {
		t.Fatal(err)
	}
	if r.Name != "web" || r.Node != "fake" || r.Bytes.Registry != 3000 || r.Way.Start != "boot" ||
		r.Stages[spec.Ready] == 0 {
		t.Errorf("record %+v", r)
	}
	if want := []string{spec.Resolved, spec.Mounted, spec.Created, spec.Started,
		spec.Ready}; !reflect.DeepEqual(seen.stages, want) {
		t.Errorf("stages %v, want %v", seen.stages, want)
	}
	for _, l := range nginx.Layers {
		if got := seen.layers[l.Digest]; got.State != spec.StateComplete || got.Fetched != l.Size {
			t.Errorf("layer %+v, want it complete", got)
		}
	}
	if n := len(seen.states); n > 10 {
		t.Errorf("%d reports of 2 layers came though the pull was instant", n)
	}
}

func TestDeployFailsWithItsRecord(t *testing.T) {
	n, _, c := newNode(t)
	n.Fail("Deploy", fmt.Errorf("write layer: %w", syscall.ENOSPC))
	r, err := c.Deploy(t.Context(), spec.Request{Image: "nginx:1"}, spec.Watch{})
	wantCode(t, err, api.DiskFull, api.ExitDiskFull)
	if !strings.Contains(err.Error(), "dew prune") {
		t.Errorf("%q has no remedy", err)
	}
	if r.Error == "" {
		t.Errorf("the record %+v does not tell the error", r)
	}
}

func TestDeployIsValidatedAtTheEdge(t *testing.T) {
	_, _, c := newNode(t)
	for _, r := range []spec.Request{
		{}, {Image: "i", Net: "moon"}, {Image: "i", Ready: "tcp"}, {Image: "i", Memory: -1},
		{Image: "i", Net: "none", Ports: []spec.Port{{Host: 1, Container: 1}}}, {Image: "i", Inflaters: -1},
		{Image: "i", Volumes: []spec.Volume{{Source: "a/b", Target: "/b"}}}, {Image: "i", Env: []string{"=x"}},
		labeled("", "x"), labeled("a b", "x"), labeled("a", "x\x00"), labeled("a", strings.Repeat("x", 4096)),
		labeled("containerd.io/gc.root", "x"),
		labeled("dewpoint.net", "host"), labeled("dewpoint.restore.afterwards", "x"),
		labeled("dewpoint.checkpoint", "sometimes"),
	} {
		_, err := c.Deploy(t.Context(), r, spec.Watch{})
		wantCode(t, err, api.BadRequest, api.ExitUsage)
	}
}

func labeled(name, value string) spec.Request {
	return spec.Request{Image: "i", Labels: map[string]string{name: value}}
}

func TestClientThatGoesAwayCancelsTheDeployment(t *testing.T) {
	_, _, c := newNode(t)
	ctx, cancel := context.WithCancel(t.Context())
	w := spec.Watch{Reached: func(_, stage string, _ float64) {
		if stage == spec.Started {
			cancel()
		}
	}}
	_, err := c.Deploy(ctx,
		spec.Request{Image: "nginx:1", Name: "web", Cmd: []string{"sleep"}, Ready: "log:never"}, w)
	wantCode(t, err, api.Canceled, api.ExitInterrupted)
	testkit.Eventually(t, "the container is undone", func() bool {
		list, err := c.List(t.Context(), true)
		return err == nil && len(list) == 0
	})
}

func TestRunGivesOutputAndStatusThenRemoves(t *testing.T) {
	_, _, c := newNode(t)
	for i := range 50 {
		var seen transcript
		req := spec.Request{Image: "nginx:1", Name: "job", Remove: true,
			Cmd: strings.Fields("echo hello warn careful exit 7")}
		r, status, err := c.Run(t.Context(), req, seen.watch(), seen.emit)
		if err != nil || status != 7 || r.Name != "job" {
			t.Fatalf("run %d: record %+v, status %d, error %v", i, r, status, err)
		}
		if got := seen.out.String(); got != "stdout:hello\nstderr:careful\n" {
			t.Fatalf("run %d: output %q", i, got)
		}
	}
	if list, err := c.List(t.Context(), true); err != nil || len(list) != 0 {
		t.Errorf("left: %v, %v", list, err)
	}
}

func TestRunTellsTheLastWordsOfWhatDidNotBecomeReady(t *testing.T) {
	_, _, c := newNode(t)
	var seen transcript
	req := spec.Request{Image: "nginx:1", Cmd: strings.Fields("warn no configuration exit 3"),
		Ready: "log:never"}
	_, _, err := c.Run(t.Context(), req, seen.watch(), seen.emit)
	wantCode(t, err, api.Exited, api.ExitNotReady)
	if got := seen.out.String(); got != "stderr:no configuration\n" {
		t.Errorf("output %q", got)
	}
}

func TestRunThatIsCutLeavesTheContainer(t *testing.T) {
	n, s, c := newNode(t)
	w := spec.Watch{Reached: func(_, stage string, _ float64) {
		if stage == spec.Ready {
			go s.Stop()
		}
	}}
	_, _, err := c.Run(t.Context(),
		spec.Request{Image: "nginx:1", Name: "web", Remove: true, Cmd: []string{"sleep"}}, w, new(transcript).emit)
	wantCode(t, err, api.StatusUnknown, api.ExitUnknown)
	list, err := n.List(t.Context(), false)
	if err != nil || len(list) != 1 {
		t.Fatalf("running: %v, %v", list, err)
	}
}

func TestStoppingDaemonEndsCalls(t *testing.T) {
	// On a busy machine a call may come after the end: then they get more time to begin.
	for pause := 20 * time.Millisecond; ; pause *= 4 {
		_, s, c := newNode(t)
		if _, err := c.Deploy(t.Context(), spec.Request{Image: "nginx:1", Name: "web", Cmd: []string{"sleep"}},
			spec.Watch{}); err != nil {
			t.Fatal(err)
		}
		failed := make(chan error, 2)
		go func() { _, err := c.Wait(t.Context(), "web"); failed <- err }()
		go func() {
			failed <- c.Logs(t.Context(), "web", spec.LogOptions{Follow: true}, new(transcript).emit)
		}()
		time.Sleep(pause)
		begin := time.Now()
		s.Stop()
		errs := []error{<-failed, <-failed}
		took := time.Since(begin)
		if pause < 10*time.Second && slices.ContainsFunc(errs, func(err error) bool {
			var e *api.Error
			return errors.As(err, &e) && e.Code == api.NoDaemon
		}) {
			continue
		}
		for _, err := range errs {
			wantCode(t, err, api.Stopping, api.ExitNoDaemon)
		}
		if took > 4*time.Second { // they would have five to end by themselves
			t.Errorf("stopping took %v", took)
		}
		_, err := c.List(t.Context(), false)
		wantCode(t, err, api.NoDaemon, api.ExitNoDaemon)
		return
	}
}

func TestPanicIsAnErrorOfTheCall(t *testing.T) {
	_, s, _ := newNode(t)
	p := apitest.Serve(t, panicking{})
	for name, call := range map[string]func(*api.Client) error{
		"unary": func(c *api.Client) error { _, err := c.Doctor(t.Context()); return err },
		"deploy": func(c *api.Client) error {
			_, err := c.Deploy(t.Context(), spec.Request{Image: "i"}, spec.Watch{})
			return err
		},
		"pull": func(c *api.Client) error {
			_, err := c.Pull(t.Context(), spec.PullRequest{Image: "i"}, spec.Watch{})
			return err
		},
		"stream": func(c *api.Client) error {
			return c.Logs(t.Context(), "web", spec.LogOptions{}, new(transcript).emit)
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := call(p.Dial(t))
			wantCode(t, err, api.Internal, api.ExitFailure)
			if !strings.Contains(err.Error(), "defect") {
				t.Errorf("error %q", err)
			}
		})
	}
	_ = s
}

// panicking is a node all of whose methods are defects.
type panicking struct{ api.Node }

func TestPullTwice(t *testing.T) {
	_, _, c := newNode(t)
	for _, way := range []string{"whole", "local"} {
		r, err := c.Pull(t.Context(), spec.PullRequest{Image: "nginx:1"}, spec.Watch{})
		if err != nil || r.Way.Pull != way {
			t.Fatalf("record %+v, %v; want %s", r, err, way)
		}
	}
	_, err := c.Pull(t.Context(), spec.PullRequest{Image: "apache"}, spec.Watch{})
	wantCode(t, err, api.NotFound, api.ExitNotFound)
	images, err := c.Images(t.Context())
	if err != nil || !reflect.DeepEqual(images, []spec.Image{nginx}) {
		t.Errorf("images %+v, %v", images, err)
	}
}

func TestContainersRoundTrip(t *testing.T) {
	_, _, c := newNode(t)
	port := spec.Port{HostIP: "127.0.0.1", Host: 65535, Container: 80, Protocol: "tcp"}
	req := spec.Request{Image: "nginx:1", Name: "web", Net: "bridge", Ports: []spec.Port{port},
		Cmd: strings.Fields("echo one echo two sleep")}
	if _, err := c.Deploy(t.Context(), req, spec.Watch{}); err != nil {
		t.Fatal(err)
	}
	list, err := c.List(t.Context(), false)
	if err != nil || len(list) != 1 {
		t.Fatalf("%v, %v", list, err)
	}
	got := list[0]
	if got.Ports[0] != port || got.Status != spec.StatusRunning || got.PID == 0 ||
		time.Since(got.Created) > time.Minute {
		t.Errorf("container %+v", got)
	}
	wantCode(t, c.Remove(t.Context(), "web", false), api.Running, api.ExitConflict)
	wantCode(t, c.RemoveImage(t.Context(), "nginx:1"), api.InUse, api.ExitConflict)
	if err := c.Stop(t.Context(), "web", time.Second); err != nil {
		t.Fatal(err)
	}
	if status, err := c.Wait(t.Context(), "web"); err != nil || status != 143 {
		t.Errorf("status %d, %v", status, err)
	}
	var seen transcript
	if err := c.Logs(t.Context(), "web", spec.LogOptions{Tail: 1}, seen.emit); err != nil ||
		seen.out.String() != "stdout:two\n" {
		t.Errorf("logs %q, %v", seen.out.String(), err)
	}
	if err := c.Remove(t.Context(), "web", false); err != nil {
		t.Fatal(err)
	}
	report, err := c.Prune(t.Context(), spec.PruneOptions{Images: true})
	if err != nil || report.Bytes != 9000 || len(report.Images) != 1 || len(report.Layers) != 2 {
		t.Errorf("pruned %+v, %v", report, err)
	}
}

func TestStartsAnew(t *testing.T) {
	_, _, c := newNode(t)
	ctx := t.Context()
	if _, err := c.Deploy(ctx, spec.Request{Image: "nginx:1", Name: "web", Cmd: []string{"sleep"}},
		spec.Watch{}); err != nil {
		t.Fatal(err)
	}
	wantCode(t, c.Kill(ctx, "web", "HANGUP"), api.BadRequest, api.ExitUsage)
	for what, end := range map[string]func() error{
		"stop": func() error { return c.Stop(ctx, "web", 0) },
		"kill": func() error { return c.Kill(ctx, "web", "") },
	} {
		if err := end(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if status, err := c.Wait(ctx, "web"); err != nil || status != 137 {
			t.Errorf("%s: status %d, %v", what, status, err)
		}
		wantCode(t, c.Kill(ctx, "web", "TERM"), api.NotRunning, api.ExitConflict)
		for range 2 { // one that runs is left alone
			if err := c.Start(ctx, "web"); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := c.Restart(ctx, "web", time.Second); err != nil {
		t.Error(err)
	}
	if list, err := c.List(ctx, false); err != nil || len(list) != 1 {
		t.Errorf("%v, %v", list, err)
	}
	for _, err := range []error{c.Start(ctx, "none"), c.Restart(ctx, "none", 0), c.Kill(ctx, "none", "")} {
		wantCode(t, err, api.NotFound, api.ExitNotFound)
	}
}

func TestStopTimeouts(t *testing.T) {
	_, _, c := newNode(t)
	for _, timeout := range []time.Duration{0, 10 * time.Millisecond} {
		if _, err := c.Deploy(t.Context(), spec.Request{Image: "nginx:1", Name: "mule", Cmd: []string{"stubborn"}},
			spec.Watch{}); err != nil {
			t.Fatal(err)
		}
		if err := c.Stop(t.Context(), "mule", timeout); err != nil {
			t.Fatal(err)
		}
		if err := c.Remove(t.Context(), "mule", false); err != nil {
			t.Fatal(err)
		}
	}
}

func TestEventsGoOnWhereTheyWere(t *testing.T) {
	_, _, c := newNode(t)
	for _, name := range []string{"a", "b"} {
		if _, err := c.Deploy(t.Context(), spec.Request{Image: "nginx:1", Name: name, Cmd: []string{"sleep"}},
			spec.Watch{}); err != nil {
			t.Fatal(err)
		}
	}
	enough := errors.New("enough")
	after := spec.Mark{Seq: 1}
	var got []spec.Event
	err := c.Events(t.Context(), &after, nil, func(e spec.Event) error {
		got = append(got, e)
		return enough
	})
	if !errors.Is(err, enough) || got[0].Seq != 2 || got[0].Record == nil || got[0].Record.Name != "b" ||
		got[0].ExitCode != nil {
		t.Errorf("events %+v, %v", got, err)
	}
}

func TestJSONOverHTTP1(t *testing.T) {
	_, s, _ := newNode(t)
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", s.Socket)
	}}
	defer tr.CloseIdleConnections()
	h := http.Client{Transport: tr}
	post := func(method, body string) (int, string) {
		t.Helper()
		res, err := h.Post("http://dewd/dewpoint.v1.Node/"+method, "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res.StatusCode, string(b)
	}
	if code, body := post("Version", "{}"); code != 200 || !strings.Contains(body, `"v0.0-test"`) {
		t.Errorf("version: %d %s", code, body)
	}
	if code, body := post("Stop", `{"name":"none"}`); code != 404 || !strings.Contains(body, "not_found") {
		t.Errorf("stop: %d %s", code, body)
	}
	if code, _ := post("Stop", `{"name":"`+strings.Repeat("x", 2<<20)+`"}`); code != 429 && code != 413 {
		t.Errorf("an overlong request got %d", code)
	}
}

func TestListen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	for range 2 {
		// A socket that nobody serves, as a killed daemon leaves it.
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		l.(*net.UnixListener).SetUnlinkOnClose(false)
		l.Close()
		a, err := api.Listen(path, 0o660)
		if err != nil {
			t.Fatal(err)
		}
		if st, err := os.Stat(path); err != nil || st.Mode() != os.ModeSocket|0o660 {
			t.Errorf("mode %v, %v", st.Mode(), err)
		}
		if _, err := api.Listen(path, 0o660); err == nil || !strings.Contains(err.Error(), "another") {
			t.Errorf("a second listener: %v", err)
		}
		a.Close()
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket is left: %v", err)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".dewd-*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// One client goes on with a node that is started anew, oftener than it may have connections, with calls
// open at each end of it; and has more calls open at once than one connection carries.
func TestClientOutlivesItsNode(t *testing.T) {
	n, s, c := newNode(t)
	for range 6 {
		var open sync.WaitGroup
		for range 5 {
			open.Go(func() { _ = c.Events(t.Context(), nil, nil, func(spec.Event) error { return nil }) })
		}
		for tries := 0; ; tries++ { // a connection that has just broken may be noticed by a call that fails
			_, err := c.Images(t.Context())
			if err == nil {
				break
			}
			if tries == 10 {
				t.Fatal(err)
			}
		}
		s.Stop()
		open.Wait()
		next, err := apitest.Start(s.Socket, n)
		if err != nil {
			t.Fatal(err)
		}
		s = next
	}
	defer s.Stop()
	ctx, cancel := context.WithCancel(t.Context())
	var open sync.WaitGroup
	for range 1200 {
		open.Go(func() { _ = c.Events(ctx, nil, nil, func(spec.Event) error { return nil }) })
	}
	testkit.Eventually(t, "a call is answered beside them", func() bool {
		_, err := c.Images(t.Context())
		return err == nil
	})
	cancel()
	open.Wait()
}

// Who was told that he is listening misses nothing of what happens from then on.
func TestListenersMissNothing(t *testing.T) {
	n, _, c := newNode(t)
	for i := range 50 {
		name := fmt.Sprintf("seen-%d", i)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		begun, seen := make(chan struct{}), errors.New("seen")
		heard := make(chan error, 1)
		go func() {
			heard <- c.Events(ctx, nil, func() error { close(begun); return nil }, func(e spec.Event) error {
				if e.Name == name {
					return seen
				}
				return nil
			})
		}()
		select {
		case <-begun:
		case err := <-heard:
			t.Fatal(err)
		}
		if _, err := n.Deploy(ctx, spec.Request{Image: nginx.Name, Name: name, Cmd: []string{"sleep"}},
			spec.Watch{}); err != nil {
			t.Fatal(err)
		}
		if err := <-heard; !errors.Is(err, seen) {
			t.Fatalf("listener %d: %v", i, err)
		}
		cancel()
	}
}
