// Package order is what the benchmark says to ctrclient and hears of it: one
// JSON object a line.
package order

// Order is a container to deploy, or to remove.
type Order struct {
	ID          int      `json:"id"`
	Name        string   `json:"name"`
	Remove      bool     `json:"remove,omitempty"`
	Image       string   `json:"image,omitempty"` // a reference that containerd has and has unpacked
	Args        []string `json:"args,omitempty"`  // none are the image's own
	HostNetwork bool     `json:"host_network,omitempty"`
}

// Done answers the order of that ID: the container runs, or is gone.
type Done struct {
	ID    int    `json:"id"`
	Error string `json:"error,omitempty"`
}
