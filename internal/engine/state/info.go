package state

import (
	"cmp"
	"encoding/json"
	"errors"
	"net/netip"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	"github.com/opencontainers/go-digest"

	"dewpoint/internal/engine/cgroup"
	"dewpoint/internal/engine/network"
)

// Labels of our containers' records, and of images of ours.
const (
	LabelNet    = "dewpoint.net"
	LabelPorts  = "dewpoint.ports"
	LabelDigest = "dewpoint.image-digest"
	LabelOwn    = "dewpoint.own" // on an image: the engine has made its record, and may remove it
)

// The networks of a container.
const (
	NetHost   = "host"
	NetBridge = "bridge"
	NetNone   = "none"
)

// ErrNotFound says that there is no such container.
var ErrNotFound = errors.New("no such container")

// Exit is how a process ended. A process killed by signal N has status 128+N.
type Exit struct {
	Status int
	At     time.Time
}

// Status is the state of a container's first process.
type Status string

const (
	Created Status = "created"
	Running Status = "running"
	Paused  Status = "paused"
	Stopped Status = "stopped" // ended, or lost with a reboot
	Unknown Status = "unknown" // for the moment: see Settle
)

// Info describes a container.
type Info struct {
	Name    string
	Image   string            // its reference
	Digest  digest.Digest     // of what the reference named
	Labels  map[string]string // not to be changed
	Created time.Time

	Status Status
	Pid    uint32 // of the first process on the host, 0 if it does not run, or is not made yet
	Exit   *Exit  // nil unless Stopped and known

	Net    string
	NetNS  string     // path, "" on the host's network
	Addr   netip.Addr // on the bridge
	Ports  []network.Port
	Cgroup string // path below each hierarchy's mount
	Stdout string // path of the file with the standard output
	Stderr string
}

// Record is what the engine reads back from a container's labels.
type Record struct {
	Name   string
	Image  string
	Net    string
	Ports  []network.Port
	Labels map[string]string
	Made   time.Time
}

func toRecord(c *containersapi.Container) Record {
	r := Record{Name: c.ID, Image: c.Image, Labels: c.Labels, Made: c.CreatedAt.AsTime()}
	r.Net = cmp.Or(c.Labels[LabelNet], NetHost)
	_ = json.Unmarshal([]byte(c.Labels[LabelPorts]), &r.Ports)
	return r
}

// FormatPorts makes a label of the ports; a label has at most 4096 bytes.
func FormatPorts(p []network.Port) string {
	b, err := json.Marshal(p)
	if err != nil {
		panic(err) // a struct of numbers and addresses
	}
	return string(b)
}

// CgroupDir is the directory of a container's cgroup in the hierarchy that
// carries controller, on cgroup v1 and v2.
func (i *Info) CgroupDir(controller string) string {
	return cgroup.Dir(i.Cgroup, controller)
}

// ImageInfo is what containerd knows of an image.
type ImageInfo struct {
	Name    string
	Digest  digest.Digest // of the target: an index or a manifest
	Created time.Time
	Updated time.Time
	Labels  map[string]string
}

// Own reports whether the engine has made the image's record: those of other clients are theirs to remove,
// also when the engine has registered what they are of.
func (i *ImageInfo) Own() bool { return i.Labels[LabelOwn] != "" }

// ImageInfoOf is what a record of containerd's says.
func ImageInfoOf(m *imagesapi.Image) *ImageInfo {
	return &ImageInfo{m.Name, digest.Digest(m.GetTarget().GetDigest()), m.CreatedAt.AsTime(),
		m.UpdatedAt.AsTime(), m.Labels}
}
