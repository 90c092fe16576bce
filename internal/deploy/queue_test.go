package deploy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/deploy/journal"
	"dewpoint/internal/engine"
	"dewpoint/internal/spec"
)

// fakeMaker makes nothing: a deployment goes on, once it is admitted, until the test ends it.
type fakeMaker struct {
	mu         sync.Mutex
	ends       map[string]chan error // by name
	owners     map[string]string     // what containers would be labeled with, by name
	carried    []string
	adopted    []string
	takenBack  []string
	containers map[string]*engine.Info
}

func (f *fakeMaker) end(name string) chan error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ends[name] == nil {
		f.ends[name] = make(chan error, 1)
	}
	return f.ends[name]
}

func (f *fakeMaker) note(list *[]string, name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	*list = append(*list, name)
}

func (f *fakeMaker) carry(ctx context.Context, o *run, w spec.Watch) (spec.Record, error) {
	defer o.place.Done(0)
	rec := spec.Record{ID: o.id, Name: o.name, Image: o.ref.String()}
	if err := o.place.Wait(ctx); err != nil {
		return rec, why(ctx, err)
	}
	f.note(&f.carried, o.name)
	f.mu.Lock()
	f.owners[o.name] = o.labels()[checkpoint.LabelOwner]
	f.mu.Unlock()
	w.Reached(o.name, spec.Admitted, 0.1)
	select {
	case err := <-f.end(o.name):
		return rec, err
	case <-ctx.Done():
		return rec, why(ctx, ctx.Err())
	}
}

func (f *fakeMaker) made(context.Context) (map[string]*engine.Info, error) { return f.containers, nil }

func (f *fakeMaker) adopt(_ context.Context, o *run, _ *engine.Info, _ time.Time,
	w spec.Watch) (spec.Record, error) {
	if strings.Contains(o.name, "half") {
		return spec.Record{}, errIncomplete
	}
	f.note(&f.adopted, o.name)
	w.Reached(o.name, spec.Ready, 1)
	return spec.Record{ID: o.id, Name: o.name, Image: o.ref.String()}, nil
}

func (f *fakeMaker) takeBack(_ context.Context, name string) error {
	f.note(&f.takenBack, name)
	return nil
}

// queueOf opens a Queue over a fake. Its admission has one slot and room for eight.
func queueOf(t *testing.T, path string, f *fakeMaker) *Queue {
	t.Helper()
	d := New(Config{Admit: admit.Config{Max: 1, Queue: 16, PerCaller: 8, Memory: func() (admit.Memory, error) {
		return admit.Memory{Available: 1 << 34, Total: 1 << 34}, nil
	}, Pressure: func() admit.Pressure { return admit.Pressure{} }}})
	t.Cleanup(d.Close)
	k, err := NewQueue(QueueConfig{Deployer: d, Path: path, Failure: func(err error) *spec.Failure {
		f := &spec.Failure{Code: "internal", Message: err.Error(), Exit: 1}
		var e *ended
		if errors.As(err, &e) {
			f.Code = e.kind
		}
		return f
	}})
	if err != nil {
		t.Fatal(err)
	}
	if f.ends == nil {
		f.ends = map[string]chan error{}
	}
	f.owners = map[string]string{}
	k.make = f
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
	return k
}

// queue runs f with a Queue, a fake, and virtual time.
func queue(t *testing.T, f func(t *testing.T, k *Queue, m *fakeMaker)) {
	synctest.Test(t, func(t *testing.T) {
		m := &fakeMaker{}
		f(t, queueOf(t, filepath.Join(t.TempDir(), "deployments"), m), m)
	})
}

func app(name string, terms spec.Terms) spec.Request {
	return spec.Request{Image: "app:1", Name: name, Net: engine.NetNone, Terms: terms}
}

// asking is one call of Deploy that goes on.
type asking struct {
	leave context.CancelFunc
	over  chan struct{}
	rec   spec.Record
	err   error
}

