// Package evict decides what a full cache lets go of.
//
// A cache of layers is not a cache of pages: its objects differ in size by five orders of magnitude, fetching
// one again may take a second or ten minutes, one of them may be part of forty images, and what a container
// stands on cannot go at all. The policies here know keys, sizes, costs and the number of images, and nothing
// else: no file, no clock, no network, no randomness. The same calls in the same order give the same victims,
// on every node and after a restart, so that a trace replayed by the simulator shows what a PoP would do.
//
// A Policy is told of what comes (Add), is used (Hit) and goes (Remove), and names what to evict next
// (Victim). Naming is not evicting: the cache may find that the object has come into use and leave it where
// it is.
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
// The policies differ in what they keep:
//
//   - lru: what was used last. The thesis's policy, and the one that the others are measured against.
//   - gdsf: what saves most for the room that it takes: uses × cost × weight of sharing / size, above a floor
//     ("inflation") that rises to the value of the last victim, so that what was popular once grows old. Cost
//     in seconds minimises waiting, cost in bytes minimises traffic.
//   - s3fifo: what was used again soon after it came. New objects pass through a small queue of a tenth of
//     the bytes; most of them leave from there. A memory of keys that left ("ghosts") lets them in at once
//     when they come back.
//   - sieve: what was used at all since a hand passed by that sweeps from the oldest to the newest.
//   - overdue: a combination of ours. As gdsf, but uses count by their logarithm; and what was in steady use
//     and has stopped goes first. A layer that a new version of its image replaced was popular until
//     yesterday: recency and frequency both keep it for long.
//   - lru-overdue: the same of lru. It keeps less of what is popular than overdue does, and is hardly ever
//     worse than lru.
//   - contest: the default. It plays all that is asked for on shadows, caches without contents, of lru, lru-
//     overdue, overdue and s3fifo, and follows the one that has lately had most bytes. No policy is best at
//     all sizes and of all users: s3fifo is in a cache far too small for what is popular, and worse than lru
//     in a large one. It costs about 1 KiB of memory per object where lru costs 0.2, little beside a layer.
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
	return []string{"lru", "gdsf", "s3fifo", "sieve", "overdue", "lru-overdue", "contest"}
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
	case "sieve":
		return newSieve()
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
