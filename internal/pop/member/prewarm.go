package member

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// What other nodes of the PoP deploy again and again is prewarmed here while nothing is being deployed: the
// image's documents and its layers' indexes are copied, and containerd is told of it. Its layers are
// attached, mounted and referenced as any others, until the store needs room. Then they are deactivated:
// neither mounted nor referenced. So they keep nothing in the store, and may be evicted; whoever mounts one
// references it first and looks whether it is still there, in the files that it was attached from (activate).

// prewarmer prewarms images that other nodes deploy.
type prewarmer struct {
	*common
	prewarmed *prewarmed // nil: nothing is
}

// PrewarmConfig says how images are prewarmed. All of it is required but Path.
type PrewarmConfig struct {
	Images int // so many at most; below 1 none
	// After is how many deployments on other nodes make an image worth it; 0 is 2.
	After  int
	Engine Engine
	// Path is the file that remembers which images were prewarmed; "" remembers none.
	Path string
}

const (
	// prewarmQuiet is for how long nothing must have happened here, or been published, before an image is
	// prewarmed.
	prewarmQuiet = 500 * time.Millisecond
	// prewarmAfter is PrewarmConfig.After unless it is given: most images are deployed once, a few of them
	// nearly always.
	prewarmAfter = 2
	// After an image that took t there is a pause of prewarmShare times t, so that prewarming takes a
	// twentieth of the time, at most prewarmMost: what takes longer than half a second waits for most of it.
	prewarmShare = 19
	prewarmMost  = 10 * time.Second
	// prewarmAgain is the pause before an image is looked at again that was not whole in the store, prewarmAge
	// for how long.
	prewarmAgain = 5 * time.Second
	prewarmAge   = 30 * time.Minute
	maxDemand    = 256 // images
)

// prewarmed is what is prewarmed here, and what is to be. The methods of nil do nothing.
type prewarmed struct {
	cfg  PrewarmConfig
	news chan struct{} // has one when there is something to look at

	saving sync.Mutex
	// held by deactivate: of two at once each could take for its own what the other has found busy
	letting sync.Mutex
	mu      sync.Mutex
	demand  []demand // for images that are not prewarmed; what was deployed last is last
	// that are prewarmed, or are being; what was deployed elsewhere last is last
	images   []image.Reference
	inactive map[digest.Digest]bool // attached, and neither mounted nor referenced
}

// demand is how often other nodes have deployed an image.
type demand struct {
	ref   string
	times int
	since time.Time // when that was often enough; zero before
}

func newPrewarmed(cfg PrewarmConfig) *prewarmed {
	cfg.After = cmp.Or(cfg.After, prewarmAfter)
	r := &prewarmed{cfg: cfg, news: make(chan struct{}, 1), inactive: map[digest.Digest]bool{}}
	var refs []string
	if b, err := os.ReadFile(cfg.Path); err == nil && json.Unmarshal(b, &refs) == nil {
		for _, s := range refs {
			if ref, err := image.ParseReference(s); err == nil {
				r.images = append(r.images, ref)
			}
		}
	}
	return r
}

// save writes down which images are prewarmed. A file that is lost costs some references: what it named stays
// in use.
func (r *prewarmed) save() {
	r.saving.Lock()
	defer r.saving.Unlock()
	r.mu.Lock()
	refs := make([]string, len(r.images))
	for i, ref := range r.images {
		refs[i] = ref.String()
	}
	r.mu.Unlock()
	if b, err := json.Marshal(refs); err == nil && r.cfg.Path != "" {
		_ = os.WriteFile(r.cfg.Path, b, 0o600)
	}
}

// demanded notes that a node has deployed an image. What is here, or on its way, is not counted: if it is
// removed, that was asked for.
func (s *prewarmer) demanded(e pop.Event) {
	if s.prewarmed == nil || e.Node == s.cfg.Node {
		return
	}
	s.prewarmed.stays(e.Key)
	if ref, err := image.ParseReference(e.Key); err == nil {
		if img := s.catalog.Get(ref); img != nil &&
			(s.node.Have(img) || slices.ContainsFunc(idsOf(img), s.holds.Held)) {
			return
		}
	}
	s.prewarmed.heard(e, s.cfg.Node)
}

