package api

import (
	"context"
	"errors"
	"sync"

	"connectrpc.com/connect"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

// requestOf reads a request and refuses what the caller may not ask for.
func requestOf(ctx context.Context, s *pb.Spec, t spec.Terms) (spec.Request, error) {
	for _, p := range s.GetPorts() {
		if p.GetHost() > 65535 || p.GetContainer() > 65535 {
			return spec.Request{}, New(BadRequest, "a port is at most 65535")
		}
	}
	r := requestFrom(s)
	r.Terms = t
	if err := r.Validate(); err != nil {
		return r, Of(BadRequest, err)
	}
	return r, host(ctx, &r)
}

func (h *handler) DeployMany(ctx context.Context, req *connect.Request[pb.DeployManyRequest],
	stream *connect.ServerStream[pb.DeployManyResponse]) error {
	m := spec.Many{Count: int(req.Msg.Count), Parallel: int(req.Msg.Parallel),
		Terms: callerOf(ctx).terms(req.Msg.Key, req.Msg.Deadline.AsDuration())}
	m.Terms.Detach = req.Msg.Detach
	for _, s := range req.Msg.Specs {
		r, err := requestOf(ctx, s, spec.Terms{Deadline: m.Terms.Deadline})
		if err != nil {
			return h.fail(ctx, err)
		}
		m.Requests = append(m.Requests, r)
	}
	if _, err := m.All(); err != nil {
		return bad(err)
	}
	f := newManyFeed()
	return h.fail(ctx, pump(ctx, f.wake, func(ctx context.Context) error {
		return h.guard("DeployMany", func() error {
			return h.node.DeployMany(ctx, m, spec.ManyWatch{Watch: f.watch, Ended: f.ended})
		})
	}, func() error {
		for _, s := range f.drain() {
			if err := stream.Send(s); err != nil {
				return err
			}
		}
		return nil
	}))
}

// manyFeed is the feeds of many deployments, by index. It never blocks who tells.
type manyFeed struct {
	wake chan struct{} // has one element when there is something to take

	mu    sync.Mutex
	feeds map[int]*feed                    // guarded by mu; of those under way
	news  []int                            // guarded by mu; whose feeds have something
	over  map[int][]*pb.DeployManyResponse // guarded by mu; last words
	known map[int]bool                     // guarded by mu; that are in news
}

func newManyFeed() *manyFeed {
	return &manyFeed{wake: make(chan struct{}, 1), feeds: map[int]*feed{}, known: map[int]bool{},
		over: map[int][]*pb.DeployManyResponse{}}
}

func (m *manyFeed) watch(i int) spec.Watch {
	f := newFeed()
	f.told = func() { m.announce(i) }
	m.mu.Lock()
	m.feeds[i] = f
	m.mu.Unlock()
	return spec.Watch{Reached: f.reached, Layer: f.layer, Deployment: f.deployment}
}

func (m *manyFeed) announce(i int) {
	m.mu.Lock()
	if !m.known[i] {
		m.known[i] = true
		m.news = append(m.news, i)
	}
	m.mu.Unlock()
	signal(m.wake)
}

func (m *manyFeed) ended(i int, r spec.Record, why *spec.Failure) {
	var last []*pb.DeployManyResponse
	if r.Image != "" {
		last = append(last, &pb.DeployManyResponse{Step: &pb.DeployManyResponse_Record{Record: recordOf(r)}})
	}
	if why != nil {
		last = append(last, &pb.DeployManyResponse{Step: &pb.DeployManyResponse_Error{Error: failureOf(why)}})
	}
	m.mu.Lock()
	m.over[i] = last
	m.mu.Unlock()
	m.announce(i)
}

// drain returns what came since the last take.
func (m *manyFeed) drain() []*pb.DeployManyResponse {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*pb.DeployManyResponse
	for _, i := range m.news {
		from := len(out)
		if f := m.feeds[i]; f != nil {
			n := f.drain()
			if n.deployment != nil {
				step := &pb.DeployManyResponse_Deployment{Deployment: n.deployment}
				out = append(out, &pb.DeployManyResponse{Step: step})
			}
			if len(n.layers) > 0 {
				step := &pb.DeployManyResponse_Layers{Layers: &pb.Layers{Layers: n.layers}}
				out = append(out, &pb.DeployManyResponse{Step: step})
			}
			for _, s := range n.stages {
				out = append(out, &pb.DeployManyResponse{Step: &pb.DeployManyResponse_Stage{Stage: s}})
			}
		}
		if last, over := m.over[i]; over {
			out = append(out, last...)
			delete(m.over, i)
			delete(m.feeds, i)
		}
		for _, s := range out[from:] {
			s.Index = int32(i)
		}
	}
	m.news = nil
	clear(m.known)
	return out
}

func (h *handler) WatchDeployment(ctx context.Context, req *connect.Request[pb.WatchDeploymentRequest],
	stream *connect.ServerStream[pb.DeployResponse]) error {
	ref := spec.DeploymentRef{ID: req.Msg.Id, Key: req.Msg.Key, Caller: callerOf(ctx).name}
	if ref.ID == "" && ref.Key == "" {
		return bad(errors.New("no deployment is named"))
	}
	d := &deploying{h: h, feed: newFeed(), stream: stream}
	var record spec.Record
	w := spec.Watch{Reached: d.feed.reached, Layer: d.feed.layer, Deployment: d.feed.deployment}
	err := pump(ctx, d.feed.wake, func(ctx context.Context) error {
		return h.guard("WatchDeployment", func() (err error) {
			record, err = h.node.WatchDeployment(ctx, ref, w)
			return err
		})
	}, d.progress)
	if record.Image != "" {
		err = errors.Join(err,
			d.send(&pb.DeployResponse{Step: &pb.DeployResponse_Record{Record: recordOf(record)}}))
	}
	return h.fail(ctx, err)
}

func (h *handler) ListDeployments(ctx context.Context,
	req *connect.Request[pb.ListDeploymentsRequest]) (*connect.Response[pb.ListDeploymentsResponse], error) {
	return answer(ctx, h, shortCall, func(ctx context.Context) (*pb.ListDeploymentsResponse, error) {
		q := spec.DeploymentQuery{All: req.Msg.All, Limit: int(req.Msg.Limit), Spans: req.Msg.Spans}
		list, err := h.node.ListDeployments(ctx, q)
		return &pb.ListDeploymentsResponse{Deployments: each(list, func(d spec.Deployment) *pb.Deployment {
			return listed(d, q)
		})}, err
	})
}

func (h *handler) CancelDeployment(ctx context.Context,
	req *connect.Request[pb.CancelDeploymentRequest]) (*connect.Response[pb.CancelDeploymentResponse], error) {
	ref := spec.DeploymentRef{ID: req.Msg.Id, Key: req.Msg.Key}
	if ref.ID == "" && ref.Key == "" {
		return nil, bad(errors.New("no deployment is named"))
	}
	if c := callerOf(ctx); ref.ID == "" || c.role != Admin {
		ref.Caller = c.name
	}
	return answer(ctx, h, longCall, func(ctx context.Context) (*pb.CancelDeploymentResponse, error) {
		d, err := h.node.CancelDeployment(ctx, ref)
		return &pb.CancelDeploymentResponse{Deployment: deploymentOf(d)}, err
	})
}

func (h *handler) Inspect(ctx context.Context,
	req *connect.Request[pb.InspectRequest]) (*connect.Response[pb.InspectResponse], error) {
	if err := named("container", req.Msg.Name); err != nil {
		return nil, err
	}
	return answer(ctx, h, shortCall, func(ctx context.Context) (*pb.InspectResponse, error) {
		i, err := h.node.Inspect(ctx, req.Msg.Name)
		if err == nil {
			err = owned(ctx, i.Container)
		}
		return inspectionOf(i), err
	})
}

func deploymentOf(d spec.Deployment) *pb.Deployment {
	p := &pb.Deployment{Id: d.ID, Name: d.Name, Image: d.Image, Caller: d.Caller, Key: d.Key, State: d.State,
		Position: int32(d.Position), Waits: d.Waits, Asked: timeOf(d.Asked), Ended: timeOf(d.Ended),
		Detached: d.Detached}
	if d.Record != nil {
		p.Record = recordOf(*d.Record)
	}
	if d.Failure != nil {
		p.Error = failureOf(d.Failure)
	}
	return p
}

// listed is deploymentOf as q asks for it.
func listed(d spec.Deployment, q spec.DeploymentQuery) *pb.Deployment {
	if d.Record != nil && !q.Spans {
		r := *d.Record
		r.Spans = nil
		d.Record = &r
	}
	return deploymentOf(d)
}

func deploymentFrom(p *pb.Deployment) spec.Deployment {
	d := spec.Deployment{ID: p.GetId(), Name: p.GetName(), Image: p.GetImage(), Caller: p.GetCaller(),
		Key: p.GetKey(), State: p.GetState(),
		Position: int(p.GetPosition()), Waits: p.GetWaits(), Asked: timeFrom(p.GetAsked()),
		Ended: timeFrom(p.GetEnded()), Detached: p.GetDetached()}
	if p.GetRecord() != nil {
		r := recordFrom(p.GetRecord())
		d.Record = &r
	}
	if p.GetError() != nil {
		d.Failure = failureFrom(p.GetError())
	}
	return d
}

func failureOf(f *spec.Failure) *pb.Error {
	return &pb.Error{Code: f.Code, Message: f.Message, Remedy: f.Remedy, Exit: int32(f.Exit)}
}

func failureFrom(p *pb.Error) *spec.Failure {
	return &spec.Failure{Code: p.GetCode(), Message: p.GetMessage(), Remedy: p.GetRemedy(),
		Exit: int(p.GetExit())}
}

func inspectionOf(i spec.Inspection) *pb.InspectResponse {
	p := &pb.InspectResponse{Container: containerOf(i.Container), Oci: i.OCI}
	if i.Request != nil {
		p.Spec = specOf(*i.Request)
	}
	if i.Record != nil {
		p.Record = recordOf(*i.Record)
	}
	return p
}

func inspectionFrom(p *pb.InspectResponse) spec.Inspection {
	i := spec.Inspection{Container: containerFrom(p.GetContainer()), OCI: p.GetOci()}
	if p.GetSpec() != nil {
		r := requestFrom(p.GetSpec())
		i.Request = &r
	}
	if p.GetRecord() != nil {
		r := recordFrom(p.GetRecord())
		i.Record = &r
	}
	return i
}

// DeployMany implements Deployments.
func (c *Client) DeployMany(ctx context.Context, m spec.Many, w spec.ManyWatch) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.rpc.DeployMany(ctx,
		connect.NewRequest(&pb.DeployManyRequest{Specs: each(m.Requests, specOf), Count: int32(m.Count),
			Parallel: int32(m.Parallel), Key: m.Terms.Key, Deadline: durationOf(m.Terms.Deadline),
			Detach: m.Terms.Detach}))
	if err != nil {
		return c.problem(ctx, err)
	}
	defer stream.Close()
	told := &manyTold{w: w, watches: map[int]spec.Watch{}, records: map[int]spec.Record{}}
	for stream.Receive() {
		told.step(stream.Msg())
	}
	return c.problem(ctx, stream.Err())
}

