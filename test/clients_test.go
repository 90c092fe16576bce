package test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dewpoint/testkit/containerdtest"
	"dewpoint/testkit/registrytest"
)

// ctr and nerdctl on the system's containerd, old and new, run the image that
// dewd has, from mounted files.
func TestClients(t *testing.T) {
	t.Parallel()
	for _, v := range []containerdtest.Version{containerdtest.V16, containerdtest.V24} {
		t.Run(string(v), func(t *testing.T) { testClients(t, v) })
	}
}

func testClients(t *testing.T, v containerdtest.Version) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 1<<20), appOptions())
	m := newMachine(t, reg)
	dir := filepath.Join(filepath.Dir(m.root), "c")
	if err := errors.Join(os.MkdirAll(m.state, 0o755), os.MkdirAll(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	c := containerdtest.Start(t, v, dir, filepath.Join(m.state, "snapshotter.sock"))
	m.args = []string{"--containerd", c.Address}
	m.start()
	id := fmt.Sprintf("sys%d", os.Getpid())

	m.must("pull", img.Ref)
	reg.Forget()
	want(t, c.Ctr("-n", "dewpoint", "run", "--rm", "--snapshotter", "dewpoint", img.Ref, id, "/app", "cat",
		"/etc/motd"), "above")
	if n := reg.Total(); n != 0 {
		t.Errorf("ctr fetched %d bytes of an image that dew had pulled", n)
	}
	wantFiles(t, m, len(img.Layers))

	// The same image in another namespace, by the clients' own pulls.
	c.Ctr("images", "pull", "--plain-http", "--snapshotter", "dewpoint", img.Ref)
	want(t, c.Ctr("run", "--rm", "--snapshotter", "dewpoint", img.Ref, id, "/app", "cat", "/etc/motd"), "above")
	want(t, c.Nerdctl("run", "--rm", "--net", "none", "--insecure-registry", "--name", id, img.Ref, "cat",
		"/etc/motd"), "above")
	wantFiles(t, m, len(img.Layers))

	// One that dew does not know: only a new containerd tells which image it is.
	if v != containerdtest.V16 {
		other := reg.PushImage("other:1",
			append(appLayers(t, 0), registrytest.Layer{Tar: registrytest.RandomTar(9, 3, 100_000)}), appOptions())
		want(t, c.Nerdctl("run", "--rm", "--net", "none", "--insecure-registry", "--name", id, other.Ref, "cat",
			"/etc/motd"), "above")
		wantFiles(t, m, len(img.Layers)+1)
	}

	// What needs the original blobs, and the remedy.
	out := filepath.Join(filepath.Dir(m.root), "image.tar")
	export := []string{"-n", "dewpoint", "images", "export"}
	if v != containerdtest.V16 {
		export = append(export, "--local") // else ctr may end before it has written what containerd has sent
	}
	export = append(export, out, img.Ref)
	if got, err := c.Try(t.Context(), export...); err == nil {
		t.Errorf("an export without blobs went well: %s", got)
	}
	m.must("pull", "--blobs", img.Ref)
	c.Ctr(export...)
	c.Ctr("-n", "third", "images", "import", "--snapshotter", "dewpoint", out)
	want(t, c.Ctr("-n", "third", "run", "--rm", "--snapshotter", "dewpoint", img.Ref, id, "/app", "cat",
		"/etc/motd"), "above")

	testAdopt(t, m, c, reg)
}

func want(t *testing.T, got, part string) {
	t.Helper()
	if !strings.Contains(got, part) {
		t.Errorf("%q does not contain %q", got, part)
	}
}

// wantFiles asserts that n layers are mounted files and that no image layer is
// a directory.
func wantFiles(t *testing.T, m *machine, n int) {
	t.Helper()
	mounted := 0
	for _, at := range m.mounts() {
		if strings.HasPrefix(at, filepath.Join(m.root, "snapshotter", "m")+"/") {
			mounted++
		}
	}
	if mounted != n {
		t.Errorf("%d layers are mounted files, want %d", mounted, n)
	}
	var dirs []string
	for range 100 { // containerd cleans up behind removed containers
		dirs, _ = filepath.Glob(filepath.Join(m.root, "snapshotter", "snapshots", "*"))
		if len(dirs) == 0 {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Errorf("directories: %v", dirs)
}
