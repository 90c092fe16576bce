package containerd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	contentapi "github.com/containerd/containerd/api/services/content/v1"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	introapi "github.com/containerd/containerd/api/services/introspection/v1"
	leasesapi "github.com/containerd/containerd/api/services/leases/v1"
	namespacesapi "github.com/containerd/containerd/api/services/namespaces/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	versionapi "github.com/containerd/containerd/api/services/version/v1"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/emptypb"

	"dewpoint/internal/sched"
)

// CallTimeout bounds a call whose context has no deadline, so that a dead
// containerd cannot hang its callers. Waiting calls are exempt.
const (
	CallTimeout = 2 * time.Minute
	waitMethod  = "/containerd.services.tasks.v1.Tasks/Wait"
)

// readsOnly says that a call may be repeated when containerd died under it.
func readsOnly(method string) bool {
	switch method[strings.LastIndexByte(method, '/')+1:] {
	case "Get", "List", "Stat", "Mounts", "Version", "Plugins", "Wait":
		return true
	}
	return false
}

// undelivered tells a call that containerd could not pass on to the
// snapshotter: after a restart of the daemon it tries the socket seconds apart.
func undelivered(err error) bool { return strings.Contains(err.Error(), "Error while dialing") }

// Native makes of an error of containerd's API one of package errdefs. A disk that is full wraps ENOSPC as
// well, which the API has no code for: only the text says it. The kernel has the same number for too many
// cgroups, which is something else.
func Native(err error) error {
	if err == nil {
		return nil
	}
	full := strings.Contains(err.Error(), unix.ENOSPC.Error()) && !strings.Contains(err.Error(), "cgroup")
	if err = errgrpc.ToNative(err); full {
		err = fullError{err}
	}
	return err
}

// fullError is an error that wraps ENOSPC besides, which its text says already.
type fullError struct{ error }

func (e fullError) Unwrap() []error { return []error{e.error, unix.ENOSPC} }

// Client is the part of containerd's API that the engine uses, by the bare
// generated stubs: the client library costs megabytes and extra round trips.
// Calls carry the namespace, wait while containerd is being restarted, and
// give errors of package errdefs.
type Client struct {
	Conn       *grpc.ClientConn
	Containers containersapi.ContainersClient
	Content    contentapi.ContentClient
	Events     eventsapi.EventsClient
	Images     imagesapi.ImagesClient
	Intro      introapi.IntrospectionClient
	Leases     leasesapi.LeasesClient
	Namespaces namespacesapi.NamespacesClient
	Snapshots  snapshotsapi.SnapshotsClient
	Tasks      tasksapi.TasksClient
	Version    versionapi.VersionClient
}

const namespaceHeader = "containerd-namespace"

// InNamespace has the calls under the context be for another namespace than the client's.
func InNamespace(ctx context.Context, namespace string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, namespaceHeader, namespace)
}

// Dial connects to the containerd at a socket, for one namespace. It does not wait for it.
func Dial(socket, namespace string) (*Client, error) {
	withNS := func(ctx context.Context) context.Context {
		if md, _ := metadata.FromOutgoingContext(ctx); len(md.Get(namespaceHeader)) > 0 {
			return ctx
		}
		return InNamespace(ctx, namespace)
	}
	unary := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
		invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if _, ok := ctx.Deadline(); !ok && method != waitMethod {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, CallTimeout)
			defer cancel()
		}
		ctx = withNS(ctx)
		for {
			err := Native(invoke(ctx, method, req, reply, cc, opts...))
			if !errdefs.IsUnavailable(err) || !readsOnly(method) && !undelivered(err) ||
				!sched.Sleep(ctx, 10*time.Millisecond) {
				return err
			}
		}
	}
	stream := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
		streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		s, err := streamer(withNS(ctx), desc, cc, method, opts...)
		return s, Native(err)
	}
	conn, err := grpc.NewClient("passthrough:///"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", addr)
		}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.6,
				MaxDelay: time.Second},
			MinConnectTimeout: 5 * time.Second,
		}),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true), grpc.MaxCallRecvMsgSize(64<<20)),
		grpc.WithUnaryInterceptor(unary), grpc.WithStreamInterceptor(stream),
		grpc.WithReadBufferSize(8<<10), grpc.WithWriteBufferSize(8<<10),
		grpc.WithIdleTimeout(0), grpc.WithDisableServiceConfig())
	if err != nil {
		return nil, fmt.Errorf("containerd at %s: %w", socket, err)
	}
	return &Client{
		Conn:       conn,
		Containers: containersapi.NewContainersClient(conn),
		Content:    contentapi.NewContentClient(conn),
		Events:     eventsapi.NewEventsClient(conn),
		Images:     imagesapi.NewImagesClient(conn),
		Intro:      introapi.NewIntrospectionClient(conn),
		Leases:     leasesapi.NewLeasesClient(conn),
		Namespaces: namespacesapi.NewNamespacesClient(conn),
		Snapshots:  snapshotsapi.NewSnapshotsClient(conn),
		Tasks:      tasksapi.NewTasksClient(conn),
		Version:    versionapi.NewVersionClient(conn),
	}, nil
}

// Alive returns the version of a containerd that answers.
func (c *Client) Alive(ctx context.Context) (string, error) {
	v, err := c.Version.Version(ctx, &emptypb.Empty{})
	if err != nil {
		return "", err
	}
	return v.Version, nil
}

// SnapshotterMissingError says that a containerd which is not ours does not
// know the snapshotter. Its text shows what to add to the configuration.
type SnapshotterMissingError struct {
	Snapshotter, Address, Socket string
}

func (e *SnapshotterMissingError) Error() string {
	return fmt.Sprintf("containerd at %s has no snapshotter %q; add to /etc/containerd/config.toml:\n\n%s\nand restart containerd",
		e.Address, e.Snapshotter, proxySnippet(e.Snapshotter, e.Socket))
}

func proxySnippet(name, socket string) string {
	return fmt.Sprintf("[proxy_plugins.%s]\n  type = \"snapshot\"\n  address = %q\n", name, socket)
}

// RequireSnapshotter gives a *SnapshotterMissingError where containerd does not have the configured one.
func (c *Client) RequireSnapshotter(ctx context.Context, cfg Config) error {
	r, err := c.Intro.Plugins(ctx, &introapi.PluginsRequest{
		Filters: []string{"type==io.containerd.snapshotter.v1,id==" + cfg.Snapshotter},
	})
	if err != nil {
		return fmt.Errorf("list containerd's plugins: %w", err)
	}
	for _, p := range r.Plugins {
		if p.ID == cfg.Snapshotter && p.InitErr == nil {
			return nil
		}
	}
	return &SnapshotterMissingError{cfg.Snapshotter, cfg.Address, cfg.SnapshotterSocket}
}

// ContentRoot is the directory of containerd's content store.
func (c *Client) ContentRoot(ctx context.Context) (string, error) {
	r, err := c.Intro.Plugins(ctx, &introapi.PluginsRequest{Filters: []string{"type==io.containerd.content.v1"}})
	if err != nil {
		return "", fmt.Errorf("list containerd's plugins: %w", err)
	}
	for _, p := range r.Plugins {
		if root := p.Exports["root"]; root != "" {
			return root, nil
		}
	}
	return "", errors.New("containerd does not say where its content store is")
}

// EndOfStream is nil for the end of a stream, else the error as Native gives it.
func EndOfStream(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return Native(err)
}
