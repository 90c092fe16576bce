package snapshot_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"dewpoint/internal/snapshot"
	"dewpoint/testkit/treetest"
)

// describing is a layer that describes /tmp, passing one that has only a file
// named name in it.
func (b *bed) describing(mode int64, uid int, xattr string) digest.Digest {
	var a treetest.Archive
	a.Add(tar.Header{Name: "tmp/", Typeflag: tar.TypeDir, Mode: mode, Uid: uid, Gid: uid + 1,
		PAXRecords: map[string]string{"SCHILY.xattr.user.x": xattr}}, "")
	return b.archive(&a)
}

func (b *bed) passing(name string) digest.Digest {
	var a treetest.Archive
	return b.archive(a.File("tmp/"+name, name))
}

func (b *bed) archive(a *treetest.Archive) digest.Digest {
	b.t.Helper()
	id, _, err := b.store.Add(b.t.Context(), bytes.NewReader(a.Bytes()))
	if err != nil {
		b.t.Fatal(err)
	}
	return id
}

// wantTmp mounts and checks mode, owner and attribute of tmp, and the files in it.
func (b *bed) wantTmp(m []mount.Mount, want string, files ...string) {
	b.t.Helper()
	dir := b.mount(m)
	defer b.unmount(dir)
	var st unix.Stat_t
	path := filepath.Join(dir, "tmp")
	if err := unix.Stat(path, &st); err != nil {
		b.t.Fatal(err)
	}
	value := make([]byte, 64)
	n, _ := unix.Getxattr(path, "user.x", value)
	got := fmt.Sprintf("%o %d:%d %s", st.Mode&0o7777, st.Uid, st.Gid, value[:max(n, 0)])
	if got != want {
		b.t.Errorf("tmp is %q, want %q, in %v", got, want, m)
	}
	for _, f := range files {
		b.want(filepath.Join(path, f), f)
	}
}

// corrected lists what is in ROOT/f.
func (b *bed) corrected() []string {
	b.t.Helper()
	entries, err := os.ReadDir(filepath.Join(b.root(), "f"))
	if err != nil {
		b.t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if e.Name() != "boot" {
			names = append(names, e.Name())
		}
	}
	return names
}

func (b *bed) view(key, parent string) []mount.Mount {
	b.t.Helper()
	m, err := b.View(b.t.Context(), key, parent)
	if err != nil {
		b.t.Fatal(err)
	}
	return m
}

func (b *bed) again(key string) []mount.Mount {
	b.t.Helper()
	m, err := b.Mounts(b.t.Context(), key)
	if err != nil {
		b.t.Fatal(err)
	}
	return m
}

const sticky = "1777 7:8 low"

func TestDirectoriesOfLayersBelow(t *testing.T) { onEach(t, directoriesBelow) }

