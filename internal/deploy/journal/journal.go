// Package journal keeps account of deployments, so that a daemon that was killed knows
// what it had accepted, and a client that asks twice gets one container.
//
// # The file
//
// One file that grows by lines, each
//
//	CRC32C MORE JSON
//
// where the JSON is what was accepted or how it ended, and MORE is how many lines of the
// same acceptance follow: of what was accepted together either all is in the journal or
// nothing. A line whose sum is wrong was torn by a crash, or rotted; it is passed over.
// The file is written anew, without what is forgotten, when half of it is of no use.
//
// # What is durable when
//
// Both kinds of lines are written at once, which is enough for a daemon that is killed.
// An acceptance is durable when Durable says so: one fdatasync serves all that wait for it
// then, so a thousand deployments cost an SD card no more than one. An end becomes
// durable within a second or with the next acceptance. If a power cut takes it, the
// deployment is found to be open, and whoever looks after it finds its container.
//
// In memory there is about half a kilobyte for each deployment; requests and records are read from the file,
// but for the records that were listed last. It is not a bbolt database, as the snapshotter has, because a
// transaction there is two fsyncs, and cannot do without.
//
// What ended is kept for Config.Keep and, of that, the newest Config.Most; its key with it.
package journal

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/spec"
)

// Config of a Journal. Path is required; the zero value of the others is the default.
type Config struct {
	Path string
	Keep time.Duration // how long what has ended is kept; 0 is a day
	Most int           // of what has ended; 0 is 2000
	Log  *slog.Logger  // nil discards
}

// Entry is one deployment that was accepted.
type Entry struct {
	spec.Deployment
	Admin    bool         // the caller is an administrator
	Request  spec.Request // its Terms are in Deployment and Until
	Sum      string       // of the request as it was asked for: what the key stands for
	Until    time.Time    // its deadline; zero is none
	Group    string       // deployments that were asked for together have one
	Parallel int          // of the group under way at once; 0 is any
}

// ErrClosed is returned after Close.
var ErrClosed = errors.New("the journal is closed")

// Journal is safe for concurrent use.
type Journal struct {
	cfg Config

	mu        sync.Mutex
	f         *os.File            // guarded by mu
	size      int64               // guarded by mu; of f, in whole lines
	base      int64               // guarded by mu; of f when it was last written anew
	torn      bool                // guarded by mu; f has to be written anew before it is written to
	lost      bool                // guarded by mu; a sync failed, and the next one would not say so
	items     map[string]*item    // guarded by mu; by ID
	order     []*item             // guarded by mu; as they were accepted
	keys      map[[2]string]*item // guarded by mu; by caller and key
	ended     int                 // guarded by mu; of order
	unwritten []*item             // guarded by mu; whose end the file does not have yet
	wrote     uint64              // guarded by mu; counts writes
	synced    uint64              // guarded by mu; what is durable of wrote
	failed    error               // guarded by mu; of the last fdatasync
	turned    chan struct{}       // guarded by mu; closed when synced or failed has changed
	closed    bool                // guarded by mu

	recent map[string]spec.Deployment // guarded by mu; what List gave last, by ID

	hurry chan struct{} // has one element when somebody waits for what is written
	soon  chan struct{} // has one element when something is written that nobody waits for
	stop  chan struct{} // closed by Close
	gone  chan struct{} // closed at the end of sync
}

// item is what memory keeps of a deployment.
type item struct {
	spec.Deployment // without Record and Failure
	sum             string
	void            bool // the key is free again
	accept, end     span
	last            []byte // the line of the end, while the file does not have it
}

// span is where a line's JSON is in the file; n is 0 if it is not there.
type span struct {
	at int64
	n  int
}

