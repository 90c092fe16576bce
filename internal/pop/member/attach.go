package member

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop"
	"dewpoint/internal/trace"

	"github.com/opencontainers/go-digest"
)

// attacher makes layers of the store known on this node, and lets go of them.
type attacher struct {
	*common

	mu     sync.Mutex
	proved map[digest.Digest]proof // that the tars of layers can be opened
	device uint64                  // of the store's mount; 0 before it was seen
}

// attaching makes layers of the store known that are not here, all at once: while they are
// being referenced, which waits for the store several times, their records and tables are read and the
// indexes built. What was read of a layer that is another one by then was in vain.
type attaching struct {
	s   *attacher
	st  *pop.Store
	img *image.Image

	ahead  bool // no deployment needs them yet: they are not counted
	layers []image.Layer
	looked chan struct{} // closed when it is known which of them the store seems to have
	done   chan struct{} // closed at the end

	mu      sync.Mutex
	seeming map[digest.Digest]bool // guarded by mu until looked is closed
	used    []*pop.Layer           // guarded by mu until done is closed

	referenced chan struct{} // closed when have and err are there
	have       map[digest.Digest]*pop.Layer
	err        error // why the others are not
}

// begin attaches what is not here of img, and goes on whatever becomes of who asked. likely says
// that the store is likely to have all of it.
func (s *attacher) begin(st *pop.Store, img *image.Image, likely bool) *attaching {
	return s.beginAs(st, img, likely, false)
}

func (s *attacher) beginAs(st *pop.Store, img *image.Image, likely, ahead bool) *attaching {
	a := &attaching{s: s, st: st, img: img, ahead: ahead, looked: make(chan struct{}), done: make(chan struct{}),
		referenced: make(chan struct{}), seeming: map[digest.Digest]bool{}}
	for _, l := range img.Unique() {
		if !s.layerIsHere(l.DiffID) {
			a.layers = append(a.layers, l)
		}
	}
	if len(a.layers) == 0 {
		close(a.looked)
		close(a.done)
		return a
	}
	s.work.Go(func() {
		ctx, cancel := context.WithTimeout(s.life, storePatience)
		defer cancel()
		defer close(a.done)
		a.run(ctx, likely)
	})
	return a
}

// layerIsHere reports whether there is something of a layer on this node, or it is attached.
func (s *common) layerIsHere(id digest.Digest) bool {
	_, err := s.layers.Peek(id)
	return err == nil || s.layers.Partial(id) != nil
}

func (a *attaching) ids() []digest.Digest {
	ids := make([]digest.Digest, len(a.layers))
	for i, l := range a.layers {
		ids[i] = l.DiffID
	}
	return ids
}

func (a *attaching) run(ctx context.Context, likely bool) {
	ids := a.ids()
	defer a.s.lockAll(ids)()
	ids = slices.DeleteFunc(ids, func(id digest.Digest) bool {
		here := a.s.layerIsHere(id) // meanwhile
		if here && !a.ahead {
			if rec := a.s.found(a.layer(id)); rec != nil {
				a.s.copies.reused(id)
				a.used = append(a.used, rec)
			}
		}
		return here
	})
	lookups := a.st.Lookups(ctx, ids)
	if !likely {
		a.keepThere(lookups)
	}
	left := len(lookups)
	if left == 0 {
		close(a.looked)
		return
	}
	var all sync.WaitGroup
	for id, g := range lookups {
		all.Go(func() {
			rec, err := g.Record()
			a.mu.Lock()
			a.seeming[id] = err == nil
			if left--; left == 0 {
				close(a.looked)
			}
			a.mu.Unlock()
			if err == nil {
				a.attach(ctx, rec)
			}
		})
	}
	a.have, a.err = a.st.UseAll(ctx, lookups)
	close(a.referenced)
	<-a.looked
	for id, rec := range a.have {
		if !a.seeming[id] { // a moment ago
			all.Go(func() { a.attach(ctx, rec) })
		}
	}
	all.Wait()
	if a.err != nil && !errors.Is(a.err, pop.ErrUnknown) {
		a.s.log.Warn("layers of the PoP's store cannot be used", "image", a.img.Ref, "err", a.err)
	}
}

// keepThere leaves those of the layers that the store has, as it seems.
func (a *attaching) keepThere(lookups map[digest.Digest]*pop.Lookup) {
	for id, g := range lookups {
		_, err := g.Record()
		if err != nil && !errors.Is(err, pop.ErrUnknown) {
			a.s.log.Warn("a layer of the PoP's store cannot be used", "layer", id, "err", err)
		}
		if err != nil {
			delete(lookups, id)
		}
	}
}

