package evict

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// version is the snapshot format's. A snapshot of another is refused: order is all that is lost.
const version = 1

// maxValue is more than any object's in a cache that has run for an age of the world.
const maxValue = 1e300

// state is a policy as it lies on disk, in JSON. Lists run from the oldest to the newest.
type state struct {
	Version int     `json:"version"`
	Policy  string  `json:"policy"`
	Clock   float64 `json:"clock,omitempty"` // gdsf: the inflation
	Now     uint64  `json:"now,omitempty"`   // gdsf: uses of anything, ever
	Objects []saved `json:"objects"`
	Ghosts  []saved `json:"ghosts,omitempty"` // s3fifo

	// Of a contest. All keys in it and in its shadows' states are indices into Keys.
	Keys    []string `json:"keys,omitempty"`
	Leader  string   `json:"leader,omitempty"`
	Asked   float64  `json:"asked,omitempty"`
	Full    int64    `json:"full,omitempty"`
	Shadows []*state `json:"shadows,omitempty"`
	Saved   float64  `json:"saved,omitempty"` // of a shadow
}

// rename replaces all keys but those of its shadows.
func (s *state) rename(as func(string) (string, error)) (err error) {
	for _, list := range [][]saved{s.Objects, s.Ghosts} {
		for i := range list {
			if list[i].Key, err = as(list[i].Key); err != nil {
				return err
			}
		}
	}
	return nil
}

type saved struct {
	Key    string  `json:"key"`
	Size   int64   `json:"size"`
	Cost   float64 `json:"cost,omitempty"`
	Images int     `json:"images,omitempty"`
	Uses   uint32  `json:"uses,omitempty"`
	Value  float64 `json:"value,omitempty"` // gdsf
	Last   uint64  `json:"last,omitempty"`  // gdsf: the use of anything that was its last
	Gap    float64 `json:"gap,omitempty"`   // overdue
	Due    float64 `json:"due,omitempty"`   // overdue
	Main   bool    `json:"main,omitempty"`  // s3fifo: it is in the main queue
}

func save(e *entry) saved {
	return saved{Key: e.Key, Size: e.Size, Cost: e.Cost, Images: e.Images, Uses: e.uses, Value: e.value}
}

func (s saved) entry() *entry {
	e := &entry{uses: s.Uses, value: s.Value}
	e.set(Object{Key: s.Key, Size: s.Size, Cost: s.Cost, Images: s.Images})
	return e
}

func (s *state) encode(policy string) ([]byte, error) {
	s.Version, s.Policy = version, policy
	return json.Marshal(s)
}

// parse reads a snapshot of the named policy; what it returns has no object twice and no number that a policy
// could not have written.
func parse(policy string, b []byte) (*state, error) {
	var s state
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSnapshot, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%w: more after its end", ErrSnapshot)
	}
	if s.Version != version || s.Policy != policy {
		return nil, fmt.Errorf("%w: version %d of %q", ErrSnapshot, s.Version, s.Policy)
	}
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSnapshot, err)
	}
	return &s, nil
}

func (s *state) check() error {
	if s.Clock < 0 || s.Clock > maxValue {
		return fmt.Errorf("clock is %g", s.Clock)
	}
	if s.Full < 0 || !(s.Asked >= 0) || s.Asked > maxValue || !(s.Saved >= 0) || s.Saved > maxValue {
		return fmt.Errorf("full is %d, asked %g, saved %g", s.Full, s.Asked, s.Saved)
	}
	seen := make(map[string]bool, len(s.Objects)+len(s.Ghosts))
	for _, o := range append(s.Objects[:len(s.Objects):len(s.Objects)], s.Ghosts...) {
		if seen[o.Key] {
			return fmt.Errorf("%q is there twice", o.Key)
		}
		seen[o.Key] = true
		if o.Size < 0 || o.Cost < 0 || o.Images < 0 || o.Value < 0 || o.Value > maxValue || o.Gap < 0 ||
			o.Gap > maxValue || o.Due < 0 || o.Due > maxValue {
			return fmt.Errorf("%q has a number out of range", o.Key)
		}
	}
	return nil
}
