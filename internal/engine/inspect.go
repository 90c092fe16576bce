package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"dewpoint/internal/engine/cgroup"
	"dewpoint/internal/engine/network"
)

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

// record is what the engine reads back from a container's labels.
type record struct {
	name   string
	image  string
	net    string
	ports  []network.Port
	labels map[string]string
	made   time.Time
}

func (r record) stopSignal() unix.Signal {
	if sig, err := ParseSignal(r.labels[labelStop]); err == nil {
		return sig
	}
	return unix.SIGTERM
}

func toRecord(c *containersapi.Container) record {
	r := record{name: c.ID, image: c.Image, labels: c.Labels, made: c.CreatedAt.AsTime()}
	r.net = cmp.Or(c.Labels[labelNet], NetHost)
	_ = json.Unmarshal([]byte(c.Labels[labelPorts]), &r.ports)
	return r
}

// formatPorts makes a label of the ports; a label has at most 4096 bytes.
func formatPorts(p []network.Port) string {
	b, err := json.Marshal(p)
	if err != nil {
		panic(err) // a struct of numbers and addresses
	}
	return string(b)
}

var errForeign = fmt.Errorf("it belongs to another client of containerd: %w", errdefs.ErrInvalidArgument)

func (e *Engine) getRecord(ctx context.Context, name string) (record, error) {
	r, err := e.c.Containers.Get(ctx, &containersapi.GetContainerRequest{ID: name})
	if err != nil {
		return record{}, err
	}
	if _, ours := r.Container.Labels[labelNet]; !ours {
		return record{}, fmt.Errorf("container %s: %w", name, errForeign)
	}
	return toRecord(r.Container), nil
}

func (e *Engine) listRecords(ctx context.Context) ([]record, error) {
	r, err := e.c.Containers.List(ctx,
		&containersapi.ListContainersRequest{Filters: []string{`labels."` + labelNet + `"`}})
	if err != nil {
		return nil, err
	}
	out := make([]record, len(r.Containers))
	for i, c := range r.Containers {
		out[i] = toRecord(c)
	}
	return out, nil
}

func (e *Engine) taskState(ctx context.Context, name string) (*task.Process, error) {
	r, err := e.c.Tasks.Get(ctx, &tasksapi.GetRequest{ContainerID: name})
	if err != nil {
		return nil, err
	}
	return r.Process, nil
}

// info is what the record says; the task is not looked at.
func (e *Engine) info(r record) *Info {
	i := &Info{
		Name: r.name, Image: r.image, Labels: r.labels, Created: r.made, Status: Stopped,
		Digest: digest.Digest(r.labels[labelDigest]), Net: r.net, Ports: r.ports, Cgroup: e.cgroup(r.name),
	}
	i.Stdout, i.Stderr = e.logFiles(r.name)
	if r.net != NetHost {
		i.NetNS = e.cfg.netns(r.name)
	}
	if r.net == NetBridge {
		if b, err := os.ReadFile(e.addrFile(r.name)); err == nil {
			i.Addr, _ = netip.ParseAddr(string(b))
		}
	}
	return i
}

// Inspect describes one container, as List does.
func (e *Engine) Inspect(ctx context.Context, id string) (*Info, error) {
	name := Name(id)
	i, foreign, sure := e.known.get(name)
	if i == nil && !sure { // a container that another client has just made, perhaps
		if err := e.askContainer(ctx, name); err != nil {
			return nil, fmt.Errorf("inspect container %s: %w", name, err)
		}
		i, foreign, _ = e.known.get(name)
	}
	switch {
	case foreign:
		return nil, fmt.Errorf("inspect container %s: %w", name, errForeign)
	case i == nil || !means(id, i.Created):
		return nil, fmt.Errorf("inspect container %s: %w", name, ErrNotFound)
	}
	return i, nil
}

// OCI is the OCI runtime specification that a container was made with, JSON. While there
// is a task, containerd keeps it as a file beside that.
func (e *Engine) OCI(ctx context.Context, id string) ([]byte, error) {
	name := Name(id)
	if ValidName(name) == nil {
		if b, err := os.ReadFile(filepath.Join(e.bundle(name), "config.json")); err == nil {
			return b, nil
		}
	}
	r, err := e.c.Containers.Get(ctx, &containersapi.GetContainerRequest{ID: name})
	if err != nil {
		return nil, fmt.Errorf("inspect container %s: %w", name, notFound(err))
	}
	return r.Container.GetSpec().GetValue(), nil
}

// TaskMade is when a container's present task was made, just before its processes were: by the clock that
// files have their times of. The zero time is that it is not known.
func (e *Engine) TaskMade(name string) time.Time {
	fi, err := os.Stat(filepath.Join(e.bundle(name), "config.json"))
	if err != nil {
		return time.Time{}
	}
	return fi.ModTime()
}

// List describes all containers, by name, from what the engine has in memory. What it
// has done itself when List is called, and whatever containerd has told by then, is seen. Others may
// call it as often as they like: the labels are not copied.
func (e *Engine) List(ctx context.Context) ([]*Info, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	return e.known.list(), nil
}

// CgroupDir is the directory of a container's cgroup in the hierarchy that
// carries controller, on cgroup v1 and v2.
func (i *Info) CgroupDir(controller string) string {
	return cgroup.Dir(i.Cgroup, controller)
}