func ask(k *Queue, req spec.Request) *asking {
	a := &asking{over: make(chan struct{})}
	var ctx context.Context
	ctx, a.leave = context.WithCancel(context.Background())
	go func() {
		defer close(a.over)
		a.rec, a.err = k.Deploy(ctx, req, spec.Watch{})
	}()
	synctest.Wait()
	return a
}

func kindOf(err error) string {
	var e *ended
	var f *spec.Failure
	switch {
	case errors.As(err, &e):
		return e.kind
	case errors.As(err, &f):
		return f.Code
	case err != nil:
		return err.Error()
	}
	return ""
}

// stateOf is the state of the deployment of a name.
func stateOf(t *testing.T, k *Queue, name string) spec.Deployment {
	t.Helper()
	var got []spec.Deployment
	for _, d := range k.List(spec.DeploymentQuery{All: true}) {
		if d.Name == name {
			got = append(got, d)
		}
	}
	if len(got) != 1 {
		t.Fatalf("%d deployments are called %s", len(got), name)
	}
	return got[0]
}

// A key stands for one deployment of its caller: joined, told again, refused for another request.
func TestQueueKeys(t *testing.T) {
	queue(t, func(t *testing.T, k *Queue, m *fakeMaker) {
		mine := app("web", spec.Terms{Key: "k", Caller: "me"})
		first, second := ask(k, mine), ask(k, mine)
		other := mine
		other.Env = []string{"A=b"}
		if _, err := k.Deploy(t.Context(), other, spec.Watch{}); kindOf(err) != "key_reused" {
			t.Errorf("the key for another request: %v", err)
		}
		m.end("web") <- nil
		<-first.over
		<-second.over
		if first.err != nil || second.err != nil || first.rec.ID != second.rec.ID || len(m.carried) != 1 {
			t.Errorf("%v, %v: %d were made", first.err, second.err, len(m.carried))
		}
		again, err := k.Deploy(t.Context(), mine, spec.Watch{})
		if err != nil || again.ID != first.rec.ID || len(m.carried) != 1 {
			t.Errorf("told again: %+v, %v", again, err)
		}
		theirs := app("theirs", spec.Terms{Key: "k", Caller: "them"})
		m.end("theirs") <- errors.New("no")
		if _, err := k.Deploy(t.Context(), theirs, spec.Watch{}); err == nil || err.Error() != "no" ||
			len(m.carried) != 2 {
			t.Errorf("another caller's key of the same name: %v", err)
		}
		if _, err := k.Deploy(t.Context(), theirs, spec.Watch{}); err == nil || err.Error() != "no" ||
			len(m.carried) != 2 {
			t.Errorf("what has failed, asked for again: %v", err)
		}
	})
}

// Who asks keeps a deployment going, who watches does not; what the last one has left
// is undone, and its key is free.
func TestQueueLeft(t *testing.T) {
	queue(t, func(t *testing.T, k *Queue, m *fakeMaker) {
		req := app("web", spec.Terms{Key: "k"})
		first, second := ask(k, req), ask(k, req)
		id := stateOf(t, k, "web").ID
		watched := make(chan error, 1)
		go func() {
			_, err := k.Watch(context.Background(), spec.DeploymentRef{ID: id}, spec.Watch{})
			watched <- err
		}()
		first.leave()
		<-first.over
		if d := stateOf(t, k, "web"); d.State != spec.StateDeploying {
			t.Errorf("one of two has left: it is %s", d.State)
		}
		second.leave()
		<-second.over
		if err := <-watched; kindOf(err) != "canceled" {
			t.Errorf("who watches is told %v", err)
		}
		if d := stateOf(t, k, "web"); d.State != spec.StateCanceled {
			t.Errorf("nobody waits for it, and it is %s", d.State)
		}
		third := ask(k, req)
		m.end("web") <- nil
		if <-third.over; third.err != nil || third.rec.ID == id {
			t.Errorf("asked for anew: %+v, %v", third.rec, third.err)
		}
	})
}

