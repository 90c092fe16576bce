package snapshot

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	diffapi "github.com/containerd/containerd/api/services/diff/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/diffservice"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/containerd/v2/defaults"
	"google.golang.org/grpc"
)

// stopWait is how long calls under way may take when Serve is to end.
const stopWait = 3 * time.Second

// Serve is ServeOn a Unix socket that only root may connect to. A socket that
// a dead process left is replaced.
//
// While nobody listens, containerd answers its clients with "unavailable", and
// for up to 3 s longer, since it tries to connect again after growing pauses.
func Serve(ctx context.Context, socket string, s *Snapshotter, d *Diff) error {
	l, err := listen(socket)
	if err != nil {
		return fmt.Errorf("serve snapshotter: %w", err)
	}
	defer os.Remove(socket)
	return ServeOn(ctx, l, s, d)
}

// ServeOn answers containerd on l until ctx ends, then lets calls under way
// finish for a few seconds, closes l and returns nil. d may be nil: then there
// is no diff service. On a listener that outlives the process (systemd keeps
// those), containerd's calls wait for the next process instead of failing.
func ServeOn(ctx context.Context, l net.Listener, s *Snapshotter, d *Diff) error {
	server := grpc.NewServer(
		grpc.MaxRecvMsgSize(defaults.DefaultMaxRecvMsgSize),
		grpc.MaxSendMsgSize(defaults.DefaultMaxSendMsgSize),
	)
	snapshotsapi.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(s))
	if d != nil {
		diffapi.RegisterDiffServer(server, diffservice.FromApplierAndComparer(d, d))
	}
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		abort := time.AfterFunc(stopWait, server.Stop)
		defer abort.Stop()
		server.GracefulStop()
	})
	err := server.Serve(l)
	if !stop() {
		<-stopped
		return nil
	}
	return fmt.Errorf("serve snapshotter: %w", err)
}

// listen makes the socket with mode 0600 from the first moment that its name
// can be seen.
func listen(socket string) (net.Listener, error) {
	made := socket + ".new"
	if err := os.Remove(made); err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: made, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(made, 0o600); err != nil {
		l.Close()
		return nil, err
	}
	if err := os.Rename(made, socket); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}
