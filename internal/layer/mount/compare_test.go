package mount_test

import (
	"cmp"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/match"
	"github.com/google/go-containerregistry/pkg/v1/partial"

	"dewpoint/testkit/mounttest"
	"dewpoint/testkit/treetest"
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
	a.Dir("etc").File("etc/one", "a").File("etc/two", "a").Dir("opt").Dir("opt/app").File("opt/app/x",
		"a").Symlink("lib", "usr/lib")
	b.Dir("etc").File("etc/one", "b").File("etc/.wh.two", "").Link("etc/other",
		"etc/one").Dir("lib").File("lib/b", "b")
	c.Dir("opt").Dir("opt/app").File("opt/app/.wh..wh..opq", "").File("opt/app/y",
		"c").Dir("etc").File("etc/two", "c")
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
	for i, parts := range [][]string{{"usr/share/zoneinfo", "usr/share/perl5", "etc"},
		{"usr/share/zoneinfo/Europe", "usr/share/base-files", "etc/ssl"}} {
		out := filepath.Join(dir, string(rune('a'+i)))
		args := append([]string{"-C", "/", "--xattrs", "--xattrs-include=*", "--format=pax", "--ignore-failed-read",
			"-cf", out}, withParents(t, parts)...)
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

// TestShape compares a stack of three layers of the shapes that images have.
func TestShape(t *testing.T) { mounttest.Compare(t, likeAnImage(t)) }

// TestImages compares real images, which lie in the OCI layout directory that
// DEWPOINT_IMAGES names.
func TestImages(t *testing.T) {
	dir := cmp.Or(os.Getenv("DEWPOINT_IMAGES"), "/var/cache/dewpoint/images")
	all, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatalf("the images to compare are missing: %v (\"make images\" builds them; DEWPOINT_IMAGES names another place)", err)
	}
	for _, image := range []string{"nginx:1", "redis:1", "python:1"} {
		t.Run(image, func(t *testing.T) { mounttest.Compare(t, layersOf(t, all, image)) })
	}
}

// layersOf inflates the layers of an image to files, bottom first.
func layersOf(t *testing.T, all v1.ImageIndex, name string) []string {
	t.Helper()
	found, err := partial.FindImages(all, match.Name(name))
	if err != nil || len(found) != 1 {
		t.Fatalf("%d images %s (\"make images\" builds them): %v", len(found), name, err)
	}
	layers, err := found[0].Layers()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	var files []string
	for i, l := range layers {
		files = append(files, filepath.Join(dir, string(rune('a'+i))))
		if err := inflate(files[i], l); err != nil {
			t.Fatalf("inflate layer %d of %s: %v", i, name, err)
		}
	}
	return files
}

func inflate(path string, l v1.Layer) error {
	r, err := l.Uncompressed()
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return errors.Join(err, w.Close())
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
	return []string{mounttest.File(t, base.Bytes()), mounttest.File(t, packages.Bytes()),
		mounttest.File(t, app.Bytes())}
}