// attach attaches one layer, of what seemed to be its record.
func (a *attaching) attach(ctx context.Context, seemed *pop.Layer) {
	err := a.from(ctx, seemed, func() error { return a.confirm(seemed) })
	rec := a.confirmed(seemed.DiffID)
	if rec != nil && rec.Name != seemed.Name { // whatever the table of a layer that went was
		err = a.from(ctx, rec, nil)
	}
	switch {
	case rec == nil: // run says why
	case err == nil && a.ahead:
	case err == nil:
		a.s.prove(rec.DiffID)
		a.s.count(func(h *pop.Hits) { h.Store++; h.StoreBytes += a.layer(rec.DiffID).Size })
		a.mu.Lock()
		defer a.mu.Unlock()
		a.used = append(a.used, rec)
	case !errors.Is(err, pop.ErrUnknown) && !errors.Is(err, layer.ErrBusy):
		a.s.log.Warn("a layer of the PoP's store cannot be used", "layer", rec.DiffID, "err", err)
	}
}

func (a *attaching) from(ctx context.Context, rec *pop.Layer, await func() error) error {
	e, err := a.s.described(ctx, a.st, rec, a.layer(rec.DiffID))
	if err != nil {
		return err
	}
	e.Await = await
	if _, err = a.s.layers.Attach(e); err != nil {
		return err
	}
	return a.s.unlessDenied(a.st, rec)
}

// unlessDenied lets go of a layer that was attached if its files were found damaged meanwhile: who was told
// of that did not find it attached.
func (s *attacher) unlessDenied(st *pop.Store, rec *pop.Layer) error {
	if !st.Denies(rec.Name) {
		return nil
	}
	return errors.Join(fmt.Errorf("layer %s was damaged: %w", rec.DiffID, pop.ErrUnknown), s.Detach(rec.DiffID))
}

// confirmed is the record of a layer once it is referenced; nil if it is not there.
func (a *attaching) confirmed(id digest.Digest) *pop.Layer {
	<-a.referenced
	return a.have[id]
}

// confirm returns nil when the layer is referenced and is the one that it seemed to be.
func (a *attaching) confirm(seemed *pop.Layer) error {
	switch rec := a.confirmed(seemed.DiffID); {
	case rec == nil:
		return a.err
	case rec.Name != seemed.Name:
		return fmt.Errorf("layer %s was replaced meanwhile: %w", seemed.DiffID, pop.ErrUnknown)
	}
	return nil
}

func (a *attaching) layer(id digest.Digest) image.Layer {
	return a.layers[slices.IndexFunc(a.layers, func(l image.Layer) bool { return l.DiffID == id })]
}

// has reports whether the layer is one of those that are attached.
func (a *attaching) has(id digest.Digest) bool {
	return slices.ContainsFunc(a.layers, func(l image.Layer) bool { return l.DiffID == id })
}

// all reports whether the store seems to have all layers that are not here.
func (a *attaching) all(ctx context.Context) bool {
	select {
	case <-a.looked:
	case <-ctx.Done():
		return false
	}
	for _, l := range a.layers {
		if !a.seeming[l.DiffID] && !a.s.node.Mountable(a.img, l.DiffID) {
			return false
		}
	}
	return true
}

// wait returns what the store has of the layers when they are attached.
func (a *attaching) wait(ctx context.Context) []*pop.Layer {
	select {
	case <-a.done:
		return a.used
	case <-ctx.Done():
		return nil
	}
}

// attachLayer makes one layer known that the store has, unless there is something of it here.
func (s *attacher) attachLayer(ctx context.Context, st *pop.Store, l image.Layer) error {
	defer s.lock(l.DiffID)()
	if s.layerIsHere(l.DiffID) {
		s.found(l)
		s.copies.reused(l.DiffID)
		return nil
	}
	rec, e, err := s.elsewhere(ctx, st, l)
	if err == nil {
		_, err = s.layers.Attach(e)
	}
	if err == nil {
		err = s.unlessDenied(st, rec)
	}
	if err != nil {
		return err
	}
	s.prove(l.DiffID)
	s.count(func(h *pop.Hits) { h.Store++; h.StoreBytes += l.Size })
	return nil
}

// elsewhere is a layer that the store has, referenced by this node.
func (s *attacher) elsewhere(ctx context.Context, st *pop.Store, l image.Layer) (*pop.Layer, *layer.Elsewhere,
	error) {
	rec, err := st.Use(ctx, l.DiffID)
	if err != nil {
		return nil, nil, err
	}
	e, err := s.described(ctx, st, rec, l)
	return rec, e, err
}

// described is a layer of the store with its table, of which its index is built here.
func (s *attacher) described(ctx context.Context, st *pop.Store, rec *pop.Layer,
	l image.Layer) (e *layer.Elsewhere, err error) {
	e = &layer.Elsewhere{DiffID: l.DiffID, Blob: rec.Blob, BlobSize: rec.BlobSize, Size: rec.Size,
		Data: s.cfg.Dir.Path(rec.Data())}
	e.Table, err = st.Table(ctx, rec)
	return e, err
}

// A layer's tar was seen when it was attached, or referenced. Who mounts it then, which looks twice, need not
// look again; whoever comes later, or a second later, looks himself.
const (
	provedTime = time.Second
	provedUses = 2
)

