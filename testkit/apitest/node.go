// Package apitest has a node for tests that speak its API: in memory, without
// images or processes, and failing on command.
//
// A container's command is a little script of words: "echo WORD…" and "warn
// WORD…" write a line to standard output or error, "exit N" ends, "sleep" lives
// until it is stopped, "stubborn" until it is killed and says "no" to a stop,
// "cat" writes what it reads until that ends, or an end-of-file key comes, "panic"
// is a defect of the daemon. Anything else ends at once with status 0.
//
// An image exists when it has been added. Its layers "arrive" in ten steps of
// Node.Step each.
package apitest

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

// Node implements api.Node. The zero value is an empty node.
type Node struct {
	Step time.Duration // between two reports of a layer

	processes sync.WaitGroup

	mu         sync.Mutex
	changed    chan struct{}         // guarded by mu; closed when something below changes
	images     map[string]spec.Image // guarded by mu
	pulled     map[string]bool       // guarded by mu
	containers map[string]*container // guarded by mu
	ids        int                   // guarded by mu; that containers have had
	failures   map[string][]failure  // guarded by mu
	events     []spec.Event          // guarded by mu
	made       int                   // guarded by mu: names made up
	learned    map[string]*learned   // guarded by mu; by image

	checkpoints []spec.Checkpoint // guarded by mu
	deployments []*deployment     // guarded by mu; in the order of being asked for
	volumes     []string          // guarded by mu; that were made by themselves
	closed      bool              // guarded by mu
}

type container struct {
	spec.Container
	req    spec.Request
	output []spec.LogChunk
	input  []byte // that was not read yet
	closed bool   // no more input comes
	stop   string // "", "term", "kill"
	gone   bool
}

type failure struct {
	err   error
	after bool
}

var _ api.Node = (*Node)(nil)

// Close kills what runs, calls off what would, and waits until it has ended.
func (n *Node) Close() {
	unlock := n.lock()
	n.closed = true
	for _, d := range n.deployments {
		d.cancel(api.New(api.Stopping, "the node is closed"))
	}
	for _, c := range n.containers {
		c.stop = "kill"
	}
	unlock()
	n.processes.Wait()
}

// Add makes an image known to the registry that this node would ask.
func (n *Node) Add(images ...spec.Image) {
	defer n.lock()()
	for _, i := range images {
		n.images[i.Name] = i
	}
}

// Fail lets the next call of a method return err instead of doing anything.
func (n *Node) Fail(method string, err error) {
	defer n.lock()()
	n.failures[method] = append(n.failures[method], failure{err: err})
}

// FailAfter lets the next call of a method do its work and then return err.
func (n *Node) FailAfter(method string, err error) {
	defer n.lock()()
	n.failures[method] = append(n.failures[method], failure{err, true})
}

// lock returns what unlocks, and wakes who waits for a change.
func (n *Node) lock() func() {
	n.mu.Lock()
	if n.changed == nil {
		n.changed = make(chan struct{})
		n.images, n.pulled = map[string]spec.Image{}, map[string]bool{}
		n.containers, n.failures = map[string]*container{}, map[string][]failure{}
		n.learned = map[string]*learned{}
	}
	return func() {
		close(n.changed)
		n.changed = make(chan struct{})
		n.mu.Unlock()
	}
}

