package datafs

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

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/presence"
)

// Config says how a Client works. State and Exec must be set. The functions are
// called one at a time, must not block, and may call the Client's methods that
// do not wait: Present, Fail, Abort and Remove.
type Config struct {
	State      string   // directory for datafs's socket and log
	Mountpoint string   // directory where the file system appears; "" is State/datafs
	Exec       []string // program and arguments that call Main with the arguments that follow

	// Want says that a read waits for the bytes [from, to) of a layer, whole
	// pages up to the data's end. However many readers wait, each page is wanted
	// once until it has come or failed.
	Want func(id digest.Digest, from, to int64)
	// Released says that a removed layer is not used any more.
	Released func(id digest.Digest)
	// Lost says that what is mounted of these layers gives errors from now on:
	// datafs died, and no other could take its place in time, or the kernel cannot
	// resend what it left unanswered.
	Lost func(ids []digest.Digest)
	// Healed says that a layer which was lost can be mounted anew, by the same paths.
	Healed func(id digest.Digest)
	Log    *slog.Logger // nil is none

	patience time.Duration // 0 is the constant
	noResend bool          // take the kernel for one that cannot
	mortal   bool          // the datafs ends when this process is killed, as that of a trial does
}

// Client is dewd's side of datafs. It keeps a datafs running, starts another
// one when it dies, and is safe for concurrent use.
type Client struct {
	cfg    Config
	log    *slog.Logger
	ctx    context.Context
	cancel context.CancelFunc
	done   chan struct{} // closed when run has ended

	mu        sync.Mutex
	closed    bool
	layers    map[string]*entry // by hexadecimal name
	next      uint32            // number of the next layer
	device    *os.File
	canResend bool
	down      bool  // the mount was given up, and there is no other yet
	link      *link // nil while there is no datafs
	calls     map[call][]chan error
}

// entry is a layer as dewd knows it.
type entry struct {
	id     string
	number uint32
	content
	index *os.File // nil without a tree
	flags uint8    // flagHeldFile, flagHeldTree, flagRemoved
	mine  bool     // added by this process: its wants are told
	lost  bool     // something that gives errors was mounted of it, and it is not served anew yet
	wants spans
}

// call is a message that will be answered.
type call struct {
	kind kind
	id   string
}

// callTime bounds how long datafs, or one that takes its place, takes to answer.
const callTime = 30 * time.Second

// Start connects to the datafs that runs in cfg.State or, if there is none,
// mounts the file system and starts one. ctx bounds the start only.
func Start(ctx context.Context, cfg Config) (*Client, error) {
	if len(cfg.Exec) == 0 || cfg.State == "" {
		return nil, errors.New("datafs: no program or no directory given")
	}
	if cfg.Mountpoint == "" {
		cfg.Mountpoint = filepath.Join(cfg.State, "datafs")
	}
	if cfg.patience == 0 {
		cfg.patience = patience
	}
	if err := os.MkdirAll(cfg.State, 0o700); err != nil {
		return nil, err
	}
	c := &Client{cfg: cfg, log: cfg.Log, done: make(chan struct{}), layers: map[string]*entry{}, next: 1,
		calls: map[call][]chan error{}}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	p, err := c.adopt(ctx)
	// else a mount is in use that must not go
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
		c.log.Debug("no datafs runs yet", "error", err)
		p, err = c.begin(ctx)
	}
	if err != nil {
		c.cancel()
		c.forgetAll()
		return nil, fmt.Errorf("start datafs: %w", err)
	}
	go c.run(p)
	return c, nil
}

// adopt takes over the datafs that another process left.
func (c *Client) adopt(ctx context.Context) (*peer, error) {
	p, err := dial(ctx, c.cfg.State, c.learn)
	if err != nil {
		c.forgetAll()
		return nil, err
	}
	c.device, p.hello.files = p.hello.files[0], nil
	c.canResend = p.hello.flags&flagResend != 0 && !c.cfg.noResend
	c.connected(p, false)
	if p.hello.flags&flagIdle != 0 {
		p.send(message{kind: kindResend})
	}
	return p, nil
}

