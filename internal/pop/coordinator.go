package pop

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// ErrAway means that the coordinator did not answer in time or cannot be
// reached. What was asked for may have happened nevertheless.
var ErrAway = errors.New("the PoP's coordinator is away")

// ErrFenced means that a holder with a greater token was there before.
var ErrFenced = errors.New("a later holder of the lease was there before")

// HeldError says that another holder has the lease that was asked for.
type HeldError struct {
	Key    string
	Holder Member // Node always; the rest as the node announced it, if it did
	Token  uint64
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("lease of %s: held by %s with token %d", e.Key, e.Holder.Node, e.Token)
}

// A Coordinator is one node's view of what the nodes of a PoP agree on. Its
// methods may be called at the same time. Every call ends within a few seconds,
// with an error that wraps ErrAway if the coordinator cannot be reached, or with
// the context's if that ended first.
//
// What a node has announced (its leases, its references and itself) is kept alive
// in the background until Close, and announced again after the coordinator has
// been away or has lost its memory.
type Coordinator interface {
	Leases
	References
	Uses
	Board
	Members

	// Settled reports whether this epoch is older than a lease period. A new
	// epoch begins whenever the coordinator has lost its memory, or may have lost
	// a part of it (emptied, restarted, replaced by another server). Before it has
	// settled, references of living nodes may be missing, so nothing may be
	// evicted.
	Settled(ctx context.Context) (bool, error)

	// Close withdraws what the node has announced, if the coordinator can be
	// reached, ends all leases as lost and all subscriptions, and returns when the
	// background work has ended. Calls after it fail with ErrAway.
	Close() error
}

// Leases say who does what. They save work and protect nothing: a holder that
// was stopped for long may go on without knowing, so what it writes must carry
// its token.
type Leases interface {
	// Acquire takes the lease of key for this node, or returns a *HeldError, also
	// if this node holds it. The token is greater than every earlier token of the
	// key and greater than above, which is the greatest that the caller knows from
	// elsewhere (the store): it covers a coordinator that lost its memory and whose
	// clock went back.
	// After an error that is not a *HeldError the lease may be taken; it expires, and
	// this node can acquire it before that.
	Acquire(ctx context.Context, key string, above uint64) (Lease, error)
	// Holder is who holds the lease of key with which token, if anyone.
	Holder(ctx context.Context, key string) (h Holding, held bool, err error)
	// Break ends the lease of key, whoever holds it, if this is still its token. It is for who has seen that
	// the holder is dead. One that lives has lost the lease, as by expiry, and learns so when it renews it.
	Break(ctx context.Context, key string, token uint64) error
}

// A Holding is a lease as others see it.
type Holding struct {
	Holder Member
	Token  uint64
}

// A Lease is held until it is released or lost. It is renewed in the background.
type Lease interface {
	Key() string
	Token() uint64
	// Lost is closed when the lease may not be counted on any longer: another node
	// has it, or it could not be renewed in time. The time is measured by this
	// node's monotonic clock, and it is over before the coordinator gives the lease
	// to another, unless another breaks it. It is closed after Release, too.
	Lost() <-chan struct{}
	// Release gives the lease up. It is given up for this node even if there is an
	// error; for the others it then ends by expiry.
	Release(ctx context.Context) error
}

// References are what nodes use: a set per node, not a count. A node's set as
// a whole expires when the node is not heard of for a lease period.
type References interface {
	// Use adds keys to what this node uses. After nil the coordinator knows them.
	// After an error they are announced as soon as it is back, unless they were dropped.
	Use(ctx context.Context, keys ...string) error
	// Drop takes keys from what this node uses. After an error the coordinator is
	// told as soon as it is back.
	Drop(ctx context.Context, keys ...string) error
	// Users are the nodes that use each of keys, sorted; keys that nobody uses are left out.
	Users(ctx context.Context, keys ...string) (map[string][]string, error)
}

// A Touch says that a key was used.
type Touch struct {
	Key       string  `json:"key"`
	Size      int64   `json:"size,omitempty"` // bytes
	Cost      float64 `json:"cost,omitempty"` // of fetching it again, seconds
	Image     string  `json:"image,omitempty"`
	Namespace string  `json:"namespace,omitempty"`
	Node      string  `json:"node,omitempty"` // filled in by the coordinator
}

// PolicyState is the saved state of an eviction policy.
type PolicyState struct {
	Data     []byte
	Position string // the policy knows all touches until here
	Token    uint64 // of the lease under which it was saved
}