// proof is that a tar was there.
type proof struct {
	at   time.Time
	left int // uses
}

func (s *attacher) prove(id digest.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, p := range s.proved {
		if time.Since(p.at) > provedTime {
			delete(s.proved, id)
		}
	}
	s.proved[id] = proof{time.Now(), provedUses}
}

// isProved reports whether the tar was seen a moment ago, and the store answers.
func (s *attacher) isProved(id digest.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.proved[id]
	if !ok || p.left == 0 || time.Since(p.at) > provedTime || s.cfg.Dir.Away() != nil {
		return false
	}
	p.left--
	s.proved[id] = p
	return true
}

// Attach implements fetch.Source: it makes those layers of img known that the store has, before anything is
// decided about the others. Layers of a store that is away are let go of.
func (s *attacher) Attach(ctx context.Context, img *image.Image, begun any) (lost []digest.Digest) {
	ctx, step := trace.Start(ctx, "attach")
	defer step.End()
	under, _ := begun.(*attaching)
	return s.attach(ctx, img, under)
}

// attach is Attach, part of which begun, unless nil, does already.
func (s *attacher) attach(ctx context.Context, img *image.Image, begun *attaching) (lost []digest.Digest) {
	s.opening(ctx)
	ctx, cancel := context.WithTimeout(ctx, storePatience)
	defer cancel()
	unused := s.prewarmer.unused(img)
	s.prewarmer.prewarmed.adopt(img)
	st := s.usable()
	if st == nil {
		return s.disown(img)
	}
	s.work.Go(func() { // where it is needed at once, findPack waits for it
		if err := s.packs.bringPack(s.life, img.Desc.Digest); err != nil {
			s.log.Warn("a startup pack of the PoP's store cannot be used", "image", img.Ref, "err", err)
		}
	})
	// the registry says that it is another image now
	if begun == nil || begun.img.Desc.Digest != img.Desc.Digest {
		begun = s.begin(st, img, false)
	}
	var used []*pop.Layer
	var mu sync.Mutex
	var group sync.WaitGroup
	group.Go(func() { s.remounted(ctx) })
	inactive := s.prewarmer.prewarmed.inactiveOf(idsOf(img))
	activated := make(chan struct{})
	var left map[digest.Digest]bool // of those; there once activated is closed
	group.Go(func() {
		defer close(activated)
		left = s.prewarmer.activate(ctx, st, inactive)
	})
	for _, l := range img.Unique() {
		if begun.has(l.DiffID) {
			continue
		}
		group.Go(func() {
			wasInactive, isGone := slices.Contains(inactive, l.DiffID), false
			if wasInactive {
				<-activated
				isGone = left[l.DiffID]
			} else if isGone = s.unreachable(ctx, l.DiffID); isGone {
				s.detach(img, l.DiffID)
			}
			mu.Lock()
			defer mu.Unlock()
			if isGone {
				lost = append(lost, l.DiffID)
			} else if rec := s.found(l); rec != nil {
				used = append(used, rec)
				if !slices.Contains(unused, l.DiffID) {
					s.copies.reused(l.DiffID)
				}
			}
		})
	}
	group.Wait()
	used = append(used, begun.wait(ctx)...)
	s.touch(img, used)
	if s.usable() == nil { // it went meanwhile
		return append(lost, s.disown(img)...)
	}
	return lost
}

// touch tells the PoP that an image is deployed and its layers are used, behind the deployment.
func (s *attacher) touch(img *image.Image, used []*pop.Layer) {
	st := s.usable()
	if st == nil {
		return
	}
	s.work.Go(func() {
		ctx, cancel := context.WithTimeout(s.life, storePatience)
		defer cancel()
		err := s.cfg.Coord.Publish(ctx, pop.Event{Kind: pop.Deployed, Key: img.Ref.String()})
		if len(used) > 0 {
			err = errors.Join(err, st.Touch(ctx, img.Ref.String(), img.Ref.Host, used...))
		}
		if err != nil {
			s.log.Debug("use is not noted", "image", img.Ref, "err", err)
		}
	})
}

// found counts a layer that is here already, and returns what the policy is told of it.
func (s *attacher) found(l image.Layer) *pop.Layer {
	have, err := s.layers.Peek(l.DiffID)
	if err == nil && have.At != "" {
		s.count(func(h *pop.Hits) { h.Store++; h.StoreBytes += l.Size })
		return s.recordOf(have)
	}
	s.count(func(h *pop.Hits) { h.Local++; h.LocalBytes += l.Size })
	return s.recordOf(have)
}

// recordOf is what the policy is told of a layer that is here; nil of none.
func (s *attacher) recordOf(l *layer.Layer) *pop.Layer {
	if l == nil {
		return nil
	}
	return &pop.Layer{DiffID: l.DiffID, Size: l.Size, Blob: l.Blob, BlobSize: l.BlobSz}
}
