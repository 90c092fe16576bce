package api_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

// manySeen is what a client was told of many deployments.
type manySeen struct {
	mu      sync.Mutex
	states  map[int][]string      // guarded by mu
	stages  map[int][]string      // guarded by mu
	records map[int]spec.Record   // guarded by mu
	failed  map[int]*spec.Failure // guarded by mu
}

func (s *manySeen) watch() spec.ManyWatch {
	s.states, s.stages, s.records, s.failed = map[int][]string{}, map[int][]string{}, map[int]spec.Record{},
		map[int]*spec.Failure{}
	return spec.ManyWatch{
		Watch: func(i int) spec.Watch {
			return spec.Watch{
				Deployment: func(d spec.Deployment) {
					s.mu.Lock()
					defer s.mu.Unlock()
					s.states[i] = append(s.states[i], d.State)
				},
				Reached: func(_, stage string, _ float64) {
					s.mu.Lock()
					defer s.mu.Unlock()
					s.stages[i] = append(s.stages[i], stage)
				},
			}
		},
		Ended: func(i int, r spec.Record, f *spec.Failure) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.records[i], s.failed[i] = r, f
		},
	}
}

// Each of many deployments is told of under its index; one that fails does not fail the others.
func TestDeployManyTellsOfEach(t *testing.T) {
	_, _, c := newNode(t)
	seen := &manySeen{}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	m := spec.Many{Requests: []spec.Request{{Image: nginx.Name, Name: "w", Net: "none"},
		{Image: "missing", Net: "none"}}, Count: 3, Parallel: 2, Terms: spec.Terms{Key: "k"}}
	if err := c.DeployMany(ctx, m, seen.watch()); err != nil {
		t.Fatal(err)
	}
	for i := range 6 {
		if i < 3 {
			if seen.failed[i] != nil || seen.records[i].Name != fmt.Sprintf("w-%d", i+1) ||
				seen.stages[i][len(seen.stages[i])-1] != spec.Ready {
				t.Errorf("deployment %d: %+v, %v, stages %v", i, seen.records[i], seen.failed[i], seen.stages[i])
			}
		} else if seen.failed[i] == nil || seen.failed[i].Code != string(api.NotFound) {
			t.Errorf("deployment %d of an image that is not there: %v", i, seen.failed[i])
		}
		if len(seen.states[i]) == 0 {
			t.Errorf("deployment %d was not told of", i)
		}
	}
	list, err := c.ListDeployments(ctx, spec.DeploymentQuery{All: true})
	if err != nil || len(list) != 6 || list[0].Caller != "local" || list[0].Key != "k/0" ||
		list[5].State != spec.StateFailed {
		t.Fatalf("the list: %+v, %v", list, err)
	}
	if r := list[0].Record; r == nil || len(r.Stages) == 0 || len(r.Spans) > 0 {
		t.Errorf("a list has the stages of a record, and no spans: %+v", r)
	}
	whole, err := c.ListDeployments(ctx, spec.DeploymentQuery{All: true, Spans: true})
	if err != nil || len(whole) != 6 || whole[0].Record == nil || len(whole[0].Record.Spans) == 0 {
		t.Errorf("the list with spans: %+v, %v", whole, err)
	}
	if _, err := c.WatchDeployment(ctx, spec.DeploymentRef{ID: list[5].ID},
		spec.Watch{}); codeOf(err) != api.NotFound {
		t.Errorf("watching one that failed: %v", err)
	}
	r, err := c.WatchDeployment(ctx, spec.DeploymentRef{Key: "k/0"}, spec.Watch{})
	if err != nil || r.ID != list[0].ID || r.Name != "w-1" {
		t.Errorf("watching one that is done, by its key: %+v, %v", r, err)
	}
	i, err := c.Inspect(ctx, "w-1")
	if err != nil || i.Request == nil || i.Request.Image != nginx.Name || i.Record == nil || i.OCI == "" ||
		i.Container.Name != "w-1" {
		t.Errorf("inspected: %+v, %v", i, err)
	}
}

// What makes no sense is refused before the node hears of it.
func TestDeployManyRefusesNonsense(t *testing.T) {
	_, _, c := newNode(t)
	long := make([]byte, spec.MaxKey+1)
	for name, m := range map[string]spec.Many{
		"nothing":      {},
		"no image":     {Requests: []spec.Request{{}}},
		"too many":     {Requests: []spec.Request{{Image: nginx.Name}}, Count: spec.MaxMany + 1},
		"below zero":   {Requests: []spec.Request{{Image: nginx.Name}}, Parallel: -1},
		"a long key":   {Requests: []spec.Request{{Image: nginx.Name}}, Terms: spec.Terms{Key: string(long)}},
		"late already": {Requests: []spec.Request{{Image: nginx.Name}}, Terms: spec.Terms{Deadline: -time.Second}},
	} {
		if err := c.DeployMany(t.Context(), m, spec.ManyWatch{}); codeOf(err) != api.BadRequest {
			t.Errorf("%s: %v", name, err)
		}
	}
	if list, err := c.ListDeployments(t.Context(), spec.DeploymentQuery{All: true}); err != nil ||
		len(list) > 0 {
		t.Errorf("accepted: %+v, %v", list, err)
	}
}

// A deployment that is called off is told to who called it off and to who waits.
func TestCancelDeployment(t *testing.T) {
	_, _, c := newNode(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	asked := make(chan spec.Deployment, 10)
	over := make(chan error, 1)
	go func() {
		_, err := c.Deploy(ctx,
			spec.Request{Image: nginx.Name, Net: "none", Cmd: []string{"sleep"}, Ready: "log:never",
				Terms: spec.Terms{Key: "mine"}},
			spec.Watch{Deployment: func(d spec.Deployment) { asked <- d }})
		over <- err
	}()
	d := <-asked
	ended, err := c.CancelDeployment(ctx, spec.DeploymentRef{Key: "mine"})
	if err != nil || ended.ID != d.ID || ended.State != spec.StateCanceled {
		t.Errorf("canceled: %+v, %v", ended, err)
	}
	if err := <-over; codeOf(err) != api.Canceled {
		t.Errorf("who waited is told %v", err)
	}
	if _, err := c.CancelDeployment(ctx, spec.DeploymentRef{ID: "none"}); codeOf(err) != api.NotFound {
		t.Errorf("one that is not there: %v", err)
	}
}

func codeOf(err error) api.Code {
	var e *api.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}
