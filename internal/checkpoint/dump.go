package checkpoint

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/checkpoint/hooks"
	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/checkpoint/upper"
	"dewpoint/internal/engine"
	"dewpoint/internal/engine/stdio"
	"dewpoint/internal/image"
	"dewpoint/internal/pop"
)

// Options of one checkpoint.
type Options struct {
	Share    bool    // it is for all callers, not only for the container's owner
	Stateful bool    // though the container keeps state
	TCP      string  // close, refuse; "" is close
	Boot     float64 // seconds from start to readiness; 0 is what was measured before, or unknown
}

// Checkpoint saves a container that runs, by its name or ID: memory and writable layer as they
// were at one moment. The container runs on, whatever happens. Once Checkpoint
// returns nil, containers start from it, also after a power cut.
func (m *Manager) Checkpoint(ctx context.Context, id string, o Options) (store.Record, Dumped, error) {
	name := engine.Name(id)
	r, d, err := m.checkpoint(ctx, id, o)
	if err != nil {
		return r, d, fmt.Errorf("checkpoint of %s: %w", name, err)
	}
	if m.cfg.Audience != nil {
		m.cfg.Audience.Made(name, r)
	}
	return r, d, nil
}

func (m *Manager) checkpoint(ctx context.Context, id string, o Options) (r store.Record, d Dumped,
	err error) {
	a, err := m.probe(ctx)
	if err != nil {
		return r, d, err
	}
	c, err := m.subject(ctx, id, o, a)
	if err != nil {
		return r, d, err
	}
	name := c.info.Name
	if err := m.whole(ctx, name); err != nil {
		return r, d, err
	}
	made := m.making.begin(c.fit.kind())
	defer made()
	below, err := m.below(ctx, c)
	if err != nil {
		return r, d, err
	}
	defer below.close()
	work, remove, err := m.cfg.Store.Scratch()
	if err != nil {
		return r, d, err
	}
	below.then(remove)
	done, err := m.making.turn(ctx, name)
	if err != nil {
		return r, d, err
	}
	s, err := m.dump(ctx, c, work)
	done()
	if err == nil {
		err = s.merge(ctx, work, below)
	}
	if err != nil {
		return r, s.dumped, err
	}
	r, err = m.keep(ctx, c, s, work)
	return r, s.dumped, err
}

// Publish puts a checkpoint into the PoP's store, one after the other. If there is none now that is no error:
// PublishPending does it later, as it does after an error that may pass.
func (m *Manager) Publish(ctx context.Context, r store.Record) error {
	select {
	case m.giving <- struct{}{}:
		defer func() { <-m.giving }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return m.publish(ctx, r)
}

func (m *Manager) publish(ctx context.Context, r store.Record) (err error) {
	if r.Upper != nil {
		err = m.cfg.Layers.UploadLayer(ctx, r.Upper.DiffID)
	}
	if err == nil {
		err = m.cfg.Store.Publish(ctx, r.ID)
	}
	again := m.cfg.Store.Settle(ctx, r.ID, err)
	if errors.Is(err, pop.ErrStoreAway) || errors.Is(err, store.ErrNoPoP) {
		return nil
	}
	if err != nil && again {
		err = fmt.Errorf("%w (it is tried again)", err)
	}
	return err
}

// PublishPending puts those of this node's checkpoints into the PoP's store that could not be when they were
// made, unless later ones have taken their place there. It returns at once if there are none, or if some are
// on their way.
func (m *Manager) PublishPending(ctx context.Context) error {
	pending := m.cfg.Store.PendingUploads()
	if len(pending) == 0 {
		return nil
	}
	select {
	case m.giving <- struct{}{}:
		defer func() { <-m.giving }()
	default:
		return nil
	}
	var errs error
	for _, r := range pending {
		if ctx.Err() != nil {
			break
		}
		if m.cfg.Store.Superseded(ctx, r) {
			m.cfg.Store.Settle(ctx, r.ID, nil)
			continue
		}
		if err := m.publish(ctx, r); err != nil {
			errs = errors.Join(errs, fmt.Errorf("checkpoint %.12s: %w", r.ID, err))
		}
	}
	return errs
}

// subject is a container that a checkpoint is to be made of.
type subject struct {
	info *engine.Info
	spec *specs.Spec
	img  *image.Image
	fit  Fit
	o    Options
	able *able
}

// subject looks at a container and refuses what no checkpoint may be made of.
func (m *Manager) subject(ctx context.Context, id string, o Options, a *able) (*subject, error) {
	info, err := m.cfg.Containers.Inspect(ctx, id)
	if err != nil {
		return nil, err
	}
	name := info.Name
	if info.Status != engine.Running {
		return nil, engine.ErrNotRunning
	}
	c := &subject{info: info, o: o, able: a}
	if c.spec, err = m.cfg.Containers.SpecOf(ctx, name); err != nil {
		return nil, err
	}
	if c.img = m.cfg.Images.Image(ctx, info.Image, info.Digest); c.img == nil {
		return nil, fmt.Errorf("the image %s is not known here any more: pull it again", info.Image)
	}
	if err := c.bare(); err != nil {
		return nil, err
	}
	if err := refuse(c); err != nil {
		return nil, err
	}
	c.fit = FitOf(c.img, c.spec, a.Ability, info.Labels)
	c.fit.User = info.Labels[engine.LabelUser]
	var changed string
	if c.fit.Contents, changed = contentsSince(c.spec, freeVolumes(c.img, info.Labels),
		m.cfg.Containers.TaskMade(name)); changed != "" {
		return nil, &UnfitError{"what is mounted read-only has changed since it was started, and its memory may be of what was there before: " + changed, "start it anew and save it then"}
	}
	if o.Share {
		c.fit.Owner = Anyone
	}
	return c, nil
}

// refuse tells containers whose clones would do harm, or cannot be.
func refuse(c *subject) error {
	labels := labelsOf(c.img, c.info.Labels)
	switch {
	case labels[LabelCheckpoint] == "never":
		return &UnfitError{"its label " + LabelCheckpoint +
			"=never, or its image's, says that no checkpoint is to be made",
			"if you want one, start it with --label " + LabelCheckpoint + "="}
	case c.info.Labels[stdio.Label] != "":
		return &UnfitError{"it has a terminal or an open standard input, which no checkpoint keeps",
			"start it without -i and -t"}
	case len(unsaved(c.spec)) > 0:
		return &UnfitError{"it has what no checkpoint keeps: " + strings.Join(unsaved(c.spec), ", "),
			"start it without that"}
	case c.o.Stateful:
		return nil
	}
	if why := stateOf(c.img, c.spec, c.info.Labels).refused(); why != nil {
		return why
	}
	return nil
}

// saved is what was copied of a container, in a work directory.
type saved struct {
	dumped Dumped
	tar    string        // the layer of what was written
	upper  digest.Digest // of the tar
	size   int64         // of the tar
	info   upper.Info
}

// dump stops the container for as long as it takes to copy it.
func (m *Manager) dump(ctx context.Context, c *subject, work string) (s saved, err error) {
	if m.cfg.Hold != nil {
		release, err := m.cfg.Hold(ctx, c.info.ID())
		if err != nil {
			return s, err
		}
		defer release()
	}
	if err := (hooks.Runner{}).Before(ctx, m.hooked(c.info, c.img, "")); err != nil {
		return s, err
	}
	dir := filepath.Join(work, "images")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return s, err
	}
	top, err := m.cfg.Containers.Upper(ctx, c.info.Name)
	if err != nil {
		return s, err
	}
	subject := Container{Name: c.info.Name, PID: int(c.info.Pid), TTY: c.spec.Process.Terminal,
		Options: DumpOptions{RefuseTCP: c.o.TCP == "refuse"}}
	s.dumped, err = c.able.engine.Dump(ctx, subject, dir, func(ctx context.Context) (err error) {
		if _, err := m.cfg.Containers.Inspect(ctx, c.info.ID()); err != nil { // another one has its name by now
			return err
		}
		return s.write(filepath.Join(work, "upper.tar"), func(w io.Writer) (upper.Info, error) {
			return upper.Write(ctx, w, top)
		})
	})
	return s, err
}

