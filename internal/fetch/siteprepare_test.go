package fetch

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"dewpoint/internal/image"
	"dewpoint/internal/registry/registrytest"

	"github.com/opencontainers/go-digest"
)

// readyEngine is an engine as making images ready needs it: it mounts layers, and forgets images.
type readyEngine struct {
	n *siteNode // set before anything is deployed

	mu      sync.Mutex
	images  []string
	mounted map[digest.Digest]bool
	stands  map[digest.Digest]bool // containers do
}

func (e *readyEngine) register(ctx context.Context, img *image.Image) error {
	for _, l := range img.Layers {
		if _, err := e.n.Files(ctx, l.DiffID); err != nil {
			return err
		}
		e.n.use(l.DiffID)
		e.mu.Lock()
		e.mounted[l.DiffID] = true
		e.mu.Unlock()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.images = append(e.images, img.Ref.String())
	return nil
}

func (e *readyEngine) rest(_ context.Context, ids ...digest.Digest) (busy []digest.Digest, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, id := range ids {
		if e.stands[id] {
			busy = append(busy, id)
		} else {
			delete(e.mounted, id)
		}
	}
	return busy, nil
}

func (e *readyEngine) forget(_ context.Context, ref image.Reference) error {
	e.mu.Lock()
	e.images = slices.DeleteFunc(e.images, func(s string) bool { return s == ref.String() })
	e.mu.Unlock()
	return e.n.cfg.Catalog.Forget(ref)
}

func (e *readyEngine) has(p registrytest.Pushed) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Contains(e.images, e.n.ref(p.Ref).String())
}

// preparing is a node that makes so many images ready.
func (s *siteBed) preparing(name string, images int) (*siteNode, *readyEngine) {
	e := &readyEngine{mounted: map[digest.Digest]bool{}, stands: map[digest.Digest]bool{}}
	e.n = s.node(name, func(c *PoPConfig) {
		c.Prepare = PrepareConfig{Images: images, Register: e.register, Rest: e.rest, Forget: e.forget, Path: filepath.Join(s.t.TempDir(), "prepared")}
	})
	return e.n, e
}

// marks are those of a node in the store.
func (s *siteBed) marks(name string) int {
	s.t.Helper()
	marks, err := os.ReadDir(filepath.Join(s.store, "refs", name))
	if err != nil {
		s.t.Fatal(err)
	}
	return len(marks)
}

// awaitReady waits until an image is ready, and neither mounted nor marked.
func (s *siteBed) awaitReady(e *readyEngine, p registrytest.Pushed) {
	s.t.Helper()
	e.n.eventually("an image is ready", func() bool {
		e.mu.Lock()
		mounted := len(e.mounted)
		e.mu.Unlock()
		return e.has(p) && mounted == 0 && s.marks(e.n.name) == 0
	})
}

// An image that another node has deployed is made ready without a mark; who mounts its layers marks them, and fetches those that
// have left the store unnoticed.
func TestReadyLayersAreMarkedBeforeTheyAreMounted(t *testing.T) {
	s := newSiteBed(t)
	a := s.node("a", nil)
	b, e := s.preparing("b", 4)
	p := a.push("app", 1, 2)
	ids := []digest.Digest{}
	for _, l := range a.bring(p) {
		ids = append(ids, l.Layer.DiffID)
	}
	s.awaitReady(e, p)
	if h := b.site.hitsNow(); h.Store != 0 {
		t.Errorf("what nobody deployed counts: %+v", h)
	}
	if err := s.hide(ids[1]); err != nil {
		t.Fatal(err)
	}
	f, err := b.Files(t.Context(), ids[0])
	if err != nil || s.marks("b") != 1 || f.Data != s.data(b.published(ids[0])) {
		t.Errorf("%+v, %v, %d marks", f, err, s.marks("b"))
	}
	sent := s.served(p)
	f, err = b.Files(t.Context(), ids[1])
	if err != nil || s.served(p) == sent {
		t.Errorf("what has left the store: %+v, %v", f, err)
	}
}

// What is deployed of an image that is ready comes out of the store, and counts; from then on it is as any other.
func TestReadyIsDeployed(t *testing.T) {
	s := newSiteBed(t)
	a := s.node("a", nil)
	b, e := s.preparing("b", 1)
	p, q := a.push("app", 1, 2), a.push("other", 3)
	a.bring(p)
	s.awaitReady(e, p)
	sent := s.served(p)
	for _, l := range b.bring(p) {
		if l.From != (Origins{PoP: l.Layer.Size}) {
			t.Errorf("%+v", l.From)
		}
	}
	if h := b.site.hitsNow(); h.Store != 2 || s.served(p) != sent || s.marks("b") == 0 {
		t.Errorf("%+v, %d marks", h, s.marks("b"))
	}
	a.bring(q)
	b.eventually("the other image is ready", func() bool { return e.has(q) })
	if !e.has(p) {
		t.Error("what was deployed went for what is ready")
	}
}

// So many images are ready and no more; one whose layer is evicted is not ready any more.
func TestReadyIsTakenBack(t *testing.T) {
	s := newSiteBed(t)
	a := s.node("a", nil)
	b, e := s.preparing("b", 2)
	var all []registrytest.Pushed
	for i := range 3 {
		all = append(all, a.push(fmt.Sprint("app", i), uint64(i+1)))
		a.bring(all[i])
		s.awaitReady(e, all[i])
	}
	b.eventually("the oldest goes", func() bool { return !e.has(all[0]) && e.has(all[1]) })
	id := b.cfg.Catalog.Get(b.ref(all[2].Ref)).Layers[0].DiffID
	rec, err := a.site.usable().Record(t.Context(), id)
	if err == nil {
		err = a.site.usable().Quarantine(t.Context(), rec)
	}
	if err != nil {
		t.Fatal(err)
	}
	b.eventually("it is taken back", func() bool { return !e.has(all[2]) && !b.Has(id) })
	if !e.has(all[1]) {
		t.Error("the other one went with it")
	}
}
