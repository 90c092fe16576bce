package deploy

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/deploy/journal"
	"dewpoint/internal/engine"
	"dewpoint/internal/spec"
)

// QueueConfig says what a Queue works with. Deployer and Path are required.
type QueueConfig struct {
	Deployer *Deployer
	Path     string // of the journal
	// Failure says an error as the API does. nil knows texts only.
	Failure func(error) *spec.Failure
	Log     *slog.Logger // nil discards
}

// Queue takes deployments in, writes them into the journal before anything is made for
// them, and has the Deployer carry each. It answers for what it has accepted: also
// when the daemon was killed meanwhile, each ends as done, failed or canceled, or
// is deployed anew if nobody but the Queue waits for it; see Recover.
//
// Who asks for a deployment keeps it going: when the last of them goes away it is
// undone, unless it is detached. Who only watches keeps nothing. A Queue is safe for
// concurrent use.
type Queue struct {
	cfg  QueueConfig
	d    *Deployer
	make maker // d but for tests
	j    *journal.Journal
	life context.Context
	stop context.CancelCauseFunc
	bg   sync.WaitGroup

	mu      sync.Mutex
	live    map[string]*task // guarded by mu; by ID
	serial  uint64           // guarded by mu
	telling bool             // guarded by mu: tellPlaces runs
}

// maker is what a Queue has its deployments made by.
type maker interface {
	// carry is a deployment, from its place in the queue until it ends.
	carry(ctx context.Context, r *run, w spec.Watch) (spec.Record, error)
	// made gives the containers that deployments have made, by the deployments' IDs.
	made(ctx context.Context) (map[string]*engine.Info, error)
	// adopt waits until a container is ready that an earlier daemon has started. One that was being restored it
	// makes one of its own; errIncomplete if that cannot be, or if the container has ended: it had not served
	// yet.
	adopt(ctx context.Context, r *run, c *engine.Info, asked time.Time, w spec.Watch) (spec.Record, error)
	// takeBack removes what there is of a container that has not started.
	takeBack(ctx context.Context, name string) error
}

// ended is why a deployment is called off, or is refused.
type ended struct{ kind, text, remedy string }

func (e *ended) Error() string  { return e.text }
func (e *ended) Kind() string   { return e.kind }
func (e *ended) Remedy() string { return e.remedy }

var (
	errGone   = &ended{"canceled", "who asked for the deployment has gone away", "deploy again"}
	errCalled = &ended{"canceled", "the deployment was called off", "deploy again"}
	errLate   = &ended{"deadline", "the deployment was not done by its deadline",
		"allow more time, or look at what it waited for"}
	errStop   = &ended{"stopping", "dewd is stopping", "try again when it runs"}
	errKilled = &ended{"stopping", "dewd was killed while it deployed; what was made was taken back",
		"deploy again"}
	errReused = &ended{"key_reused", "the key stands for another deployment",
		"take another key for what is not the same"}
	errUnknown  = &ended{"not_found", "there is no such deployment", "those that have ended are known for a day"}
	errNoRecord = &ended{"unsupported", "the start of an image that no registry gives cannot be recorded",
		"push the image to a registry, and run it from there"}
	errOthers = &ended{"permission", "the deployment is another caller's",
		"ask who asked for it, or an administrator"}
)

// LabelDeployment is the ID of the deployment that made a container, LabelCaller who asked for
// it, LabelRequest what was asked for, as JSON, if it is short.
const (
	LabelDeployment = "dewpoint.deployment"
	LabelCaller     = "dewpoint.caller"
	LabelRequest    = "dewpoint.request"
	maxRequest      = 3 << 10 // bytes; containerd takes 4096 for a label
)

// NewQueue opens the journal. Recover must follow, and Close.
func NewQueue(cfg QueueConfig) (*Queue, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Failure == nil {
		cfg.Failure = func(err error) *spec.Failure {
			return &spec.Failure{Code: "internal", Message: err.Error(), Exit: 1}
		}
	}
	j, err := journal.Open(journal.Config{Path: cfg.Path, Log: cfg.Log})
	if err != nil {
		return nil, err
	}
	k := &Queue{cfg: cfg, d: cfg.Deployer, make: cfg.Deployer, j: j, live: map[string]*task{}}
	k.life, k.stop = context.WithCancelCause(context.Background())
	return k, nil
}

// Close undoes what is under way and waits for that. What is detached stays in the
// journal, for the next Queue: of that, containers that have started go on.
func (k *Queue) Close() error {
	k.stop(errStop)
	k.bg.Wait()
	return k.j.Close()
}

// Deploy carries req until the container is ready. If ctx ends before, or anything fails before the container
// has started, nothing of it is left. A container that starts and is not ready in time is stopped; it, or one
// that exits before, is kept for inspection, unless req.Remove or req.Record. A request whose key is known
// joins that deployment, or gives its record again.
func (k *Queue) Deploy(ctx context.Context, req spec.Request, w spec.Watch) (spec.Record, error) {
	got, err := k.ask(ctx, []spec.Request{req}, 0, func(int) spec.Watch { return w })
	if err != nil {
		return spec.Record{}, err
	}
	return got[0].wait(ctx)
}

// Many deploys many; see api.Deployments.
func (k *Queue) Many(ctx context.Context, m spec.Many, w spec.ManyWatch) error {
	all, err := m.All()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrRequest, err)
	}
	got, err := k.ask(ctx, all, m.Parallel, w.Watch)
	if err != nil {
		return err
	}
	if m.Terms.Detach {
		return k.sure(ctx, got)
	}
	var g sync.WaitGroup
	for i, a := range got {
		g.Go(func() {
			r, err := a.wait(ctx)
			var f *spec.Failure
			if err != nil {
				f = k.failure(err)
			}
			w.Ended(i, r, f)
		})
	}
	g.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// sure returns when what was accepted survives a power cut.
