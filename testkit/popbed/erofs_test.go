package popbed

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"dewpoint/internal/layer/mount"
	"dewpoint/testkit/mounttest"
	"dewpoint/testkit/registrytest"
)

// testMounts mounts a layer whose index and tar one node has written, on another.
func testMounts(t *testing.T, b *Bed) {
	body := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	data := filepath.Join(b.Nodes[0].Store, "layer.data")
	if err := os.WriteFile(data, registrytest.Tar(registrytest.File{Name: "a", Body: string(body)}),
		0o644); err != nil {
		t.Fatal(err)
	}
	files, err := mounttest.Layer(b.Nodes[0].Store, data, false)
	if err != nil {
		t.Fatal(err)
	}
	backend, err := mount.New(mount.EROFS)
	if err != nil {
		t.Fatal(err)
	}
	n := b.Nodes[1]
	files.Index, files.Data = filepath.Join(n.Store, filepath.Base(files.Index)),
		filepath.Join(n.Store, filepath.Base(files.Data))
	target := filepath.Join(n.Dir, "layer")
	if err := errors.Join(os.Mkdir(target, 0o755), backend.Mount(t.Context(), files, target)); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(target, "a"))
	if err != nil || !bytes.Equal(got, body) {
		t.Errorf("a layer in the store reads %d bytes, %v", len(got), err)
	}
	if err := backend.Unmount(target); err != nil {
		t.Error(err)
	}
}
