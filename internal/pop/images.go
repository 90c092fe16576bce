package pop

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// images are what references of images were resolved to.
type images struct {
	*layout

	mu      sync.Mutex
	sharing map[digest.Digest]int // in how many image records a layer is, as the last sweep saw them
}

func imageOf(ref string) string {
	sum := sha256.Sum256([]byte(ref))
	return path.Join(imagesDir, hex.EncodeToString(sum[:])+".json")
}

// PutImage records what a reference was resolved to: an image record (docs/design/formats.md), one JSON
// value. Other nodes are told. It is written over what is there, which may be longer; who reads
// a record that is being written gets one that does not verify, and asks the registry.
func (im *images) PutImage(ctx context.Context, ref string, record []byte) error {
	if have, err := im.Image(ctx, ref); err == nil && bytes.Equal(have, record) {
		return nil
	}
	if _, err := im.overwrite(ctx, imageOf(ref), append(bytes.Clone(record), '\n'), true); err != nil {
		return fmt.Errorf("record image %s in the PoP's store: %w", ref, err)
	}
	im.tell(ctx, Event{Kind: Resolved, Key: ref})
	return nil
}

// Resolved is the kind of events that say that a reference was resolved anew.
const Resolved = "resolved"

// Resolved is when PutImage was last called for ref, by the clock of the store's file system. The error wraps
// ErrUnknown if it was not.
func (im *images) Resolved(ctx context.Context, ref string) (time.Time, error) {
	fi, err := im.cfg.FS.Stat(ctx, imageOf(ref))
	if errors.Is(err, fs.ErrNotExist) {
		return time.Time{}, fmt.Errorf("image %s: %w", ref, ErrUnknown)
	}
	if err != nil {
		return time.Time{}, err
	}
	return fi.ModTime(), nil
}

// Image returns what PutImage was given, by any node, or an error that wraps ErrUnknown.
func (im *images) Image(ctx context.Context, ref string) ([]byte, error) {
	b, err := im.cfg.FS.ReadFile(ctx, imageOf(ref))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("image %s: %w", ref, ErrUnknown)
	}
	if err != nil {
		return nil, err
	}
	return firstValue(b)
}

// firstValue is the JSON value that b begins with: what follows is of a longer one.
func firstValue(b []byte) ([]byte, error) {
	var v json.RawMessage
	if err := json.NewDecoder(bytes.NewReader(b)).Decode(&v); err != nil {
		return nil, fmt.Errorf("image record: %w: %w", err, ErrDamaged)
	}
	return v, nil
}

// layersOf are the layers that an image record is of.
func layersOf(record []byte) ([]digest.Digest, error) {
	var rec struct {
		Config []byte `json:"config"`
	}
	var cfg ocispec.Image
	v, err := firstValue(record)
	if err == nil {
		err = json.Unmarshal(v, &rec)
	}
	if err == nil {
		err = json.Unmarshal(rec.Config, &cfg)
	}
	return cfg.RootFS.DiffIDs, err
}

// imageSeen is a record of an image as a sweep has read it.
type imageSeen struct {
	size    int64
	changed time.Time
	layers  []digest.Digest // nil if it could not be understood
}

// share tells in how many image records each layer is.
func (im *images) share(sharing map[digest.Digest]int) {
	im.mu.Lock()
	defer im.mu.Unlock()
	im.sharing = sharing
}

// imagesOf is how many references lead to images that have the layer, of those that have image records in the
// store; 0 while that is not known.
func (im *images) imagesOf(id digest.Digest) int {
	im.mu.Lock()
	defer im.mu.Unlock()
	return im.sharing[id]
}