// begin mounts the file system and starts the first datafs of the mount.
func (c *Client) begin(ctx context.Context) (*peer, error) {
	if err := leave(c.cfg.Mountpoint); err != nil { // a datafs that nobody can reach may serve it
		return nil, err
	}
	if err := os.MkdirAll(c.cfg.Mountpoint, 0o711); err != nil {
		return nil, err
	}
	device, err := mountFS(c.cfg.Mountpoint)
	if err != nil {
		return nil, err
	}
	c.device = device
	p, err := c.launch(ctx, false)
	if err == nil {
		stuck := time.AfterFunc(c.cfg.patience, func() { detach(c.cfg.Mountpoint) }) // else it waits for a dead one
		err = c.awaitInit()
		stuck.Stop()
	}
	if err != nil && p != nil {
		p.finish()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.link, c.device = nil, nil
		return nil, errors.Join(err, device.Close(), detach(c.cfg.Mountpoint))
	}
	c.down = false
	return p, nil
}

// awaitInit waits until the kernel and datafs have agreed on the protocol, and
// so knows that datafs answers.
func (c *Client) awaitInit() error {
	_, err := os.Lstat(filepath.Join(c.cfg.Mountpoint, "none"))
	if errors.Is(err, os.ErrNotExist) {
		return stopReadAhead(c.cfg.Mountpoint)
	}
	return fmt.Errorf("%w: look into the mount: %w", ErrUnusable, err)
}

// launch starts a datafs for the mount and gives it all layers.
func (c *Client) launch(ctx context.Context, adopted bool) (*peer, error) {
	cmd, err := spawn(&c.cfg, c.device, adopted)
	if err != nil {
		return nil, err
	}
	p, err := dial(ctx, c.cfg.State, func(m message) { closeFiles(m.files) })
	if err != nil {
		reap(cmd, true)
		return nil, fmt.Errorf("talk to datafs: %w%s", err, lastWords(&c.cfg))
	}
	p.cmd = cmd
	closeFiles(p.hello.files)
	p.hello.files = nil
	c.mu.Lock()
	c.canResend = adopted || p.hello.flags&flagResend != 0 && !c.cfg.noResend
	c.mu.Unlock()
	c.connected(p, true)
	if adopted {
		p.send(message{kind: kindResend})
	}
	return p, nil
}

// connected makes p the datafs that is talked to, and tells it all if it is new.
func (c *Client) connected(p *peer, tell bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.layers {
		if tell {
			e.wants = nil
			p.send(e.add())
			if e.index != nil {
				p.send(e.tree())
			}
		}
	}
	c.link = p.link
	if c.closed {
		p.close()
	}
}

func (e *entry) add() message {
	return message{kind: kindAdd, id: e.id, number: e.number, flags: e.flags,
		files: []*os.File{e.data, e.present.File()}}
}

func (e *entry) tree() message {
	return message{kind: kindTree, id: e.id, files: []*os.File{e.index}}
}

// learn records what a datafs that ran before says.
func (c *Client) learn(m message) {
	switch {
	case m.kind == kindWant:
		if e := c.layers[m.id]; e != nil {
			e.wants = e.wants.add(span{m.from, m.to})
		}
		return
	case m.kind == kindHave && (len(m.files) == 2 || len(m.files) == 3) && c.layers[m.id] == nil:
		present, err := presence.View(m.files[1])
		if err != nil {
			c.log.Error("presence of a layer that datafs has", "layer", m.id, "error", err)
			break
		}
		e := &entry{id: m.id, number: m.number, content: content{m.files[0], present},
			flags: m.flags & (flagHeldFile | flagHeldTree | flagRemoved)}
		if len(m.files) == 3 {
			e.index = m.files[2]
		}
		c.layers[m.id] = e
		c.next = max(c.next, m.number+1)
		return
	}
	closeFiles(m.files)
}

