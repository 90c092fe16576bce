package mount_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"dewpoint/internal/mount/mounttest"
	"dewpoint/internal/toc/treetest"
)

// TestCases shows each generated layer as containerd does, on every backend.
func TestCases(t *testing.T) {
	for _, c := range treetest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			layer, like := mounttest.File(t, c.Tar), c.Tar
			if c.Own != "" {
				like = c.Same
			}
			stack, likeStack := []string{layer}, []string{mounttest.File(t, like)}
			if c.Lower != nil {
				lower := mounttest.File(t, c.Lower)
				stack, likeStack = []string{lower, layer}, []string{lower, likeStack[0]}
			}
			want := mounttest.Applied(t, likeStack)
			mounttest.Matches(t, stack, want, c.Skip(want))
		})
	}
}

// TestStack puts layers on each other that replace, hide and extend what the
// ones below have.
func TestStack(t *testing.T) {
	var a, b, c, d treetest.Archive
	a.Dir("etc").File("etc/one", "a").File("etc/two", "a").Dir("opt").Dir("opt/app").File("opt/app/x", "a").Symlink("lib", "usr/lib")
	b.Dir("etc").File("etc/one", "b").File("etc/.wh.two", "").Link("etc/other", "etc/one").Dir("lib").File("lib/b", "b")
	c.Dir("opt").Dir("opt/app").File("opt/app/.wh..wh..opq", "").File("opt/app/y", "c").Dir("etc").File("etc/two", "c")
	d.Dir("lib").File("lib/.wh.b", "").Symlink("etc", "opt")
	var layers []string
	for _, x := range []*treetest.Archive{&a, &b, &c, &d} {
		layers = append(layers, mounttest.File(t, x.Bytes()))
	}
	mounttest.Compare(t, layers)
}

// TestRealTree compares parts of this machine's own system, in two layers.
func TestRealTree(t *testing.T) {
	dir := t.TempDir()
	var layers []string
	for i, parts := range [][]string{{"usr/share/zoneinfo", "usr/share/perl5", "etc"}, {"usr/share/zoneinfo/Europe", "usr/share/base-files", "etc/ssl"}} {
		out := filepath.Join(dir, string(rune('a'+i)))
		args := append([]string{"-C", "/", "--xattrs", "--xattrs-include=*", "--format=pax", "--ignore-failed-read", "-cf", out}, withParents(t, parts)...)
		if msg, err := exec.Command("tar", args...).CombinedOutput(); err != nil {
			t.Fatalf("tar: %v: %s", err, msg)
		}
		layers = append(layers, out)
	}
	mounttest.Compare(t, layers)
}

// withParents are arguments of tar for the parts that exist and, without their
// contents, the directories they lie in.
func withParents(t *testing.T, parts []string) []string {
	args := []string{"--no-recursion"}
	var here []string
	for _, p := range parts {
		if _, err := os.Stat("/" + p); err != nil {
			continue
		}
		here = append(here, p)
		for i := range p {
			if p[i] == '/' && !slices.Contains(args, p[:i]) {
				args = append(args, p[:i])
			}
		}
	}
	if len(here) == 0 {
		t.Fatalf("none of %v is on this machine", parts)
	}
	return append(append(args, "--recursion"), here...)
}

// TestImages compares the layers of real images: DEWPOINT_TEST_LAYERS names
// directories, separated by colons, each of which holds the uncompressed layers
// of one image, named so that their order is the names'. Without it a stack of
// three layers of the shapes that images have stands in.
func TestImages(t *testing.T) {
	env := os.Getenv("DEWPOINT_TEST_LAYERS")
	if env == "" {
		mounttest.Compare(t, likeAnImage(t))
		return
	}
	for _, dir := range strings.Split(env, ":") {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			layers, err := filepath.Glob(filepath.Join(dir, "*"))
			if err != nil || len(layers) == 0 {
				t.Fatalf("no layers in %s: %v", dir, err)
			}
			slices.Sort(layers)
			mounttest.Compare(t, layers)
		})
	}
}

func likeAnImage(t *testing.T) []string {
	base, packages, app := new(treetest.Archive), new(treetest.Archive), new(treetest.Archive)
	base.Dir("bin").Dir("etc").Dir("usr").Dir("usr/bin").Dir("usr/lib").Dir("var").Dir("var/lib").Dir("var/lib/apt").Dir("var/lib/apt/lists")
	packages.Dir("etc").Dir("usr").Dir("usr/bin").Dir("usr/lib").Dir("var").Dir("var/lib").Dir("var/lib/apt").
		Dir("var/lib/apt/lists").File("var/lib/apt/lists/.wh..wh..opq", "")
	for i := range 200 {
		name := "usr/lib/f" + strings.Repeat("x", i%7) + string(rune('a'+i%26)) + string(rune('a'+i/26))
		base.File(name, treetest.Text(i*97))
		if i%5 == 0 {
			packages.File(name, treetest.Text(i*31))
		}
		if i%55 == 0 {
			packages.Link("usr/bin/"+filepath.Base(name), name)
		}
	}
	app.Dir("srv").File("srv/app", treetest.Text(1<<20)).Dir("usr").Dir("usr/lib").File("usr/lib/.wh.faa", "")
	return []string{mounttest.File(t, base.Bytes()), mounttest.File(t, packages.Bytes()), mounttest.File(t, app.Bytes())}
}