// stays moves a prewarmed image behind the others: it is taken back last.
func (r *prewarmed) stays(ref string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.IndexFunc(r.images, func(have image.Reference) bool { return have.String() == ref }); i >= 0 {
		have := r.images[i]
		r.images = append(slices.Delete(r.images, i, i+1), have)
	}
}

// heard counts what other nodes have deployed, and looks what of it may be whole in the store now.
func (r *prewarmed) heard(e pop.Event, self string) {
	if r == nil || r.cfg.Images < 1 || e.Node == self && e.Kind == pop.Deployed {
		return
	}
	r.mu.Lock()
	if e.Kind == pop.Deployed {
		r.deployed(e.Key)
	}
	news := (e.Kind == pop.Deployed || e.Kind == pop.Published) && len(r.wanted()) > 0
	r.mu.Unlock()
	if !news {
		return
	}
	select {
	case r.news <- struct{}{}:
	default:
	}
}

// deployed is called with mu held.
func (r *prewarmed) deployed(ref string) {
	d := demand{ref: ref}
	if i := r.demandFor(ref); i >= 0 {
		d = r.demand[i]
		r.demand = slices.Delete(r.demand, i, i+1)
	}
	if d.times++; d.times == r.cfg.After {
		d.since = time.Now()
	}
	r.demand = append(r.demand, d)
	r.demand = r.demand[max(0, len(r.demand)-maxDemand):]
}

// demandFor is called with mu held.
func (r *prewarmed) demandFor(ref string) int {
	return slices.IndexFunc(r.demand, func(d demand) bool { return d.ref == ref })
}

// wanted are the images that are worth being prewarmed. It is called with mu held.
func (r *prewarmed) wanted() (all []demand) {
	for _, d := range r.demand {
		if d.times >= r.cfg.After {
			all = append(all, d)
		}
	}
	return all
}

// met forgets the demand for an image.
func (r *prewarmed) met(ref string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := r.demandFor(ref); i >= 0 {
		r.demand = slices.Delete(r.demand, i, i+1)
	}
}

// isInactive reports whether a layer is attached without a reference.
func (r *prewarmed) isInactive(id digest.Digest) bool {
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.inactive[id]
}

// inactiveOf are those of the layers that are inactive.
func (r *prewarmed) inactiveOf(ids []digest.Digest) []digest.Digest {
	return slices.DeleteFunc(slices.Clone(ids), func(id digest.Digest) bool { return !r.isInactive(id) })
}

func (r *prewarmed) setInactive(id digest.Digest, inactive bool) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if inactive {
		r.inactive[id] = true
	} else {
		delete(r.inactive, id)
	}
}

// adopt notes that an image is deployed here: it stays as any other.
func (r *prewarmed) adopt(img *image.Image) {
	if r == nil {
		return
	}
	r.met(img.Ref.String())
	r.drop(img.Ref)
}

// drop takes an image from those that are prewarmed.
func (r *prewarmed) drop(ref image.Reference) {
	r.mu.Lock()
	n := len(r.images)
	r.images = slices.DeleteFunc(r.images, func(have image.Reference) bool {
		return have.String() == ref.String()
	})
	changed := len(r.images) != n
	r.mu.Unlock()
	if changed {
		r.save()
	}
}

// activate references those of the layers that are inactive. It detaches, and returns, those that are not
// there any more, in the files that they were attached from.
func (s *prewarmer) activate(ctx context.Context, st *pop.Store,
	layers []digest.Digest) map[digest.Digest]bool {
	ids := s.prewarmed.inactiveOf(layers)
	if len(ids) == 0 {
		return nil
	}
	defer s.lockAll(ids)()
	if ids = s.prewarmed.inactiveOf(layers); len(ids) == 0 {
		return nil
	}
	have, err := st.UseAll(ctx, st.Lookups(ctx, ids))
	left := map[digest.Digest]bool{}
	for _, id := range ids {
		if l, perr := s.layers.Peek(id); perr == nil && l.At != "" &&
			(have[id] == nil || s.cfg.Dir.Path(have[id].Data()) != l.At) {
			left[id] = true
			s.log.Debug("a layer that was prewarmed has left the PoP's store", "layer", id, "err", err)
			if err := s.attacher.Detach(id); err != nil {
				s.log.Warn("detach layer", "layer", id, "err", err)
			}
		} else if perr == nil {
			s.attacher.prove(id)
		}
		s.prewarmed.setInactive(id, false) // who sees that sees what was detached, too
	}
	return left
}

