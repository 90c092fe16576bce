package spec

// PoP is what a node knows of the nodes that share a store with it.
type PoP struct {
	Name        string         `json:"name"`
	Node        string         `json:"node"` // this one
	Store       PoPStore       `json:"store"`
	Coordinator PoPCoordinator `json:"coordinator"`
	Nodes       []PoPNode      `json:"nodes"`
	Layers      []PoPLayer     `json:"layers"` // in the store
}

// The states of a PoP's store and of its coordinator.
const (
	PoPOK        = "ok"
	PoPAway      = "away"
	PoPNone      = "none"      // there is to be none
	PoPSettled   = "settled"   // it answers and remembers
	PoPUnsettled = "unsettled" // it answers, and has lost its memory a moment ago: nothing is evicted
)

// PoPStore is the shared store.
type PoPStore struct {
	Path  string `json:"path,omitempty"`
	ID    string `json:"id,omitempty"`
	State string `json:"state"`         // PoPOK, PoPAway, PoPNone
	Why   string `json:"why,omitempty"` // it is away, or other nodes have another one
	Total int64  `json:"total"`         // bytes of its file system
	Free  int64  `json:"free"`
	Bytes int64  `json:"bytes"` // of its layers
	Trash int64  `json:"trash"` // bytes that were evicted and not deleted yet
	// Capacity is how many bytes of layers it is to hold, 0 while it is away.
	Capacity int64 `json:"capacity"`
	// Quotas are those of this node's configuration, by prefix; none while the store is away.
	Quotas []PoPQuota `json:"quotas,omitempty"`
}

// PoPQuota is what the layers of images whose references begin so may take of the store.
type PoPQuota struct {
	Prefix string `json:"prefix"`
	Bytes  int64  `json:"bytes"` // of layers that were fetched for such an image first
	Most   int64  `json:"most"`  // bytes
}

// PoPCoordinator is what the nodes agree by.
type PoPCoordinator struct {
	Kind  string `json:"kind"`          // redis, local
	State string `json:"state"`         // PoPSettled, PoPUnsettled, PoPAway
	Why   string `json:"why,omitempty"` // it is away
}

// PoPHits are layers that came from one place, and their compressed bytes.
type PoPHits struct {
	Layers int64 `json:"layers"`
	Bytes  int64 `json:"bytes"`
}

// PoPNode is one node, with where its layers came from since it started.
type PoPNode struct {
	Name     string     `json:"name"`
	Address  string     `json:"address,omitempty"` // where the others ask it
	Cache    int64      `json:"cache"`             // bytes of its own layers
	Capacity int64      `json:"capacity"`          // bytes that these may take; 0 where nobody knows
	Local    PoPHits    `json:"local"`
	Store    PoPHits    `json:"store"`
	Peer     PoPHits    `json:"peer"`
	Registry PoPHits    `json:"registry"`
	Fetching []PoPFetch `json:"fetching,omitempty"`
}

// PoPFetch is a layer that a node brings from the registry.
type PoPFetch struct {
	Layer string `json:"layer"` // diffID
	Done  int64  `json:"done"`  // compressed bytes
	Size  int64  `json:"size"`
}

// PoPLayer is a layer in the store.
type PoPLayer struct {
	DiffID   string   `json:"diff_id"`
	Size     int64    `json:"size"`            // bytes of its tar
	BlobSize int64    `json:"blob_size"`       // compressed bytes
	Image    string   `json:"image,omitempty"` // that it was fetched for first
	Node     string   `json:"node,omitempty"`  // that published it
	Users    []string `json:"users,omitempty"`
}

// The states of a PoPVerified.
const (
	PoPWhole    = "whole"
	PoPDamaged  = "damaged"  // it was taken out
	PoPReplaced = "replaced" // it was damaged, and is there anew
	PoPGone     = "gone"     // it has left the store meanwhile
)

// PoPVerified is what the verification of a layer of the store has found.
type PoPVerified struct {
	DiffID string `json:"diff_id"`
	Image  string `json:"image,omitempty"`
	Size   int64  `json:"size"`
	State  string `json:"state"`
	Error  string `json:"error,omitempty"` // what is wrong
}
