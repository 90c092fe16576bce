// Package evict decides what leaves a full cache.
//
// Layers differ in size by five orders of magnitude, fetching one again may take a second or ten minutes, one
// may be part of forty images, and a layer under a container cannot go at all. The policies know keys, sizes,
// costs and the number of images, and nothing else: no file, no clock, no network, no randomness. The same
// calls in the same order give the same victims, on every node and in the simulator.
//
// A Policy is told of what comes (Add), is used (Hit) and goes (Remove), and names what to evict next
// (Victim). Naming is not evicting: the cache may find the object in use and leave it where it is.
//
//	for used > low {
//		key, ok := p.Victim(func(key string) bool { return !inUse(key) })
//		if !ok {
//			break // all that is left is in use
//		}
//		if evict(key) {
//			p.Remove(key)
//		}
//	}
//
// lru keeps what was used last; it is the thesis's policy. gdsf keeps what saves most for its room: uses ×
// cost × weight of sharing / size, above a floor that rises to the last victim's value. s3fifo keeps what was
// used again soon after it came, and remembers keys that left. overdue is gdsf with the logarithm of the
// uses, and lets go first of what was in steady use and has stopped, as a layer that a new version replaced;
// lru-overdue is the same of lru. contest, the default, plays all on shadows of lru, lru-overdue, overdue and
// s3fifo and follows the one with most bytes lately; it costs about 1 KiB of memory an object, lru 0.2.
package evict

import (
	"errors"
	"fmt"
	"slices"
)

var (
	// ErrSnapshot is what New wraps when it cannot make sense of a snapshot. The cache goes on without it.
	ErrSnapshot = errors.New("not a snapshot of this policy")
	// ErrUnknown is what New wraps for a name that is not in Names.
	ErrUnknown = errors.New("unknown policy")
)

// Object is what a policy knows of something in the cache. Values that make no sense count as the nearest
// that does.
type Object struct {
	Key string
	// Size is the bytes that evicting it frees.
	Size int64
	// Cost is what fetching it again takes, in any unit as long as it is one: seconds, or bytes on the WAN. 0
	// stands for Size.
	Cost float64
	// Images is how many images are known to need it; 0 stands for 1.
	Images int
}

// Policy orders a cache's objects by what may go first. It is not safe for concurrent use: the cache's own
// lock guards it.
type Policy interface {
	// Add tells that the object is in the cache and was used. Of a key that is there already it only
	// replaces Size, Cost and Images: that is no use.
	Add(Object)
	// Hit tells that the object was used once more. A key that is not there is ignored.
	Hit(key string)
	// Get is what Add was told last of an object that is there, made sensible. That is no use.
	Get(key string) (Object, bool)
	// Remove tells that the object is gone. If Victim named it last and it was not used since, it counts as
	// evicted, which some policies remember; otherwise as deleted by somebody. A key that is not there is
	// ignored.
	Remove(key string)
	// Victim names the object that should go first of those that may accepts, and false if it accepts none. The
	// object stays until Remove; until another call changes something, Victim names the same again. A nil may
	// accepts all. may is called at most a few times per object and must not call the policy.
	Victim(may func(key string) bool) (string, bool)
	// Snapshot returns what New needs to go on from here.
	Snapshot() ([]byte, error)
}

// Default is the policy that wins the study (docs/research/pop-study.md).
const Default = "contest"

// Names lists the policies, the thesis's first.
func Names() []string {
	return []string{"lru", "gdsf", "s3fifo", "overdue", "lru-overdue", "contest"}
}

// New returns the named policy for a cache of capacity bytes, empty or as snapshot left it. The capacity may
// be another than it was; objects beyond it are the cache's to evict.
func New(name string, snapshot []byte, capacity int64) (Policy, error) {
	p := empty(name, capacity)
	if p == nil {
		return nil, fmt.Errorf("%w %q: have %q", ErrUnknown, name, Names())
	}
	if len(snapshot) == 0 {
		return p, nil
	}
	s, err := parse(name, snapshot)
	if err != nil {
		return nil, err
	}
	if err := p.restore(s); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSnapshot, err)
	}
	return p, nil
}

// empty returns the named policy, or nil if there is none.
func empty(name string, capacity int64) policy {
	switch name {
	case "lru":
		return newLRU()
	case "gdsf":
		return newGDSF()
	case "s3fifo":
		return newS3FIFO(capacity)
	case "overdue":
		return newOverdue()
	case "lru-overdue":
		return newLRUOverdue()
	case "contest":
		return newContest(capacity)
	}
	return nil
}

// policy is a Policy that can be filled from a parsed snapshot, which it may keep parts of.
type policy interface {
	Policy
	state() *state
	restore(*state) error
	get(key string) *entry // nil if it is not there
}

// Known reports whether New knows the name.
func Known(name string) bool { return slices.Contains(Names(), name) }
