package fetch

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/image"

	"github.com/opencontainers/go-digest"
)

// Catalog remembers the images that were resolved: manifest and configuration
// by reference, so that what is here starts without a registry, and a chain of
// layers is known by its chain ID. One file an image reference. It is a cache:
// losing it costs a round trip, not correctness. Safe for concurrent use.
type Catalog struct {
	dir string

	writing sync.Mutex // held while a record is written; taken before mu
	mu      sync.Mutex
	refs    map[string]*image.Image
	asked   map[string]time.Time              // by reference, when it was last put or given
	chains  map[digest.Digest][]digest.Digest // diffIDs, bottom first
}

// OpenCatalog reads the records in dir. A record that does not verify is dropped.
func OpenCatalog(dir string, log *slog.Logger) (*Catalog, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	c := &Catalog{dir: dir, refs: map[string]*image.Image{}, asked: map[string]time.Time{},
		chains: map[digest.Digest][]digest.Digest{}}
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		img := new(image.Image)
		b, err := os.ReadFile(f)
		if err == nil {
			err = json.Unmarshal(b, img)
		}
		if err != nil {
			log.Warn("image record dropped", "file", f, "err", err)
			os.Remove(f)
			continue
		}
		c.learn(img)
	}
	return c, nil
}

// learn is called with mu held, or before the catalog is shared.
func (c *Catalog) learn(img *image.Image) {
	c.refs[img.Ref.String()] = img
	c.asked[img.Ref.String()] = time.Now()
	c.learnChains(img)
}

func (c *Catalog) learnChains(img *image.Image) {
	ids := make([]digest.Digest, len(img.Layers))
	for i, l := range img.Layers {
		ids[i] = l.DiffID
	}
	for i, chain := range img.ChainIDs() {
		c.chains[chain] = ids[:i+1]
	}
}

// Put records img under its reference, durably.
func (c *Catalog) Put(img *image.Image) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isKnown(img) {
		return nil
	}
	if err := c.write(img); err != nil {
		return err
	}
	c.learn(img)
	return nil
}

// PutSoon makes img known at once, and records it while the caller goes on, who asks wait whether
// that went well. If it did not, img is known until the process ends.
func (c *Catalog) PutSoon(img *image.Image) (wait func() error) {
	c.mu.Lock()
	if c.isKnown(img) {
		c.mu.Unlock()
		return func() error { return nil }
	}
	c.learn(img)
	c.mu.Unlock()
	done := make(chan error, 1)
	go func() { done <- c.writeCurrent(img) }()
	return sync.OnceValue(func() error { return <-done })
}

// writeCurrent records img unless it was replaced or forgotten meanwhile.
func (c *Catalog) writeCurrent(img *image.Image) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	current := func() *image.Image {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.refs[img.Ref.String()]
	}
	if current() != img {
		return nil
	}
	err := c.write(img)
	if err == nil && current() == nil {
		err = os.Remove(c.file(img.Ref.String()))
	}
	return err
}

// isKnown is called with mu held.
func (c *Catalog) isKnown(img *image.Image) bool {
	have := c.refs[img.Ref.String()]
	if have == nil || have.Desc.Digest != img.Desc.Digest || have.Target.Digest != img.Target.Digest {
		return false
	}
	c.asked[img.Ref.String()] = time.Now()
	return true
}

// write is called with writing held.
func (c *Catalog) write(img *image.Image) error {
	b, err := json.Marshal(img)
	if err != nil {
		return err
	}
	if err := durable.WriteFile(c.file(img.Ref.String()), b, 0o600); err != nil {
		return fmt.Errorf("record image %s: %w", img.Ref, err)
	}
	return nil
}

func (c *Catalog) file(ref string) string {
	sum := sha256.Sum256([]byte(ref))
	return filepath.Join(c.dir, hex.EncodeToString(sum[:])+".json")
}

// All returns every image, in no order.
func (c *Catalog) All() []*image.Image {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]*image.Image, 0, len(c.refs))
	for _, img := range c.refs {
		all = append(all, img)
	}
	return all
}

// Get returns what ref was last resolved to, or nil.
func (c *Catalog) Get(ref image.Reference) *image.Image {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.give(c.refs[ref.String()])
}

// give notes that img, which may be nil, was asked for.
func (c *Catalog) give(img *image.Image) *image.Image {
	if img != nil {
		c.asked[img.Ref.String()] = time.Now()
	}
	return img
}

// Manifest returns an image whose platform manifest, or whose index, has that
// digest, or nil. The image is one of ref's repository: if it is known from
// another one only, as a copy by that reference.
func (c *Catalog) Manifest(ref image.Reference, d digest.Digest) *image.Image {
	c.mu.Lock()
	defer c.mu.Unlock()
	var found *image.Image
	for _, img := range c.refs {
		if img.Desc.Digest != d && img.Target.Digest != d {
			continue
		}
		if img.Ref.Host == ref.Host && img.Ref.Path == ref.Path {
			return c.give(img)
		}
		found = img
	}
	if c.give(found) == nil {
		return nil
	}
	moved := *found
	moved.Ref = ref
	return &moved
}

// WithLayer returns the images that have the layer, by reference.
func (c *Catalog) WithLayer(diffID digest.Digest) []*image.Image {
	c.mu.Lock()
	defer c.mu.Unlock()
	var found []*image.Image
	for _, img := range c.refs {
		if slices.ContainsFunc(img.Layers, func(l image.Layer) bool { return l.DiffID == diffID }) {
			found = append(found, c.give(img))
		}
	}
	slices.SortFunc(found, func(a, b *image.Image) int {
		return strings.Compare(a.Ref.String(), b.Ref.String())
	})
	return found
}

// RefsWith are the references of the images that have the layer. It does not count as asking for them.
func (c *Catalog) RefsWith(diffID digest.Digest) (refs []image.Reference) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, img := range c.refs {
		if slices.ContainsFunc(img.Layers, func(l image.Layer) bool { return l.DiffID == diffID }) {
			refs = append(refs, img.Ref)
		}
	}
	return refs
}

// Sharing is in how many references' images each layer is.
func (c *Catalog) Sharing() map[digest.Digest]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	images := map[digest.Digest]int{}
	for _, img := range c.refs {
		for _, l := range img.Unique() {
			images[l.DiffID]++
		}
	}
	return images
}

// Chain returns the diffIDs of a chain, bottom first, or nil.
func (c *Catalog) Chain(chain digest.Digest) []digest.Digest {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.chains[chain]
}

// Forget drops the record of ref.
func (c *Catalog) Forget(ref image.Reference) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refs[ref.String()] == nil {
		return nil
	}
	err := c.drop(ref.String())
	c.relearn()
	return err
}

// sweepAfter is how long a record stays after it was last asked for: who asked
// is about to fill its layers.
const sweepAfter = time.Minute

// Sweep drops the records of images that are gone, and the chains that no
// record has any more. gone must not call the catalog.
func (c *Catalog) Sweep(gone func(*image.Image) bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs error
	for ref, img := range c.refs {
		if time.Since(c.asked[ref]) >= sweepAfter && gone(img) {
			errs = errors.Join(errs, c.drop(ref))
		}
	}
	c.relearn()
	return errs
}

// drop is called with mu held; relearn must follow.
func (c *Catalog) drop(ref string) error {
	delete(c.refs, ref)
	delete(c.asked, ref)
	if err := os.Remove(c.file(ref)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// relearn makes the chains anew. It is called with mu held.
func (c *Catalog) relearn() {
	clear(c.chains)
	for _, img := range c.refs {
		c.learnChains(img)
	}
}