// A deadline is of all of a deployment, its time in the queue too.
func TestQueueDeadline(t *testing.T) {
	queue(t, func(t *testing.T, k *Queue, m *fakeMaker) {
		first := ask(k, app("first", spec.Terms{}))
		begun := time.Now()
		_, err := k.Deploy(t.Context(), app("late", spec.Terms{Deadline: 3 * time.Second}), spec.Watch{})
		if kindOf(err) != "deadline" || time.Since(begun) != 3*time.Second {
			t.Errorf("after %s: %v", time.Since(begun), err)
		}
		if d := stateOf(t, k, "late"); d.State != spec.StateFailed || d.Failure.Code != "deadline" {
			t.Errorf("%+v", d)
		}
		m.end("first") <- nil
		if <-first.over; first.err != nil || !slices.Equal(m.carried, []string{"first"}) {
			t.Errorf("%v: %v", first.err, m.carried)
		}
	})
}

// Of many that are asked for by one call all are accepted, or none.
func TestQueueAllOrNone(t *testing.T) {
	queue(t, func(t *testing.T, k *Queue, _ *fakeMaker) {
		first := ask(k, app("first", spec.Terms{}))
		for range 2 {
			ask(k, app("", spec.Terms{}))
		}
		many := func(n int) error {
			return k.Many(t.Context(),
				spec.Many{Requests: []spec.Request{app("many", spec.Terms{})}, Count: n, Terms: spec.Terms{Detach: true}},
				spec.ManyWatch{Watch: func(int) spec.Watch { return spec.Watch{} }})
		}
		var busy *admit.BusyError
		if err := many(7); !errors.As(err, &busy) {
			t.Errorf("one more than there is room for: %v", err)
		}
		if n := len(k.List(spec.DeploymentQuery{All: true})); n != 3 {
			t.Errorf("%d deployments are known of a call that failed and three before", n)
		}
		// What there is never room for is not told to come again.
		if err := many(10); !errors.Is(err, ErrRequest) || !strings.Contains(err.Error(), "at most 9") {
			t.Errorf("more than the queue holds: %v", err)
		}
		if err := many(6); err != nil {
			t.Errorf("as many as there is room for: %v", err)
		}
		first.leave()
		<-first.over
	})
}

// A deployment is called off by who asked for it, by whatever way it is named.
func TestQueueCancel(t *testing.T) {
	queue(t, func(t *testing.T, k *Queue, _ *fakeMaker) {
		first := ask(k, app("first", spec.Terms{Caller: "me", Key: "k"}))
		queued := ask(k, app("queued", spec.Terms{Caller: "me"}))
		id := stateOf(t, k, "queued").ID
		for _, ref := range []spec.DeploymentRef{{ID: id, Caller: "them"}, {ID: "none"},
			{Key: "k", Caller: "them"}} {
			if _, err := k.Cancel(t.Context(), ref); kindOf(err) != "permission" && kindOf(err) != "not_found" {
				t.Errorf("%+v: %v", ref, err)
			}
		}
		for _, ref := range []spec.DeploymentRef{{ID: id}, {Key: "k", Caller: "me"}} {
			d, err := k.Cancel(t.Context(), ref)
			if err != nil || d.State != spec.StateCanceled || d.Failure == nil || d.Failure.Code != "canceled" {
				t.Errorf("%+v: %+v, %v", ref, d, err)
			}
		}
		<-first.over
		<-queued.over
		if kindOf(first.err) != "canceled" || kindOf(queued.err) != "canceled" {
			t.Errorf("who waited is told %v, %v", first.err, queued.err)
		}
		if d, err := k.Cancel(t.Context(), spec.DeploymentRef{ID: id}); err != nil ||
			d.State != spec.StateCanceled {
			t.Errorf("once more: %+v, %v", d, err)
		}
	})
}

