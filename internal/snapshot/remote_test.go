package snapshot_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/snapshotters"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"

	"dewpoint/internal/snapshot"
)

func TestRemoteLayersAreMountedOnce(t *testing.T) { onEach(t, mountedOnce) }

func mountedOnce(b *bed) {
	low, high := b.layer("a", "low", "b", "low"), b.layer("b", "high")
	top := b.pull(low, high)
	for _, key := range []string{"c1", "c2"} {
		dir := b.mount(b.prepare(key, top))
		b.want(filepath.Join(dir, "a"), "low")
		b.want(filepath.Join(dir, "b"), "high")
		b.unmount(dir)
	}
	if b.mounted() != 2 {
		b.t.Errorf("%d mounts are there, want 2", b.mounted())
	}
	if used := b.InUse(); len(used) != 2 || !used[low] || !used[high] {
		b.t.Errorf("in use: %v", used)
	}
	info, err := b.Stat(background, top)
	if err != nil || info.Labels[snapshot.LabelLayer] != high.String() {
		b.t.Errorf("%v, %v", info, err)
	}
}

func TestRemovalUnmounts(t *testing.T) {
	b := newBed(t)
	low, high := b.layer("a", "low"), b.layer("b", "high")
	top := b.pull(low, high)
	bottom := b.store.AddChain(low).String()
	b.prepare("c", top)
	if err := b.Remove(background, top); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("remove of a parent: %v", err)
	}
	for i, key := range []string{"c", top, bottom} {
		if err := b.Remove(background, key); err != nil {
			t.Fatal(err)
		}
		if want := 2 - i; b.mounted() != want || len(b.InUse()) != want {
			t.Errorf("after %s: %d mounts, %d in use, want %d", key, b.mounted(), len(b.InUse()), want)
		}
	}
	if err := b.Cleanup(background); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"m", "snapshots"} {
		if left, _ := os.ReadDir(filepath.Join(b.root(), dir)); len(left) > 0 {
			t.Errorf("%s: %v is left", dir, left)
		}
	}
}

// A layer becomes an image layer only where its chain says so.
func TestRemoteParentMustMatch(t *testing.T) {
	b := newBed(t)
	low, other, high := b.layer("a", "low"), b.layer("a", "other"), b.layer("b", "high")
	b.pull(low)
	b.pull(other)
	chain := b.store.AddChain(low, high)
	for _, parent := range []string{"", other.String()} {
		if _, err := b.Prepare(background, "extract-x"+parent, parent, ref(chain)); err != nil {
			t.Errorf("on %q: %v, want an ordinary snapshot", parent, err)
		}
	}
	if _, err := b.Stat(background, chain.String()); !errdefs.IsNotFound(err) {
		t.Errorf("chain is there: %v", err)
	}
	if _, err := b.Prepare(background, "extract-y", low.String(), ref(chain)); !errdefs.IsAlreadyExists(err) {
		t.Errorf("on its parent: %v", err)
	}
}

func imageLabels(ref string, chain, layer digest.Digest) snapshots.Opt {
	return snapshots.WithLabels(map[string]string{
		snapshots.LabelSnapshotRef:             chain.String(),
		snapshotters.TargetRefLabel:            ref,
		snapshotters.TargetLayerDigestLabel:    layer.String(),
		snapshotters.TargetManifestDigestLabel: layer.String(),
		snapshotters.TargetImageLayersLabel:    layer.String() + ",nonsense",
	})
}

func TestFetchFailureFallsBack(t *testing.T) {
	b := newBed(t)
	chain := digest.FromString("nowhere")
	b.store.Fail("Fetch", errors.New("401 Unauthorized"))
	m := b.prepare("extract-1", "", imageLabels("reg/img:1", chain, chain))
	if len(m) != 1 || m[0].Type != "bind" || b.store.Calls("Fetch") != 1 {
		t.Errorf("mounts %v after %d fetches", m, b.store.Calls("Fetch"))
	}
	b.commit(chain.String(), "extract-1", ref(chain))
	if len(b.InUse()) != 0 {
		t.Errorf("in use: %v", b.InUse())
	}
}

// A store that says a layer is here and then has no files for it is not
// believed.
func TestVanishedLayerFallsBack(t *testing.T) {
	b := newBed(t)
	id := b.layer("a", "x")
	chain := b.store.AddChain(id)
	b.store.Fail("Files", errors.New("gone"))
	b.prepare("extract-1", "", ref(chain))
	if b.mounted() != 0 || len(b.InUse()) != 0 {
		t.Errorf("%d mounts, in use %v", b.mounted(), b.InUse())
	}
}

func TestMixedChain(t *testing.T) {
	b := newBed(t)
	image := b.pull(b.layer("a", "image"))
	b.written("build", image, "b", "built")
	b.commit("built", "build")
	dir := b.mount(b.prepare("c", "built"))
	defer b.unmount(dir)
	b.want(filepath.Join(dir, "a"), "image")
	b.want(filepath.Join(dir, "b"), "built")
}

