package store

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"

	"github.com/opencontainers/go-digest"
)

// Record says what a checkpoint is. It never changes.
type Record struct {
	Format  int       `json:"format"`
	ID      string    `json:"id"` // hexadecimal: a hash of what the checkpoint consists of and fits
	Created time.Time `json:"created"`
	Node    string    `json:"node"` // that made it
	// Image is the reference that the container was started from, Manifest the digest of its
	// platform's manifest, Config that of the image's configuration.
	Image    string `json:"image"`
	Manifest string `json:"manifest"`
	Config   string `json:"config,omitempty"`
	// Key is a hash of all that must be the same where it is restored; Fit says
	// the same, and more, in words. This package looks at neither.
	Key    string          `json:"key"`
	Fit    json.RawMessage `json:"fit,omitempty"`
	Args   []string        `json:"args,omitempty"`
	Engine string          `json:"engine,omitempty"`
	Data   Blob            `json:"data"`
	Upper  *Layer          `json:"upper,omitempty"` // nil if nothing was written
	// Boot is what booting took, Restore what restoring it took, seconds; 0 is unknown.
	Boot     float64 `json:"boot,omitempty"`
	Restore  float64 `json:"restore,omitempty"`
	Stateful bool    `json:"stateful,omitempty"`
}

// Blob is a data file.
type Blob struct {
	Digest digest.Digest `json:"digest"`
	Size   int64         `json:"size"`  // bytes of the file
	Pages  int64         `json:"pages"` // bytes of memory in it, decompressed
}

// Layer is the writable layer as it was, an OCI layer's tar: it is kept as
// layers are, by the packages for layers, under its diffID.
type Layer struct {
	DiffID digest.Digest `json:"diff_id"`
	Size   int64         `json:"size"`
}

const (
	format    = 1
	maxRecord = 1 << 20
)

// identity is the ID that a record must have.
func (r *Record) identity() string {
	h := sha256.New()
	upper := ""
	if r.Upper != nil {
		upper = r.Upper.DiffID.String()
	}
	fmt.Fprintf(h, "dewpoint checkpoint %d\n%s\n%s\n%s\n%s\n", format, r.Data.Digest, upper, r.Manifest, r.Key)
	return hex.EncodeToString(h.Sum(nil))
}

// digestOf is the name of the checkpoint in a PoP's store.
func digestOf(id string) digest.Digest { return digest.NewDigestFromEncoded(digest.SHA256, id) }

func (r *Record) check() error {
	switch {
	case r.Format != format:
		return fmt.Errorf("%w: format %d", ErrDamaged, r.Format)
	case r.Data.Digest.Validate() != nil || r.Data.Size <= 0 || r.Data.Pages < 0:
		return fmt.Errorf("%w: its data are %s, %d bytes", ErrDamaged, r.Data.Digest, r.Data.Size)
	case r.Upper != nil && (r.Upper.DiffID.Validate() != nil || r.Upper.Size < 0):
		return fmt.Errorf("%w: its upper layer is %s", ErrDamaged, r.Upper.DiffID)
	case r.Manifest == "" || r.Key == "":
		return fmt.Errorf("%w: it does not say what it is of", ErrDamaged)
	case r.ID != r.identity():
		return fmt.Errorf("%w: it is not what its ID %.12s says", ErrDamaged, r.ID)
	}
	return nil
}

// parse reads a record.
func parse(b []byte) (Record, error) {
	var r Record
	if len(b) > maxRecord {
		return r, fmt.Errorf("%w: a record of %d bytes", ErrDamaged, len(b))
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return r, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return r, r.check()
}
