package pack

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"dewpoint/internal/image"

	"github.com/opencontainers/go-digest"
)

// Profile says which bytes of an image's layers runs have read, in the order of
// first use. As JSON it is a file.
type Profile struct {
	Version int             `json:"version"` // 1
	Image   digest.Digest   `json:"image"`   // of the platform's manifest
	About   About           `json:"about"`
	Layers  []digest.Digest `json:"layers"` // diffIDs; Range.Layer is an index of them
	// Reads need not be aligned, and may overlap: the first one counts.
	Reads []Range `json:"reads"`
}

// ParseProfile reads a profile's JSON. Its errors wrap ErrInvalid.
func ParseProfile(b []byte) (*Profile, error) {
	p := &Profile{}
	if err := json.Unmarshal(b, p); err != nil {
		return nil, invalid("profile: %w", err)
	}
	if p.Version != Version {
		return nil, invalid("profile of version %d; this program reads version %d", p.Version, Version)
	}
	if err := p.check(); err != nil {
		return nil, err
	}
	return p, nil
}

func (p *Profile) check() error {
	if p.Image.Validate() != nil || len(p.Layers) > image.MaxLayers || len(p.Reads) > MaxRanges {
		return invalid("profile of image %.150q with %d layers, %d reads", string(p.Image), len(p.Layers),
			len(p.Reads))
	}
	for _, d := range p.Layers {
		if err := checkSHA256("diff_id", d); err != nil {
			return err
		}
	}
	total := int64(0)
	for _, r := range p.Reads {
		if total += r.Length; total > maxReads {
			return invalid("profile of more than %d bytes", int64(maxReads))
		}
		if r.Layer < 0 || r.Layer >= len(p.Layers) || r.Offset < 0 || r.Length < 0 || r.Offset > maxOffset ||
			r.Length > maxOffset {
			return invalid("profile: %d bytes at %d of layer %d", r.Length, r.Offset, r.Layer)
		}
	}
	return p.About.check()
}

// Bounds of a profile, beyond which lies no layer and no run.
const (
	maxOffset = 1 << 44
	maxReads  = 64 << 30 // bytes of all reads
)

// pageSet knows which pages of some layers have been seen, 64 to a word.
type pageSet map[pageWord]uint64

type pageWord struct{ layer, word int64 }

// add marks a page, and reports whether it is new.
func (s pageSet) add(layer int, page int64) bool {
	at, bit := pageWord{int64(layer), page / 64}, uint64(1)<<(page%64)
	if s[at]&bit != 0 {
		return false
	}
	s[at] |= bit
	return true
}

// fresh calls f with each run of pages of r that were not seen before, as bytes
// of whole pages.
func (s pageSet) fresh(r Range, f func(Range)) {
	if r.Length <= 0 {
		return
	}
	out := Range{Layer: r.Layer}
	for page := r.Offset / Page; page <= (r.end()-1)/Page; page++ {
		if !s.add(r.Layer, page) {
			continue
		}
		if out.Length > 0 && out.end() == page*Page {
			out.Length += Page
			continue
		}
		if out.Length > 0 {
			f(out)
		}
		out.Offset, out.Length = page*Page, Page
	}
	if out.Length > 0 {
		f(out)
	}
}

// Merge makes the profile of all the runs. A page comes where the first run that
// has it read it: pages that only later runs have lie among the others as far
// into the profile as they were in theirs. Reads become whole pages, each once.
// The profiles must be of one image.
func Merge(profiles ...*Profile) (*Profile, error) {
	if len(profiles) == 0 {
		return nil, errors.New("merge profiles: there are none")
	}
	m := merger{out: &Profile{Version: Version, Image: profiles[0].Image}, seen: pageSet{}}
	m.out.About.Node = profiles[0].About.Node
	for _, p := range profiles {
		if p.Image != m.out.Image {
			return nil, fmt.Errorf("merge profiles: of %s and of %s: one image at a time", m.out.Image, p.Image)
		}
		if err := p.check(); err != nil {
			return nil, fmt.Errorf("merge profiles: %w", err)
		}
		m.add(p)
	}
	slices.SortStableFunc(m.reads, func(a, b timed) int { return cmp.Compare(a.at, b.at) })
	for _, t := range m.reads {
		m.out.Reads = appendRange(m.out.Reads, t.Range)
	}
	return m.out, nil
}

// appendRange joins r with the last range if it follows that.
func appendRange(list []Range, r Range) []Range {
	if n := len(list); n > 0 && list[n-1].Layer == r.Layer && list[n-1].end() == r.Offset {
		list[n-1].Length += r.Length
		return list
	}
	return append(list, r)
}

type merger struct {
	out   *Profile
	seen  pageSet
	reads []timed
}

// timed is a range that a run read after at bytes of others.
type timed struct {
	Range
	at int64
}

func (m *merger) add(p *Profile) {
	m.about(&p.About)
	layers := make([]int, len(p.Layers))
	for i, d := range p.Layers {
		if layers[i] = slices.Index(m.out.Layers, d); layers[i] < 0 {
			layers[i] = len(m.out.Layers)
			m.out.Layers = append(m.out.Layers, d)
		}
	}
	own := pageSet{}
	at := int64(0)
	for _, r := range p.Reads {
		r.Layer = layers[r.Layer]
		own.fresh(r, func(r Range) {
			m.seen.fresh(r, func(n Range) { m.reads = append(m.reads, timed{n, at}) })
			at += r.Length
		})
	}
}

func (m *merger) about(a *About) {
	to := &m.out.About
	to.Runs += a.Runs
	to.Exercised = to.Exercised || a.Exercised
	if a.Created.After(to.Created) {
		to.Created = a.Created
	}
}