// activateOne is activate of a layer that is about to be mounted. It reports whether that may be.
func (s *prewarmer) activateOne(ctx context.Context, l *layer.Layer) bool {
	if s.prewarmed == nil {
		return true
	}
	if s.prewarmed.isInactive(l.DiffID) {
		st := s.usable()
		if st == nil {
			return false
		}
		s.activate(ctx, st, []digest.Digest{l.DiffID})
	}
	now, err := s.layers.Peek(l.DiffID) // somebody else may have found that it is gone
	return err == nil && now.At == l.At
}

// deactivate unmounts layers that nothing needs mounted, gives their references back, and returns how many.
func (s *prewarmer) deactivate(ctx context.Context, st *pop.Store, ids []digest.Digest) (int, error) {
	s.prewarmed.letting.Lock()
	defer s.prewarmed.letting.Unlock()
	var idle []digest.Digest
	for _, id := range ids {
		if l, err := s.layers.Peek(id); err == nil && l.At != "" && !s.holds.Held(id) {
			s.prewarmed.setInactive(id, true) // from here on who mounts it references it
			idle = append(idle, id)
		}
	}
	busy, err := s.cfg.Prewarm.Engine.Unmount(ctx, idle...)
	for _, id := range busy {
		s.prewarmed.setInactive(id, false)
	}
	defer s.lockAll(idle)()
	idle = slices.DeleteFunc(idle, func(id digest.Digest) bool { // activated meanwhile
		return !s.prewarmed.isInactive(id)
	})
	if len(idle) == 0 {
		return 0, err
	}
	return len(idle), errors.Join(err, st.Unuse(ctx, idle...))
}

// deactivateIdle deactivates those layers that have not been used for idle and that no container stands on,
// whichever image has them: the older half, or what there is. The store needs room.
func (s *prewarmer) deactivateIdle(ctx context.Context, st *pop.Store, idle time.Duration) (err error) {
	if s.prewarmed == nil {
		return nil
	}
	layers := slices.DeleteFunc(s.layers.Layers(), func(l *layer.Layer) bool {
		return l.At == "" || time.Since(l.Used()) < idle || s.prewarmed.isInactive(l.DiffID)
	})
	slices.SortFunc(layers, func(a, b *layer.Layer) int { return a.Used().Compare(b.Used()) })
	for want := (len(layers) + 1) / 2; want > 0 && len(layers) > 0; {
		var ids []digest.Digest
		for _, l := range layers[:min(want, len(layers))] {
			ids = append(ids, l.DiffID)
		}
		n, rerr := s.deactivate(ctx, st, ids)
		err = errors.Join(err, rerr)
		want, layers = want-n, layers[len(ids):]
	}
	return err
}

// prewarmAll prewarms what others deploy, one image after the other, until ctx ends.
func (s *prewarmer) prewarmAll(ctx context.Context) {
	for {
		again := time.Duration(1<<63 - 1)
		if len(s.prewarmed.wishes()) > 0 {
			again = prewarmAgain
		}
		select {
		case <-ctx.Done():
			return
		case <-s.prewarmed.news:
		case <-time.After(again):
		}
		for _, d := range slices.Backward(s.prewarmed.wishes()) { // the newest first
			if !s.quiet(ctx) {
				return
			}
			if !s.prewarmed.wishesFor(d.ref) { // it was deployed here meanwhile, and perhaps removed
				continue
			}
			if st := s.usable(); st == nil || s.layers.Unpacks() {
				break
			} else if !s.grant(ctx, st, d) {
				return
			}
		}
	}
}

// wishes are the images that are worth being prewarmed.
func (r *prewarmed) wishes() []demand {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.wanted()
}

// wishesFor reports whether an image is still worth being prewarmed.
func (r *prewarmed) wishesFor(ref string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := r.demandFor(ref)
	return i >= 0 && r.demand[i].times >= r.cfg.After
}

