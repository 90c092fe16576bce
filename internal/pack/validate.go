package pack

import (
	"cmp"
	"slices"
	"unicode"

	"dewpoint/internal/image"
	"dewpoint/internal/layer/erofs"

	"github.com/opencontainers/go-digest"
)

// Validate checks every bound that the format has for a header, and that the
// ranges lie in their layers and do not overlap. Its errors wrap ErrInvalid.
func (h *Header) Validate() error {
	switch {
	case h.Version != Version:
		return invalid("version %d; this program reads version %d: build the pack again or update", h.Version,
			Version)
	case h.Image.Validate() != nil:
		return invalid("image %.150q is no digest", string(h.Image))
	case len(h.Layers) > image.MaxLayers:
		return invalid("%d layers", len(h.Layers))
	case len(h.Chunks) > MaxChunks:
		return invalid("%d chunks", len(h.Chunks))
	}
	if err := h.Profile.check(); err != nil {
		return err
	}
	seen := make(map[digest.Digest]bool, len(h.Layers))
	for i := range h.Layers {
		l := &h.Layers[i]
		if err := l.check(i); err != nil {
			return err
		}
		if seen[l.DiffID] {
			return invalid("layer %d occurs twice", i)
		}
		seen[l.DiffID] = true
	}
	return h.checkChunks()
}

func (a *About) check() error {
	if a.Runs < 0 || len(a.Node) > 255 {
		return invalid("profile of %d runs on a node with a name of %d bytes", a.Runs, len(a.Node))
	}
	for _, c := range a.Node {
		if !unicode.IsPrint(c) {
			return invalid("node's name %q", a.Node)
		}
	}
	return nil
}

func (l *Layer) check(i int) error {
	if err := checkSHA256("diff_id", l.DiffID); err != nil {
		return err
	}
	if err := checkSHA256("blob", l.Blob); err != nil {
		return err
	}
	switch l.Compression {
	case image.Plain, image.Gzip, image.Zstd:
	default:
		return invalid("layer %d: compression %.20q", i, string(l.Compression))
	}
	switch {
	case l.Size < 0 || l.Size > erofs.MaxDataSize || l.BlobSize < 0 || l.BlobSize > image.MaxLayer:
		return invalid("layer %d: %d bytes, compressed %d", i, l.Size, l.BlobSize)
	case l.Table == nil && (l.Points != nil || l.Files != nil):
		return invalid("layer %d: parts but no table", i)
	case l.Windows < 0 || l.Windows > MaxPoints*mostStored(deflateReach) || l.Windows > 0 && l.Points == nil:
		return invalid("layer %d: windows of %d bytes", i, l.Windows)
	}
	for _, p := range []struct {
		what string
		part *Part
		most int64
	}{{"table", l.Table, maxDecoded}, {"points", l.Points, maxRawPoints}, {"files", l.Files, maxRawFiles}} {
		if p.part == nil {
			continue
		}
		if err := p.part.check(p.what, p.most); err != nil {
			return err
		}
	}
	return nil
}

func (h *Header) checkChunks() error {
	var all []Range
	var needed int64
	for k := range h.Chunks {
		c := &h.Chunks[k]
		if err := c.Part.check("chunk", MaxChunk); err != nil {
			return err
		}
		if len(all)+len(c.Ranges)+len(c.Copies) > MaxRanges {
			return invalid("more than %d ranges", MaxRanges)
		}
		begin := len(all)
		all = append(all, c.Ranges...)
		of := 0
		for _, d := range c.Copies {
			if d.Of < of || d.Of >= len(c.Ranges) || d.Length != c.Ranges[d.Of].Length {
				return invalid("chunk %d: copy of range %d", k, d.Of)
			}
			of = d.Of
			all = append(all, d.Range)
		}
		raw := int64(0)
		for i, r := range all[begin:] {
			if err := h.checkRange(r); err != nil {
				return err
			}
			if needed += r.Length; i < len(c.Ranges) {
				raw += r.Length
			}
		}
		if raw != c.Raw {
			return invalid("chunk %d has %d bytes, its ranges %d", k, c.Raw, raw)
		}
	}
	if needed != h.Needed {
		return invalid("ranges of %d bytes, it says %d", needed, h.Needed)
	}
	return checkOverlap(all)
}

func (h *Header) checkRange(r Range) error {
	if r.Layer < 0 || r.Layer >= len(h.Layers) {
		return invalid("range of layer %d", r.Layer)
	}
	l := &h.Layers[r.Layer]
	switch {
	case l.Table == nil:
		return invalid("range of layer %d, which has no table", r.Layer)
	case r.Offset < 0 || r.Length <= 0 || r.Length > MaxChunk || r.Offset > l.Size-r.Length:
		return invalid("%d bytes at %d of layer %d, which has %d", r.Length, r.Offset, r.Layer, l.Size)
	case r.Offset%Page != 0 || r.Length%Page != 0 && r.end() != l.Size:
		return invalid("%d bytes at %d of layer %d: no whole pages", r.Length, r.Offset, r.Layer)
	}
	return nil
}

// checkOverlap sorts the ranges. No byte is to come twice.
func checkOverlap(all []Range) error {
	slices.SortFunc(all, compareRanges)
	for i := 1; i < len(all); i++ {
		if a, b := all[i-1], all[i]; a.Layer == b.Layer && a.end() > b.Offset {
			return invalid("byte %d of layer %d comes twice", b.Offset, b.Layer)
		}
	}
	return nil
}

func compareRanges(a, b Range) int {
	return cmp.Or(cmp.Compare(a.Layer, b.Layer), cmp.Compare(a.Offset, b.Offset))
}
