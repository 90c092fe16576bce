package snapshot_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"dewpoint/internal/snapshot"
)

// serve starts the server and returns its socket and what ends it.
func (b *bed) serve() (socket string, stop func() error) {
	b.t.Helper()
	c, cancel := context.WithCancel(background)
	socket = filepath.Join(b.dir, "snapshotter.sock")
	done := make(chan error, 1)
	go func() { done <- snapshot.Serve(c, socket, b.Snapshotter, nil) }()
	for range 200 {
		if _, err := os.Stat(socket); err == nil {
			return socket, func() error { cancel(); return <-done }
		}
		time.Sleep(5 * time.Millisecond)
	}
	b.t.Fatal("no socket")
	return "", nil
}

func TestServe(t *testing.T) {
	b := newBed(t)
	id := b.layer("a", "x")
	b.store.AddChain(id)
	if err := os.WriteFile(filepath.Join(b.dir, "snapshotter.sock.new"), nil, 0o600); err != nil { // a crash's
		t.Fatal(err)
	}
	socket, stop := b.serve()
	if fi, err := os.Stat(socket); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", fi.Mode(), err)
	}
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	client := proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(conn), "dewpoint")
	if _, err := client.Prepare(background, "extract-1", "", ref(id)); !errdefs.IsAlreadyExists(err) {
		t.Errorf("remote prepare: %v", err)
	}
	m, err := client.Prepare(background, "c", id.String())
	if err != nil {
		t.Fatal(err)
	}
	dir := b.mount(m)
	b.want(filepath.Join(dir, "a"), "x")
	b.unmount(dir)
	var names []string
	err = client.Walk(background, func(_ ctx, i snapshots.Info) error {
		names = append(names, i.Name)
		return nil
	})
	if err != nil || len(names) != 2 {
		t.Errorf("%v, %v", names, err)
	}
	conn.Close()
	if err := stop(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(socket); !os.IsNotExist(err) {
		t.Errorf("socket stays: %v", err)
	}
}