// grant prewarms an image, if that is possible now, and pauses; false is the end of ctx.
func (s *prewarmer) grant(ctx context.Context, st *pop.Store, d demand) bool {
	began := time.Now()
	done, err := s.prewarm(ctx, st, d.ref)
	if err != nil {
		s.log.Debug("an image is not prewarmed", "image", d.ref, "err", err)
	}
	if done || time.Since(d.since) > prewarmAge {
		s.prewarmed.met(d.ref)
	}
	select {
	case <-ctx.Done():
		return false
	case <-time.After(min(prewarmShare*time.Since(began), prewarmMost)):
		return true
	}
}

// quiet waits until nothing has been deployed here for a while; false is the end of ctx.
func (s *prewarmer) quiet(ctx context.Context) bool {
	for since := time.Now(); ; {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(prewarmQuiet / 5):
		}
		if s.holds.Busy() {
			since = time.Now()
		} else if time.Since(since) >= prewarmQuiet {
			return true
		}
	}
}

func idsOf(img *image.Image) (ids []digest.Digest) {
	for _, l := range img.Unique() {
		ids = append(ids, l.DiffID)
	}
	return ids
}

// prewarm prewarms an image if the store has all of it. It reports whether there is no more to be done
// about it.
func (s *prewarmer) prewarm(ctx context.Context, st *pop.Store, ref string) (done bool, err error) {
	if r, err := image.ParseReference(ref); err != nil {
		return true, err
		// it is what the PoP has: see refresh
	} else if known := s.catalog.Get(r); known != nil && s.node.Have(known) {
		return true, nil
	}
	b, err := st.Image(ctx, ref)
	img := new(image.Image)
	if err != nil || json.Unmarshal(b, img) != nil || img.Ref.String() != ref {
		return errors.Is(err, pop.ErrUnknown), err
	}
	absent, err := s.survey(ctx, st, img)
	if err != nil {
		return false, err
	}
	if absent {
		s.attacher.beginAs(st, img, true, true).wait(ctx)
	}
	if err := s.introduce(ctx, img); err != nil {
		s.relinquish(ctx, img)
		return false, err
	}
	for _, gone := range s.prewarmed.surplus() {
		s.withdraw(ctx, gone)
	}
	if s.isPressed() {
		s.deactivatePrewarmed(context.WithoutCancel(ctx), st)
	}
	return true, nil
}

// introduce makes an image known here whose layers are attached. It is noted before, so that after a crash it
// is not taken for one that was deployed here.
func (s *prewarmer) introduce(ctx context.Context, img *image.Image) error {
	if !s.node.Have(img) {
		return errors.New("not all of its layers could be attached")
	}
	s.prewarmed.note(img.Ref)
	if s.holds.Busy() { // who deploys it now may have looked before
		s.prewarmed.drop(img.Ref)
		return errors.New("something is deployed here")
	}
	err := s.catalog.Put(img)
	if err == nil {
		err = s.cfg.Prewarm.Engine.Register(ctx, img)
	}
	if err == nil {
		return nil
	}
	if ferr := s.cfg.Prewarm.Engine.Forget(context.WithoutCancel(ctx), img.Ref); ferr != nil {
		return errors.Join(err, ferr) // it stays noted, and its layers are deactivated soon
	}
	s.prewarmed.drop(img.Ref)
	return err
}

// relinquish lets go of those layers of an image that was prewarmed, or nearly, which no image here has.
func (s *prewarmer) relinquish(ctx context.Context, img *image.Image) {
	ids := slices.DeleteFunc(idsOf(img), func(id digest.Digest) bool { return len(s.imagesWith(id)) > 0 })
	st := s.usable()
	if st == nil {
		return // they go as others that nothing uses
	}
	if _, err := s.deactivate(context.WithoutCancel(ctx), st, ids); err != nil {
		s.log.Debug("layers that were prewarmed stay in use", "image", img.Ref, "err", err)
	}
	for _, id := range ids {
		s.dismiss(id)
	}
}

// survey looks at an image's layers: whether some are not here. The error says why it cannot be prewarmed
// now.
func (s *prewarmer) survey(ctx context.Context, st *pop.Store, img *image.Image) (absent bool, err error) {
	for _, l := range img.Unique() {
		if s.layers.Partial(l.DiffID) != nil || s.layers.Filling(l.DiffID) != nil {
			return false, errors.New("it is on its way here")
		}
		if s.layerIsHere(l.DiffID) {
			continue
		}
		if _, err := st.Record(ctx, l.DiffID); err != nil {
			return false, err
		}
		absent = true
	}
	return absent, nil
}

