package pop_test

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// failingDisk is a Dir of which one sync of a file fails, as Linux reports it: once, and never again.
type failingDisk struct {
	*pop.Dir

	mu    sync.Mutex
	syncs int
	fails int // the one of that number
}

type failingFile struct {
	pop.File
	disk *failingDisk
}

func (d *failingDisk) Append(ctx context.Context, name string) (pop.File, error) {
	f, err := d.Dir.Append(ctx, name)
	if err != nil {
		return nil, err
	}
	return &failingFile{f, d}, nil
}

func (f *failingFile) Sync() error {
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	if f.disk.syncs++; f.disk.syncs == f.disk.fails {
		return unix.EIO
	}
	return f.File.Sync()
}

// failed reports whether the sync that is to fail has.
func (d *failingDisk) failed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.fails > 0 && d.syncs >= d.fails
}

// Whichever sync fails while a layer is copied into the store, and whatever later syncs say: the layer is not
// published from what was written, which is discarded, and is published when it is written anew.
func TestFailedSyncFailsTheLayer(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		data := bytes.Repeat([]byte("a layer, "), 1000)
		id := digest.FromBytes(data)
		for fails := 1; ; fails++ {
			disk := &failingDisk{Dir: pop.NewDir(b.dir, 0), fails: fails}
			st := b.open(pop.StoreConfig{Node: "first", FS: disk})
			publish := func() error {
				d, err := st.Draft(t.Context(), id, 1)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := d.Write(data[:5000]); err != nil {
					t.Fatal(err)
				}
				_ = d.Checkpoint(t.Context(), []byte("{}")) // as one that does not care
				if _, err := d.Write(data[5000:]); err != nil && !disk.failed() {
					t.Fatal(err)
				}
				defer d.Close()
				return d.Publish(t.Context(), pop.Layer{Size: int64(len(data))}, []byte("a table"))
			}
			err := publish()
			if !disk.failed() {
				if err != nil || fails < 5 {
					t.Errorf("%d syncs: %v", fails-1, err)
				}
				return
			}
			if !errors.Is(err, unix.EIO) || st.HasLayer(t.Context(), id) {
				t.Errorf("sync %d failed: published with %v", fails, err)
			}
			left, _ := filepath.Glob(filepath.Join(b.dir, "*", id.Encoded()+".*"))
			if len(left) > 0 {
				t.Errorf("sync %d failed, and %q are left", fails, left)
			}
			if err := publish(); err != nil {
				t.Errorf("after sync %d failed: %v", fails, err)
			}
			l, err := st.Record(t.Context(), id)
			if err == nil {
				err = errors.Join(st.Verify(t.Context(), l, 0), st.Withdraw(t.Context(), l))
			}
			if err != nil {
				t.Errorf("after sync %d failed: %v", fails, err)
			}
			clear, _ := filepath.Glob(filepath.Join(b.dir, "*", id.Encoded()+".*"))
			for _, name := range clear { // the next round begins with nothing
				if err := unix.Unlink(name); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// An image record and a pack whose sync failed are not there, and can be put again.
func TestFailedSyncFailsImagesAndPacks(t *testing.T) {
	inBed(t, func(t *testing.T, b *bed) {
		manifest := digest.FromString("a manifest")
		disk := &failingDisk{Dir: pop.NewDir(b.dir, 0), fails: 1}
		st := b.open(pop.StoreConfig{Node: "first", FS: disk})
		if err := st.PutImage(t.Context(), "an/image", []byte(`{"a":1}`)); !errors.Is(err, unix.EIO) {
			t.Errorf("put an image: %v", err)
		}
		if got, err := st.Image(t.Context(), "an/image"); !errors.Is(err, pop.ErrUnknown) {
			t.Errorf("the image is %q: %v", got, err)
		}
		if err := st.PutImage(t.Context(), "an/image", []byte(`{"a":1}`)); err != nil {
			t.Error(err)
		}
		if _, err := st.Image(t.Context(), "an/image"); err != nil {
			t.Error(err)
		}

		disk = &failingDisk{Dir: pop.NewDir(b.dir, 0), fails: 1}
		st = b.open(pop.StoreConfig{Node: "first", FS: disk})
		if err := st.PutPack(t.Context(), manifest, strings.NewReader("a pack")); !errors.Is(err, unix.EIO) {
			t.Errorf("put a pack: %v", err)
		}
		if _, err := st.Pack(t.Context(), manifest); !errors.Is(err, pop.ErrUnknown) {
			t.Errorf("the pack is there: %v", err)
		}
		if err := st.PutPack(t.Context(), manifest, strings.NewReader("a pack")); err != nil {
			t.Error(err)
		}
	})
}
