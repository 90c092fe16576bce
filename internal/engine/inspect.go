package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"dewpoint/internal/engine/network"
)

// Status is the state of a container's first process.
type Status string

const (
	Created Status = "created"
	Running Status = "running"
	Paused  Status = "paused"
	Stopped Status = "stopped" // ended, or lost with a reboot
)

// Info describes a container.
type Info struct {
	Name    string
	Image   string        // its reference
	Digest  digest.Digest // of what the reference named
	Labels  map[string]string
	Created time.Time

	Status Status
	Pid    uint32 // of the first process on the host, 0 if it does not run
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

func (e *Engine) getRecord(ctx context.Context, name string) (record, error) {
	r, err := e.c.containers.Get(ctx, &containersapi.GetContainerRequest{ID: name})
	if err != nil {
		return record{}, err
	}
	if _, ours := r.Container.Labels[labelNet]; !ours {
		return record{}, fmt.Errorf("container %s belongs to another client of containerd: %w", name, errdefs.ErrInvalidArgument)
	}
	return toRecord(r.Container), nil
}

func (e *Engine) listRecords(ctx context.Context) ([]record, error) {
	r, err := e.c.containers.List(ctx, &containersapi.ListContainersRequest{Filters: []string{`labels."` + labelNet + `"`}})
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
	r, err := e.c.tasks.Get(ctx, &tasksapi.GetRequest{ContainerID: name})
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

func (i *Info) setTask(p *task.Process) {
	switch p.Status {
	case task.Status_CREATED:
		i.Status, i.Pid = Created, p.Pid
	case task.Status_RUNNING:
		i.Status, i.Pid = Running, p.Pid
	case task.Status_PAUSED, task.Status_PAUSING:
		i.Status, i.Pid = Paused, p.Pid
	case task.Status_STOPPED:
		i.Status = Stopped
		i.Exit = &Exit{int(p.ExitStatus), p.ExitedAt.AsTime()}
	}
}

// Inspect describes one container.
func (e *Engine) Inspect(ctx context.Context, name string) (*Info, error) {
	var r record
	var p *task.Process
	var g errgroup.Group
	g.Go(func() (err error) { r, err = e.getRecord(ctx, name); return err })
	g.Go(func() (err error) {
		if p = e.known.get(name, e.cgroup(name)); p != nil {
			return nil
		}
		if p, err = e.taskState(ctx, name); errdefs.IsNotFound(err) {
			return nil
		}
		return err
	})
	if err := g.Wait(); err != nil {
		return nil, fmt.Errorf("inspect container %s: %w", name, notFound(err))
	}
	i := e.info(r)
	if p != nil {
		i.setTask(p)
	}
	return i, nil
}

// OCI is the OCI runtime specification that a container was made with, JSON.
func (e *Engine) OCI(ctx context.Context, name string) ([]byte, error) {
	r, err := e.c.containers.Get(ctx, &containersapi.GetContainerRequest{ID: name})
	if err != nil {
		return nil, fmt.Errorf("inspect container %s: %w", name, notFound(err))
	}
	return r.Container.GetSpec().GetValue(), nil
}

// List describes all containers, by name.
func (e *Engine) List(ctx context.Context) ([]*Info, error) {
	recs, err := e.listRecords(ctx)
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	out := make([]*Info, len(recs))
	var g errgroup.Group
	g.SetLimit(8)
	for i, r := range recs {
		out[i] = e.info(r)
		g.Go(func() error {
			if p := e.knownTask(ctx, r.name); p != nil {
				out[i].setTask(p)
			}
			return ctx.Err()
		})
	}
	if err := g.Wait(); err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	slices.SortFunc(out, func(a, b *Info) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// CgroupDir is the directory of a container's cgroup in the hierarchy that
// carries controller, on cgroup v1 and v2.
func (i *Info) CgroupDir(controller string) string {
	if unifiedCgroup() {
		return path.Join("/sys/fs/cgroup", i.Cgroup)
	}
	return path.Join("/sys/fs/cgroup", controller, i.Cgroup)
}
