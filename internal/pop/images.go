package pop

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

func imageOf(ref string) string {
	sum := sha256.Sum256([]byte(ref))
	return path.Join(imagesDir, hex.EncodeToString(sum[:])+".json")
}

// PutImage records what a reference was resolved to: an image record (docs/design/formats.md), one JSON
// value. Other nodes are told. It is written over what is there, which may be longer; who reads
// a record that is being written gets one that does not verify, and asks the registry.
func (s *Store) PutImage(ctx context.Context, ref string, record []byte) error {
	if have, err := s.Image(ctx, ref); err == nil && bytes.Equal(have, record) {
		return nil
	}
	if _, err := s.overwrite(ctx, imageOf(ref), append(bytes.Clone(record), '\n'), true); err != nil {
		return fmt.Errorf("record image %s in the PoP's store: %w", ref, err)
	}
	s.tell(ctx, Event{Kind: Resolved, Key: ref})
	return nil
}

// Resolved is the kind of events that say that a reference was resolved anew.
const Resolved = "resolved"

// Resolved is when PutImage was last called for ref, by the clock of the store's file system. The error wraps
// ErrUnknown if it was not.
func (s *Store) Resolved(ctx context.Context, ref string) (time.Time, error) {
	fi, err := s.cfg.FS.Stat(ctx, imageOf(ref))
	if errors.Is(err, fs.ErrNotExist) {
		return time.Time{}, fmt.Errorf("image %s: %w", ref, ErrUnknown)
	}
	if err != nil {
		return time.Time{}, err
	}
	return fi.ModTime(), nil
}

// Image returns what PutImage was given, by any node, or an error that wraps ErrUnknown.
func (s *Store) Image(ctx context.Context, ref string) ([]byte, error) {
	b, err := s.cfg.FS.ReadFile(ctx, imageOf(ref))
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

// images removes what references were resolved to once the store has not had all their layers for
// as long as a silent node is remembered: without them a record saves nothing.
func (w *sweep) images(ctx context.Context) error {
	ents, err := w.list(ctx, imagesDir)
	errs := unlessGone(err)
	now := map[string]imageSeen{}
	for _, e := range ents {
		name := path.Join(imagesDir, e.Name())
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		seen, ok := w.s.images[name]
		if !ok || seen.size != e.Size() || !seen.changed.Equal(e.ModTime()) {
			b, err := w.s.cfg.FS.ReadFile(ctx, name)
			if err != nil {
				errs = errors.Join(errs, unlessGone(err))
				continue
			}
			seen = imageSeen{size: e.Size(), changed: e.ModTime()}
			seen.layers, _ = layersOf(b) // it may be half written
		}
		now[name] = seen
		missing := len(seen.layers) == 0 ||
			slices.ContainsFunc(seen.layers, func(id digest.Digest) bool { return !w.files[path.Base(recordOf(id))] })
		if missing && w.age(name, e.Size()) >= w.s.cfg.Forget {
			errs = errors.Join(errs, w.s.remove(ctx, name))
		}
	}
	w.s.images = now
	sharing := map[digest.Digest]int{}
	for _, seen := range now {
		for _, id := range slices.Compact(slices.Sorted(slices.Values(seen.layers))) {
			sharing[id]++
		}
	}
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	w.s.sharing = sharing
	return errs
}

// imagesOf is how many references lead to images that have the layer, of those that have image records in the
// store; 0 while that is not known.
func (s *Store) imagesOf(id digest.Digest) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sharing[id]
}

func packOf(manifest digest.Digest) string {
	return path.Join(packsDir, manifest.Encoded()+".pack")
}

// packKey names a pack to who evicts.
func packKey(manifest digest.Digest) string { return "stored-pack/" + manifest.String() }

// packs are the store's packs, as objects for who evicts, by key.
func (s *Store) packs(ctx context.Context) (map[string]*Layer, error) {
	ents, err := s.cfg.FS.ReadDir(ctx, packsDir)
	all := map[string]*Layer{}
	for _, e := range ents {
		hex, ok := strings.CutSuffix(e.Name(), ".pack")
		if m := digest.NewDigestFromEncoded(digest.SHA256, hex); ok && m.Validate() == nil {
			all[packKey(m)] = &Layer{DiffID: m, Size: e.Size(), Cost: packCost}
		}
	}
	return all, unlessGone(err)
}

// packCost is what losing a pack is taken to cost, in seconds: a start without it, on one node.
const packCost = 5

// TouchPack notes that a pack was used, for who evicts.
func (s *Store) TouchPack(ctx context.Context, manifest digest.Digest, size int64) error {
	return s.cfg.Coord.Touch(ctx, Touch{Key: packKey(manifest), Size: size, Cost: packCost})
}

// Pack opens the startup pack of a manifest that a node of the PoP has made. An
// error wraps ErrUnknown if there is none.
func (s *Store) Pack(ctx context.Context, manifest digest.Digest) (File, error) {
	f, err := s.cfg.FS.Open(ctx, packOf(manifest))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("a pack of %s: %w", manifest, ErrUnknown)
	}
	return f, err
}

// PutPack puts a pack that this node made into the store, over the one there is.
func (s *Store) PutPack(ctx context.Context, manifest digest.Digest, pack io.Reader) error {
	tmp := path.Join(packsDir, "."+manifest.Encoded()+".pack."+s.boot)
	err := s.writePack(ctx, tmp, pack)
	if err == nil {
		err = s.cfg.FS.Rename(ctx, tmp, packOf(manifest))
	}
	if err != nil {
		return errors.Join(fmt.Errorf("put the pack of %s into the PoP's store: %w", manifest, err),
			s.remove(ctx, tmp))
	}
	return nil
}

func (s *Store) writePack(ctx context.Context, name string, pack io.Reader) error {
	f, err := s.cfg.FS.Append(ctx, name)
	if err != nil {
		return err
	}
	_, err = io.CopyBuffer(io.NewOffsetWriter(f, 0), struct{ io.Reader }{pack}, make([]byte, 256<<10))
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// DropPack removes a pack that turned out to be wrong.
func (s *Store) DropPack(ctx context.Context, manifest digest.Digest) error {
	return s.remove(ctx, packOf(manifest))
}
