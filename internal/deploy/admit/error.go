package admit

import (
	"fmt"
	"time"
)

// BusyError refuses a deployment, since too many wait. After is when to try again.
type BusyError struct {
	Waiting, Mine int
	After         time.Duration
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("the node is busy: %d deployments wait, %d of them yours", e.Waiting, e.Mine)
}

// Kind is the error's code in the API.
func (e *BusyError) Kind() string { return "busy" }

// Remedy says what to do.
func (e *BusyError) Remedy() string {
	return fmt.Sprintf("try again in %d s", int(e.After.Seconds()))
}

// NeverError refuses a deployment that claims more memory than the node has. Both are in bytes.
type NeverError struct{ Need, Have int64 }

func (e *NeverError) Error() string {
	return fmt.Sprintf("the container may take %s of memory, and the node has %s for containers", mib(e.Need),
		mib(e.Have))
}

// Kind is the error's code in the API.
func (e *NeverError) Kind() string { return "no_memory" }

// Remedy says what to do.
func (e *NeverError) Remedy() string {
	return "give it less with --memory, or deploy it on a larger node; with deploy.overcommit = true limits are not held against what is free"
}

// DiskError refuses a deployment whose image does not fit on the disk. Both are in bytes.
type DiskError struct{ Need, Have int64 }

func (e *DiskError) Error() string {
	return fmt.Sprintf("disk full: %s of the image are not here, and %s are free", mib(e.Need), mib(e.Have))
}

// Kind is the error's code in the API.
func (e *DiskError) Kind() string { return "disk_full" }

// Remedy says what to do.
func (e *DiskError) Remedy() string {
	return "free some space, for instance with \"dew prune\", and try again"
}

func mib(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }
