package spec

// The states of an Adoption.
const (
	AdoptNew    = "new" // it can be adopted
	Adopting    = "adopting"
	Adopted     = "adopted"
	AdoptFailed = "failed"
)

// Adoption is an image of another client of containerd that becomes one of this node.
type Adoption struct {
	Image      string   `json:"image"`
	Digest     string   `json:"digest"`
	Namespaces []string `json:"namespaces"` // of containerd, that have it by this name
	State      string   `json:"state"`
	// What it costs, and in the end has cost: compressed bytes of layers that are here, that come from
	// containerd's content store, and over the link; and bytes of the disk, 0 if nobody knows yet.
	Here  int64 `json:"here"`
	Store int64 `json:"store"`
	Link  int64 `json:"link"`
	Disk  int64 `json:"disk"`
	Done  int64 `json:"done"` // of Store and Link
	// Error says why it is not adopted.
	Error string `json:"error,omitempty"`
}
