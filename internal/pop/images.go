package pop

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"

	"github.com/opencontainers/go-digest"
)

func imageOf(ref string) string {
	sum := sha256.Sum256([]byte(ref))
	return path.Join(imagesDir, hex.EncodeToString(sum[:])+".json")
}

// PutImage records what a reference was resolved to. Other nodes are told.
func (s *Store) PutImage(ctx context.Context, ref string, record []byte) error {
	if err := s.cfg.FS.WriteFile(ctx, imageOf(ref), record); err != nil {
		return fmt.Errorf("record image %s in the PoP's store: %w", ref, err)
	}
	s.tell(ctx, Event{Kind: Resolved, Key: ref})
	return nil
}

// Resolved is the kind of events that say that a reference was resolved anew.
const Resolved = "resolved"

// Image returns what PutImage was given, by any node, or an error that wraps ErrUnknown.
func (s *Store) Image(ctx context.Context, ref string) ([]byte, error) {
	b, err := s.cfg.FS.ReadFile(ctx, imageOf(ref))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("image %s: %w", ref, ErrUnknown)
	}
	return b, err
}

func packOf(manifest digest.Digest) string {
	return path.Join(packsDir, manifest.Encoded()+".pack")
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
		return errors.Join(fmt.Errorf("put the pack of %s into the PoP's store: %w", manifest, err), s.remove(ctx, tmp))
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
