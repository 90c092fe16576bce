// Package spec holds what a node can be asked and what it answers.
//
// A Request to deploy becomes a Record; meanwhile a Watch is told of stages
// and layers. Containers, images and findings are described by plain structs
// whose JSON is what programs read. The package has values only, does no I/O
// and imports no other part of the module, so that the daemon, its API and
// thin clients share it.
package spec

import (
	"io"
	"time"
)

// PullRequest is one instruction to bring an image onto the node without
// running it. The zero value of a field is its default.
type PullRequest struct {
	Image string
	Lazy  string // auto, never
	Blobs bool   // also put the original blobs into containerd's content store
	// Experiments; "" or 0 is the node's own choice.
	Order     string // layers, parallel
	Inflaters int
}

// The states of a container.
const (
	StatusCreated = "created"
	StatusRunning = "running"
	StatusExited  = "exited"
	StatusUnknown = "unknown" // containerd was restarted, and does not say yet
	// it has ended, and its policy starts it again
	StatusRestarting = "restarting"
)

// Container is one container on the node.
type Container struct {
	// ID is this container's alone, where a name is that of one after the other. A node takes it in place of a
	// name; clients do not see it.
	ID       string    `json:"-"`
	Name     string    `json:"name"`
	Image    string    `json:"image"`
	Digest   string    `json:"digest"`
	Status   string    `json:"status"`
	ExitCode int       `json:"exit_code"` // of the last run, once Status is exited or restarting
	PID      int       `json:"pid,omitempty"`
	IP       string    `json:"ip,omitempty"`
	Ports    []Port    `json:"ports,omitempty"`
	Created  time.Time `json:"created"`
	Node     string    `json:"node"`
	// ReadError says why reads of the container's image have failed in the last
	// minute: it runs before all of the image is here, and what it read did not
	// come. "" if none has failed.
	ReadError string `json:"read_error,omitempty"`
	Caller    string `json:"caller,omitempty"` // who deployed it, "" is not known
	// Restart is its policy, "" is no; Restarts counts what that has done since a person started it.
	Restart   string    `json:"restart,omitempty"`
	Restarts  int       `json:"restarts,omitempty"`
	CrashLoop bool      `json:"crash_loop,omitempty"` // it ends again and again, soon after its starts
	NextStart time.Time `json:"next_start,omitzero"`  // of one that is restarting
	// Health is one of its states, of one that runs and is checked; HealthError says why the last check failed.
	Health      string `json:"health,omitempty"`
	HealthError string `json:"health_error,omitempty"`

	TTY   bool `json:"tty,omitempty"`   // its process has a terminal
	Stdin bool `json:"stdin,omitempty"` // it has an input that Attach can write to
}

// LogOptions says which output of a container is wanted.
type LogOptions struct {
	Follow bool // go on until the container has exited and all its output was given
	Tail   int  // last lines to begin with: 0 is all, below 0 none
}

// The streams of a LogChunk.
const (
	Stdout = "stdout"
	Stderr = "stderr"
)

// LogChunk is some output of a container, not necessarily whole lines.
type LogChunk struct {
	Stream string // Stdout, Stderr
	Data   []byte // valid during the call that it is passed to
}

// ExecRequest is a process to run beside the container's own. The zero value
// of a field is what the container has.
type ExecRequest struct {
	Args []string
	Env  []string // KEY=VALUE, added to the container's
	User string   // USER[:GROUP]
	Dir  string
	TTY  bool // a terminal of its own: all output is stdout
	Size Size // of the terminal at first; zero is the default
}

// Size is a terminal's, in characters.
type Size struct{ Rows, Cols uint16 }

// ExecIO is what the process reads and writes. The writers are used by one
// goroutine each, and not after Exec has returned.
type ExecIO struct {
	Stdin          io.Reader // nil is /dev/null; EOF closes the process's input
	Stdout, Stderr io.Writer
	Resize         <-chan Size // nil, or changes of the terminal's size
}

// Image is one image on the node.
type Image struct {
	Name    string    `json:"name"`
	Digest  string    `json:"digest"`
	Size    int64     `json:"size"` // compressed bytes of its layers
	Disk    int64     `json:"disk"` // bytes its layers take on disk, shared ones too
	Created time.Time `json:"created,omitzero"`
	Layers  []Layer   `json:"layers"`
}

// Layer is one layer of an Image.
type Layer struct {
	Digest string `json:"digest"` // of the compressed blob
	DiffID string `json:"diff_id"`
	Size   int64  `json:"size"` // compressed bytes
	Disk   int64  `json:"disk"` // bytes on disk
	State  string `json:"state"`
}

// PruneOptions says what may go besides layers that no image has.
type PruneOptions struct {
	Images bool // images that no container uses
	PoP    bool // what no node uses of the PoP's store
}

