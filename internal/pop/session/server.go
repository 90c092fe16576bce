package session

import (
	"context"
	"errors"

	"dewpoint/internal/pop"
)

// Errors of a Server's steps, besides those of package pop and of the context.
// Any other error means that the server is away.
var (
	ErrEpoch   = errors.New("the coordinator has begun a new epoch")
	ErrUnknown = errors.New("the coordinator does not know this session")
	ErrBroken  = errors.New("the connection broke") // the step may have happened; it is tried again
)

// MaxToken is the greatest token: all whole numbers until it are exact in Lua.
const MaxToken = 1<<53 - 1

// A Server is a session's line to what remembers. Each method is one atomic step.
// All but Begin, Publish and Listen do nothing and return ErrEpoch if epoch is not the
// current one. A step whose caller has given up may still happen, at any later time.
type Server interface {
	// Begin is the current epoch; it begins one if the server has lost its memory.
	// Tokens of an epoch that it begins are greater than floor.
	Begin(ctx context.Context, floor uint64) (epoch string, err error)
	// Beat makes what a session has to say known and keeps it for a lease period.
	// If the server does not know the session and the beat is not Full, it does
	// nothing and returns ErrUnknown. A beat that is not newer than the last one it saw
	// does nothing.
	Beat(ctx context.Context, epoch string, b Beat) (Pulse, error)
	// Acquire takes a lease, or returns a token of 0 and who holds it. A lease of this node
	// is held only against an Acquire that is not newer.
	Acquire(ctx context.Context, epoch string, seq uint64, key string, above uint64) (token uint64,
		held *pop.Holding, err error)
	// Release ends the lease, of any session, if token is its.
	Release(ctx context.Context, epoch, key string, token uint64) error
	// Holder is nil if nobody holds the lease.
	Holder(ctx context.Context, epoch, key string) (*pop.Holding, error)
	Users(ctx context.Context, epoch string, keys []string) (map[string][]string, error)
	Members(ctx context.Context, epoch string) ([]pop.Member, error)
	// Settled reports whether the epoch is older than a lease period.
	Settled(ctx context.Context, epoch string) (bool, error)

	Touch(ctx context.Context, epoch string, touches []pop.Touch) error
	Touches(ctx context.Context, epoch, after string, limit int) ([]pop.Touch, string, error)
	SavePolicy(ctx context.Context, epoch string, p pop.PolicyState) error
	LoadPolicy(ctx context.Context, epoch string) (pop.PolicyState, error)

	Publish(ctx context.Context, e pop.Event) error
	// Listen calls connected once every event published from then on will come, and
	// event for each of them, until the connection breaks or ctx ends.
	Listen(ctx context.Context, connected func(), event func(pop.Event)) error
	// Close ends what runs in the background.
	Close() error
}

// A Beat is all that a session repeats.
type Beat struct {
	Seq       uint64      // grows with each beat of the session
	Member    *pop.Member // nil: not announced
	Leases    []Renewal
	Full      bool // Use is all references; otherwise Use and Drop are what changed
	Use, Drop []string
}

// A Renewal asks for a lease to go on. With Restore, the lease was granted in an
// earlier epoch: it is taken again unless a greater token has it.
type Renewal struct {
	Key     string
	Token   uint64
	Restore bool
}

// A Pulse answers a Beat.
type Pulse struct {
	Lost []string // leases that others have or that have expired
	Top  uint64   // the greatest token given so far
}
