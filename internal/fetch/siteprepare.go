package fetch

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

// What other nodes of the PoP have deployed is made ready here while nothing is being deployed: the image's documents and
// its layers' indexes are copied, and containerd is told of it. Its layers then rest: they are attached, and neither
// mounted nor marked. So they keep nothing in the store, and may be evicted; whoever mounts one marks it first and looks
// whether it is still there, in the files that it was attached from (rouse).

// PrepareConfig says how images are made ready. All of it is required but Path.
type PrepareConfig struct {
	Images int // so many at most; 0 is none
	// Register makes an image known to the engine, whose layers are attached.
	Register func(ctx context.Context, img *image.Image) error
	// Rest unmounts layers that nothing needs mounted, and returns the others.
	Rest func(ctx context.Context, ids ...digest.Digest) (busy []digest.Digest, err error)
	// Forget has the engine, and the catalog, forget an image, unless a container uses it.
	Forget func(ctx context.Context, ref image.Reference) error
	// Path is the file that remembers which images were made ready; "" remembers none.
	Path string
}

const (
	// prepareRest is for how long nothing must have happened here, or been published, before an image is made ready.
	prepareRest = 500 * time.Millisecond
	// prepareAgain is the pause before an image is looked at again that was not whole in the store, prepareAge for how long.
	prepareAgain = 5 * time.Second
	prepareAge   = 30 * time.Minute
	maxWishes    = 256
	// maxReadyIndex is how many bytes of indexes may be ready: beyond it one image goes for each that comes.
	maxReadyIndex = 64 << 20
)

// prepared is what is ready here, and what is to be. The methods of nil do nothing.
type prepared struct {
	cfg  PrepareConfig
	news chan struct{} // has one when there is something to look at

	saving sync.Mutex
	mu     sync.Mutex
	wishes []wish // the newest last
	resync bool   // look what images the store has
	images []image.Reference
	rest   map[digest.Digest]bool // attached, and neither mounted nor marked
}

// wish is an image that another node has deployed.
type wish struct {
	ref   string
	since time.Time
}

func newPrepared(cfg PrepareConfig) *prepared {
	r := &prepared{cfg: cfg, news: make(chan struct{}, 1), resync: true, rest: map[digest.Digest]bool{}}
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

// save writes down which images are ready. A file that is lost costs some marks: what it named stays in use.
func (r *prepared) save() {
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

// heard notes what other nodes have deployed.
func (r *prepared) heard(e pop.Event, self string) {
	if r == nil {
		return
	}
	r.mu.Lock()
	switch {
	case e.Kind == pop.Resync:
		r.resync = true
	case e.Kind == pop.Resolved && e.Node != self:
		r.want(e.Key)
	case e.Kind != pop.Published || len(r.wishes) == 0:
		r.mu.Unlock()
		return
	}
	r.mu.Unlock()
	select {
	case r.news <- struct{}{}:
	default:
	}
}

// want is called with mu held.
func (r *prepared) want(ref string) {
	r.wishes = slices.DeleteFunc(r.wishes, func(w wish) bool { return w.ref == ref })
	r.wishes = append(r.wishes, wish{ref, time.Now()})
	r.wishes = r.wishes[max(0, len(r.wishes)-maxWishes):]
}

// rests reports whether a layer is attached without a mark.
func (r *prepared) rests(id digest.Digest) bool {
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rest[id]
}

func (r *prepared) setRest(id digest.Digest, rests bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if rests {
		r.rest[id] = true
	} else {
		delete(r.rest, id)
	}
}

// adopt notes that an image is deployed here: it stays as any other.
func (r *prepared) adopt(img *image.Image) {
	if r == nil {
		return
	}
	r.mu.Lock()
	n := len(r.images)
	r.images = slices.DeleteFunc(r.images, func(ref image.Reference) bool { return ref.String() == img.Ref.String() })
	changed := len(r.images) != n
	r.mu.Unlock()
	if changed {
		r.save()
	}
}

// rouse marks those of the layers that rest. It returns those that are not there any more, in the files
// that they were attached from: they are to be detached.
func (s *site) rouse(ctx context.Context, st *pop.Store, layers []image.Layer) map[digest.Digest]bool {
	resting := func() (ids []digest.Digest) {
		for _, l := range layers {
			if s.ready.rests(l.DiffID) {
				ids = append(ids, l.DiffID)
			}
		}
		return ids
	}
	ids := resting()
	if len(ids) == 0 {
		return nil
	}
	defer s.lockAll(ids)()
	if ids = resting(); len(ids) == 0 {
		return nil
	}
	have, err := st.UseAll(ctx, ids, nil)
	left := map[digest.Digest]bool{}
	for _, id := range ids {
		if l, perr := s.p.cfg.Layers.Peek(id); perr == nil && l.At != "" && (have[id] == nil || s.cfg.Dir.Path(have[id].Data()) != l.At) {
			left[id] = true
			s.log.Debug("a layer that was made ready has left the PoP's store", "layer", id, "err", err)
		}
		s.ready.setRest(id, false)
	}
	return left
}

// rouseOne is rouse of a layer that is about to be mounted. It reports whether that may be.
func (s *site) rouseOne(ctx context.Context, l *layer.Layer) bool {
	if !s.ready.rests(l.DiffID) {
		return true
	}
	st := s.usable()
	return st != nil && len(s.rouse(ctx, st, []image.Layer{{DiffID: l.DiffID}})) == 0
}

// letRest has layers rest that nothing needs mounted.
func (s *site) letRest(ctx context.Context, st *pop.Store, ids []digest.Digest) error {
	var rest []digest.Digest
	for _, id := range ids {
		if l, err := s.p.cfg.Layers.Peek(id); err == nil && l.At != "" && !s.p.isHeld(id) {
			s.ready.setRest(id, true) // from here on who mounts it marks it
			rest = append(rest, id)
		}
	}
	busy, err := s.cfg.Prepare.Rest(ctx, rest...)
	for _, id := range busy {
		s.ready.setRest(id, false)
	}
	defer s.lockAll(rest)()
	rest = slices.DeleteFunc(rest, func(id digest.Digest) bool { return !s.ready.rests(id) }) // roused meanwhile
	if len(rest) == 0 {
		return err
	}
	return errors.Join(err, st.Unuse(ctx, rest...))
}

// prepareAll makes ready what others deploy, one image after the other, until ctx ends.
func (s *site) prepareAll(ctx context.Context) {
	for {
		again := time.Duration(1<<63 - 1)
		if s.ready.pending() {
			again = prepareAgain
		}
		select {
		case <-ctx.Done():
			return
		case <-s.ready.news:
		case <-time.After(again):
		}
		if !s.quiet(ctx) {
			return
		}
		if st := s.usable(); st != nil && !s.p.cfg.Layers.Unpacks() {
			s.catchUp(ctx, st)
			s.prepareWishes(ctx, st)
		}
	}
}

func (r *prepared) pending() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.wishes) > 0 || r.resync
}

