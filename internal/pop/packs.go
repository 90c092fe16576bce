package pop

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"

	"github.com/opencontainers/go-digest"
)

// packs are the startup packs that the PoP's nodes have made.
type packs struct{ *layout }

func packOf(manifest digest.Digest) string {
	return path.Join(packsDir, manifest.Encoded()+".pack")
}

// packKey names a pack to who evicts.
func packKey(manifest digest.Digest) string { return "stored-pack/" + manifest.String() }

// all are the store's packs, as objects for who evicts, by key.
func (pk *packs) all(ctx context.Context) (map[string]*Layer, error) {
	ents, err := pk.cfg.FS.ReadDir(ctx, packsDir)
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
func (pk *packs) TouchPack(ctx context.Context, manifest digest.Digest, size int64) error {
	return pk.cfg.Coord.Touch(ctx, Touch{Key: packKey(manifest), Size: size, Cost: packCost})
}

// Pack opens the startup pack of a manifest that a node of the PoP has made. An
// error wraps ErrUnknown if there is none.
func (pk *packs) Pack(ctx context.Context, manifest digest.Digest) (File, error) {
	f, err := pk.cfg.FS.Open(ctx, packOf(manifest))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("a pack of %s: %w", manifest, ErrUnknown)
	}
	return f, err
}

// PutPack puts a pack that this node made into the store, over the one there is.
func (pk *packs) PutPack(ctx context.Context, manifest digest.Digest, pack io.Reader) error {
	tmp := path.Join(packsDir, "."+manifest.Encoded()+".pack."+pk.boot)
	err := pk.writePack(ctx, tmp, pack)
	if err == nil {
		err = pk.cfg.FS.Rename(ctx, tmp, packOf(manifest))
	}
	if err != nil {
		return errors.Join(fmt.Errorf("put the pack of %s into the PoP's store: %w", manifest, err),
			pk.remove(ctx, tmp))
	}
	return nil
}

func (pk *packs) writePack(ctx context.Context, name string, pack io.Reader) error {
	f, err := pk.cfg.FS.Append(ctx, name)
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
func (pk *packs) DropPack(ctx context.Context, manifest digest.Digest) error {
	return pk.remove(ctx, packOf(manifest))
}
