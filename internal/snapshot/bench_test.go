package snapshot_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"dewpoint/internal/layer/mount"
	"dewpoint/internal/snapshot"
	"dewpoint/testkit/snapshottest"
)

// BenchmarkContainer prepares and removes a container on ten layers, with
// containerd's overlay snapshotter beside.
func BenchmarkContainer(b *testing.B) {
	b.Run("dewpoint", func(b *testing.B) {
		s, top := benchImage(b, 10)
		benchContainers(b, s, top)
	})
	b.Run("overlay", func(b *testing.B) {
		s, err := overlay.NewSnapshotter(b.TempDir())
		if err != nil {
			b.Fatal(err)
		}
		defer s.Close()
		parent := ""
		for i := range 10 {
			if _, err := s.Prepare(background, "x", parent); err != nil {
				b.Fatal(err)
			}
			parent = fmt.Sprint(i)
			if err := s.Commit(background, parent, "x"); err != nil {
				b.Fatal(err)
			}
		}
		benchContainers(b, s, parent)
	})
}

func benchContainers(b *testing.B, s snapshots.Snapshotter, top string) {
	for i := 0; b.Loop(); i++ {
		key := fmt.Sprint("c", i)
		if _, err := s.Prepare(background, key, top); err != nil {
			b.Fatal(err)
		}
		if err := s.Remove(background, key); err != nil {
			b.Fatal(err)
		}
	}
}

// benchImage pulls an image of n layers.
func benchImage(b *testing.B, n int) (*snapshot.Snapshotter, string) {
	dir := b.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "layers"), 0o700); err != nil {
		b.Fatal(err)
	}
	store := snapshottest.New(filepath.Join(dir, "layers"))
	backend, err := mount.New(mount.EROFS)
	if err != nil {
		b.Fatal(err)
	}
	s, err := snapshot.New(background, snapshot.Config{
		Root: filepath.Join(dir, "r"), Layers: store, Backend: backend, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { s.Close(); snapshottest.UnmountAll(dir) })
	parent := ""
	var ids []digest.Digest
	for i := range n {
		id, _, err := store.Add(background, bytes.NewReader(tarOf(b, "file", fmt.Sprint(i))))
		if err != nil {
			b.Fatal(err)
		}
		ids = append(ids, id)
		chain := store.AddChain(ids...)
		if _, err := s.Prepare(background, "extract "+chain.String(), parent,
			ref(chain)); !errdefs.IsAlreadyExists(err) {
			b.Fatal(err)
		}
		parent = chain.String()
	}
	return s, parent
}

// BenchmarkRemoteLayer commits layers that are here: record, mount and, on
// removal, unmount.
func BenchmarkRemoteLayer(b *testing.B) {
	s, top := benchImage(b, 1)
	for b.Loop() {
		if err := s.Remove(background, top); err != nil {
			b.Fatal(err)
		}
		if _, err := s.Prepare(background, "extract "+top, "",
			ref(digest.Digest(top))); !errdefs.IsAlreadyExists(err) {
			b.Fatal(err)
		}
	}
}
