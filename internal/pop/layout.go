package pop

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"github.com/opencontainers/go-digest"
)

// The layout is where things lie in the store's directory, and in which form. It never changes once the store
// is open; every part of a Store has it.
//
//	dewpoint.json            which store this is
//	layers/HEX.json          the record of a layer or checkpoint, beside HEX.TOKEN.NONCE.data, .table
//	fill/                    titles of what is being written, and checkpoints of fills
//	trash/                   titles of what was evicted (.json) or is deleted (.dead)
//	refs/NODE/               what a node uses (references.go)
//	nodes/NODE.json, .owner  a node's signs of life, and the machine that has its name
//	images/, packs/          image records and startup packs
//	verified/, failed/, orders/, lost/   notes of verification and of checkpoints
type layout struct {
	cfg  StoreConfig
	boot string // of this Store, as its node's file says; random
}

const (
	layersDir = "layers"
	fillDir   = "fill"
	packsDir  = "packs"
	imagesDir = "images"
	refsDir   = "refs"
	nodesDir  = "nodes"
	trashDir  = "trash"
)

var storeDirs = []string{layersDir, fillDir, packsDir, imagesDir, refsDir, nodesDir, trashDir, verifiedDir,
	failedDir, ordersDir, lostDir}

const formatVersion = 1

type storeRecord struct {
	Version int    `json:"version"`
	ID      string `json:"id"`
}

// Layer is the record of a complete layer, or of a checkpoint.
type Layer struct {
	Version  int           `json:"version"`
	DiffID   digest.Digest `json:"diff_id"`
	Size     int64         `json:"size"` // of the tar, bytes
	Blob     digest.Digest `json:"blob"` // the compressed form that it came from
	BlobSize int64         `json:"blob_size"`
	Name     string        `json:"name"`  // of its files in layers/, without what ends them: HEX.TOKEN.NONCE
	Table    digest.Digest `json:"table"` // sha256 of the layer's table
	Sums     []byte        `json:"sums"`  // sha256 of each SumBytes of the tar, one after the other
	Node     string        `json:"node"`  // who published it
	// Cost is what fetching it took, seconds.
	Cost float64 `json:"cost,omitempty"`
	// Image is the reference that it was fetched for first.
	Image string `json:"image,omitempty"`
	// Checkpoint, unless empty, says that this is no layer but a checkpoint, and which:
	// for who makes and uses it. Upper is the layer that it stands on, "" for none.
	Checkpoint json.RawMessage `json:"checkpoint,omitempty"`
	Upper      digest.Digest   `json:"upper,omitempty"`
}

// SumBytes is how much of a layer's tar one of its sums covers.
const SumBytes = 4 << 20

func (l *Layer) valid() bool {
	hex, _, ok := parseName(l.Name)
	return ok && l.Version == formatVersion && l.DiffID.Validate() == nil &&
		l.DiffID.Algorithm() == digest.SHA256 && hex == l.DiffID.Encoded() && l.Size >= 0 &&
		int64(len(l.Sums)) == (l.Size+SumBytes-1)/SumBytes*sha256.Size && l.Table.Validate() == nil &&
		(l.Upper == "" || l.Upper.Validate() == nil)
}

func recordOf(id digest.Digest) string { return path.Join(layersDir, id.Encoded()+".json") }

const (
	dataEnd  = ".data"
	tableEnd = ".table"
	// indexEnd and blobEnd are of earlier versions, which published indexes and kept compressed bytes.
	indexEnd = ".index"
	blobEnd  = ".blob"
)

// fileEnds end the names of a layer's files.
var fileEnds = []string{dataEnd, tableEnd, indexEnd, blobEnd}

const titleEnd = ".title"

// titleOf is where the record of a layer lies until it is published.
func titleOf(name string) string { return path.Join(fillDir, name+titleEnd) }

func checkpointOf(id digest.Digest) string { return path.Join(fillDir, id.Encoded()+".json") }

const (
	trashEnd = ".json" // of what was evicted
	deadEnd  = ".dead" // of what is deleted
)