// manyTold passes on what a node tells of many deployments.
type manyTold struct {
	w       spec.ManyWatch
	watches map[int]spec.Watch
	records map[int]spec.Record
}

func (t *manyTold) step(m *pb.DeployManyResponse) {
	i := int(m.Index)
	w, known := t.watches[i]
	if !known && t.w.Watch != nil {
		w = t.w.Watch(i)
		t.watches[i] = w
	}
	switch s := m.Step.(type) {
	case *pb.DeployManyResponse_Deployment:
		tellDeployment(w, s.Deployment)
	case *pb.DeployManyResponse_Stage:
		tellStage(w, s.Stage)
	case *pb.DeployManyResponse_Layers:
		tellLayers(w, s.Layers)
	case *pb.DeployManyResponse_Record:
		r := recordFrom(s.Record)
		if r.Error != "" { // the error follows
			t.records[i] = r
			return
		}
		t.end(i, r, nil)
	case *pb.DeployManyResponse_Error:
		t.end(i, t.records[i], failureFrom(s.Error))
	}
}

func (t *manyTold) end(i int, r spec.Record, f *spec.Failure) {
	delete(t.records, i)
	if t.w.Ended != nil {
		t.w.Ended(i, r, f)
	}
}

func tellDeployment(w spec.Watch, d *pb.Deployment) {
	if w.Deployment != nil {
		w.Deployment(deploymentFrom(d))
	}
}

