package snapshot_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"dewpoint/internal/snapshot"
)

// diffBed is a bed with a diff plugin over a content store.
type diffBed struct {
	*bed
	*snapshot.Diff
	blobs content.Store
}

func newDiffBed(t *testing.T) *diffBed {
	b := newBed(t)
	blobs, err := local.NewStore(filepath.Join(b.dir, "blobs"))
	if err != nil {
		t.Fatal(err)
	}
	return &diffBed{b, snapshot.NewDiff(b.Snapshotter, blobs), blobs}
}

// blob puts a gzip layer into the content store.
func (b *diffBed) blob(files ...string) (ocispec.Descriptor, digest.Digest) {
	b.t.Helper()
	layer := tarOf(b.t, files...)
	var buf bytes.Buffer
	z := gzip.NewWriter(&buf)
	z.Write(layer)
	z.Close()
	desc := ocispec.Descriptor{
		MediaType: ocispec.MediaTypeImageLayerGzip, Digest: digest.FromBytes(buf.Bytes()), Size: int64(buf.Len()),
	}
	if err := content.WriteBlob(background, b.blobs, desc.Digest.String(), &buf, desc); err != nil {
		b.t.Fatal(err)
	}
	return desc, digest.FromBytes(layer)
}

func TestApplyMakesAFile(t *testing.T) {
	b := newDiffBed(t)
	desc, diffID := b.blob("a", "x")
	key := "ns/1/extract-1 " + diffID.String() // a client without labels
	got, err := b.Apply(background, desc, b.prepare(key, ""))
	if err != nil || got.Digest != diffID {
		t.Fatalf("%v, %v", got, err)
	}
	b.reboot() // between the two calls
	b.commit("ns/2/"+diffID.String(), key)
	info, err := b.Stat(background, "ns/2/"+diffID.String())
	if err != nil || info.Labels[snapshot.LabelLayer] != diffID.String() {
		t.Errorf("%v, %v", info, err)
	}
	if err := b.Cleanup(background); err != nil {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(filepath.Join(b.root(), "snapshots")); len(left) != 0 {
		t.Errorf("directories: %v", left)
	}
	dir := b.mount(b.prepare("c", "ns/2/"+diffID.String()))
	defer b.unmount(dir)
	b.want(filepath.Join(dir, "a"), "x")
}

func TestApplyFallsBackToExtraction(t *testing.T) {
	b := newDiffBed(t)
	low := b.layer("low", "x")
	top := b.pull(low)
	desc, diffID := b.blob("a", "x")
	b.store.Fail("Import", errors.New("no space left on device"))
	chain := digest.FromString(top + " " + diffID.String())
	got, err := b.Apply(background, desc, b.prepare("extract-1", top, ref(chain)))
	if err != nil || got.Digest != diffID {
		t.Fatalf("%v, %v", got, err)
	}
	b.commit(chain.String(), "extract-1", ref(chain))
	dir := b.mount(b.prepare("c", chain.String()))
	defer b.unmount(dir)
	b.want(filepath.Join(dir, "a"), "x")
	b.want(filepath.Join(dir, "low"), "x")
	if used := b.InUse(); len(used) != 1 {
		t.Errorf("in use: %v", used)
	}
}

// What is not an empty extraction of ours is containerd's business.
func TestApplyIsNotImplementedElsewhere(t *testing.T) {
	b := newDiffBed(t)
	desc, diffID := b.blob("a", "x")
	full := b.prepare("extract-1 "+diffID.String(), "")
	if err := os.WriteFile(filepath.Join(full[0].Source, "f"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	others := []mount.Mount{{Type: "bind", Source: t.TempDir(), Options: []string{"rbind", "rw"}}}
	for _, m := range [][]mount.Mount{b.prepare("c", ""), full, others, nil} {
		if _, err := b.Apply(background, desc, m); !errdefs.IsNotImplemented(err) {
			t.Errorf("%v: %v", m, err)
		}
	}
	if _, err := b.Compare(background, others, others); !errdefs.IsNotImplemented(err) {
		t.Errorf("compare: %v", err)
	}
}

// An image whose configuration lies about a layer is found out by containerd.
func TestApplyReportsWhatItFound(t *testing.T) {
	b := newDiffBed(t)
	desc, diffID := b.blob("a", "x")
	promised := digest.FromString("something else")
	got, err := b.Apply(background, desc, b.prepare("extract-1", "", ref(promised)))
	if err != nil || got.Digest != diffID {
		t.Errorf("%v, %v", got, err)
	}
	if len(b.InUse()) != 0 {
		t.Errorf("in use: %v", b.InUse())
	}
}

func TestApplyEndsWithItsCaller(t *testing.T) {
	b := newDiffBed(t)
	desc, diffID := b.blob("a", "x")
	m := b.prepare("extract-1", "", ref(diffID))
	c, cancel := context.WithCancel(background)
	cancel()
	if _, err := b.Apply(c, desc, m); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestCommitRefusesWritesOverAnImport(t *testing.T) {
	b := newDiffBed(t)
	desc, diffID := b.blob("a", "x")
	m := b.prepare("extract-1", "", ref(diffID))
	if _, err := b.Apply(background, desc, m); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(m[0].Source, "f"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.Commit(background, diffID.String(), "extract-1"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("%v", err)
	}
	if err := b.Remove(background, "extract-1"); err != nil {
		t.Fatal(err)
	}
	if len(b.InUse()) != 0 || b.mounted() != 0 {
		t.Errorf("in use: %v", b.InUse())
	}
}

// containerd 1.6 has no diff plugins: its tree is dropped for the file when
// the layer has come by then.
func TestCommitTakesALayerThatArrived(t *testing.T) {
	b := newBed(t)
	id := b.layer("a", "x")
	key := "ns/1/extract-1 " + id.String()
	b.written(key, "", "a", "x")
	b.store.AddChain(id)
	b.commit("ns/2/"+id.String(), key)
	if !b.InUse()[id] {
		t.Error("the layer stayed a directory")
	}
	b.reboot()
	if left, _ := os.ReadDir(filepath.Join(b.root(), "snapshots")); len(left) != 0 {
		t.Errorf("directories: %v", left)
	}
	dir := b.mount(b.prepare("c", "ns/2/"+id.String()))
	defer b.unmount(dir)
	b.want(filepath.Join(dir, "a"), "x")
}