// nameOf is a name for a layer's files that nobody else uses.
func nameOf(id digest.Digest, token uint64) string {
	return fmt.Sprintf("%s.%d.%s", id.Encoded(), token, rand.Text()[:8])
}

// parseName is the layer, in hexadecimals, and the token of a name.
func parseName(name string) (hex string, token uint64, ok bool) {
	hex, rest, _ := strings.Cut(name, ".")
	number, nonce, _ := strings.Cut(rest, ".")
	token, err := strconv.ParseUint(number, 10, 64)
	return hex, token, err == nil && nonce != "" && !strings.ContainsAny(nonce, "./")
}

// filesOf is the name of the files that a title in the trash is of, which it begins with.
func filesOf(title string) string {
	parts := strings.SplitN(title, ".", 4)
	return strings.Join(parts[:min(3, len(parts))], ".")
}

// idOf is the object whose hexadecimals a name begins with, up to a dot.
func idOf(name string) (digest.Digest, bool) {
	hex, _, _ := strings.Cut(name, ".")
	id := digest.NewDigestFromEncoded(digest.SHA256, hex)
	return id, id.Validate() == nil
}

// LayerLease names the lease of who brings a layer into the PoP.
func LayerLease(id digest.Digest) string { return "layer/" + id.String() }

// remove is Remove of what may not be there.
func (lay *layout) remove(ctx context.Context, name string) error {
	if err := lay.cfg.FS.Remove(ctx, name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// overwrite writes b where the same number of bytes is, or nothing. A file that is renamed
// over another while servers of a replicated file system are parted is another file on each, and
// read by nobody for good (GlusterFS: a split brain of the file's identity); one that is
// written in place is what the majority has. Unless it is to last, a power cut may take it; if its
// sync fails then, it is removed. It returns how many bytes there were.
func (lay *layout) overwrite(ctx context.Context, name string, b []byte, last bool) (had int64, err error) {
	f, err := lay.cfg.FS.Append(ctx, name)
	if err != nil {
		return 0, err
	}
	if had, err = f.Size(); err == nil {
		_, err = f.WriteAt(b, 0)
	}
	if err == nil && last {
		if err = f.Sync(); err != nil {
			err = errors.Join(err, lay.remove(context.WithoutCancel(ctx), name))
		}
	}
	return had, errors.Join(err, f.Close())
}

// tell publishes an event; who misses it looks for himself.
func (lay *layout) tell(ctx context.Context, e Event) {
	if err := lay.cfg.Coord.Publish(ctx, e); err != nil {
		lay.cfg.Log.Debug("event is not published", "kind", e.Kind, "key", e.Key, "err", err)
	}
}

func unlessGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (l *Layer) data() string { return path.Join(layersDir, l.Name+dataEnd) }

func (l *Layer) table() string { return path.Join(layersDir, l.Name+tableEnd) }

// Data is the name of the file that has the layer's tar.
func (l *Layer) Data() string { return l.data() }

// verify compares what r gives with the sums and, if it is a layer, with its digest: who published it is not
// believed. A checkpoint is named by its record.
func (l *Layer) verify(ctx context.Context, r io.ReaderAt) error {
	buf := make([]byte, min(256<<10, l.Size))
	whole := l.DiffID.Verifier()
	for at, k := int64(0), 0; at < l.Size; at, k = at+SumBytes, k+1 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		h := sha256.New()
		n, err := io.CopyBuffer(struct{ io.Writer }{io.MultiWriter(h, whole)},
			struct{ io.Reader }{io.NewSectionReader(r, at, min(SumBytes, l.Size-at))}, buf)
		if err != nil {
			return err
		}
		if n < min(SumBytes, l.Size-at) || !bytes.Equal(h.Sum(nil), l.Sums[k*sha256.Size:][:sha256.Size]) {
			return fmt.Errorf("layer %s at %d: %w", l.DiffID, at, ErrDamaged)
		}
	}
	if l.Checkpoint == nil && !whole.Verified() {
		return fmt.Errorf("layer %s is not what its digest says: %w", l.DiffID, ErrDamaged)
	}
	return nil
}