// write makes the tar of what was written.
func (s *saved) write(file string, layer func(w io.Writer) (upper.Info, error)) error {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	h := sha256.New()
	n := count{new(atomic.Int64)}
	s.info, err = layer(io.MultiWriter(f, h, n))
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("copy the writable layer: %w", err)
	}
	s.tar, s.upper, s.size = file, digest.NewDigest(digest.SHA256, h), n.n.Load()
	return nil
}

// bootOf is how long a restored container's image takes to boot, as its checkpoint knows from where it was
// made; 0 is unknown.
func (m *Manager) bootOf(ctx context.Context, c *subject) float64 {
	id := c.standsOn()
	if id == "" {
		return 0
	}
	for _, l := range m.list(ctx, c.fit.Manifest) {
		if l.ID == id {
			return l.Boot
		}
	}
	return 0
}

// standsOn is the checkpoint whose files the container was made with; "" is none.
func (c *subject) standsOn() string {
	return cmp.Or(c.info.Labels[LabelRestored], c.info.Labels[LabelAnew])
}

// keep makes a checkpoint of what was saved: layer and memory first, then the
// record that names them.
func (m *Manager) keep(ctx context.Context, c *subject, s saved, work string) (store.Record, error) {
	fit, err := json.Marshal(c.fit)
	if err != nil {
		return store.Record{}, err
	}
	r := store.Record{
		Created: time.Now().UTC(), Node: m.cfg.Node, Image: c.info.Image, Manifest: c.fit.Manifest,
		Config: c.fit.Config,
		Key:    c.fit.Key(), Fit: fit, Args: c.fit.Args, Engine: c.fit.Engine, Boot: c.o.Boot,
		Stateful: c.o.Stateful,
	}
	if r.Boot == 0 {
		r.Boot = m.boots.median(c.fit.bootKey())
	}
	if r.Boot == 0 {
		r.Boot = m.bootOf(ctx, c)
	}
	if s.info.Entries > 0 {
		m.making.hold(s.upper, 1)
		defer m.making.hold(s.upper, -1)
		if err := m.cfg.Layers.Add(ctx, s.tar, s.upper, s.size); err != nil {
			return r, fmt.Errorf("keep the writable layer: %w", err)
		}
		r.Upper = &store.Layer{DiffID: s.upper, Size: s.size}
	}
	file, info, err := m.cfg.Store.Pack(ctx, filepath.Join(work, "images"))
	if err != nil {
		return r, fmt.Errorf("keep the memory: %w", err)
	}
	r.Data = store.Blob{Digest: info.Digest, Size: info.Size, Pages: info.Pages}
	if r, err = m.cfg.Store.Put(ctx, r, file); err != nil {
		return r, err
	}
	if err := m.cfg.Store.Adopt(r, filepath.Join(work, "images")); err != nil {
		m.cfg.Log.Debug("the first restore has to unpack it", "checkpoint", r.ID, "err", err)
	}
	return r, nil
}
