package test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"golang.org/x/sys/unix"
)

// client speaks the node's API. A dewd that was started anew wants another one.
func (m *machine) client(t *testing.T) *api.Client {
	t.Helper()
	c, err := api.Dial("unix://" + filepath.Join(m.state, "dewd.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func code(err error) api.Code {
	var e *api.Error
	errors.As(err, &e)
	if e == nil {
		return ""
	}
	return e.Code
}

// quiet asks for a container that only sleeps, on no network.
func quiet(ref, name string, t spec.Terms) spec.Request {
	return spec.Request{Image: ref, Name: name, Net: "none", Cmd: []string{"sleep", "1h"}, Restore: "never",
		Terms: t}
}

// deployments are those of a node, by name, with its containers.
func (m *machine) deployments(t *testing.T) (map[string][]spec.Deployment, map[string]spec.Container) {
	t.Helper()
	c := m.client(t)
	list, err := c.ListDeployments(t.Context(), spec.DeploymentQuery{All: true, Limit: 1000})
	if err != nil {
		t.Fatal(err)
	}
	containers, err := c.List(t.Context(), true)
	if err != nil {
		t.Fatal(err)
	}
	byName, have := map[string][]spec.Deployment{}, map[string]spec.Container{}
	for _, d := range list {
		byName[d.Name] = append(byName[d.Name], d)
	}
	for _, c := range containers {
		have[c.Name] = c
	}
	return byName, have
}

// idle waits until no deployment is under way.
func (m *machine) idle(t *testing.T) {
	t.Helper()
	c := m.client(t)
	testkit.Retry(t, "no deployment is open", func() error {
		open, err := c.ListDeployments(t.Context(), spec.DeploymentQuery{})
		if err == nil && len(open) > 0 {
			err = fmt.Errorf("%d are: %+v", len(open), open[0])
		}
		return err
	})
}

// accounted asserts that each of the names was accepted once, and that there is a container
// of it if, and only if, its deployment is done. It returns how many are.
func (m *machine) accounted(t *testing.T, names []string) int {
	t.Helper()
	by, have := m.deployments(t)
	done := 0
	for _, name := range names {
		if len(by[name]) != 1 {
			t.Errorf("%s: %d deployments", name, len(by[name]))
			continue
		}
		d, c := by[name][0], have[name]
		switch {
		case d.State == spec.StateDone && c.Status == spec.StatusRunning:
			done++
		case d.State == spec.StateDone:
			t.Errorf("%s is done, and its container is %q", name, c.Status)
		case d.Failure == nil || d.Failure.Message == "":
			t.Errorf("%s is %s without a reason", name, d.State)
		case c.Name != "":
			t.Errorf("%s has failed (%s), and its container is there", name, d.Failure.Message)
		}
		delete(have, name)
	}
	for name := range have {
		t.Errorf("a container of no deployment: %s", name)
	}
	return done
}

// removeAll takes all containers away.
func (m *machine) removeAll(t *testing.T) {
	t.Helper()
	c := m.client(t)
	list, err := c.List(t.Context(), true)
	if err != nil {
		t.Fatal(err)
	}
	var g sync.WaitGroup
	for _, one := range list {
		g.Go(func() {
			if err := c.Remove(context.Background(), one.Name, true); err != nil {
				t.Errorf("remove %s: %v", one.Name, err)
			}
		})
	}
	g.Wait()
}

func names(prefix string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("%s-%d", prefix, i+1)
	}
	return out
}

// dewd is killed in the middle of 100 deployments, 60 detached and 40 of a client that is
// connected, and once more while the next one takes them up. In the end each is done or has failed
// with a reason, the detached ones are all done, none is there twice, and nothing else is left.
func TestKilledWhileItDeploysMany(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).start()
	c := m.client(t)
	if _, err := c.Deploy(t.Context(), quiet(img.Ref, "first", spec.Terms{}), spec.Watch{}); err != nil {
		t.Fatal(err)
	}
	if err := c.DeployMany(t.Context(),
		spec.Many{Requests: []spec.Request{quiet(img.Ref, "lone", spec.Terms{})}, Count: 60,
			Terms: spec.Terms{Detach: true, Key: "batch"}},
		spec.ManyWatch{Watch: func(int) spec.Watch { return spec.Watch{} }}); err != nil {
		t.Fatal(err)
	}
	over := make(chan error, 1)
	go func() {
		over <- c.DeployMany(context.Background(),
			spec.Many{Requests: []spec.Request{quiet(img.Ref, "kept", spec.Terms{})}, Count: 40}, spec.ManyWatch{})
	}()
	m.eventually("some are done", func() bool { return m.done(t) >= 12 })
	m.kill()
	if err := <-over; code(err) != api.NoDaemon {
		t.Errorf("who was connected is told %v", err)
	}
	m.start()
	m.eventually("some more are done", func() bool { return m.done(t) >= 24 })
	m.kill()
	m.start()
	m.idle(t)
	all := append(append(names("lone", 60), names("kept", 40)...), "first")
	done := m.accounted(t, all)
	by, _ := m.deployments(t)
	for _, name := range names("lone", 60) {
		if d := by[name]; len(d) == 1 && d[0].State != spec.StateDone {
			t.Errorf("%s, which is detached, is %s: %+v", name, d[0].State, d[0].Failure)
		}
	}
	t.Logf("%d of %d are done", done, len(all))
	// The same call once more makes nothing.
	c = m.client(t)
	if err := c.DeployMany(t.Context(),
		spec.Many{Requests: []spec.Request{quiet(img.Ref, "lone", spec.Terms{})}, Count: 60,
			Terms: spec.Terms{Detach: true, Key: "batch"}}, spec.ManyWatch{}); err != nil {
		t.Errorf("the same call again: %v", err)
	}
	m.idle(t)
	if again := m.accounted(t, all); again != done {
		t.Errorf("%d are done after the same call again, %d before", again, done)
	}
	m.removeAll(t)
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// done is how many deployments are done.
func (m *machine) done(t *testing.T) int {
	t.Helper()
	list, err := m.client(t).ListDeployments(t.Context(), spec.DeploymentQuery{All: true, Limit: 1000})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, d := range list {
		if d.State == spec.StateDone {
			n++
		}
	}
	return n
}

// containerd is killed, or told to end, in the middle of some deployments: each is done or has failed with a
// reason, nothing else is left, and the node deploys again.
func TestContainerdKilledWhileMany(t *testing.T) {
	t.Parallel()
	for name, signal := range map[string]unix.Signal{"killed": unix.SIGKILL, "ended in order": unix.SIGTERM} {
		t.Run(name, func(t *testing.T) { containerdEndsWhileMany(t, signal) })
	}
}

func containerdEndsWhileMany(t *testing.T, signal unix.Signal) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).start()
	c := m.client(t)
	over := make(chan error, 1)
	go func() {
		over <- c.DeployMany(context.Background(),
			spec.Many{Requests: []spec.Request{quiet(img.Ref, "some", spec.Terms{})}, Count: 30}, spec.ManyWatch{})
	}()
	m.eventually("some are done", func() bool { return m.done(t) >= 5 })
	was := m.privateContainerd()
	if err := unix.Kill(was, signal); err != nil {
		t.Fatal(err)
	}
	if err := <-over; err != nil {
		t.Errorf("the call: %v", err)
	}
	m.eventually("it deploys again", func() bool {
		r, err := c.Deploy(t.Context(), quiet(img.Ref, "", spec.Terms{}), spec.Watch{})
		return err == nil && c.Remove(t.Context(), r.Name, true) == nil && m.privateContainerd() != was
	})
	m.idle(t)
	done := m.accounted(t, names("some", 30))
	t.Logf("%d of 30 are done", done)
	m.removeAll(t)
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// Who waits can be called off, in the queue and while it is being deployed; nothing of it is left, and who
// waited for it is told.
func TestCancelQueuedAndRunning(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).start()
	c := m.client(t)
	never := quiet(img.Ref, "never", spec.Terms{})
	never.Ready, never.ReadyTimeout = "log:never", time.Hour
	failed := make([]*spec.Failure, 3)
	over := make(chan error, 1)
	go func() {
		over <- c.DeployMany(context.Background(),
			spec.Many{Requests: []spec.Request{never}, Count: 3, Parallel: 1, Terms: spec.Terms{Key: "n"}},
			spec.ManyWatch{Ended: func(i int, _ spec.Record, f *spec.Failure) { failed[i] = f }})
	}()
	m.eventually("one runs and two wait", func() bool {
		by, have := m.deployments(t)
		two := by["never-2"]
		return have["never-1"].Status == spec.StatusRunning && len(two) == 1 && two[0].State == spec.StateQueued &&
			two[0].Position > 0
	})
	for _, i := range []int{2, 1, 0} { // the queue first: none begins meanwhile
		d, err := c.CancelDeployment(t.Context(), spec.DeploymentRef{Key: fmt.Sprintf("n/%d", i)})
		if err != nil || d.State != spec.StateCanceled || d.Failure == nil ||
			d.Failure.Code != string(api.Canceled) {
			t.Errorf("canceled: %+v, %v", d, err)
		}
	}
	if err := <-over; err != nil {
		t.Errorf("the call: %v", err)
	}
	for i, f := range failed {
		if f == nil || f.Code != string(api.Canceled) {
			t.Errorf("deployment %d ended with %v", i, f)
		}
	}
	// Canceled once more it stays as it is; its key stands for it.
	if d, err := c.CancelDeployment(t.Context(), spec.DeploymentRef{Key: "n/0"}); err != nil ||
		d.State != spec.StateCanceled {
		t.Errorf("canceled again: %+v, %v", d, err)
	}
	again := never
	again.Name, again.Terms.Key = "never-1", "n/0"
	if _, err := c.Deploy(t.Context(), again, spec.Watch{}); code(err) != api.Canceled {
		t.Errorf("asked for again under its key: %v", err)
	}
	if _, have := m.deployments(t); len(have) > 0 {
		t.Errorf("containers are left: %v", have)
	}
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// The same key is the same deployment: joined, replayed, refused for another request; free
// again when its client went away. A deadline ends what is late.
func TestKeysAndDeadlines(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).start()
	c := m.client(t)
	one := quiet(img.Ref, "one", spec.Terms{Key: "k"})

	// Ten clients at once, one container.
	records := make([]spec.Record, 10)
	var g sync.WaitGroup
	for i := range records {
		g.Go(func() {
			var err error
			if records[i], err = m.client(t).Deploy(context.Background(), one, spec.Watch{}); err != nil {
				t.Errorf("client %d: %v", i, err)
			}
		})
	}
	g.Wait()
	for i, r := range records {
		if r.ID == "" || r.ID != records[0].ID {
			t.Errorf("client %d has deployment %q, the first %q", i, r.ID, records[0].ID)
		}
	}
	// Replayed, also by the next dewd.
	for _, restart := range []bool{false, true} {
		if restart {
			m.kill()
			m.start()
			c = m.client(t)
		}
		r, err := c.Deploy(t.Context(), one, spec.Watch{})
		if err != nil || r.ID != records[0].ID || r.Stages[spec.Ready] != records[0].Stages[spec.Ready] {
			t.Errorf("replayed, restart %t: %+v, %v", restart, r, err)
		}
	}
	other := one
	other.Env = []string{"A=b"}
	if _, err := c.Deploy(t.Context(), other, spec.Watch{}); code(err) != api.KeyReused {
		t.Errorf("the key of another request: %v", err)
	}
	i, err := c.Inspect(t.Context(), "one")
	if err != nil || i.Request == nil || i.Request.Cmd[0] != "sleep" || i.Record == nil ||
		i.Record.ID != records[0].ID || !strings.Contains(i.OCI, "ociVersion") {
		t.Errorf("inspected: %+v, %v", i, err)
	}

	// A client that vanishes takes its deployment with it, unless another has joined; then its key is free.
	slow := quiet(img.Ref, "slow", spec.Terms{Key: "s"})
	slow.Ready = "log:never"
	ctx, vanish := context.WithCancel(t.Context())
	joined, leave := context.WithCancel(t.Context())
	gone := make(chan error, 2)
	go func() { _, err := m.client(t).Deploy(ctx, slow, spec.Watch{}); gone <- err }()
	m.eventually("it runs", func() bool {
		_, have := m.deployments(t)
		return have["slow"].Status == spec.StatusRunning
	})
	told := make(chan spec.Deployment, 100)
	go func() {
		_, err := m.client(t).Deploy(joined, slow, spec.Watch{Deployment: func(d spec.Deployment) { told <- d }})
		gone <- err
	}()
	<-told
	vanish()
	<-gone
	if _, have := m.deployments(t); have["slow"].Status != spec.StatusRunning {
		t.Errorf("the other client's container is %q", have["slow"].Status)
	}
	leave()
	<-gone
	m.idle(t)
	if _, have := m.deployments(t); have["slow"].Name != "" {
		t.Error("a container that nobody waits for is left")
	}
	slow.Terms.Deadline = time.Second
	if _, err := c.Deploy(t.Context(), slow, spec.Watch{}); code(err) != api.Deadline {
		t.Errorf("late: %v", err)
	}
	m.idle(t)
	m.removeAll(t)
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// What strangers send is refused, or ends with their connection; it harms nobody else.
func TestGarbage(t *testing.T) {
	t.Parallel()
	m := newMachine(t, nil).start()
	socket := filepath.Join(m.state, "dewd.sock")
	head := "POST /dewpoint.v1.Node/DeployMany HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+proto\r\nConnect-Protocol-Version: 1\r\n"
	for name, send := range map[string]string{
		"nothing":         "",
		"no HTTP":         strings.Repeat("\x00\xff garbage \r\n", 1000),
		"half a request":  head,
		"a long envelope": head + "Content-Length: 9\r\n\r\n\x00\xff\xff\xff\xffxxxx",
		"a cut envelope":  head + "Content-Length: 100\r\n\r\n\x00\x00\x00\x00\x20xx",
		"no protobuf":     head + "Content-Length: 9\r\n\r\n\x00\x00\x00\x00\x04\xff\xff\xff\xff",
		"no JSON": strings.Replace(head, "+proto", "+json", 1) +
			"Content-Length: 9\r\n\r\n\x00\x00\x00\x00\x04{{{{",
		"HTTP/2 rubbish": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + strings.Repeat("\xff", 200),
	} {
		s, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		s.SetDeadline(time.Now().Add(10 * time.Second))
		_, _ = s.Write([]byte(send)) // it may hang up before
		answer := make([]byte, 1000)
		if name == "no protobuf" || name == "no JSON" || name == "a long envelope" {
			if n, err := s.Read(answer); n == 0 {
				t.Errorf("%s: no answer: %v", name, err)
			}
		}
		s.Close()
	}
	list, err := m.client(t).ListDeployments(t.Context(), spec.DeploymentQuery{All: true})
	if err != nil || len(list) != 0 {
		t.Errorf("afterwards: %v, %v", list, err)
	}
	m.stop() // not killed: it may still be probing the kernel, with processes of its own
}