// forgetAll closes what the Client has.
func (c *Client) forgetAll() {
	for id, e := range c.layers {
		e.close()
		delete(c.layers, id)
	}
	if c.device != nil {
		c.device.Close()
		c.device = nil
	}
}

func (e *entry) close() {
	e.content.close()
	if e.index != nil {
		e.index.Close()
	}
}

// Down reports whether the mount was given up and there is no other yet.
func (c *Client) Down() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.down
}

// Layers tells which layers datafs has: after a restart of dewd, those that it
// should Add again. Wants of such a layer are told after that.
func (c *Client) Layers() []digest.Digest {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []digest.Digest
	for id := range c.layers {
		out = append(out, digest.NewDigestFromEncoded(digest.SHA256, id))
	}
	slices.Sort(out)
	return out
}

// Add serves the layer whose tar is data and whose presence file is present,
// and returns the path of the file that shows it. The files stay the caller's.
// Adding what is served already, also by a dewd before this one, replaces its
// files.
func (c *Client) Add(id digest.Digest, data, present *os.File) (string, error) {
	name := id.Encoded()
	if id.Algorithm() != digest.SHA256 || !validID(name) {
		return "", fmt.Errorf("serve layer %q: not a sha256 digest", id)
	}
	wants, err := c.insert(name, data, present)
	if err != nil {
		return "", fmt.Errorf("serve layer %s: %w", id, err)
	}
	err = c.request(call{kindAdd, name}, (*entry).add)
	if err != nil {
		return "", fmt.Errorf("serve layer %s: %w", id, err)
	}
	for _, w := range wants {
		c.want(id, w)
	}
	return filepath.Join(c.cfg.Mountpoint, name), nil
}

// insert notes a layer, and returns the wants of one that was there.
func (c *Client) insert(name string, data, present *os.File) (spans, error) {
	own, err := copies(data, present)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.down {
		own.close()
		return nil, errDown
	}
	e := c.layers[name]
	if e == nil {
		c.layers[name] = &entry{id: name, number: c.next, content: *own, mine: true}
		c.next++
		return nil, nil
	}
	if e.present.Size() != own.present.Size() {
		own.close()
		return nil, errors.New("it is served with another size")
	}
	e.content.close()
	e.content = *own
	e.flags &^= flagRemoved
	if e.mine {
		return nil, nil
	}
	e.mine = true
	return slices.Clone(e.wants), nil
}

// copies opens a layer's files once more.
func copies(data, present *os.File) (*content, error) {
	d, err := dup(data)
	if err != nil {
		return nil, err
	}
	p, err := dup(present)
	if err != nil {
		d.Close()
		return nil, err
	}
	m, err := presence.View(p)
	if err != nil {
		closeFiles([]*os.File{d, p})
		return nil, err
	}
	return &content{d, m}, nil
}

func sameOpen(a, b *os.File) bool {
	x, err1 := a.Stat()
	y, err2 := b.Stat()
	return err1 == nil && err2 == nil && os.SameFile(x, y)
}

// Tree shows an added layer as a directory tree too, and returns its path. index
// is the layer's EROFS index; the file stays the caller's and must not change.
func (c *Client) Tree(id digest.Digest, index *os.File) (string, error) {
	name := id.Encoded()
	if err := c.plant(name, index); err != nil {
		return "", fmt.Errorf("tree of layer %s: %w", id, err)
	}
	if err := c.request(call{kindTree, name}, (*entry).tree); err != nil {
		return "", fmt.Errorf("tree of layer %s: %w", id, err)
	}
	return filepath.Join(c.cfg.Mountpoint, name+treeSuffix), nil
}

func (c *Client) plant(name string, index *os.File) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.layers[name]
	if e == nil {
		return ErrUnknown
	}
	if e.index != nil {
		return nil
	}
	own, err := dup(index)
	e.index = own
	return err
}

