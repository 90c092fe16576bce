package snapshot_test

import (
	"archive/tar"
	"bytes"
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"github.com/containerd/continuity/sysx"

	"dewpoint/internal/layer/mount"
	"dewpoint/internal/snapshot"
	"dewpoint/internal/spec"
	"dewpoint/testkit/snapshottest"
)

// TestSuite runs containerd's own suite with overlay mounts as containerd's
// overlay snapshotter makes them; by this name the suite knows that such mounts
// do not rename directories of lower layers.
func TestSuite(t *testing.T) {
	testsuite.SnapshotterSuite(t, "overlayfs", suiteOf(t, mount.EROFS, nil, false))
}

// TestSuiteWhole leaves out nothing: with redirect_dir, directories of lower
// layers can be renamed too.
func TestSuiteWhole(t *testing.T) {
	testsuite.SnapshotterSuite(t, "dewpoint", suiteOf(t, mount.EROFS, []string{"redirect_dir=on"}, false))
}

// TestSuiteOnImageLayers turns every snapshot that the suite commits into an
// image layer, so that all of it stands on mounted layers. In the
// suites above no backend mounts anything.
func TestSuiteOnImageLayers(t *testing.T) {
	for _, backend := range spec.Mounts {
		t.Run(backend, func(t *testing.T) {
			testsuite.SnapshotterSuite(t, "overlayfs", suiteOf(t, backend, nil, true))
		})
	}
}

func suiteOf(t *testing.T, backend string, overlay []string, layers bool) testsuite.SnapshotterFunc {
	return func(ctx context.Context, root string) (snapshots.Snapshotter, func() error, error) {
		dir := t.TempDir()
		store := snapshottest.New(dir)
		backend, err := mount.New(backend)
		if err != nil {
			return nil, nil, err
		}
		s, err := snapshot.New(ctx, snapshot.Config{Root: root, Layers: store, Backend: backend, Overlay: overlay})
		if err != nil {
			return nil, nil, err
		}
		done := func() error {
			s.Close()
			return snapshottest.UnmountAll(root)
		}
		if layers {
			return &layered{s, store}, done, nil
		}
		return s, done, nil
	}
}

// layered commits each snapshot as an image layer of the store.
type layered struct {
	*snapshot.Snapshotter
	store *snapshottest.Store
}

func (l *layered) Commit(ctx context.Context, name, key string, opts ...snapshots.Opt) error {
	upper, err := l.Upper(ctx, key)
	if err != nil {
		return err
	}
	layer, err := layerOf(upper)
	if err != nil {
		return err
	}
	id, _, err := l.store.Add(ctx, bytes.NewReader(layer))
	if err != nil {
		return err
	}
	if err := clear(upper); err != nil {
		return err
	}
	if err := l.Mark(ctx, key, id); err != nil {
		return err
	}
	return l.Snapshotter.Commit(ctx, name, key, opts...)
}

func clear(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return err
}

// layerOf writes an overlay's upper directory as a layer tar, with whiteouts
// as images have them.
func layerOf(upper string) ([]byte, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	links := make(map[uint64]string)
	err := filepath.WalkDir(upper, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(upper, path)
		return entry(w, path, name, links)
	})
	if err != nil {
		return nil, err
	}
	err = w.Close()
	return buf.Bytes(), err
}

func entry(w *tar.Writer, path, name string, links map[uint64]string) error {
	fi, err := os.Lstat(path)
	if err != nil {
		return err
	}
	st := fi.Sys().(*syscall.Stat_t)
	if fi.Mode()&fs.ModeCharDevice != 0 && st.Rdev == 0 {
		return w.WriteHeader(&tar.Header{Name: filepath.Join(filepath.Dir(name), ".wh."+filepath.Base(name))})
	}
	target, _ := os.Readlink(path)
	h, err := tar.FileInfoHeader(fi, target)
	if err != nil {
		return err
	}
	h.Name, h.Format = name, tar.FormatPAX
	var content []byte
	switch first, linked := links[st.Ino]; {
	case fi.Mode().IsRegular() && linked:
		h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
	case fi.Mode().IsRegular():
		links[st.Ino] = name
		content, err = os.ReadFile(path)
	case fi.IsDir():
		h.Name += "/"
	}
	if err != nil {
		return err
	}
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	if _, err := w.Write(content); err != nil {
		return err
	}
	if opaque, _ := sysx.LGetxattr(path, "trusted.overlay.opaque"); string(opaque) == "y" {
		return w.WriteHeader(&tar.Header{Name: filepath.Join(name, ".wh..wh..opq")})
	}
	return nil
}

// Update hides the labels of image layers, which the suite does not expect.
func (l *layered) Update(ctx context.Context, info snapshots.Info, fieldpaths ...string) (snapshots.Info,
	error) {
	info, err := l.Snapshotter.Update(ctx, info, fieldpaths...)
	delete(info.Labels, snapshot.LabelLayer)
	delete(info.Labels, snapshot.LabelMount)
	return info, err
}
