package containerdtest_test

import (
	"os"
	"path/filepath"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
)

// topChain is the chain of the whole image.
func (n *node) topChain() string {
	var ids []digest.Digest
	for _, tar := range n.tars {
		ids = append(ids, digest.FromBytes(tar))
	}
	return identity.ChainID(ids).String()
}

// with calls fn with the snapshotter as containerd's clients see it.
func (n *node) with(fn func(s snapshots.Snapshotter) error) {
	n.t.Helper()
	client, err := containerd.New(n.Address)
	if err != nil {
		n.t.Fatal(err)
	}
	defer client.Close()
	if err := fn(client.SnapshotService("dewpoint")); err != nil {
		n.t.Fatal(err)
	}
}

// commitOn writes a file over a committed snapshot and commits it as "built".
func (n *node) commitOn(parent, file, content string) {
	n.t.Helper()
	ctx := namespaces.WithNamespace(n.t.Context(), "default")
	root := snapshots.WithLabels(map[string]string{"containerd.io/gc.root": "test"})
	n.with(func(s snapshots.Snapshotter) error {
		mounts, err := s.Prepare(ctx, "build", parent, root)
		if err != nil {
			return err
		}
		err = mount.WithTempMount(ctx, mounts, func(dir string) error {
			return os.WriteFile(filepath.Join(dir, file), []byte(content), 0o644)
		})
		if err != nil {
			return err
		}
		return s.Commit(ctx, "built", "build", root)
	})
}

// wantView looks into a view of a committed snapshot.
func (n *node) wantView(name, file, content string) {
	n.t.Helper()
	ctx := namespaces.WithNamespace(n.t.Context(), "default")
	n.with(func(s snapshots.Snapshotter) error {
		mounts, err := s.View(ctx, "view", name,
			snapshots.WithLabels(map[string]string{"containerd.io/gc.root": "now"}))
		if err != nil {
			return err
		}
		err = mount.WithTempMount(ctx, mounts, func(dir string) error {
			got, err := os.ReadFile(filepath.Join(dir, file))
			if string(got) != content {
				n.t.Errorf("%s: %q, want %q", file, got, content)
			}
			return err
		})
		if err != nil {
			return err
		}
		return s.Remove(ctx, "view")
	})
}