// quiet waits until nothing has been deployed here for a while; false is the end of ctx.
func (s *site) quiet(ctx context.Context) bool {
	for since := time.Now(); ; {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(prepareRest / 5):
		}
		if s.p.busy() {
			since = time.Now()
		} else if time.Since(since) >= prepareRest {
			return true
		}
	}
}

// busy reports whether a pull is under way.
func (p *Puller) busy() bool {
	p.holdMu.Lock()
	defer p.holdMu.Unlock()
	return len(p.holds) > 0
}

// catchUp looks at what was missed: images that an earlier process made ready, whose layers are marked since it opened the
// store, and what other nodes have deployed while this one did not hear of it.
func (s *site) catchUp(ctx context.Context, st *pop.Store) {
	r := s.ready
	r.mu.Lock()
	resync := r.resync
	r.resync = false
	r.mu.Unlock()
	if !resync {
		return
	}
	if err := s.restReady(ctx, st); err != nil {
		s.log.Debug("layers that were made ready stay in use", "err", err)
	}
	records, err := st.Images(ctx, r.cfg.Images)
	if err != nil {
		s.log.Debug("images of the PoP's store", "err", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, b := range slices.Backward(records) {
		img := new(image.Image)
		if json.Unmarshal(b, img) == nil {
			r.want(img.Ref.String())
		}
	}
}

func idsOf(img *image.Image) (ids []digest.Digest) {
	for _, l := range img.Unique() {
		ids = append(ids, l.DiffID)
	}
	return ids
}

func (s *site) prepareWishes(ctx context.Context, st *pop.Store) {
	r := s.ready
	r.mu.Lock()
	wishes := slices.Clone(r.wishes)
	r.mu.Unlock()
	for _, w := range slices.Backward(wishes) { // the newest first
		if !s.quiet(ctx) {
			return
		}
		done, err := s.prepare(ctx, st, w.ref)
		if err != nil {
			s.log.Debug("an image is not made ready", "image", w.ref, "err", err)
		}
		if done || time.Since(w.since) > prepareAge {
			r.mu.Lock()
			r.wishes = slices.DeleteFunc(r.wishes, func(have wish) bool { return have == w })
			r.mu.Unlock()
		}
	}
}

// prepare makes an image ready if the store has all of it. It reports whether there is no more to be done about it.
func (s *site) prepare(ctx context.Context, st *pop.Store, ref string) (done bool, err error) {
	b, err := st.Image(ctx, ref)
	img := new(image.Image)
	if err != nil || json.Unmarshal(b, img) != nil || img.Ref.String() != ref {
		return errors.Is(err, pop.ErrUnknown), err
	}
	if known := s.p.cfg.Catalog.Get(img.Ref); known != nil && known.Desc.Digest == img.Desc.Digest && s.p.have(known) {
		return true, nil
	}
	absent, err := s.survey(ctx, st, img)
	if err != nil {
		return false, err
	}
	if absent {
		s.beginAs(st, img, true, true).wait(ctx)
	}
	if s.p.have(img) {
		if err = s.p.cfg.Catalog.Put(img); err == nil {
			err = s.cfg.Prepare.Register(ctx, img)
		}
		done = err == nil
	}
	if done {
		s.readied(ctx, img)
	}
	return done, errors.Join(err, s.restReady(context.WithoutCancel(ctx), st))
}

// survey looks at an image's layers: whether some are not here. The error says why it cannot be made ready now.
func (s *site) survey(ctx context.Context, st *pop.Store, img *image.Image) (absent bool, err error) {
	for _, l := range img.Unique() {
		if s.p.cfg.Layers.Partial(l.DiffID) != nil || s.p.cfg.Layers.Filling(l.DiffID) != nil {
			return false, errors.New("it is on its way here")
		}
		if s.here(l.DiffID) {
			continue
		}
		if _, err := st.Record(ctx, l.DiffID); err != nil {
			return false, err
		}
		absent = true
	}
	return absent, nil
}

// restReady has those layers of ready images rest that no other image here has.
func (s *site) restReady(ctx context.Context, st *pop.Store) error {
	if s.ready == nil {
		return nil
	}
	s.ready.mu.Lock()
	images := slices.Clone(s.ready.images)
	s.ready.mu.Unlock()
	wanted := map[digest.Digest]bool{}
	for _, ref := range images {
		img := s.p.cfg.Catalog.Get(ref)
		if img == nil {
			continue
		}
		for _, id := range idsOf(img) {
			if l, err := s.p.cfg.Layers.Peek(id); err == nil && l.At != "" && !s.ready.rests(id) && s.onlyReady(id, images) {
				wanted[id] = true
			}
		}
	}
	if len(wanted) == 0 {
		return nil
	}
	return s.letRest(ctx, st, slices.Sorted(maps.Keys(wanted)))
}

// onlyReady reports whether no image but these has the layer.
func (s *site) onlyReady(id digest.Digest, images []image.Reference) bool {
	return !slices.ContainsFunc(s.p.cfg.Catalog.WithLayer(id), func(img *image.Image) bool {
		return !slices.ContainsFunc(images, func(ref image.Reference) bool { return ref.String() == img.Ref.String() })
	})
}

// readied notes that an image is ready, and lets go of the one that was made so first if there are too many.
func (s *site) readied(ctx context.Context, img *image.Image) {
	r := s.ready
	r.adopt(img)
	r.mu.Lock()
	r.images = append(r.images, img.Ref)
	n := max(0, len(r.images)-r.cfg.Images)
	if len(r.images) > 1 && s.indexes(r.rest) > maxReadyIndex {
		n = max(n, 1)
	}
	gone := slices.Clone(r.images[:n])
	r.images = slices.Clone(r.images[n:])
	r.mu.Unlock()
	r.save()
	for _, ref := range gone {
		s.unready(ctx, ref)
	}
}

// indexes is how many bytes the indexes of these layers take.
func (s *site) indexes(ids map[digest.Digest]bool) (sum int64) {
	for id := range ids {
		if l, err := s.p.cfg.Layers.Peek(id); err == nil && l.At != "" {
			sum += l.Index
		}
	}
	return sum
}

// unready takes back that an image was made ready. What rests of it is let go of.
func (s *site) unready(ctx context.Context, ref image.Reference) {
	img := s.p.cfg.Catalog.Get(ref)
	if err := s.cfg.Prepare.Forget(ctx, ref); err != nil {
		s.log.Debug("an image that was made ready is not forgotten", "image", ref, "err", err)
		return
	}
	if img == nil {
		return
	}
	for _, id := range idsOf(img) {
		if len(s.imagesWith(id)) == 0 {
			s.dismiss(id)
		}
	}
}

// dismiss detaches a layer that rests.
func (s *site) dismiss(id digest.Digest) {
	defer s.lock(id)()
	if !s.ready.rests(id) {
		return
	}
	if err := s.p.cfg.Layers.Detach(id); err != nil {
		s.log.Warn("detach layer", "layer", id, "err", err)
	}
	s.ready.setRest(id, false)
}

// takeBack takes back what was made ready of a layer that has left the store, and reports whether it rested.
func (s *site) takeBack(id digest.Digest) bool {
	if !s.ready.rests(id) {
		return false
	}
	s.p.work.Go(func() {
		s.dismiss(id)
		r := s.ready
		r.mu.Lock()
		images := slices.Clone(r.images)
		r.mu.Unlock()
		for _, ref := range images {
			img := s.p.cfg.Catalog.Get(ref)
			if img != nil && slices.Contains(idsOf(img), id) {
				r.adopt(img)
				s.unready(s.p.life, ref)
			}
		}
	})
	return true
}