// ListDeployments implements Deployments.
func (c *Client) ListDeployments(ctx context.Context, q spec.DeploymentQuery) ([]spec.Deployment, error) {
	r, err := call(ctx, c.conn, c.rpc.ListDeployments,
		&pb.ListDeploymentsRequest{All: q.All, Limit: int32(q.Limit), Spans: q.Spans})
	return each(r.Deployments, deploymentFrom), err
}

// WatchDeployment implements Deployments.
func (c *Client) WatchDeployment(ctx context.Context, ref spec.DeploymentRef, w spec.Watch) (spec.Record,
	error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.rpc.WatchDeployment(ctx,
		connect.NewRequest(&pb.WatchDeploymentRequest{Id: ref.ID, Key: ref.Key}))
	if err != nil {
		return spec.Record{}, c.problem(ctx, err)
	}
	record, _, err := c.receive(ctx, stream, w, false, nil)
	return record, err
}

// CancelDeployment implements Deployments.
func (c *Client) CancelDeployment(ctx context.Context, ref spec.DeploymentRef) (spec.Deployment, error) {
	r, err := call(ctx, c.conn, c.rpc.CancelDeployment, &pb.CancelDeploymentRequest{Id: ref.ID, Key: ref.Key})
	return deploymentFrom(r.Deployment), err
}

// Inspect implements Containers.
func (c *Client) Inspect(ctx context.Context, name string) (spec.Inspection, error) {
	r, err := call(ctx, c.conn, c.rpc.Inspect, &pb.InspectRequest{Name: name})
	return inspectionFrom(r), err
}
