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
	"sync"

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

	mu     sync.Mutex
	refs   map[string]*image.Image
	chains map[digest.Digest][]digest.Digest // diffIDs, bottom first
}

// OpenCatalog reads the records in dir. A record that does not verify is dropped.
func OpenCatalog(dir string, log *slog.Logger) (*Catalog, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	c := &Catalog{dir: dir, refs: map[string]*image.Image{}, chains: map[digest.Digest][]digest.Digest{}}
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
	c.mu.Lock()
	defer c.mu.Unlock()
	if have := c.refs[img.Ref.String()]; have != nil && have.Desc.Digest == img.Desc.Digest {
		return nil
	}
	b, err := json.Marshal(img)
	if err != nil {
		return err
	}
	if err := durable.WriteFile(c.file(img.Ref.String()), b, 0o600); err != nil {
		return fmt.Errorf("record image %s: %w", img.Ref, err)
	}
	c.learn(img)
	return nil
}

func (c *Catalog) file(ref string) string {
	sum := sha256.Sum256([]byte(ref))
	return filepath.Join(c.dir, hex.EncodeToString(sum[:])+".json")
}

// Get returns what ref was last resolved to, or nil.
func (c *Catalog) Get(ref image.Reference) *image.Image {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.refs[ref.String()]
}

// Manifest returns an image whose platform manifest, or whose index, has that
// digest, or nil.
func (c *Catalog) Manifest(d digest.Digest) *image.Image {
	return c.find(func(img *image.Image) bool { return img.Desc.Digest == d || img.Target.Digest == d })
}

// WithLayer returns an image that has the layer and that layer, or nil.
func (c *Catalog) WithLayer(diffID digest.Digest) (*image.Image, image.Layer) {
	var found image.Layer
	img := c.find(func(img *image.Image) bool {
		for _, l := range img.Layers {
			if l.DiffID == diffID {
				found = l
				return true
			}
		}
		return false
	})
	return img, found
}

func (c *Catalog) find(match func(*image.Image) bool) *image.Image {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, img := range c.refs {
		if match(img) {
			return img
		}
	}
	return nil
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
	img := c.refs[ref.String()]
	if img == nil {
		return nil
	}
	delete(c.refs, ref.String())
	for _, chain := range img.ChainIDs() {
		delete(c.chains, chain)
	}
	for _, other := range c.refs {
		c.learn(other)
	}
	if err := os.Remove(c.file(ref.String())); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