// Who watches is told of the place in the queue, and the list has it.
func TestQueuePlaces(t *testing.T) {
	queue(t, func(t *testing.T, k *Queue, m *fakeMaker) {
		ask(k, app("first", spec.Terms{}))
		ask(k, app("second", spec.Terms{}))
		var mu sync.Mutex
		var told []string
		third := make(chan error, 1)
		go func() {
			_, err := k.Deploy(context.Background(), app("third", spec.Terms{}),
				spec.Watch{Deployment: func(d spec.Deployment) {
					mu.Lock()
					defer mu.Unlock()
					told = append(told, strings.TrimSpace(fmt.Sprint(d.State, " ", d.Position, d.Waits)))
				}})
			third <- err
		}()
		synctest.Wait()
		if d := stateOf(t, k, "third"); d.State != spec.StateQueued || d.Position != 2 || d.Waits != spec.WaitsTurn {
			t.Errorf("%+v", d)
		}
		for _, name := range []string{"first", "second", "third"} {
			m.end(name) <- nil
			time.Sleep(time.Second)
		}
		if err := <-third; err != nil {
			t.Error(err)
		}
		if want := []string{"queued 2turn", "queued 1turn", "deploying 0", "done 0"}; !slices.Equal(told, want) {
			t.Errorf("told %q, want %q", told, want)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if k.mu.Lock(); k.telling {
			t.Error("somebody looks at an empty queue")
		}
		k.mu.Unlock()
	})
}

// A container belongs to its caller, or to the administrators, also when another daemon makes it
// than the one that was asked.
func TestQueueOwners(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "deployments")
		asked := map[string]spec.Terms{"root": {Caller: spec.Local, Admin: true},
			"boss": {Caller: "token:boss", Admin: true}, "ci": {Caller: "token:ci"}}
		want := map[string]string{"root": "", "boss": "", "ci": "token:ci"}
		first, second := &fakeMaker{}, &fakeMaker{}
		k := queueOf(t, path, first)
		for name, terms := range asked {
			terms.Detach = true
			err := k.Many(t.Context(), spec.Many{Requests: []spec.Request{app(name, terms)}, Terms: terms},
				spec.ManyWatch{Watch: func(int) spec.Watch { return spec.Watch{} }})
			if err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		if err := k.Close(); err != nil {
			t.Fatal(err)
		}
		for name, owner := range first.owners {
			if owner != want[name] {
				t.Errorf("%s belongs to %q", name, owner)
			}
		}
		second.ends = map[string]chan error{}
		for name := range asked {
			second.end(name) <- nil
		}
		if err := queueOf(t, path, second).Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(first.owners) == 0 || !maps.Equal(second.owners, want) {
			t.Errorf("the first queue's belong to %q, the next one's to %q", first.owners, second.owners)
		}
	})
}

