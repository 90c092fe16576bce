package snapshot_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	"golang.org/x/sys/unix"

	layermount "dewpoint/internal/layer/mount"
	"dewpoint/internal/snapshot"
)

// device is the file system at a path: a fresh mount has another one.
func device(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return uint64(st.Dev)
}

// A mount that something may have read from is made anew, and no other; what is
// held stays mounted.
func TestFresh(t *testing.T) {
	for _, backend := range []string{layermount.EROFS, layermount.Loop} {
		t.Run(backend, func(t *testing.T) {
			b := newBedOn(t, backend)
			var told [][]digest.Digest
			var last <-chan struct{}
			b.Close()
			s, err := snapshot.New(t.Context(), snapshot.Config{Root: b.root(), Layers: b.store, Backend: b.backend,
				Prepared: func(ids []digest.Digest, gone <-chan struct{}) { told, last = append(told, ids), gone }})
			if err != nil {
				t.Fatal(err)
			}
			b.Snapshotter = s
			one, two := b.layer("a", "1"), b.layer("b", "2")
			ids := []digest.Digest{one, two}
			b.store.AddChain(ids...)
			parent := ""
			for i, chain := range identity.ChainIDs(slices.Clone(ids)) {

				_, err := b.Prepare(t.Context(), fmt.Sprint("extract-", i, " ", chain), parent,
					snapshots.WithLabels(map[string]string{snapshots.LabelSnapshotRef: chain.String()}))
				if err == nil {
					t.Fatal("the layer is left to containerd")
				}
				parent = chain.String()
			}
			fresh := func() uint64 {
				t.Helper()
				path, release, err := b.Fresh(t.Context(), one)
				if err != nil {
					t.Fatal(err)
				}
				defer release()
				return device(t, path)
			}
			first := fresh()
			if again := fresh(); again == first {
				t.Error("a mount that was given away is given again")
			}
			if len(told) > 0 {
				t.Errorf("a pull was taken for a container: %v", told)
			}
			if _, err := b.Prepare(t.Context(), "web", parent); err != nil {
				t.Fatal(err)
			}
			if len(told) != 1 || !slices.Equal(told[0], ids) {
				t.Errorf("told of %v", told)
			}
			if _, err := b.View(t.Context(), "look", parent); err != nil || len(told) != 1 {
				t.Errorf("told of %v, %v", told, err)
			}
			path, release, err := b.Fresh(t.Context(), two)
			if err != nil {
				t.Fatal(err)
			}
			for _, key := range []string{"look", "web", parent, one.String()} {
				select {
				case <-last:
					t.Error("the container is gone before it is removed")
				default:
				}
				if err := b.Remove(t.Context(), key); err != nil {
					t.Fatal(err)
				}
				if key == "web" {
					<-last
					last = nil
				}
			}
			if b.InUse()[one] || !b.InUse()[two] {
				t.Errorf("in use: %v", b.InUse())
			}
			device(t, path)
			release()
			release()
			if len(b.InUse()) > 0 {
				t.Errorf("in use: %v", b.InUse())
			}
		})
	}
}