// deactivatePrewarmed deactivates those layers of prewarmed images that no other image here has: the store
// needs room.
func (s *prewarmer) deactivatePrewarmed(ctx context.Context, st *pop.Store) {
	if s.prewarmed == nil {
		return
	}
	var ids []digest.Digest
	for _, l := range s.layers.Layers() {
		if l.At != "" && !s.prewarmed.isInactive(l.DiffID) && s.onlyPrewarmed(l.DiffID) {
			ids = append(ids, l.DiffID)
		}
	}
	if len(ids) == 0 {
		return
	}
	if _, err := s.deactivate(ctx, st, ids); err != nil {
		s.log.Debug("layers that were prewarmed stay in use", "err", err)
	}
}

// onlyPrewarmed reports whether images have the layer, and none of them was deployed here.
func (s *prewarmer) onlyPrewarmed(id digest.Digest) bool {
	refs := s.catalog.RefsWith(id)
	return len(refs) > 0 &&
		!slices.ContainsFunc(refs, func(ref image.Reference) bool { return !s.prewarmed.has(ref) })
}

// unused are those layers of an image that is about to be deployed which nothing here has used: they were
// prewarmed.
func (s *prewarmer) unused(img *image.Image) []digest.Digest {
	if !s.prewarmed.has(img.Ref) {
		return nil
	}
	return slices.DeleteFunc(idsOf(img), func(id digest.Digest) bool { return !s.onlyPrewarmed(id) })
}

// has reports whether an image is prewarmed, or is being.
func (r *prewarmed) has(ref image.Reference) bool {
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.images, func(have image.Reference) bool {
		return have.String() == ref.String()
	})
}

// note adds an image to those that are prewarmed.
func (r *prewarmed) note(ref image.Reference) {
	r.mu.Lock()
	r.images = append(slices.DeleteFunc(r.images, func(have image.Reference) bool {
		return have.String() == ref.String()
	}), ref)
	r.mu.Unlock()
	r.save()
}

// surplus takes out and returns the images that were deployed elsewhere least lately, if there are too many.
func (r *prewarmed) surplus() (gone []image.Reference) {
	r.mu.Lock()
	n := max(0, len(r.images)-r.cfg.Images)
	gone, r.images = slices.Clone(r.images[:n]), slices.Clone(r.images[n:])
	r.mu.Unlock()
	if n > 0 {
		r.save()
	}
	return gone
}

// withdraw takes back that an image was prewarmed, and lets go of what nothing else has of it.
func (s *prewarmer) withdraw(ctx context.Context, ref image.Reference) {
	img := s.catalog.Get(ref)
	if err := s.cfg.Prewarm.Engine.Forget(ctx, ref); err != nil {
		s.log.Debug("an image that was prewarmed is not forgotten", "image", ref, "err", err)
		return
	}
	if img != nil {
		s.relinquish(ctx, img)
	}
}

// dismiss detaches an inactive layer.
func (s *prewarmer) dismiss(id digest.Digest) {
	defer s.lock(id)()
	if !s.prewarmed.isInactive(id) {
		return
	}
	if err := s.attacher.Detach(id); err != nil {
		s.log.Warn("detach layer", "layer", id, "err", err)
	}
}

// takeBack takes back what was prewarmed of a layer that has left the store, and reports whether nothing
// here had used it.
func (s *prewarmer) takeBack(ctx context.Context, id digest.Digest) bool {
	if st := s.usable(); st != nil && s.prewarmed != nil && !s.prewarmed.isInactive(id) && s.onlyPrewarmed(id) {
		if _, err := s.deactivate(ctx, st, []digest.Digest{id}); err != nil {
			s.log.Debug("a layer that was prewarmed stays in use", "layer", id, "err", err)
		}
	}
	if !s.prewarmed.isInactive(id) {
		return false
	}
	s.dismiss(id)
	r := s.prewarmed
	r.mu.Lock()
	images := slices.Clone(r.images)
	r.mu.Unlock()
	for _, ref := range images {
		img := s.catalog.Get(ref)
		if img != nil && slices.Contains(idsOf(img), id) {
			r.drop(ref)
			s.withdraw(ctx, ref)
		}
	}
	return true
}
