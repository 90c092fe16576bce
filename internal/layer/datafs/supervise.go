package datafs

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// run listens to datafs, and starts another when it has died, until the Client
// is closed.
func (c *Client) run(p *peer) {
	defer close(c.done)
	var until time.Time // readers wait so long for a datafs that stays alive
	early := 0          // that have lived for less than patience, in a row
	for p != nil {
		began := time.Now()
		ended := c.listen(p)
		c.mu.Lock()
		c.link = nil
		closed := c.closed
		c.mu.Unlock()
		switch {
		case ended:
			reap(p.cmd, false)
			p.release()
			return
		case closed:
			p.release()
			return
		}
		c.answered(call{kind: kindShutdown}, unix.EAGAIN) // the next one is not to end
		p.finish()
		c.log.Warn("datafs has died: another takes its place")
		pause := shortest
		now := time.Now()
		lived := now.Sub(began)
		if early++; lived > c.cfg.patience {
			early = 1
		}
		switch {
		case until.IsZero() || lived > alive && early <= mostEarly:
			until, pause = now.Add(c.cfg.patience), 0
		case now.After(until):
			pause = longest
		}
		p = c.revive(until, pause)
	}
}

// listen does what datafs's messages ask for until the connection ends. It
// reports whether datafs has agreed to end.
func (c *Client) listen(p *peer) (ended bool) {
	var writer sync.WaitGroup
	writer.Go(p.link.run)
	defer writer.Wait()
	defer p.close()
	for {
		m, err := receiveMessage(p.conn)
		if err != nil {
			return ended
		}
		closeFiles(m.files)
		if m.kind == kindShutdown && m.from == 0 {
			ended = true
			c.mu.Lock()
			c.closed = true
			c.mu.Unlock()
			c.cancel()
		}
		c.heed(&m)
	}
}

func (c *Client) heed(m *message) {
	switch m.kind {
	case kindAdd, kindTree, kindShutdown:
		c.answered(call{m.kind, m.id}, errorOf(m.from))
		c.healed(m)
	case kindKernel:
		c.mu.Lock()
		c.canResend = m.flags&flagResend != 0 && !c.cfg.noResend
		c.mu.Unlock()
	case kindWant:
		c.wanted(m)
	case kindHeld:
		c.mu.Lock()
		if e := c.layers[m.id]; e != nil {
			e.flags = e.flags&flagRemoved | m.flags&(flagHeldFile|flagHeldTree)
		}
		c.mu.Unlock()
	case kindReleased:
		c.released(m.id)
	}
}

func (c *Client) answered(to call, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, answer := range c.calls[to] {
		answer <- err
	}
	delete(c.calls, to)
	if e := c.layers[to.id]; err != nil && to.kind == kindAdd && e != nil {
		e.close()
		delete(c.layers, to.id)
	}
}

// healed says of a lost layer that it is served again, once all of it is.
func (c *Client) healed(m *message) {
	c.mu.Lock()
	e := c.layers[m.id]
	again := e != nil && e.lost && m.from == 0 && (m.kind == kindTree || e.index == nil)
	if again {
		e.lost = false
	}
	c.mu.Unlock()
	if again && c.cfg.Healed != nil {
		c.cfg.Healed(digest.NewDigestFromEncoded(digest.SHA256, m.id))
	}
}

// wanted notes a want and passes it on. What came while the want was on its way
// is said to be there at once: Present did not know that someone waited.
func (c *Client) wanted(m *message) {
	c.mu.Lock()
	e := c.layers[m.id]
	if e == nil {
		c.mu.Unlock()
		return
	}
	s := span{m.from, m.to}
	missing := absent(nil, e.present, s)
	if len(missing) != 1 || missing[0] != s {
		c.send(message{kind: kindPresent, id: e.id, from: s.from, to: s.to})
	}
	var fresh spans
	for _, w := range missing {
		fresh = append(fresh, e.wants.missing(w)...)
		e.wants = e.wants.add(w)
	}
	mine := e.mine
	c.mu.Unlock()
	if !mine {
		return
	}
	for _, w := range fresh {
		c.want(digest.NewDigestFromEncoded(digest.SHA256, m.id), w)
	}
}

func (c *Client) want(id digest.Digest, w span) {
	if c.cfg.Want != nil {
		c.cfg.Want(id, w.from, w.to)
	}
}

func (c *Client) released(id string) {
	c.mu.Lock()
	e := c.layers[id]
	if e == nil || e.flags&flagRemoved == 0 {
		c.mu.Unlock()
		return
	}
	e.close()
	delete(c.layers, id)
	c.mu.Unlock()
	if c.cfg.Released != nil {
		c.cfg.Released(digest.NewDigestFromEncoded(digest.SHA256, id))
	}
}

const (
	// patience is how long readers wait for a datafs in the place of one that has died.
	patience = 20 * time.Second
	// alive is how old a datafs gets that has started well; after mostEarly that died within patience no
	// other is waited for longer.
	alive, mostEarly = time.Second, 5
	// The pauses between tries.
	shortest, longest = 100 * time.Millisecond, 5 * time.Second
)

// revive puts another datafs in the place of one that is dead, after a pause: up to a time on the same mount,
// whose readers wait, later on a new one. It returns nil when the Client was closed.
func (c *Client) revive(until time.Time, pause time.Duration) *peer {
	c.mu.Lock()
	over := c.canResend
	c.mu.Unlock()
	if over {
		ctx, cancel := context.WithDeadline(c.ctx, until)
		defer cancel()
		p := c.retry(ctx, pause, func() (*peer, error) { return c.launch(ctx, true) })
		if p != nil || c.ctx.Err() != nil {
			return p
		}
	}
	c.lose()
	return c.retry(c.ctx, pause, func() (*peer, error) { return c.begin(c.ctx) })
}

// retry calls start until it succeeds, after pauses that grow. It returns nil when ctx ends.
func (c *Client) retry(ctx context.Context, pause time.Duration, start func() (*peer, error)) *peer {
	for ; ; pause = min(max(2*pause, shortest), longest) {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		if ctx.Err() != nil {
			return nil
		}
		p, err := start()
		if err == nil {
			return p
		}
		c.log.Error("datafs does not start", "error", err)
	}
}

// lose gives up a mount whose server has died. Who reads its layers gets errors, but for pages that the
// kernel has.
func (c *Client) lose() {
	c.mu.Lock()
	c.device.Close()
	c.device, c.down = nil, true
	var lost, gone []digest.Digest
	for id, e := range c.layers {
		d := digest.NewDigestFromEncoded(digest.SHA256, id)
		if e.flags&(flagHeldFile|flagHeldTree) != 0 {
			lost, e.lost = append(lost, d), true
		}
		if e.flags&flagRemoved != 0 {
			gone = append(gone, d)
			e.close()
			delete(c.layers, id)
		}
		e.flags, e.wants = 0, nil
	}
	c.mu.Unlock()
	slices.Sort(lost)
	if err := detach(c.cfg.Mountpoint); err != nil { // whoever else holds the device
		c.log.Error("take the mount of the dead datafs away", "error", err)
	}
	c.log.Error("datafs has died and its mount is given up: what is mounted of its layers gives errors",
		"layers", fmt.Sprint(lost))
	if c.cfg.Lost != nil {
		c.cfg.Lost(lost)
	}
	if c.cfg.Released != nil {
		for _, d := range gone {
			c.cfg.Released(d)
		}
	}
}