// Uses is the log of touches, which whoever evicts reads into its policy, and the
// state of that policy. The log is bounded: the oldest touches are dropped when nobody
// reads them. It is advice: touches may be lost or come twice.
type Uses interface {
	Touch(ctx context.Context, touches ...Touch) error
	// Touches are at most limit touches after the position and the position of the
	// last of them. An empty position is the beginning, and so is one that the
	// coordinator does not know (it lost its memory).
	Touches(ctx context.Context, after string, limit int) (touches []Touch, position string, err error)
	// SavePolicy keeps p and drops the touches until its position, in one step. It
	// returns an error that wraps ErrFenced, and does nothing, if a policy with a
	// greater token is there.
	SavePolicy(ctx context.Context, p PolicyState) error
	// LoadPolicy is what was saved last; the zero PolicyState if there is none.
	LoadPolicy(ctx context.Context) (PolicyState, error)
}

// Kinds of events. The coordinator itself makes Resync only.
const (
	Resync    = "resync"    // events may have been missed: look at everything again
	Published = "published" // the key is complete in the store
	Evicted   = "evicted"   // the key is gone from the store
	Damaged   = "damaged"   // the key is gone from the store: it was not what was published
	Pressed   = "pressed"   // the store needs room and finds none: nodes are to let go of what they can
	Filling   = "filling"   // the node begins to fill the key
	Released  = "released"  // the node does not fill the key any longer
	// the checkpoint key is complete in the store, or a node has noted how restoring it went
	Saved    = "saved"
	Returned = "returned" // the key is in the store again, which was out of sight for a moment
	Deployed = "deployed" // the node deploys the reference, whether it had to ask for it or not
)

// An Event is something that other nodes may want to know.
type Event struct {
	Kind  string `json:"kind"`
	Key   string `json:"key,omitempty"`
	Node  string `json:"node,omitempty"` // filled in by the coordinator
	Token uint64 `json:"token,omitempty"`
	// Name, of Damaged, is what the files are called that nobody is to use any more (see Layer); "" is not
	// known.
	Name string `json:"name,omitempty"`
}

// Board passes events to all nodes, the sender included. One may come twice.
type Board interface {
	Publish(ctx context.Context, e Event) error
	// Subscribe gives events in the order in which they were published, until ctx
	// ends or the coordinator is closed, which closes the channel. The first is a
	// Resync; another one follows whenever events may have been missed: after
	// every reconnect, after the coordinator lost its memory, when this node was taken for
	// dead, and when the reader was slow. Subscribe itself needs no connection: while the
	// coordinator is away nothing comes, and then the Resync.
	Subscribe(ctx context.Context) (<-chan Event, error)
}

// A Member is a node of the PoP as it describes itself.
type Member struct {
	Node     string  `json:"node"`
	Address  string  `json:"address,omitempty"`  // host:port of its peer endpoint
	Store    string  `json:"store,omitempty"`    // ID of the store that it has open
	Capacity int64   `json:"capacity,omitempty"` // bytes that its local cache may take
	Used     int64   `json:"used,omitempty"`     // bytes that it takes
	Hits     Hits    `json:"hits"`
	Fetching []Fetch `json:"fetching,omitempty"`
	// Twin is the address of another machine that has the same name; "" is none. Members fills it in.
	Twin string `json:"-"`
}

// Hits counts where a node's layers came from since it started. Registry is what nothing of the PoP had: its
// blob may lie in containerd's content store for all that.
type Hits struct {
	Local         int64 `json:"local,omitempty"`
	Store         int64 `json:"store,omitempty"`
	Peer          int64 `json:"peer,omitempty"`
	Registry      int64 `json:"registry,omitempty"`
	LocalBytes    int64 `json:"local_bytes,omitempty"`
	StoreBytes    int64 `json:"store_bytes,omitempty"`
	PeerBytes     int64 `json:"peer_bytes,omitempty"`
	RegistryBytes int64 `json:"registry_bytes,omitempty"`
}

// A Fetch is a layer that a node brings from the registry.
type Fetch struct {
	Key  string `json:"key"`
	Done int64  `json:"done"`
	Size int64  `json:"size"`
}

// Members are the nodes that are alive.
type Members interface {
	// Announce makes m what the other nodes see of this one; m.Node is filled in.
	// After an error it is announced as soon as the coordinator is back. A node that
	// never announced is no member, though it may hold leases.
	Announce(ctx context.Context, m Member) error
	// Members are the nodes heard of within a lease period, by name.
	Members(ctx context.Context) ([]Member, error)
}

// Config is what every coordinator needs to know. All nodes of a PoP have the
// same TTL.
type Config struct {
	Node string // this node's name, unique in the PoP
	// TTL is the lease period: how long what a node announced outlives it. Default
	// 15 s. The node is heard of every fifth of it, and counts a lease as lost after
	// three fifths without an answer.
	TTL time.Duration
	// Timeout is the longest that one call takes. Default 2 s.
	Timeout time.Duration
	Log     *slog.Logger // default: none
}