// containerd fetched the lower layer itself, under a name with a namespace;
// the upper one is here. Another namespace has both as image layers.
func TestImageLayerOnLocalParent(t *testing.T) {
	b := newBed(t)
	low, high := b.layer("a", "low"), b.layer("b", "high")
	b.store.Fail("Chain", snapshot.ErrNotHere)
	b.written("ns/1/extract-1 "+low.String(), "", "a", "low")
	b.commit("ns/2/"+low.String(), "ns/1/extract-1 "+low.String())
	b.store.Fail("Chain", nil)
	top := b.pull(low, high)
	chain := b.store.AddChain(low, high)
	_, err := b.Prepare(background, "ns/3/extract-2 "+chain.String(), "ns/2/"+low.String(), ref(chain))
	if !errdefs.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	var found []snapshots.Info
	filter := fmt.Sprintf("labels.%q==%s", snapshots.LabelSnapshotRef, chain)
	err = b.Walk(background, func(_ ctx, i snapshots.Info) error {
		if i.Parent == "ns/2/"+low.String() {
			found = append(found, i)
		}
		return nil
	}, filter)
	if err != nil || len(found) != 1 || found[0].Name == top {
		t.Fatalf("%v, %v", found, err)
	}
	dir := b.mount(b.prepare("c", found[0].Name))
	defer b.unmount(dir)
	b.want(filepath.Join(dir, "a"), "low")
	b.want(filepath.Join(dir, "b"), "high")
}

func TestRepeatedLayer(t *testing.T) {
	b := newBed(t)
	empty, file := b.layer(), b.layer("a", "x")
	top := b.pull(empty, file, empty, file)
	dir := b.mount(b.prepare("c", top))
	defer b.unmount(dir)
	b.want(filepath.Join(dir, "a"), "x")
	var total int64
	err := b.Walk(background, func(c ctx, i snapshots.Info) error {
		u, err := b.Usage(c, i.Name)
		total += u.Inodes
		return err
	})
	if err != nil || total > 12 {
		t.Errorf("%d inodes (%v): layers are counted more than once", total, err)
	}
}

func Test127Layers(t *testing.T) {
	b := newBed(t)
	var ids []digest.Digest
	for i := range 127 {
		ids = append(ids, b.layer(fmt.Sprintf("file%d", i), "x", "same", fmt.Sprint(i)))
	}
	m := b.prepare("c", b.pull(ids...))
	t.Logf("%d bytes of options", len(strings.Join(m[0].Options, ",")))
	dir := b.mount(m)
	b.want(filepath.Join(dir, "same"), "126")
	b.want(filepath.Join(dir, "file0"), "x")
	b.unmount(dir)
	b.reboot()
	if b.mounted() != 127 {
		t.Errorf("%d mounts after a reboot", b.mounted())
	}
	m, err := b.Mounts(background, "c")
	if err != nil {
		t.Fatal(err)
	}
	dir = b.mount(m)
	defer b.unmount(dir)
	b.want(filepath.Join(dir, "file63"), "x")
}

func TestConcurrentPullsAndRemovals(t *testing.T) {
	b := newBed(t)
	ids := []digest.Digest{b.layer("a", "1"), b.layer("b", "2"), b.layer("c", "3")}
	for i := range ids {
		b.store.AddChain(ids[:i+1]...)
	}
	var group errgroup.Group
	for worker := range 8 {
		group.Go(func() error { return churn(b, worker, ids) })
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	for i := len(ids); i > 0; i-- {
		if err := b.Remove(background, b.store.AddChain(ids[:i]...).String()); err != nil &&
			!errdefs.IsNotFound(err) {
			t.Fatal(err)
		}
	}
	if err := b.Cleanup(background); err != nil {
		t.Fatal(err)
	}
	if b.mounted() != 0 || len(b.InUse()) != 0 {
		t.Errorf("%d mounts, in use %v", b.mounted(), b.InUse())
	}
}

// churn pulls, runs, and tries to remove the image, again and again. What
// others do meanwhile may make a step fail by NotFound or FailedPrecondition.
func churn(b *bed, worker int, ids []digest.Digest) error {
	for round := range 20 {
		parent := ""
		for i := range ids {
			chain := b.store.AddChain(ids[:i+1]...)
			key := fmt.Sprintf("extract-%d-%d-%d %s", worker, round, i, chain)
			_, err := b.Prepare(background, key, parent, ref(chain))
			if errdefs.IsNotFound(err) {
				break
			}
			if !errdefs.IsAlreadyExists(err) {
				return fmt.Errorf("pull: %w", err)
			}
			parent = chain.String()
		}
		if err := runOnce(b, fmt.Sprintf("c-%d-%d", worker, round), parent); err != nil {
			return err
		}
		if err := b.Remove(background, parent); err != nil && !errdefs.IsNotFound(err) &&
			!errdefs.IsFailedPrecondition(err) {
			return err
		}
	}
	return nil
}

func runOnce(b *bed, key, parent string) error {
	_, err := b.Prepare(background, key, parent)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("run: %w", err)
	}
	m, err := b.Mounts(background, key)
	if err != nil {
		return err
	}
	for _, o := range m[0].Options {
		if dirs, ok := strings.CutPrefix(o, "lowerdir="); ok {
			for _, dir := range strings.Split(dirs, ":") {
				if files, err := os.ReadDir(dir); err != nil || len(files) == 0 {
					return fmt.Errorf("lower directory %s: %v, %w", dir, files, err)
				}
			}
		}
	}
	return b.Remove(background, key)
}
