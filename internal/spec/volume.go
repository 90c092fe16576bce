package spec

import (
	"fmt"
	"path"
	"regexp"
	"time"
)

// VolumeInfo is a named volume of the node.
type VolumeInfo struct {
	Name       string    `json:"name"`
	Path       string    `json:"path"`                 // on the node
	Changed    time.Time `json:"changed"`              // when a name in it was last made or removed
	Containers []string  `json:"containers,omitempty"` // that have it, running or not
}

var volumeName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}$`)

// ValidVolume reports whether a named volume may have that name.
func ValidVolume(name string) bool { return volumeName.MatchString(name) }

// Named reports whether it is a named volume of the node, and not a path of the host.
func (v Volume) Named() bool { return !path.IsAbs(v.Source) }

func (v Volume) validate() error {
	switch {
	case !path.IsAbs(v.Target) || path.Clean(v.Target) == "/":
		return fmt.Errorf("volume %s:%s: the path in the container has to be absolute, and not /", v.Source, v.Target)
	case v.Named() && !ValidVolume(v.Source):
		return fmt.Errorf("volume %s:%s: %q is neither an absolute path of the host nor the name of a volume (letters, digits, _, . and -)",
			v.Source, v.Target, v.Source)
	}
	return nil
}