func (k *Queue) sure(ctx context.Context, got []*asked) error {
	for _, a := range got {
		if a.t != nil {
			a.t.leave(a)
			if err := a.t.written(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

func (k *Queue) failure(err error) *spec.Failure {
	var f *spec.Failure
	if errors.As(err, &f) {
		return f
	}
	return k.cfg.Failure(err)
}

// asked is one deployment that somebody asked for: a task under way or, replayed, what
// an earlier one has come to.
type asked struct {
	t    *task
	w    *watcher
	past spec.Deployment
}

// wait returns how the deployment ended. When ctx ends before, it is undone unless somebody
// else asks for it, or it is detached.
func (a *asked) wait(ctx context.Context) (spec.Record, error) {
	if a.t == nil {
		return outcome(a.past)
	}
	select {
	case <-a.t.done:
		return a.t.rec, a.t.err
	case <-ctx.Done():
	}
	if a.t.leave(a) {
		<-a.t.done
	}
	return spec.Record{}, context.Cause(ctx)
}

// outcome is what Deploy returned of one that has ended.
func outcome(d spec.Deployment) (rec spec.Record, err error) {
	if d.Record != nil {
		rec = *d.Record
	}
	if d.Failure != nil {
		err = d.Failure
	}
	return rec, err
}

// ask accepts requests: all or, with an error, none. Those that are new begin.
func (k *Queue) ask(ctx context.Context, reqs []spec.Request, parallel int,
	watch func(int) spec.Watch) ([]*asked, error) {
	fresh := make([]*task, len(reqs))
	for i, r := range reqs {
		t, err := k.task(ctx, r)
		if err != nil {
			return nil, err
		}
		fresh[i] = t
	}
	var group *admit.Group
	if parallel > 0 {
		group = &admit.Group{Limit: parallel}
		for _, t := range fresh {
			t.entry.Group, t.entry.Parallel = fresh[0].entry.ID, parallel
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.life.Err() != nil {
		return nil, errStop
	}
	got, begin, err := k.sort(fresh)
	if most := k.d.admission.Most(); err == nil && len(begin) > most {
		err = fmt.Errorf("%w: %d deployments at once are more than the queue has room for: ask for at most %d by one call",
			ErrRequest, len(begin), most)
	}
	if err == nil {
		err = k.accept(begin, group)
	}
	if err != nil {
		return nil, err
	}
	for i, a := range got {
		w := spec.Watch{}
		if watch != nil {
			w = watch(i)
		}
		if reqs[i].Terms.Detach { // it is told that it was accepted, no more
			w = spec.Watch{Deployment: w.Deployment}
		}
		switch {
		case a.t != nil:
			a.w = a.t.join(w, true)
		case w.Deployment != nil:
			w.Deployment(a.past)
		}
	}
	for _, t := range begin {
		k.begin(t, func() (spec.Record, error) { return k.make.carry(t.ctx, t.run, t.watch()) })
	}
	return got, nil
}

// sort tells what is new from what is known by its key. It is called with mu held.
func (k *Queue) sort(fresh []*task) (got []*asked, begin []*task, err error) {
	for _, t := range fresh {
		key := [2]string{t.entry.Caller, t.entry.Key}
		if t.entry.Key == "" {
			got, begin = append(got, &asked{t: t}), append(begin, t)
			continue
		}
		past, sum, known := k.j.Key(key[0], key[1])
		switch {
		case known && sum != t.entry.Sum:
			return nil, nil, errReused
		case known && past.Over():
			got = append(got, &asked{past: past})
		case known && k.live[past.ID] != nil:
			got = append(got, &asked{t: k.live[past.ID]})
		default:
			got, begin = append(got, &asked{t: t}), append(begin, t)
		}
	}
	return got, begin, nil
}

// accept gives tasks their places in the queue and writes them down. It is called with mu held.
func (k *Queue) accept(begin []*task, g *admit.Group) error {
	entries := make([]journal.Entry, len(begin))
	for i, t := range begin {
		var err error
		if err = t.enter(g, false); err != nil {
			undo(begin[:i])
			return err
		}
		entries[i] = t.entry
	}
	if len(begin) == 0 {
		return nil
	}
	seq, err := k.j.Accept(entries)
	if err != nil {
		undo(begin)
		return err
	}
	for _, t := range begin {
		t.seq = seq
	}
	return nil
}

// undo gives places in the queue back.
func undo(begin []*task) {
	for _, t := range begin {
		t.run.place.Done(0)
	}
}

// begin lets a task run. It is called with mu held.
func (k *Queue) begin(t *task, run func() (spec.Record, error)) {
	k.serial++
	t.serial = k.serial
	k.live[t.entry.ID] = t
	k.bg.Go(func() {
		rec, err := run()
		k.end(t, rec, err)
	})
	if !k.telling {
		k.telling = true
		k.bg.Go(k.tellPlaces)
	}
}

// placesEvery is the time between two looks at the queue, for who watches.
const placesEvery = 400 * time.Millisecond

// tellPlaces tells who watches a deployment in the queue of its place there, as long as
// any is under way.
func (k *Queue) tellPlaces() {
	tick := time.NewTicker(placesEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-k.life.Done(): // its tasks end
			return
		}
		k.mu.Lock()
		if len(k.live) == 0 {
			k.telling = false
			k.mu.Unlock()
			return
		}
		var waiting []*task
		for _, t := range k.live {
			if t.watched() {
				waiting = append(waiting, t)
			}
		}
		k.mu.Unlock()
		for i, p := range k.places(waiting) {
			waiting[i].moved(p)
		}
	}
}

// places are those of tasks that have one.
func (k *Queue) places(tasks []*task) []admit.Place {
	tickets := make([]*admit.Ticket, len(tasks))
	for i, t := range tasks {
		tickets[i] = t.run.place
	}
	return k.d.admission.Places(tickets)
}

// task is a deployment that was understood. ctx gives it values; it does not end it.
func (k *Queue) task(ctx context.Context, req spec.Request) (*task, error) {
	sum := sumOf(req)
	r, err := k.d.parse(req)
	if err != nil {
		return nil, err
	}
	r.Name = r.name
	now := time.Now()
	e := journal.Entry{Request: r.Request, Sum: sum, Admin: req.Terms.Admin,
		Deployment: spec.Deployment{ID: newID(), Name: r.name, Image: r.ref.String(),
			Caller: req.Terms.Caller, Key: req.Terms.Key, State: spec.StateQueued, Asked: now.UTC(),
			Detached: req.Terms.Detach}}
	if req.Terms.Deadline > 0 {
		e.Until = now.Add(req.Terms.Deadline).UTC()
	}
	return k.newTask(ctx, r, e), nil
}

// newTask makes the task of an entry.
func (k *Queue) newTask(ctx context.Context, r *run, e journal.Entry) *task {
	t := &task{k: k, run: r, entry: e, done: make(chan struct{}), stand: e.Deployment}
	r.id, r.written = e.ID, t.written
	ctx = context.WithoutCancel(ctx)
	end := context.CancelFunc(func() {})
	if !e.Until.IsZero() {
		ctx, end = context.WithDeadlineCause(ctx, e.Until, errLate)
	}
	t.ctx, t.cancel = context.WithCancelCause(ctx)
	unhook := context.AfterFunc(k.life, func() { t.cancel(errStop) })
	t.release = func() { unhook(); t.cancel(nil); end() }
	return t
}

// end writes down what a deployment has come to, and tells it.
func (k *Queue) end(t *task, rec spec.Record, err error) {
	d := t.entry.Deployment
	d.State, d.Ended = spec.StateDone, time.Now().UTC()
	if rec.Image != "" {
		d.Record = &rec
	}
	var why *ended
	if err != nil {
		d.State, d.Failure = spec.StateFailed, k.failure(err)
		if errors.As(err, &why) && why.kind == "canceled" {
			d.State = spec.StateCanceled
		}
	}
	// What was called off before it came to anything leaves its key free: who asks again
	// with it means it.
	void := why == errGone || why == errStop || why == errKilled
	k.mu.Lock()
	defer k.mu.Unlock()
	if why != errStop || !t.entry.Detached {
		k.j.End(d, void)
	}
	delete(k.live, t.entry.ID)
	t.finish(d, rec, err)
	t.release()
}

// GoesOn reports whether a deployment is under way.
func (k *Queue) GoesOn(id string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.live[id] != nil
}

// find is the deployment that ref names. It is called with mu held.
func (k *Queue) find(ref spec.DeploymentRef) (*task, spec.Deployment, error) {
	if ref.ID == "" {
		d, _, ok := k.j.Key(ref.Caller, ref.Key)
		if !ok {
			return nil, d, errUnknown
		}
		ref.ID = d.ID
	}
	if t := k.live[ref.ID]; t != nil {
		return t, spec.Deployment{}, nil
	}
	d, ok := k.j.Get(ref.ID)
	if !ok {
		return nil, d, errUnknown
	}
	return nil, d, nil
}

// Watch follows a deployment until it has ended; see api.Deployments.
func (k *Queue) Watch(ctx context.Context, ref spec.DeploymentRef, w spec.Watch) (spec.Record, error) {
	k.mu.Lock()
	t, past, err := k.find(ref)
	if err != nil {
		k.mu.Unlock()
		return spec.Record{}, err
	}
	a := &asked{t: t, past: past}
	if t != nil {
		a.w = t.join(w, false)
	} else if w.Deployment != nil {
		w.Deployment(past)
	}
	k.mu.Unlock()
	return a.wait(ctx)
}

// Cancel calls a deployment off; see api.Deployments.
func (k *Queue) Cancel(ctx context.Context, ref spec.DeploymentRef) (spec.Deployment, error) {
	k.mu.Lock()
	t, past, err := k.find(ref)
	k.mu.Unlock()
	if err != nil {
		return past, err
	}
	if t != nil {
		past = t.entry.Deployment
	}
	if ref.Caller != "" && past.Caller != ref.Caller {
		return spec.Deployment{}, errOthers
	}
	if t == nil {
		return past, nil
	}
	t.cancel(errCalled)
	select {
	case <-t.done:
		return t.last, nil
	case <-ctx.Done():
		return spec.Deployment{}, context.Cause(ctx)
	}
}

// List gives deployments in the order in which they were asked for.
func (k *Queue) List(q spec.DeploymentQuery) []spec.Deployment {
	var out []spec.Deployment
	k.mu.Lock()
	tasks := slices.Collect(maps.Values(k.live))
	k.mu.Unlock()
	if q.All { // read while nobody waits for the queue, and behind the others: what ends meanwhile is in both
		out = k.j.List(cmp.Or(max(0, q.Limit), 100))
		ended := map[string]bool{}
		for _, d := range out {
			ended[d.ID] = true
		}
		tasks = slices.DeleteFunc(tasks, func(t *task) bool { return ended[t.entry.ID] })
	}
	slices.SortFunc(tasks, func(a, b *task) int { return int(a.serial) - int(b.serial) })
	out = append(out, k.now(tasks)...)
	slices.SortStableFunc(out, func(a, b spec.Deployment) int { return a.Asked.Compare(b.Asked) })
	return out
}

// now is where tasks stand.
func (k *Queue) now(tasks []*task) []spec.Deployment {
	queued := make([]*task, 0, len(tasks))
	for _, t := range tasks {
		if t.placed() {
			queued = append(queued, t)
		}
	}
	at := map[*task]admit.Place{}
	for i, p := range k.places(queued) {
		at[queued[i]] = p
	}
	out := make([]spec.Deployment, len(tasks))
	for i, t := range tasks {
		t.mu.Lock()
		out[i] = t.standing(at[t])
		t.mu.Unlock()
	}
	return out
}

// RequestOf gives what is known of a container: what was asked for, and the record of its
// deployment; nil where it is not known any more.
func (k *Queue) RequestOf(labels map[string]string) (*spec.Request, *spec.Record) {
	id := labels[LabelDeployment]
	d, _ := k.j.Get(id)
	var req spec.Request
	if text := labels[LabelRequest]; text == "" || json.Unmarshal([]byte(text), &req) != nil {
		var known bool
		if req, known = k.j.Request(id); !known {
			return nil, d.Record
		}
	}
	return &req, d.Record
}

// sumOf is what a key stands for.
func sumOf(req spec.Request) string {
	b, err := json.Marshal(req) // without its Terms
	if err != nil {
		return err.Error()
	}
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:16])
}

func newID() string { return strings.ToLower(rand.Text()[:13]) }
