package layer

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"dewpoint/internal/durable"
	"dewpoint/internal/image"
	"dewpoint/internal/layer/inflate"

	"github.com/opencontainers/go-digest"
)

// progress says how far the fill of a layer has come, so that it can go on
// there: data is whole up to Point.Out, the blob has been hashed up to BlobAt.
//
// It is kept twice. "progress" is written after an fsync of the data and holds
// for ever. "progress.boot" is written without one; what it says is true as
// long as the page cache lives, that is until the machine stops, so it counts
// only in the boot that wrote it.
type progress struct {
	Version  int           `json:"version"`
	Blob     digest.Digest `json:"blob"`
	Point    inflate.Point `json:"point"`
	BlobAt   int64         `json:"blob_at"` // not after Point.In
	BlobHash []byte        `json:"blob_hash"`
	DataHash []byte        `json:"data_hash"` // over data up to Point.Out
	Kept     int64         `json:"kept"`      // length of the kept blob that is durable; 0 if none is kept
	Boot     string        `json:"boot,omitempty"`

	Compression image.Compression `json:"compression,omitempty"` // as found in the stream
}

const (
	progressVersion = 1
	progressFile    = "progress"
	bootFile        = "progress.boot"
	blobFile        = "blob" // compressed bytes that are kept
)

// loadProgress returns the newest record in dir that holds for blob, or nil.
func loadProgress(dir string, blob digest.Digest) *progress {
	p, err := readProgress(filepath.Join(dir, bootFile))
	if err == nil && p.Boot != "" && p.Boot == durable.BootID() && p.fits(blob) {
		return p
	}
	if p, err = readProgress(filepath.Join(dir, progressFile)); err == nil && p.fits(blob) {
		return p
	}
	return nil
}

func (p *progress) fits(blob digest.Digest) bool {
	return p.Version == progressVersion && p.Blob == blob
}

func readProgress(path string) (*progress, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	p := new(progress)
	if err := json.Unmarshal(b, p); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if err := p.sane(); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return p, nil
}

func (p *progress) sane() error {
	if p.Point.In < 0 || p.Point.Out < 0 || p.BlobAt < 0 || p.BlobAt > p.Point.In || p.Kept < 0 {
		return errors.New("impossible offsets")
	}
	return nil
}

// within says whether a fill of the layer can go on there: the record may be a neighbour's.
func (p *progress) within(l image.Layer) bool {
	switch p.Compression {
	case "", image.Plain, image.Gzip, image.Zstd:
	default:
		return false
	}
	return p.Point.In <= l.Size && (p.Point.In > 0 || p.Point.Out == 0)
}

// saveBoot writes the record for the rest of this boot.
func (p progress) saveBoot(dir string) error {
	p.Boot = durable.BootID()
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, bootFile)
	if err := os.WriteFile(path+".tmp", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// save writes the record for good. The data must be durable already.
func (p progress) save(dir string) error {
	p.Boot = ""
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return durable.WriteFile(filepath.Join(dir, progressFile), b, 0o600)
}
