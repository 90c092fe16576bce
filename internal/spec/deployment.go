package spec

import "time"

// Request is one instruction to deploy. The zero value of a field is its default.
type Request struct {
	Image      string
	Name       string // "" means one is made up
	Entrypoint []string
	Cmd        []string
	Env        []string // KEY=VALUE
	Net        string   // host, bridge, none; "" is bridge with Ports, else host
	Ports      []Port
	Volumes    []Volume
	Memory     int64   // bytes, 0 is unlimited
	CPUs       float64 // 0 is unlimited
	// tcp:PORT, http:PORT/PATH, cmd:…, log:RE, none; "" is the health check, else none
	Ready        string
	ReadyTimeout time.Duration // 0 is the node's default
	Lazy         string        // auto, never
	Restore      string        // auto, never, always
	Checkpoint   bool          // make a checkpoint when it is ready, if none fits
	Remove       bool          // remove the container when it exits; see Watch.Hold
	// Labels are the container's own, over the image's; one with an empty value takes the image's away.
	Labels map[string]string `json:",omitempty"`
	// Restart says when it starts again once it has ended, as ParseRestart reads it. Not with Remove or Record.
	Restart string `json:",omitempty"`
	// Health is how it is checked while it runs; nil is the image's health check.
	Health *Health `json:",omitempty"`
	Record bool    // record what is read of the image until ProfileEnd; it is pulled whole first
	// Experiments; "" or 0 is the node's own choice.
	Mount     string // erofs, loop, tree
	Order     string // layers, parallel
	Inflaters int

	Options

	Terms Terms `json:"-"`
}

// Port publishes the container's TCP or UDP port on the host (bridge only).
type Port struct {
	HostIP    string `json:"host_ip,omitempty"`
	Host      uint16 `json:"host"`
	Container uint16 `json:"container"`
	Protocol  string `json:"protocol"` // tcp, udp
}

// Volume binds a directory or file of the host, or a named volume of the node, into the container.
type Volume struct {
	Source, Target string // Source is an absolute path, or a name
	ReadOnly       bool
}

// Record is what is known of one deployment. Stage times are seconds from
// the instruction; what did not happen is absent.
type Record struct {
	Name   string             `json:"name"`
	Image  string             `json:"image"`
	Digest string             `json:"digest,omitempty"`
	Node   string             `json:"node"`
	Stages map[string]float64 `json:"stages"`
	Bytes  Bytes              `json:"bytes"`
	Way    Way                `json:"way"`
	Error  string             `json:"error,omitempty"`
	ID     string             `json:"id,omitempty"` // of the deployment
	Spans  []Span             `json:"spans,omitempty"`
}

// The stages, in the order in which a deployment passes them.
const (
	Admitted = "admitted" // it was its turn
	Resolved = "resolved" // manifest and config are here
	Tables   = "tables"   // the layers' tables of contents are here (lazy)
	Mounted  = "mounted"  // the image's tree can be read
	Created  = "created"  // the container and its task exist
	Started  = "started"  // its first process runs
	Restored = "restored" // its processes run, from a checkpoint
	Ready    = "ready"    // it serves
	Complete = "complete" // every layer is verified and on disk
)

// Bytes counts compressed bytes by where they came from.
type Bytes struct {
	Registry int64 `json:"registry"` // but for what came because others wanted the same layers
	PoP      int64 `json:"pop"`
	Local    int64 `json:"local"`
}

// Way says how the image and the processes came about.
type Way struct {
	Pull  string   `json:"pull"`           // lazy, whole, local, pop
	Pack  string   `json:"pack,omitempty"` // why the pack was believed, of a lazy pull: pop, signed, repository
	Start string   `json:"start"`          // boot, restore
	Why   []string `json:"why,omitempty"`
}

// Watch is told how a deployment or a pull goes on. The functions may be nil,
// are called by several goroutines, and return at once: they never wait for a
// reader. The zero value watches nothing.
type Watch struct {
	// Reached is called when a stage has been reached, in order: the
	// container's name ("" in a pull), the stage, and seconds from the
	// instruction. Created is reported before the first process runs.
	Reached func(name, stage string, at float64)
	// Deployment is called first, and when the deployment's state has changed or its
	// position in the queue.
	Deployment func(Deployment)
	// Layer is called when a layer's state changes and some times a second
	// while it is being filled.
	Layer func(LayerProgress)
	// Hold, unless nil, keeps a container with Request.Remove from being
	// removed before it is closed, though the container may have exited: its
	// output and status are still being read.
	Hold <-chan struct{}
}

// The states of a layer.
const (
	StateWaiting  = "waiting"  // nothing is fetched now
	StateFilling  = "filling"  // its bytes arrive
	StateVerified = "verified" // it has hashed to its digests
	StateComplete = "complete" // and is on disk for good
)

// LayerProgress is the state of one layer that is being filled.
type LayerProgress struct {
	Digest  string  `json:"digest"`
	Size    int64   `json:"size"`    // compressed bytes
	Fetched int64   `json:"fetched"` // compressed bytes here
	State   string  `json:"state"`   // one of the states above
	Rate    float64 `json:"rate"`    // compressed bytes a second, lately
}
