package pack

import (
	"bytes"
	_ "crypto/sha512" // manifests may be named by it
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"dewpoint/internal/image"

	"github.com/opencontainers/go-digest"
)

// Header says what is in a pack. One that came from Open, ReadHeader or
// ParseHeader is valid, is not changed and is safe for concurrent use; its
// Layout and Decode methods are for such headers only.
type Header struct {
	Version int           `json:"version"`
	Image   digest.Digest `json:"image"` // of the platform's manifest
	Layers  []Layer       `json:"layers"`
	Chunks  []Chunk       `json:"chunks"`
	Needed  int64         `json:"needed"` // bytes of all ranges and copies
	Profile About         `json:"profile"`

	layout Layout
}

// Layer is a layer of the image, and its parts. One without a Table is not to
// be started lazily; it has no other part and no ranges.
type Layer struct {
	DiffID      digest.Digest     `json:"diff_id"`
	Blob        digest.Digest     `json:"blob"`
	BlobSize    int64             `json:"blob_size"`
	Size        int64             `json:"size"` // of the tar
	Compression image.Compression `json:"compression"`
	Table       *Part             `json:"table,omitempty"`
	Points      *Part             `json:"points,omitempty"`
	Windows     int64             `json:"windows,omitempty"` // bytes of all windows as stored
	Files       *Part             `json:"files,omitempty"`   // of packs that were built once; nobody reads it
}

// Chunk is some ranges of the layers' tars, one after the other in one frame.
type Chunk struct {
	Part
	Ranges []Range `json:"ranges"`
	Copies []Copy  `json:"copies,omitempty"`
}

// Range is Length bytes at Offset of the tar of layer number Layer: whole
// pages, but for the last one of a tar. As JSON it is an array of the three.
type Range struct {
	Layer          int
	Offset, Length int64
}

func (r Range) end() int64 { return r.Offset + r.Length }

// Copy is a place with the same bytes as the chunk's range number Of, and of
// its length. A chunk's copies are in the order of Of.
type Copy struct {
	Range
	Of int
}

// About is where a profile comes from.
type About struct {
	Runs      int       `json:"runs"`
	Exercised bool      `json:"exercised"` // a script exercised the container
	Created   time.Time `json:"created"`
	Node      string    `json:"node,omitempty"`
}

func appendNumbers(n ...int64) []byte {
	b := []byte{'['}
	for i, v := range n {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, v, 10)
	}
	return append(b, ']')
}

// parseNumbers reads an array of exactly len(to) integers.
func parseNumbers(b []byte, to ...*int64) error {
	b = bytes.TrimSpace(b)
	if len(b) < 2 || b[0] != '[' || b[len(b)-1] != ']' {
		return errors.New("no array of numbers")
	}
	b = b[1 : len(b)-1]
	for i, p := range to {
		field, rest, more := bytes.Cut(b, []byte{','})
		n, err := strconv.ParseInt(string(bytes.TrimSpace(field)), 10, 64)
		if err != nil || more != (i+1 < len(to)) {
			return fmt.Errorf("no array of %d numbers", len(to))
		}
		*p, b = n, rest
	}
	return nil
}

func (r Range) MarshalJSON() ([]byte, error) {
	return appendNumbers(int64(r.Layer), r.Offset, r.Length), nil
}

func (r *Range) UnmarshalJSON(b []byte) error {
	var layer int64
	err := parseNumbers(b, &layer, &r.Offset, &r.Length)
	r.Layer = int(layer)
	return err
}

func (c Copy) MarshalJSON() ([]byte, error) {
	return appendNumbers(int64(c.Layer), c.Offset, c.Length, int64(c.Of)), nil
}

func (c *Copy) UnmarshalJSON(b []byte) error {
	var layer, of int64
	err := parseNumbers(b, &layer, &c.Offset, &c.Length, &of)
	c.Layer, c.Of = int(layer), int(of)
	return err
}

const (
	magic = "DEWPACK1"
	// PreambleSize is how many bytes of a pack tell the header's length.
	PreambleSize = 16
)

// HeaderSize reads a preamble: the bytes that preamble and header take together.
func HeaderSize(preamble []byte) (int64, error) {
	if len(preamble) < PreambleSize || string(preamble[:8]) != magic {
		return 0, invalid("it does not begin as one")
	}
	stored := int64(binary.LittleEndian.Uint32(preamble[8:]))
	raw := int64(binary.LittleEndian.Uint32(preamble[12:]))
	if raw == 0 || raw > MaxHeader || stored == 0 || stored > mostStored(raw) {
		return 0, invalid("header of %d bytes, %d stored", raw, stored)
	}
	return PreambleSize + stored, nil
}

// ParseHeader reads a pack's first HeaderSize bytes.
func ParseHeader(b []byte) (*Header, error) {
	size, err := HeaderSize(b)
	if err != nil {
		return nil, err
	}
	if int64(len(b)) != size {
		return nil, invalid("header: %d bytes of %d", len(b), size)
	}
	raw := int(binary.LittleEndian.Uint32(b[12:]))
	text, err := inflateFrame(b[PreambleSize:], make([]byte, 0, raw))
	if err != nil {
		return nil, fmt.Errorf("header: %w", err)
	}
	if len(text) != raw {
		return nil, invalid("header: %d bytes of %d", len(text), raw)
	}
	h, err := parseJSON(text)
	if err != nil {
		return nil, err
	}
	h.layout = h.place(size)
	return h, nil
}

// parseJSON counts objects and arrays before it makes any, since each takes
// many times the memory of its text.
func parseJSON(text []byte) (*Header, error) {
	if bytes.Count(text, []byte{'{'}) > MaxChunks+4*image.MaxLayers+64 ||
		bytes.Count(text, []byte{'['}) > MaxRanges+2*MaxChunks+64 {
		return nil, invalid("header of too many ranges, chunks or layers")
	}
	h := &Header{}
	if err := json.Unmarshal(text, h); err != nil {
		return nil, invalid("header: %w", err)
	}
	if err := h.Validate(); err != nil {
		return nil, err
	}
	return h, nil
}

// ReadHeader reads a pack's header, and returns it and its digest: the sha256
// of preamble and header as stored. It reads no further.
func ReadHeader(r io.Reader) (*Header, digest.Digest, error) {
	var pre [PreambleSize]byte
	if _, err := io.ReadFull(r, pre[:]); err != nil {
		return nil, "", fmt.Errorf("read pack: %w", early(err))
	}
	size, err := HeaderSize(pre[:])
	if err != nil {
		return nil, "", err
	}
	var b bytes.Buffer // grows with what arrives
	b.Write(pre[:])
	if n, err := io.CopyN(&b, r, size-PreambleSize); err != nil {
		return nil, "", fmt.Errorf("read pack: %d bytes of its header: %w", n, early(err))
	}
	h, err := ParseHeader(b.Bytes())
	return h, digest.FromBytes(b.Bytes()), err
}

// early makes of an end that came too soon the error of it.
func early(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// marshal encodes preamble and header.
func (h *Header) marshal(e *encoder) ([]byte, error) {
	text, err := json.Marshal(h)
	if err != nil {
		return nil, fmt.Errorf("encode pack header: %w", err)
	}
	if len(text) > MaxHeader {
		return nil, fmt.Errorf("pack header of %d bytes, at most %d: profile less of the image", len(text),
			MaxHeader)
	}
	part, stored := e.part(text)
	b := binary.LittleEndian.AppendUint32([]byte(magic), uint32(part.Length))
	b = binary.LittleEndian.AppendUint32(b, uint32(part.Raw))
	return append(b, stored...), nil
}
