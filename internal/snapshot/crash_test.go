package snapshot_test

import (
	"archive/tar"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/opencontainers/go-digest"

	"dewpoint/internal/layer/mount"
	"dewpoint/internal/snapshot"
	"dewpoint/testkit/snapshottest"
	"dewpoint/testkit/treetest"
)

// crashEnv names the directory in which a child of the test works until it is
// killed.
const crashEnv = "DEWPOINT_SNAPSHOT_CRASH"

// TestKilled kills a process that pulls, runs and removes without pause, and
// expects the next one to find every snapshot mountable and nothing besides.
func TestKilled(t *testing.T) {
	b := newBed(t)
	ids := crashLayers(b)
	for round := range 6 {
		b.Close()
		killMidway(t, b.dir, time.Duration(30+rand.IntN(120))*time.Millisecond)
		if round%2 == 1 {
			if err := snapshottest.UnmountAll(b.dir); err != nil {
				t.Fatal(err)
			}
		}
		b.open()
		b.consistent(ids)
	}
}

func crashLayers(b *bed) []digest.Digest {
	var ids []digest.Digest
	for i := range 4 {
		var a treetest.Archive
		a.File("file", fmt.Sprint(i))
		if i == 0 {
			a.Add(tar.Header{Name: "tmp/", Typeflag: tar.TypeDir, Mode: 0o1777}, "")
		} else {
			a.File("tmp/x", "") // the upper layers only pass through tmp
		}
		ids = append(ids, b.archive(&a))
		b.store.AddChain(ids...)
	}
	return ids
}

func killMidway(t *testing.T, dir string, after time.Duration) {
	t.Helper()
	child := exec.Command("/proc/self/exe")
	child.Env = append(os.Environ(), crashEnv+"="+dir)
	child.Stderr = t.Output()
	out, err := child.StdoutPipe()
	if err == nil {
		err = child.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil { // it has begun
		t.Error(err)
	}
	time.Sleep(after)
	child.Process.Kill()
	child.Wait()
}

// consistent checks mounts and directories against the records.
func (b *bed) consistent(ids []digest.Digest) {
	b.t.Helper()
	layers, dirs := make(map[string]bool), 0
	err := b.Walk(background, func(c ctx, i snapshots.Info) error {
		if l := i.Labels[snapshot.LabelLayer]; l != "" {
			layers[l] = true
			return nil
		}
		if i.Kind == snapshots.KindActive || i.Parent == "" { // a view on a parent needs none
			dirs++
		}
		m, err := b.Mounts(c, i.Name)
		if err == nil {
			b.unmount(b.mount(m))
		}
		return err
	})
	if err != nil {
		b.t.Fatal(err)
	}
	left, err := os.ReadDir(filepath.Join(b.root(), "snapshots"))
	if err != nil || len(left) != dirs {
		b.t.Errorf("%d directories for %d snapshots, %v", len(left), dirs, err)
	}
	if len(b.InUse()) != len(layers) || b.mounted() > len(layers) {
		b.t.Errorf("%d layers recorded, %d in use, %d mounted", len(layers), len(b.InUse()), b.mounted())
	}
	known, err := b.IDs(background)
	for _, name := range b.corrected() {
		if known[name] == "" {
			b.t.Errorf("correction %s belongs to no snapshot, %v", name, err)
		}
	}
	for i := range ids {
		top := b.store.AddChain(ids[:i+1]...).String()
		if _, err := b.Stat(background, top); err != nil {
			break
		}
		key := fmt.Sprint("check", i, rand.Int())
		dir := b.mount(b.prepare(key, top))
		b.want(filepath.Join(dir, "file"), fmt.Sprint(i))
		if fi, err := os.Stat(filepath.Join(dir, "tmp")); err != nil ||
			fi.Mode() != os.ModeDir|os.ModeSticky|0o777 {
			b.t.Errorf("tmp of layer %d: %v, %v", i, fi, err)
		}
		b.unmount(dir)
		if err := b.Remove(background, key); err != nil {
			b.t.Error(err)
		}
	}
}

// crashChild works in dir for ever. Errors are expected: what another of its
// goroutines does meanwhile is no order.
func crashChild(dir string) {
	store, ids := crashStore(filepath.Join(dir, "layers"))
	backend, err := mount.New(mount.EROFS)
	var s *snapshot.Snapshotter
	if err == nil {
		s, err = snapshot.New(background,
			snapshot.Config{Root: filepath.Join(dir, "r"), Layers: store, Backend: backend})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Print("!")
	for worker := range 3 {
		go func() {
			for round := 0; ; round++ {
				crashStep(s, store, ids, fmt.Sprintf("%d-%d-%d", os.Getpid(), worker, round))
			}
		}()
	}
	select {}
}

func crashStep(s *snapshot.Snapshotter, store *snapshottest.Store, ids []digest.Digest, key string) {
	parent := ""
	for i := range ids {
		chain := store.AddChain(ids[:i+1]...)
		s.Prepare(background, key+fmt.Sprint(i), parent, ref(chain))
		parent = chain.String()
	}
	s.Prepare(background, key, parent)
	s.View(background, key+"v", parent)
	if rand.IntN(4) > 0 {
		s.Remove(background, key)
		s.Remove(background, key+"v")
	}
	for i := len(ids); i > 0 && rand.IntN(2) > 0; i-- {
		s.Remove(background, store.AddChain(ids[:i]...).String())
	}
	if rand.IntN(4) == 0 {
		s.Cleanup(background)
	}
}

// crashStore opens the store that the parent filled.
func crashStore(dir string) (*snapshottest.Store, []digest.Digest) {
	store := snapshottest.New(dir)
	names, _ := filepath.Glob(filepath.Join(dir, "sha256-*"))
	byContent := make(map[string]digest.Digest)
	for _, name := range names {
		id := digest.Digest(strings.Replace(filepath.Base(name), "-", ":", 1))
		content, _ := os.ReadFile(filepath.Join(name, "tree", "file"))
		byContent[string(content)] = id
		files := snapshottest.FilesIn(name)
		if string(content) != "0" {
			files.Implied = []string{"tmp"}
		}
		store.Put(id, files)
	}
	var ids []digest.Digest
	for i := range len(byContent) {
		ids = append(ids, byContent[fmt.Sprint(i)])
		store.AddChain(ids...)
	}
	return store, ids
}
