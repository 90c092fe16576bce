package deploy

import (
	"bufio"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/spec"
)

// enter takes a place in the queue for o, which carry gives back. It waits for nothing.
// g may be nil. What was accepted before gets a place though the queue be full.
func (d *Deployer) enter(o *order, g *admit.Group, accepted bool) (*admit.Ticket, error) {
	here, absent := true, int64(0)
	if d.cfg.Puller != nil {
		here, absent = d.cfg.Puller.Here(o.ref, o.options())
	}
	if o.pull {
		here = false // it needs no slot
	}
	c := admit.Claim{Caller: o.Terms.Caller, Image: o.ref.String(), Memory: o.Memory, Fetch: !here,
		Host: o.ref.Host, Absent: absent, Group: g, Accepted: accepted}
	if !o.options().Lazy {
		c.Image += " whole" // who does not need that does not wait for it
	}
	return d.door.Enter(c)
}

// carry is a deployment, until it ends. t is its place in the queue, nil if it has none yet.
func (d *Deployer) carry(ctx context.Context, o *order, t *admit.Ticket, w spec.Watch) (spec.Record, error) {
	if t == nil {
		var err error
		if t, err = d.enter(o, nil, false); err != nil {
			return spec.Record{}, err
		}
	}
	defer t.Done(0)
	begun := time.Now()
	err := t.Wait(ctx) // without anything of the work yet: thousands may wait
	r := d.begin(ctx, begun, o.ref.String(), o.name, w)
	r.place, r.rec.ID = t, o.id
	if err == nil {
		r.reached(spec.Admitted)
		err = d.deploy(r.trace.Into(ctx), o, r)
	}
	if err == nil {
		d.owed.add(r.cgroup)
		t.Done(memoryIn(r.cgroup))
	}
	t.Done(0)
	err = why(ctx, err)
	return r.end(err), err
}

// permit returns when the container may be made: there is room for it, and the journal knows of it.
func (r *run) permit(ctx context.Context, o *order) error {
	if err := r.place.Run(ctx); err != nil || o.written == nil {
		return err
	}
	return o.written(ctx)
}

// fit refuses an image that is to be here whole and is certain not to fit on the disk,
// unless room can be made.
func (d *Deployer) fit(ctx context.Context, r *run) error {
	if r.pull.Local || r.pull.Lazy != nil {
		return nil
	}
	var absent int64
	for _, l := range r.pull.Progress() {
		if !l.State.Usable() {
			absent += l.Layer.Size - here(l)
		}
	}
	err := r.place.Resolved(absent)
	var full *admit.DiskError
	if errors.As(err, &full) && d.cfg.Disk != nil {
		d.cfg.Disk.MakeFree(ctx, full.Need-full.Have)
		err = r.place.Resolved(absent)
	}
	return err
}

// Admission is how the queue stands.
func (d *Deployer) Admission() admit.Stats { return d.door.Stats() }

// memoryIn is how many bytes of memory the processes of a cgroup take that is not
// of files; 0 if it has ended, or that is not known.
func memoryIn(dir string) int64 {
	f, err := os.Open(filepath.Join(dir, "memory.stat"))
	if dir == "" || err != nil {
		return 0
	}
	defer f.Close()
	in := bufio.NewScanner(f)
	for in.Scan() {
		name, n, _ := strings.Cut(in.Text(), " ")
		if name == "anon" || name == "total_rss" { // of cgroup v2, v1
			n, _ := strconv.ParseInt(n, 10, 64)
			return n
		}
	}
	return 0
}
