// Package pack is the startup pack: what a container needs of its image before
// and while it starts, in the order in which it needs it.
//
// A pack belongs to one manifest. It is one file, made of parts without gaps:
//
//	preamble and header | tables | chunks | points | windows
//
// The header (JSON) names the other parts by length and digest. A table is a
// layer's headers, from which its index is built. A chunk is some pages of the
// layers' tars that a run has read, chunks being in the order of first use.
// Points are places at which a compressed layer can be entered, a window the
// output before such a place. Older packs end with digests of files, of no use.
// docs/design/formats.md has every byte.
//
// A Profile says which pages runs have read. Build makes the pack of a profile
// and of complete layers. Open reads a pack as it arrives, part by part; who has
// the header can fetch any part by itself (Header.Layout) and decode it alone.
// Sign and Verify bind a header to its image.
//
// All that is read comes from strangers: whatever is wrong with a pack gives an
// error that wraps ErrInvalid, no part is handed out before its digest has been
// compared, and memory is bounded by the limits below: a Stream holds the
// header, one chunk as stored and as data, and one table at a time.
package pack

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"

	"dewpoint/internal/layer/presence"
	"dewpoint/internal/layer/toc"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
)

// MediaType is that of a pack's blob, and the artifact type of its manifest.
const MediaType = "application/vnd.dewpoint.pack.v1"

// Annotations of a pack's manifest.
const (
	AnnotationBlob      = "dewpoint.pack.blob"      // digest of the pack
	AnnotationSize      = "dewpoint.pack.size"      // its bytes, decimal
	AnnotationHeader    = "dewpoint.pack.header"    // Stream.HeaderDigest
	AnnotationSignature = "dewpoint.pack.signature" // base64 of Sign's result
)

// Version is the format that this package reads and writes.
const Version = 1

// Page is what ranges are made of.
const Page = presence.Page

// Limits of a pack. What exceeds them is refused with ErrInvalid.
const (
	MaxHeader  = 16 << 20 // bytes of the header's JSON
	MaxChunks  = 1 << 16  // chunks
	MaxRanges  = 1 << 20  // ranges and copies of all chunks
	MaxChunk   = 4 << 20  // bytes of a chunk's data
	MaxWindow  = 8 << 20  // bytes of window that a zstd frame may ask for
	MaxPoints  = 1 << 18  // points of a layer
	MaxSegment = 16 << 20 // bytes of tar between two points

	maxRawPoints = 16 << 20
	maxRawFiles  = 48 << 20
	maxDecoded   = toc.MaxTable // the largest part
	deflateReach = 32 << 10     // bytes of a restart point's window
)

// ErrInvalid is wrapped by every error that means that a pack is not as it
// should be, or does not fit its layers. Reading it again does not help.
var ErrInvalid = errors.New("invalid pack")

func invalid(format string, a ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, a...)...)
}

// Part is one zstd frame of a pack.
type Part struct {
	Length int64         `json:"length"` // bytes stored
	Raw    int64         `json:"raw"`    // bytes decompressed
	SHA256 digest.Digest `json:"sha256"` // of the decompressed bytes
}

// mostStored bounds what a frame of raw bytes takes: a little more if they
// cannot be compressed.
func mostStored(raw int64) int64 { return raw + raw>>8 + 64 }

func (p *Part) check(what string, most int64) error {
	if p.Raw <= 0 || p.Raw > most || p.Length <= 0 || p.Length > mostStored(p.Raw) {
		return invalid("%s of %d bytes, %d stored", what, p.Raw, p.Length)
	}
	return checkSHA256(what, p.SHA256)
}

func checkSHA256(what string, d digest.Digest) error {
	if d.Validate() != nil || d.Algorithm() != digest.SHA256 {
		return invalid("%s: %.80q is no sha256 digest", what, string(d))
	}
	return nil
}

// decode returns the part's data, in dst's memory if that is large enough.
func (p *Part) decode(stored, dst []byte) ([]byte, error) {
	if int64(len(stored)) != p.Length {
		return nil, invalid("%d bytes of %d", len(stored), p.Length)
	}
	if int64(cap(dst)) < p.Raw {
		dst = make([]byte, p.Raw)
	}
	out, err := inflateFrame(stored, dst[:0:p.Raw])
	if err != nil {
		return nil, err
	}
	if int64(len(out)) != p.Raw || digest.FromBytes(out) != p.SHA256 {
		return nil, invalid("its digest is not %s", p.SHA256)
	}
	return out, nil
}

// inflateFrame appends to dst, which is not made larger.
func inflateFrame(stored, dst []byte) ([]byte, error) {
	d, err := decoder()
	if err != nil {
		return nil, err
	}
	out, err := d.DecodeAll(stored, dst)
	if err != nil {
		return nil, invalid("zstd: %w", err)
	}
	return out, nil
}

// decoder is shared by all: it decodes two frames at a time and starts no
// goroutine. Each takes about half a MiB beside its output.
var decoder = sync.OnceValues(func() (*zstd.Decoder, error) {
	return zstd.NewReader(nil, zstd.WithDecoderConcurrency(2), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(MaxWindow), zstd.WithDecoderMaxMemory(maxDecoded),
		zstd.WithDecodeAllCapLimit(true))
})

// encoder makes frames. It is not safe for concurrent use.
type encoder struct {
	best, small *zstd.Encoder
	buf         []byte
}

func newEncoder() (*encoder, error) {
	best, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedBestCompression),
		zstd.WithWindowSize(MaxWindow), zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false))
	if err != nil {
		return nil, err
	}
	small, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedBestCompression),
		zstd.WithWindowSize(deflateReach), zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false))
	return &encoder{best: best, small: small}, err
}

// part compresses raw. The bytes are valid until the next call.
func (e *encoder) part(raw []byte) (Part, []byte) {
	e.buf = e.best.EncodeAll(raw, e.buf[:0])
	return Part{int64(len(e.buf)), int64(len(raw)), digest.FromBytes(raw)}, e.buf
}

// window compresses a restart point's window.
func (e *encoder) window(raw []byte) []byte {
	e.buf = e.small.EncodeAll(raw, e.buf[:0])
	return e.buf
}

func sum(b []byte) [sha256.Size]byte { return sha256.Sum256(b) }