// PruneReport says what went.
type PruneReport struct {
	Images []string `json:"images"`
	Layers []string `json:"layers"`
	Bytes  int64    `json:"bytes"` // of disk
	// Of the PoP's store: what was evicted (diffIDs), the bytes that will be free there
	// after the time of grace, and why it was not all that could go.
	PoPLayers []string `json:"pop_layers,omitempty"`
	PoPBytes  int64    `json:"pop_bytes,omitempty"`
	PoPWhy    string   `json:"pop_why,omitempty"`
	// Checkpoints of images that are not here.
	Checkpoints []string `json:"checkpoints,omitempty"`
}

// The levels of a Finding.
const (
	LevelOK   = "ok"
	LevelNote = "note" // works, though better is possible
	LevelBad  = "bad"  // something does not work
)

// Finding is one thing that was looked at on the node.
type Finding struct {
	What   string `json:"what"`
	Level  string `json:"level"`
	Detail string `json:"detail"`
	Remedy string `json:"remedy,omitempty"`
}

// Version says what runs on the node.
type Version struct {
	Version  string `json:"version"`
	Node     string `json:"node"`
	Engine   string `json:"engine,omitempty"`   // "containerd v2.4.2"
	Mount    string `json:"mount,omitempty"`    // backend: erofs, loop, tree
	Inflater string `json:"inflater,omitempty"` // isal, go
	Kernel   string `json:"kernel,omitempty"`
	Go       string `json:"go,omitempty"`
}

// The kinds of an Event.
const (
	EventStage  = "stage"  // a deployment reached Stage
	EventRecord = "record" // a deployment ended, well or not: Record
	EventPulled = "pulled" // an image is here whole
	EventExited = "exited" // a container's process ended: ExitCode
	// a container's policy has started it again; with Error it could not, and tries later
	EventRestarted = "restarted"
	EventHealth    = "health"  // a container's health has another state: Health, with Error if it is bad
	EventRemoved   = "removed" // a container is gone
	EventDeleted   = "deleted" // an image is gone
	// containers get I/O errors, or Name was killed, for what served their layers or memory is gone; or Name
	// runs with files of a Layer that has left the PoP's store: Error
	EventLost     = "lost"
	EventMismatch = "lied" // bytes that an image ran with are not the layer's: Error
	// A Layer of the PoP's store is not what was published (Error), and one that was
	// so is there anew.
	EventDamaged  = "damaged"
	EventReplaced = "replaced"
	// A Checkpoint was made of Name, could not be though it was asked for, or is not used any more (Error).
	EventCheckpointed = "checkpointed"
	EventUnsaved      = "unsaved"
	EventQuarantined  = "quarantined"
	// Events that were asked for are not known any more: who follows looks at all anew.
	// It comes first, and its Seq is that before the event that follows.
	EventResync = "resync"
)

// Event is something that happened on the node. Which fields are set depends
// on the kind.
type Event struct {
	Seq      uint64    `json:"seq"`             // counts up from 1 while one daemon runs
	Epoch    string    `json:"epoch,omitempty"` // which daemon that is
	Time     time.Time `json:"time"`
	Kind     string    `json:"kind"`
	Name     string    `json:"name,omitempty"` // container
	Image    string    `json:"image,omitempty"`
	Stage    string    `json:"stage,omitempty"`
	At       float64   `json:"at,omitempty"` // seconds from the instruction
	ExitCode *int      `json:"exit_code,omitempty"`
	Error    string    `json:"error,omitempty"`
	Record   *Record   `json:"record,omitempty"`
	Layer    string    `json:"layer,omitempty"` // diffID
	// Checkpoint is its ID.
	Checkpoint string `json:"checkpoint,omitempty"`
	Health     string `json:"health,omitempty"`
}

// Mark is a place among a node's events: behind the one that has these.
type Mark struct {
	Epoch string // "" is that of the daemon that runs
	Seq   uint64
}

// LayerMap shows a layer that is not whole: containers run with it already or, Pulled, wait for the whole of
// it.
type LayerMap struct {
	DiffID  string      `json:"diff_id"`
	Image   string      `json:"image"`
	Size    int64       `json:"size"`    // bytes of its tar; Pulled, of its blob
	Present []float64   `json:"present"` // of each of so many equal parts, the share that is here
	Waits   []LayerWait `json:"waits"`   // what readers have waited for lately, the earliest first
	Waited  int         `json:"waited"`  // how often they have, as far as it is known
	Pulled  bool        `json:"pulled,omitempty"`
}

// LayerWait is one stretch of a layer that a reader waited for.
type LayerWait struct {
	At    float64   `json:"at"` // where in the layer: 0 its beginning, 1 its end
	Begun time.Time `json:"begun"`
	Took  float64   `json:"took"` // seconds
}