// request sends a layer's message and waits for the answer, if need be of the
// datafs that comes after this one.
func (c *Client) request(to call, m func(*entry) message) error {
	answer := make(chan error, 1)
	c.mu.Lock()
	e := c.layers[to.id]
	if c.closed || e == nil {
		closed := c.closed
		c.mu.Unlock()
		if closed {
			return ErrClosed
		}
		return ErrUnknown
	}
	c.calls[to] = append(c.calls[to], answer)
	if c.link != nil {
		c.link.send(m(e))
	}
	c.mu.Unlock()
	select {
	case err := <-answer:
		return err
	case <-c.ctx.Done():
		return ErrClosed
	case <-time.After(callTime):
		return errors.New("datafs does not answer")
	}
}

// Present says that the bytes [from, to) of a layer may be there now: their bits
// in the presence file have been set. It is cheap if nobody waits for them.
func (c *Client) Present(id digest.Digest, from, to int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := span{from, to}
	e := c.layers[id.Encoded()]
	if e == nil || !e.wants.touches(s) {
		return
	}
	e.wants = settle(e.wants, e.present, s)
	c.send(message{kind: kindPresent, id: e.id, from: from, to: to})
}

// Unblock gives an I/O error to the reads that these threads wait for: their
// container is to end, and a signal that it handles would wait with them. What
// they read later waits anew, and the kernel may try once more by itself: to be
// called until they have gone.
func (c *Client) Unblock(threads []int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range threads {
		c.send(message{kind: kindUnblock, number: uint32(t)})
	}
}

// Warm says that the bytes [from, to) of a layer, which are there, are about to
// be read: where that is possible they are put into the kernel's page cache at
// once. from is a multiple of presence.Page.
func (c *Client) Warm(id digest.Digest, from, to int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.layers[id.Encoded()]; e != nil {
		c.send(message{kind: kindWarm, id: e.id, from: from, to: to})
	}
}

// send sends to datafs if there is one. c.mu is held.
func (c *Client) send(m message) {
	if c.link != nil && !c.closed {
		c.link.send(m)
	}
}

// Fail gives an I/O error to the reads that wait for absent bytes of [from, to).
// What reads them later waits anew, and they are wanted anew.
func (c *Client) Fail(id digest.Digest, from, to int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.layers[id.Encoded()]; e != nil {
		e.wants = e.wants.without(span{from, to})
		c.send(message{kind: kindFail, id: e.id, from: from, to: to})
	}
}

// Abort gives an I/O error to all reads of a layer that wait.
func (c *Client) Abort(id digest.Digest) { c.Fail(id, everything.from, everything.to) }

// Remove ends a layer: it cannot be opened any more, and is released when
// nothing uses it.
func (c *Client) Remove(id digest.Digest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.layers[id.Encoded()]; e != nil {
		e.flags |= flagRemoved
		c.send(message{kind: kindRemove, id: e.id})
	}
}

// Close leaves datafs running, for the next dewd.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	if c.link != nil {
		c.link.close()
	}
	c.mu.Unlock()
	c.cancel()
	<-c.done
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgetAll()
	return nil
}

// Shutdown ends datafs and takes the mount away. If something uses a layer it
// does neither, and returns an error that wraps EBUSY, or EAGAIN if datafs has
// just died; the Client goes on.
func (c *Client) Shutdown() error {
	answer := make(chan error, 1)
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return ErrClosed
	}
	if c.link == nil {
		c.mu.Unlock()
		return fmt.Errorf("datafs is being replaced: %w", unix.EAGAIN)
	}
	to := call{kind: kindShutdown}
	c.calls[to] = append(c.calls[to], answer)
	c.link.send(message{kind: kindShutdown})
	c.mu.Unlock()
	select {
	case err := <-answer:
		if err != nil {
			return err
		}
	case <-time.After(callTime):
		return errors.New("datafs does not answer")
	}
	<-c.done
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgetAll()
	err := os.Remove(filepath.Join(c.cfg.State, socketName))
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	return err
}