// Open reads the journal at cfg.Path, which need not exist. Close must follow.
func Open(cfg Config) (*Journal, error) {
	if cfg.Keep == 0 {
		cfg.Keep = 24 * time.Hour
	}
	if cfg.Most == 0 {
		cfg.Most = 2000
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	j := &Journal{cfg: cfg, items: map[string]*item{}, keys: map[[2]string]*item{},
		turned: make(chan struct{}),
		hurry:  make(chan struct{}, 1), soon: make(chan struct{}, 1), stop: make(chan struct{}),
		gone: make(chan struct{})}
	if err := j.load(); err != nil {
		return nil, fmt.Errorf("journal of deployments: %w", err)
	}
	go j.sync()
	return j, nil
}

// load reads the file, cuts off what a crash has torn, and writes it anew if something is
// forgotten; that it cannot be, on a full disk, is no error.
func (j *Journal) load() error {
	f, err := os.OpenFile(j.cfg.Path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	j.f = f
	bad, err := j.read()
	if err == nil {
		err = f.Truncate(j.size)
	}
	if err == nil {
		err = durable.SyncDir(filepath.Dir(j.cfg.Path))
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	j.base = j.size
	if j.forget() || bad > 0 {
		j.base = -slack
		if err := j.mend(); err != nil && !j.lost {
			return err
		}
	}
	return nil
}

// Accept writes down what was accepted: all of it or, with an error, nothing. What it
// returns is for Durable.
func (j *Journal) Accept(all []Entry) (uint64, error) {
	lines := make([][]byte, len(all))
	for i, e := range all {
		e.Record, e.Failure = nil, nil
		b, err := marshal(line{Accept: &accepted{Entry: e}})
		if err != nil {
			return 0, err
		}
		lines[i] = b
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, e := range all {
		if j.items[e.ID] != nil {
			return 0, fmt.Errorf("journal: deployment %s was accepted before", e.ID)
		}
	}
	if err := j.mend(); err != nil {
		return 0, fmt.Errorf("journal of deployments: %w", err)
	}
	at, err := j.append(lines)
	if err != nil {
		return 0, fmt.Errorf("journal of deployments: %w", err)
	}
	for i, e := range all {
		j.enter(&item{Deployment: e.Deployment, sum: e.Sum, accept: at[i]})
	}
	j.forget()
	return j.wrote, nil
}

// enter is called with mu held.
func (j *Journal) enter(i *item) {
	i.Record, i.Failure = nil, nil
	j.items[i.ID] = i
	j.order = append(j.order, i)
	if i.Key != "" {
		j.keys[[2]string{i.Caller, i.Key}] = i
	}
}

// Durable returns when what Accept has written survives a power cut, or why it does not.
func (j *Journal) Durable(ctx context.Context, seq uint64) error {
	for {
		j.mu.Lock()
		synced, failed, turned, closed := j.synced, j.failed, j.turned, j.closed
		j.mu.Unlock()
		switch {
		case synced >= seq:
			return nil
		case failed != nil:
			return fmt.Errorf("journal of deployments: %w", failed)
		case closed:
			return ErrClosed
		}
		signal(j.hurry)
		select {
		case <-turned:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// End writes down how a deployment has ended: d's state, record and failure. With void
// its key is free again. A file that cannot be written to gets it when it can.
func (j *Journal) End(d spec.Deployment, void bool) {
	b, err := marshal(line{End: &ended{ID: d.ID, State: d.State, Ended: d.Ended, Record: d.Record,
		Failure: d.Failure, Void: void}})
	j.mu.Lock()
	defer j.mu.Unlock()
	i := j.items[d.ID]
	if err != nil || i == nil || i.Over() || j.closed {
		j.cfg.Log.Error("the end of a deployment is not written down", "id", d.ID, "err", err)
		return
	}
	j.finish(i, d.State, d.Ended, void)
	i.last = b
	j.unwritten = append(j.unwritten, i)
	if err := j.pay(); err != nil {
		j.cfg.Log.Error("the end of a deployment is not on disk yet", "id", d.ID, "err", err)
	}
	j.forget()
	signal(j.soon)
}

// signal fills a channel of one element, unless it is full.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// finish is called with mu held.
func (j *Journal) finish(i *item, state string, at time.Time, void bool) {
	i.State, i.Ended, i.void = state, at, void
	j.ended++
	if k := [2]string{i.Caller, i.Key}; void && j.keys[k] == i {
		delete(j.keys, k)
	}
}

// pay writes the ends that the file does not have. It is called with mu held.
func (j *Journal) pay() error {
	if len(j.unwritten) == 0 {
		return nil
	}
	if err := j.mend(); err != nil {
		return err
	}
	for len(j.unwritten) > 0 { // unless the file was written anew just now, with them
		i := j.unwritten[0]
		at, err := j.append([][]byte{i.last})
		if err != nil {
			return err
		}
		i.end, i.last = at[0], nil
		j.unwritten = j.unwritten[1:]
	}
	j.unwritten = nil
	return nil
}

// append writes lines, all or none, and says where their JSON is. It is called with mu held.
func (j *Journal) append(lines [][]byte) ([]span, error) {
	if j.closed {
		return nil, ErrClosed
	}
	var b []byte
	at := make([]span, len(lines))
	for i, l := range lines {
		b, at[i] = seal(b, len(lines)-i-1, l)
		at[i].at += j.size
	}
	if _, err := j.f.WriteAt(b, j.size); err != nil {
		// What is there of it may not stay: later lines would follow it.
		j.torn = j.f.Truncate(j.size) != nil
		return nil, err
	}
	j.size += int64(len(b))
	j.wrote++
	return at, nil
}

// Get gives a deployment with its record.
func (j *Journal) Get(id string) (spec.Deployment, bool) {
	j.mu.Lock()
	i := j.items[id]
	if i == nil {
		j.mu.Unlock()
		return spec.Deployment{}, false
	}
	h := j.half(i)
	j.mu.Unlock()
	return j.whole(h), true
}

// Request gives what a deployment was asked for.
func (j *Journal) Request(id string) (spec.Request, bool) {
	j.mu.Lock()
	i := j.items[id]
	if i == nil {
		j.mu.Unlock()
		return spec.Request{}, false
	}
	b, err := j.text(i.accept)
	j.mu.Unlock()
	if err != nil {
		return spec.Request{}, false
	}
	l, err := parse(b)
	if err != nil || l.Accept == nil {
		return spec.Request{}, false
	}
	return l.Accept.Request, true
}

// Key gives the deployment that a caller's key stands for, and the sum of its request.
func (j *Journal) Key(caller, key string) (d spec.Deployment, sum string, ok bool) {
	j.mu.Lock()
	i := j.keys[[2]string{caller, key}]
	if i == nil || i.Over() && time.Since(i.Ended) > j.cfg.Keep {
		j.mu.Unlock()
		return d, "", false
	}
	h, sum := j.half(i), i.sum
	j.mu.Unlock()
	return j.whole(h), sum, true
}

// List gives the newest of those that have ended, at most so many, the oldest first. Their
// records are shared with other callers: nobody changes them.
func (j *Journal) List(most int) []spec.Deployment {
	halves := j.newest(most)
	out := make([]spec.Deployment, len(halves))
	recent := make(map[string]spec.Deployment, min(len(halves), keepParsed))
	for n, h := range halves {
		d := j.whole(h)
		out[len(out)-1-n] = d
		if n < keepParsed && (d.Record != nil || d.Failure != nil) { // what could not be read is tried again
			recent[d.ID] = d
		}
	}
	j.mu.Lock()
	j.recent = recent
	j.mu.Unlock()
	return out
}

// keepParsed is how many records List keeps for the next one: who looks at deployments looks again, and
// a hundred records take some 5 ms of a processor to parse, and half a megabyte to keep.
const keepParsed = 100

// newest gives the newest of those that have ended, the newest first.
func (j *Journal) newest(most int) (out []half) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, i := range slices.Backward(j.order) {
		if len(out) == most {
			break
		}
		if d, known := j.recent[i.ID]; known {
			out = append(out, half{Deployment: d, parsed: true})
		} else if i.Over() {
			out = append(out, j.half(i))
		}
	}
	return out
}

// Open gives those that have not ended, in the order in which they were accepted.
func (j *Journal) Open() []Entry {
	j.mu.Lock()
	defer j.mu.Unlock()
	var out []Entry
	for _, i := range j.order {
		if i.Over() {
			continue
		}
		l, err := j.line(i.accept)
		if err != nil || l.Accept == nil {
			j.cfg.Log.Error("what was asked for cannot be read", "id", i.ID, "err", err)
			out = append(out, Entry{Deployment: i.Deployment, Sum: i.sum})
			continue
		}
		out = append(out, l.Accept.Entry)
	}
	return out
}

// half is a deployment whose end is not parsed yet: nobody waits for that.
type half struct {
	spec.Deployment
	parsed bool
	end    []byte // nil of one that has not ended
	err    error  // of reading it
}

// half is called with mu held.
func (j *Journal) half(i *item) half {
	h := half{Deployment: i.Deployment, end: i.last}
	if i.Over() && h.end == nil {
		h.end, h.err = j.text(i.end)
	}
	return h
}

// whole parses the end of a deployment. It is called without mu.
func (j *Journal) whole(h half) spec.Deployment {
	d, err := h.Deployment, h.err
	if h.parsed || !d.Over() {
		return d
	}
	var l line
	if err == nil {
		l, err = parse(h.end)
	}
	if err != nil || l.End == nil {
		j.cfg.Log.Error("a record cannot be read", "id", d.ID, "err", err)
		return d
	}
	d.Record, d.Failure = l.End.Record, l.End.Failure
	return d
}

// Close makes everything durable and closes the file. With an error not everything is.
func (j *Journal) Close() error {
	j.mu.Lock()
	if j.closed {
		j.mu.Unlock()
		return nil
	}
	err := j.pay()
	j.closed = true
	j.mu.Unlock()
	close(j.stop)
	<-j.gone
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.lost && durable.Sync(j.f) != nil {
		j.torn, j.lost = true, true
	}
	if j.lost {
		err = errors.Join(err, j.mend())
	}
	if err == nil {
		j.durable(j.wrote, nil)
	} else {
		j.durable(0, err)
	}
	return errors.Join(err, j.f.Close())
}
