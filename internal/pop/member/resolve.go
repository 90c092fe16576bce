package member

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/image"
)

// What references mean to the PoP: a node takes over what another one has resolved, and tells what it has.

// names has in common with the other nodes what references mean.
type names struct {
	*common

	mu     sync.Mutex
	untold map[string]*resolution // by reference, which the store does not have yet
}

// Resolve implements fetch.Source.
func (s *names) Resolve(ctx context.Context, ref image.Reference, local bool,
	ask func() (*image.Image, error)) (img *image.Image, begun any, err error) {
	img, under := s.resolve(ctx, ref, local)
	if img != nil {
		return img, under, nil
	}
	if img, err = ask(); err == nil {
		s.resolved(img) // before it is in the catalog: refresh would put back what the PoP knows
	}
	return img, under, err
}

// resolve returns what another node of the PoP has resolved ref to, if all
// its layers can be had within the PoP, or the reference cannot change its meaning. Those
// of its layers that the store has are being attached, also if it returns no image.
func (s *names) resolve(ctx context.Context, ref image.Reference, local bool) (*image.Image, *attaching) {
	st := s.usable()
	if st == nil || ref.Dgst == "" && !local {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, storePatience)
	defer cancel()
	b, err := st.Image(ctx, ref.String())
	if err != nil {
		return nil, nil
	}
	img := new(image.Image)
	if err := json.Unmarshal(b, img); err != nil || img.Ref.String() != ref.String() {
		s.log.Warn("an image record of the PoP's store is not used", "image", ref, "err", err)
		return nil, nil
	}
	begun := s.attacher.begin(st, img, true)
	if ref.Dgst == "" && !begun.all(ctx) {
		return nil, begun
	}
	return img, begun
}

// resolution is what a reference was resolved to here, and when.
type resolution struct {
	img *image.Image
	at  time.Time
}

// resolved tells the PoP what ref was resolved to, behind the deployment. While the store is away that
// waits until it is back.
func (s *names) resolved(img *image.Image) {
	if s.cfg.Store == nil {
		return // there is no store
	}
	r := &resolution{img, time.Now()}
	s.mu.Lock()
	s.untold[img.Ref.String()] = r
	s.mu.Unlock()
	s.work.Go(func() { s.tell(s.life, r) })
}

const tellTime = time.Minute

// tell records for the PoP what a reference was resolved to here.
func (s *names) tell(ctx context.Context, r *resolution) {
	img, st := r.img, s.usable()
	if st == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, tellTime)
	defer cancel()
	b, err := json.Marshal(img)
	if err == nil {
		err = st.PutImage(ctx, img.Ref.String(), b)
	}
	if err != nil {
		s.log.Debug("image is not recorded for the PoP", "image", img.Ref, "err", err)
		return
	}
	s.told(r)
}

// told forgets what the PoP knows.
func (s *names) told(r *resolution) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.untold[r.img.Ref.String()] == r {
		delete(s.untold, r.img.Ref.String())
	}
}

// tellAll records what could not be recorded before, unless another node has resolved it since.
func (s *names) tellAll(ctx context.Context) {
	st := s.usable()
	if st == nil {
		return
	}
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.untold))
	s.mu.Unlock()
	for _, r := range all {
		if time.Since(r.at) < tellTime {
			continue // it is being told
		}
		if at, err := st.Resolved(ctx, r.img.Ref.String()); err == nil && at.After(r.at) {
			s.told(r)
			if have := s.catalog.Get(r.img.Ref); have != nil { // it was not removed meanwhile
				s.refresh(ctx, have)
			}
			continue
		}
		s.tell(ctx, r)
	}
}

// isTold reports whether the PoP knows what ref was last resolved to here.
func (s *names) isTold(ref image.Reference) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.untold[ref.String()] == nil
}