// What an earlier daemon has accepted: containers that have started are awaited, what is
// detached begins anew, though it be more than the queue holds, what a client waited for has failed.
func TestQueueRecover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "deployments")
		j, err := journal.Open(journal.Config{Path: path})
		if err != nil {
			t.Fatal(err)
		}
		var all []journal.Entry
		add := func(name string, detached bool) {
			all = append(all, journal.Entry{Request: app(name, spec.Terms{}), Sum: "s",
				Deployment: spec.Deployment{ID: name, Name: name, Image: "docker.io/library/app:1",
					State: spec.StateQueued, Asked: time.Now(), Detached: detached}})
		}
		const many = 30 // the queue has room for eight
		for i := range many {
			add(fmt.Sprint("lone-", i), true)
		}
		add("started", false)
		add("halfway", true)
		add("waited-for", false)
		add("half-a-clone", true)
		add("half-of-nobodys", false)
		if _, err := j.Accept(all); err != nil {
			t.Fatal(err)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		m := &fakeMaker{containers: map[string]*engine.Info{"started": {Status: engine.Running},
			"halfway":      {Status: engine.Created},
			"half-a-clone": {Status: engine.Running}, "half-of-nobodys": {Status: engine.Running}}}
		k := queueOf(t, path, m)
		if err := k.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i := range many {
			m.end(fmt.Sprint("lone-", i)) <- nil
		}
		m.end("halfway") <- nil
		m.end("half-a-clone") <- nil
		time.Sleep(time.Minute)
		synctest.Wait()
		for _, e := range all {
			want := spec.StateDone
			if e.Name == "waited-for" || e.Name == "half-of-nobodys" {
				want = spec.StateFailed
			}
			if d := stateOf(t, k, e.Name); d.State != want || d.ID != e.ID {
				t.Errorf("%s is %s: %+v", e.Name, d.State, d.Failure)
			}
		}
		if d := stateOf(t, k, "waited-for"); d.Failure == nil || d.Failure.Code != "stopping" {
			t.Errorf("%+v", d)
		}
		slices.Sort(m.takenBack)
		if !slices.Equal(m.adopted, []string{"started"}) ||
			!slices.Equal(m.takenBack, []string{"half-a-clone", "half-of-nobodys", "halfway"}) ||
			len(m.carried) != many+2 {
			t.Errorf("adopted %v, taken back %v, %d made", m.adopted, m.takenBack, len(m.carried))
		}
		lone := slices.DeleteFunc(slices.Clone(m.carried), func(s string) bool {
			return strings.HasPrefix(s, "half")
		})
		for i, name := range lone {
			if name != fmt.Sprint("lone-", i) {
				t.Fatalf("they began in the order %v", m.carried)
			}
		}
	})
}

// When the queue closes, what clients wait for has ended, and what is detached is the next one's.
func TestQueueClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "deployments")
		m := &fakeMaker{}
		k := queueOf(t, path, m)
		waits := ask(k, app("waits", spec.Terms{}))
		if err := k.Many(t.Context(),
			spec.Many{Requests: []spec.Request{app("lone", spec.Terms{})},
				Terms: spec.Terms{Detach: true, Deadline: time.Hour, Key: "l"}},
			spec.ManyWatch{Watch: func(int) spec.Watch { return spec.Watch{} }}); err != nil {
			t.Fatal(err)
		}
		if err := k.Close(); err != nil {
			t.Fatal(err)
		}
		if <-waits.over; kindOf(waits.err) != "stopping" {
			t.Errorf("who waited is told %v", waits.err)
		}
		if _, err := k.Deploy(t.Context(), app("after", spec.Terms{}), spec.Watch{}); kindOf(err) != "stopping" {
			t.Errorf("a closed queue takes %v", err)
		}
		next := queueOf(t, path, m)
		if err := next.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		if d := stateOf(t, next, "waits"); d.State != spec.StateFailed {
			t.Errorf("%+v", d)
		}
		time.Sleep(2 * time.Hour) // its deadline holds for the next one, too
		synctest.Wait()
		if d := stateOf(t, next, "lone"); d.State != spec.StateFailed || d.Failure.Code != "deadline" {
			t.Errorf("%+v", d)
		}
	})
}

// What cannot be written down is not begun, and gives its place back.
func TestQueueCannotWrite(t *testing.T) {
	queue(t, func(t *testing.T, k *Queue, m *fakeMaker) {
		if err := k.j.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := k.Deploy(t.Context(), app("web", spec.Terms{}), spec.Watch{}); !errors.Is(err,
			journal.ErrClosed) {
			t.Errorf("%v", err)
		}
		if s := k.d.admission.Stats(); s.Running != 0 || s.Waiting[spec.WaitsTurn] != 0 || len(m.carried) != 0 ||
			len(k.List(spec.DeploymentQuery{All: true})) != 0 {
			t.Errorf("%+v, %v", s, m.carried)
		}
	})
}