func directoriesBelow(b *bed) {
	t := b.t
	ids := []digest.Digest{b.describing(0o1777, 7, "low"), b.passing("x"), b.layer("other", "y"), b.passing("z")}
	top := b.pull(ids...)
	if made := b.corrected(); len(made) != 0 {
		t.Errorf("%v before anything stands on it", made)
	}
	b.wantTmp(b.prepare("c", top), sticky, "x", "z")
	b.wantTmp(b.view("v", top), sticky, "x", "z")
	if made := b.corrected(); len(made) != 2 {
		t.Errorf("%v, want two", made)
	}
	restarts := map[string]func(){
		"restart": func() { b.Close(); b.open() },
		"reboot":  b.reboot,
		"another boot": func() {
			b.shut()
			if err := os.WriteFile(filepath.Join(b.root(), "f", "boot"), []byte("before"), 0o600); err != nil {
				t.Fatal(err)
			}
			b.open()
			if made := b.corrected(); len(made) != 0 {
				t.Errorf("%v is of another boot", made)
			}
		},
		"loss": func() {
			for _, name := range b.corrected() {
				if err := os.RemoveAll(filepath.Join(b.root(), "f", name)); err != nil {
					t.Fatal(err)
				}
			}
		},
		"leftovers": func() {
			b.Close()
			for _, name := range []string{"7777", "2.tmp"} {
				if err := os.MkdirAll(filepath.Join(b.root(), "f", name, "tmp"), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			b.open()
		},
	}
	for what, restart := range restarts {
		restart()
		b.wantTmp(b.again("c"), sticky, "x", "z")
		b.wantTmp(b.again("v"), sticky, "x", "z")
		if made := b.corrected(); len(made) != 2 {
			t.Errorf("after %s: %v, want two", what, made)
		}
	}
	b.removeAll("c", "v")
	for i := len(ids); i > 0; i-- {
		b.removeAll(b.store.AddChain(ids[:i]...).String())
	}
	if made := b.corrected(); len(made) != 0 || b.mounted() != 0 {
		t.Errorf("%v is left, and %d mounts", made, b.mounted())
	}
}

func (b *bed) removeAll(keys ...string) {
	b.t.Helper()
	for _, key := range keys {
		if err := b.Remove(b.t.Context(), key); err != nil {
			b.t.Fatal(err)
		}
	}
}

// One layer in two chains has two corrections, or none.
func TestCorrectionBelongsToTheChain(t *testing.T) {
	b := newBed(t)
	x := b.passing("x")
	one := b.pull(b.describing(0o1777, 7, "low"), x)
	two := b.pull(b.describing(0o700, 9, "high"), b.passing("y"), x)
	none := b.pull(b.layer("other", "y"), x)
	alone := b.pull(x)
	b.wantTmp(b.prepare("one", one), sticky, "x")
	b.wantTmp(b.prepare("two", two), "700 9:10 high", "x", "y")
	m := b.prepare("none", none)
	b.wantTmp(m, "755 0:0 ", "x")
	b.wantTmp(b.prepare("alone", alone), "755 0:0 ", "x")
	if v := b.view("view", alone); len(v) != 1 || v[0].Type != "bind" {
		t.Errorf("a view of one layer is %v", v)
	}
	for _, o := range m[0].Options {
		if strings.Contains(o, "/f/") {
			t.Errorf("%s: nothing is to be corrected", o)
		}
	}
	if made := b.corrected(); len(made) != 3 {
		t.Errorf("%v, want three", made)
	}
}

// The layer that a chain repeats, the local layers in it, and what is newest
// below.
func TestCorrectionsInMixedChains(t *testing.T) {
	b := newBed(t)
	low, mid, x := b.describing(0o1777, 7, "low"), b.describing(0o711, 5, "mid"), b.passing("x")
	b.wantTmp(b.prepare("repeated", b.pull(low, x, mid, x)), "711 5:6 mid", "x")
	b.wantTmp(b.prepare("under", b.pull(x, low, x)), sticky, "x")

	// containerd unpacked the lowest layer, and another above all is built.
	base := b.layer("base", "b")
	m := b.prepare("build", "")
	if err := os.Mkdir(filepath.Join(m[0].Source, "tmp"), 0); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(m[0].Source, "tmp"), 0o750); err != nil {
		t.Fatal(err)
	}
	b.commit("ns/1/"+base.String(), "build")
	chain := b.store.AddChain(base, x)
	_, err := b.Prepare(background, "extract-1 "+chain.String(), "ns/1/"+base.String(), ref(chain))
	if !errdefs.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	name := ""
	err = b.Walk(background, func(_ ctx, i snapshots.Info) error {
		if i.Parent == "ns/1/"+base.String() {
			name = i.Name
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	b.wantTmp(b.prepare("on local", name), "750 0:0 ", "x")
	b.written("file", name, "tmp/built", "built")
	b.commit("built", "file")
	b.wantTmp(b.prepare("on built", "built"), "750 0:0 ", "x", "built")
}

// Corrected directories, too, belong to a user namespace's own users.
func TestCorrectionInUserNamespace(t *testing.T) { onEach(t, correctionMapped) }

func correctionMapped(b *bed) {
	mapped := snapshots.WithLabels(map[string]string{
		snapshots.LabelSnapshotUIDMapping: "0:100000:65536",
		snapshots.LabelSnapshotGIDMapping: "0:200000:65536",
	})
	top := b.pull(b.describing(0o1777, 7, "low"), b.passing("x"))
	b.wantTmp(b.prepare("c", top, mapped), "1777 100007:200008 low", "x")
}

func TestCorrections127Layers(t *testing.T) {
	b := newBed(t)
	ids := []digest.Digest{b.describing(0o1777, 7, "low")}
	for i := range 126 {
		ids = append(ids, b.passing(fmt.Sprint("file", i)))
	}
	m := b.prepare("c", b.pull(ids...))
	b.wantTmp(m, sticky, "file0", "file125")
	if made := b.corrected(); len(made) != 126 {
		t.Errorf("%d corrections", len(made))
	}
}

// What is allowed can be mounted, and one byte more is refused.
func TestMountOptionsThatFit(t *testing.T) {
	b := newBed(t)
	var lowers []string
	for i := range 300 {
		dir := filepath.Join(b.dir, "lower", fmt.Sprintf("%012d", i))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		lowers = append(lowers, dir)
	}
	long := func(n int) []string {
		upper := filepath.Join(b.dir, strings.Repeat("u", n))
		return []string{"workdir=" + b.dir + "/w", "upperdir=" + upper, "lowerdir=" + strings.Join(lowers, ":"),
			"index=off"}
	}
	fits := 0
	for n := 1; n < 200; n++ {
		if err := snapshot.Mountable(long(n), lowers); err == nil {
			fits = n
		} else if !errdefs.IsResourceExhausted(err) {
			t.Fatal(err)
		}
	}
	if fits == 0 || fits == 199 {
		t.Fatalf("%d bytes fit: the test needs another number of directories", fits)
	}
	t.Log(snapshot.Mountable(long(fits+1), lowers))
	for n, works := range map[int]bool{fits: true, fits + 1: false} {
		options := long(n)
		for _, dir := range []string{b.dir + "/w", strings.TrimPrefix(options[1], "upperdir=")} {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		at := t.TempDir()
		err := mount.All([]mount.Mount{{Type: "overlay", Source: "overlay", Options: options}}, at)
		if err == nil {
			b.unmount(at)
		}
		if works != (err == nil) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}

func TestTooManyLowers(t *testing.T) {
	lowers := make([]string, 501)
	for i := range lowers {
		lowers[i] = fmt.Sprint("/", i)
	}
	if err := snapshot.Mountable(nil, lowers); !errdefs.IsResourceExhausted(err) {
		t.Error(err)
	}
}