// await calls f, with the node locked, until it returns true.
func (n *Node) await(ctx context.Context, f func() bool) error {
	for {
		unlock := n.lock()
		ok, changed := f(), n.changed
		if ok {
			unlock()
			return nil
		}
		n.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// fault returns what a call of the method returns now, and what it returns
// after its work.
func (n *Node) fault(method string) (now, after error) {
	defer n.lock()()
	queue := n.failures[method]
	if len(queue) == 0 {
		return nil, nil
	}
	n.failures[method] = queue[1:]
	if queue[0].after {
		return nil, queue[0].err
	}
	return queue[0].err, nil
}

// happened is called with mu held.
func (n *Node) happened(e spec.Event) {
	e.Seq, e.Time = uint64(len(n.events)+1), time.Now()
	n.events = append(n.events, e)
}

// find is called with mu held.
func (n *Node) find(name string) (*container, error) {
	of, _, isID := strings.Cut(name, "@")
	if c, ok := n.containers[of]; ok && (!isID || c.ID == name) {
		return c, nil
	}
	return nil, api.New(api.NotFound, fmt.Sprintf("there is no container %s", name))
}

// fetch lets an image's layers arrive, unless they are here.
func (n *Node) fetch(ctx context.Context, name string, w spec.Watch) (spec.Image, bool, error) {
	unlock := n.lock()
	img, known := n.images[name]
	here := n.pulled[name]
	unlock()
	if !known {
		return img, false, api.New(api.NotFound, fmt.Sprintf("there is no image %s", name))
	}
	for _, l := range img.Layers {
		p := spec.LayerProgress{Digest: l.Digest, Size: l.Size, Fetched: l.Size, State: spec.StateComplete}
		for i := range int64(10) {
			if here || w.Layer == nil {
				break
			}
			w.Layer(spec.LayerProgress{Digest: l.Digest, Size: l.Size, Fetched: l.Size * i / 10,
				State: spec.StateFilling, Rate: float64(l.Size)})
			select {
			case <-time.After(n.Step):
			case <-ctx.Done():
				return img, false, context.Cause(ctx)
			}
		}
		if w.Layer != nil {
			w.Layer(p)
		}
	}
	defer n.lock()()
	n.pulled[name] = true
	return img, here, nil
}

// Pull implements api.Deployer.
func (n *Node) Pull(ctx context.Context, req spec.PullRequest, w spec.Watch) (spec.Record, error) {
	now, after := n.fault("Pull")
	if now != nil {
		return spec.Record{}, now
	}
	r := spec.Record{Image: req.Image, Node: "fake", Stages: map[string]float64{}, Way: spec.Way{Pull: "whole"}}
	img, here, err := n.fetch(ctx, req.Image, w)
	if err == nil {
		err = after
	}
	if err != nil {
		r.Error = err.Error()
		return r, err
	}
	r.Digest = img.Digest
	if here {
		r.Way.Pull = "local"
	} else {
		r.Bytes.Registry = img.Size
	}
	reach(r, w, "", spec.Resolved, spec.Complete)
	defer n.lock()()
	n.happened(spec.Event{Kind: spec.EventPulled, Image: req.Image})
	return r, nil
}

func reach(r spec.Record, w spec.Watch, name string, stages ...string) {
	for _, s := range stages {
		at := 0.01 * float64(len(r.Stages)+1)
		r.Stages[s] = at
		if w.Reached != nil {
			w.Reached(name, s, at)
		}
	}
}

// Deploy implements api.Deployer.
func (n *Node) Deploy(ctx context.Context, req spec.Request, w spec.Watch) (spec.Record, error) {
	unlock := n.lock()
	for _, d := range n.deployments {
		if req.Terms.Key != "" && d.Key == req.Terms.Key && d.Caller == req.Terms.Caller {
			unlock()
			return n.WatchDeployment(ctx, spec.DeploymentRef{ID: d.ID}, w)
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	d := n.accept(req, cancel)
	d.State, d.Waits = spec.StateDeploying, ""
	unlock()
	if w.Deployment != nil {
		w.Deployment(n.stand(d))
	}
	r, err := n.deploy(ctx, req, w)
	var f *spec.Failure
	if err != nil {
		f = api.Classify(err).Failure()
	}
	if r.Image != "" {
		r.ID = d.ID
	}
	n.over(ctx, d, r, f)
	return r, err
}

func (n *Node) deploy(ctx context.Context, req spec.Request, w spec.Watch) (spec.Record, error) {
	now, after := n.fault("Deploy")
	r := spec.Record{Name: req.Name, Image: req.Image, Node: "fake", Stages: map[string]float64{},
		Way: spec.Way{Pull: "whole", Start: "boot"}}
	if now != nil {
		r.Error = now.Error()
		return r, now
	}
	img, here, err := n.fetch(ctx, req.Image, w)
	if err != nil {
		r.Error = err.Error()
		return r, err
	}
	if r.Digest = img.Digest; here {
		r.Way.Pull = "local"
	} else {
		r.Bytes.Registry = img.Size
	}
	reach(r, w, "", spec.Resolved, spec.Mounted)
	c, err := n.create(req, img)
	if err != nil {
		r.Error = err.Error()
		return r, err
	}
	r.Name = c.Name
	reach(r, w, c.Name, spec.Created)
	// What it writes comes after it is ready, but where it is ready by what it writes.
	begin := sync.OnceFunc(func() { n.processes.Go(func() { n.live(c, w.Hold) }) })
	defer begin()
	if strings.HasPrefix(req.Ready, "log:") {
		begin()
	}
	if n.restore(c, &r) {
		reach(r, w, c.Name, spec.Restored)
	} else {
		reach(r, w, c.Name, spec.Started)
	}
	if err := n.serve(ctx, c); err != nil {
		if ctx.Err() != nil || req.Record {
			n.undo(c)
		}
		r.Error = err.Error()
		return r, err
	}
	r.Spans = []spec.Span{{Name: "create", To: 0.01}}
	reach(r, w, c.Name, spec.Ready)
	defer n.lock()()
	n.happened(spec.Event{Kind: spec.EventRecord, Name: c.Name, Image: c.Image, Record: &r})
	return r, after
}

func (n *Node) undo(c *container) {
	defer n.lock()()
	c.stop = "kill"
	n.drop(c)
}

func (n *Node) create(req spec.Request, img spec.Image) (*container, error) {
	defer n.lock()()
	if req.Name == "" {
		n.made++
		req.Name = fmt.Sprintf("dew-%d", n.made)
	}
	if n.closed {
		return nil, api.New(api.Stopping, "the node is closed")
	}
	if _, taken := n.containers[req.Name]; taken {
		return nil, api.New(api.NameInUse, fmt.Sprintf("the name %s is taken", req.Name))
	}
	n.ids++
	c := &container{req: req, Container: spec.Container{
		ID: fmt.Sprintf("%s@%d", req.Name, n.ids), Name: req.Name, Image: req.Image, Digest: img.Digest,
		Status: spec.StatusRunning, TTY: req.TTY, Stdin: req.Stdin,
		PID:   100 + len(n.containers),
		Ports: req.Ports, Created: time.Now(), Node: "fake", Caller: req.Terms.Caller,
		Restart: req.Restart,
	}}
	if !req.Health.None() { // its checks succeed
		c.Health = spec.HealthHealthy
	}
	n.containers[c.Name] = c
	return c, nil
}

// serve waits until the container is ready: with log:TEXT when it has written
// that, else at once.
func (n *Node) serve(ctx context.Context, c *container) error {
	text, ok := strings.CutPrefix(c.req.Ready, "log:")
	if !ok {
		return nil
	}
	timeout := cmp.Or(c.req.ReadyTimeout, time.Minute)
	ctx, cancel := context.WithTimeoutCause(ctx, timeout,
		api.New(api.NotReady, fmt.Sprintf("%s was not ready after %v", c.Name, timeout)))
	defer cancel()
	said, status := false, 0
	err := n.await(ctx, func() bool {
		said = slices.ContainsFunc(c.output, func(l spec.LogChunk) bool {
			return strings.Contains(string(l.Data), text)
		})
		status = c.ExitCode
		return said || c.Status == spec.StatusExited
	})
	if err == nil && !said {
		return api.New(api.Exited, fmt.Sprintf("%s exited with status %d before it was ready", c.Name, status))
	}
	return err
}

// live is the container's process.
func (n *Node) live(c *container, hold <-chan struct{}) {
	status := n.script(context.Background(), c, c.req.Cmd, func(stream, line string) {
		defer n.lock()()
		c.output = append(c.output, spec.LogChunk{Stream: stream, Data: []byte(line)})
	})
	unlock := n.lock()
	c.Status, c.ExitCode, c.PID = spec.StatusExited, status, 0
	n.happened(spec.Event{Kind: spec.EventExited, Name: c.Name, ExitCode: &status})
	unlock()
	if !c.req.Remove {
		return
	}
	if hold != nil {
		<-hold
	}
	defer n.lock()()
	n.drop(c)
}

// drop is called with mu held.
func (n *Node) drop(c *container) {
	if !c.gone {
		c.gone = true
		delete(n.containers, c.Name)
		n.happened(spec.Event{Kind: spec.EventRemoved, Name: c.Name})
	}
}

// script runs the words of a command; see the package comment.
func (n *Node) script(ctx context.Context, c *container, words []string,
	print func(stream, line string)) int {
	verbs := []string{"echo", "warn", "exit", "sleep", "stubborn", "cat"}
	for len(words) > 0 {
		verb, rest := words[0], words[1:]
		end := slices.IndexFunc(rest, func(s string) bool { return slices.Contains(verbs, s) })
		if end < 0 {
			end = len(rest)
		}
		args := rest[:end]
		words = rest[end:]
		switch verb {
		case "echo":
			print(spec.Stdout, strings.Join(args, " ")+"\n")
		case "warn":
			print(spec.Stderr, strings.Join(args, " ")+"\n")
		case "exit":
			status, _ := strconv.Atoi(strings.Join(args, ""))
			return status
		case "cat":
			if n.cat(ctx, c, print); c.stop != "" {
				return 137
			}
		case "sleep":
			if n.await(ctx, func() bool { return c.stop != "" }) != nil || c.stop == "kill" {
				return 137
			}
			return 143
		case "stubborn":
			if n.await(ctx, func() bool { return c.stop != "" }) == nil && c.stop == "term" {
				print(spec.Stdout, "no\n")
			}
			_ = n.await(ctx, func() bool { return c.stop == "kill" })
			return 137
		}
	}
	return 0
}

// cat writes what the container reads.
func (n *Node) cat(ctx context.Context, c *container, print func(stream, line string)) {
	for end := false; !end; {
		var read string
		err := n.await(ctx, func() bool {
			read, c.input = string(c.input), nil
			end = c.closed || c.stop != ""
			return end || read != ""
		})
		text, _, eof := strings.Cut(read, "\x04")
		if end = end || eof || err != nil; text != "" {
			print(spec.Stdout, text)
		}
	}
}

// Attach implements api.Containers. A container with a terminal shows the sizes that it gets.
func (n *Node) Attach(ctx context.Context, name string, size spec.Size, std spec.ExecIO) (int, error) {
	if now, _ := n.fault("Attach"); now != nil {
		return 0, now
	}
	unlock := n.lock()
	c, err := n.find(name)
	if err == nil && c.Status != spec.StatusRunning {
		err = api.New(api.NotRunning, fmt.Sprintf("%s does not run", name))
	}
	seen := 0
	if err == nil {
		seen = len(c.output) // before any input: what answers that is wanted
	}
	unlock()
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if c.req.TTY {
		go n.resize(ctx, c, size, std.Resize)
	}
	if std.Stdin != nil && c.req.Stdin {
		go n.input(c, std.Stdin)
	}
	err = n.Logs(ctx, name, spec.LogOptions{Follow: true}, func(l spec.LogChunk) error {
		w := std.Stdout
		if seen--; seen >= 0 {
			return nil
		}
		if l.Stream == spec.Stderr {
			w = std.Stderr
		}
		if w == nil {
			return nil
		}
		_, err := w.Write(l.Data)
		return err
	})
	defer n.lock()()
	return c.ExitCode, err
}

func (n *Node) resize(ctx context.Context, c *container, size spec.Size, changes <-chan spec.Size) {
	for {
		unlock := n.lock()
		c.output = append(c.output, spec.LogChunk{Stream: spec.Stdout,
			Data: fmt.Appendf(nil, "%dx%d\r\n", size.Cols, size.Rows)})
		unlock()
		select {
		case size = <-changes:
		case <-ctx.Done():
			return
		}
	}
}

func (n *Node) input(c *container, r io.Reader) {
	for buf := make([]byte, 1024); ; {
		k, err := r.Read(buf)
		unlock := n.lock()
		c.input = append(c.input, buf[:k]...)
		c.closed = c.closed || err == io.EOF && !c.req.TTY
		unlock()
		if err != nil {
			return
		}
	}
}

// List implements api.Containers.
func (n *Node) List(_ context.Context, all bool) ([]spec.Container, error) {
	if now, _ := n.fault("List"); now != nil {
		return nil, now
	}
	defer n.lock()()
	var list []spec.Container
	for _, name := range slices.Sorted(maps.Keys(n.containers)) {
		if c := n.containers[name]; all || c.Status == spec.StatusRunning {
			list = append(list, c.Container)
		}
	}
	return list, nil
}

// Logs implements api.Containers.
func (n *Node) Logs(ctx context.Context, name string, opt spec.LogOptions,
	emit func(spec.LogChunk) error) error {
	if now, _ := n.fault("Logs"); now != nil {
		return now
	}
	unlock := n.lock()
	c, err := n.find(name)
	seen := 0
	if err == nil && opt.Tail != 0 {
		seen = len(c.output) - min(len(c.output), max(0, opt.Tail))
	}
	unlock()
	for err == nil {
		var news []spec.LogChunk
		over := false
		err = n.await(ctx, func() bool {
			news = c.output[seen:]
			over = c.Status == spec.StatusExited || !opt.Follow
			return over || len(news) > 0
		})
		for _, l := range news {
			if err := emit(l); err != nil {
				return err
			}
		}
		seen += len(news)
		if over {
			return err
		}
	}
	return err
}

// Exec implements api.Containers. Beside the words of a container, "cat" copies
// its input, "size" prints the terminal's sizes until its input ends, and
// "missing" cannot be run.
func (n *Node) Exec(ctx context.Context, name string, req spec.ExecRequest, std spec.ExecIO) (int, error) {
	if now, _ := n.fault("Exec"); now != nil {
		return 0, now
	}
	unlock := n.lock()
	c, err := n.find(name)
	if err == nil && c.Status != spec.StatusRunning {
		err = api.New(api.NotRunning, fmt.Sprintf("%s does not run", name))
	}
	unlock()
	if err != nil {
		return 0, err
	}
	switch req.Args[0] {
	case "missing":
		return 0, api.New(api.CommandMissing, "missing: no such program")
	case "panic":
		panic("as asked")
	case "env":
		_, err := fmt.Fprintln(std.Stdout, strings.Join(req.Env, " "), req.User, req.Dir, req.TTY)
		return 0, err
	case "cat":
		if std.Stdin == nil {
			return 0, nil
		}
		_, err := io.Copy(std.Stdout, std.Stdin)
		return 0, err
	case "size":
		return 0, sizes(req, std)
	}
	status := n.script(ctx, c, req.Args, func(stream, line string) {
		w := std.Stdout
		if stream == spec.Stderr {
			w = std.Stderr
		}
		_, _ = io.WriteString(w, line)
	})
	return status, context.Cause(ctx)
}

func sizes(req spec.ExecRequest, std spec.ExecIO) error {
	fmt.Fprintf(std.Stdout, "%dx%d\r\n", req.Size.Cols, req.Size.Rows)
	over := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, std.Stdin)
		over <- err
	}()
	for {
		select {
		case s := <-std.Resize:
			fmt.Fprintf(std.Stdout, "%dx%d\r\n", s.Cols, s.Rows)
		case err := <-over:
			return err
		}
	}
}
