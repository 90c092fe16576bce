package test

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"dewpoint/testkit/containerdtest"
)

// nerdctl and ctr, on a containerd that tells the snapshotter which image a
// layer belongs to, start an image with the pack alone.
func TestLazyClients(t *testing.T) {
	t.Parallel()
	for _, client := range []struct {
		name, backend string
		run           func(b *lazyBed, c *containerdtest.Containerd, id string) (end func())
	}{
		{"nerdctl", "tree", func(b *lazyBed, c *containerdtest.Containerd, id string) func() {
			c.Nerdctl("run", "-d", "--net", "host", "--insecure-registry", "--name", id, b.li.Ref, "serve", b.port)
			return func() {
				c.Nerdctl("rm", "-f", id)
				c.Nerdctl("rmi", b.li.Ref)
			}
		}},
		{"ctr", "loop", func(b *lazyBed, c *containerdtest.Containerd, id string) func() {
			c.Ctr("images", "pull", "--plain-http", "--snapshotter", "dewpoint", b.li.Ref)
			c.Ctr("run", "-d", "--net-host", "--snapshotter", "dewpoint", b.li.Ref, id, "/app", "serve", b.port)
			return func() {
				c.Ctr("task", "rm", "-f", id)
				c.Ctr("container", "rm", id)
				c.Ctr("images", "rm", "--sync", b.li.Ref)
			}
		}},
	} {
		t.Run(client.name, func(t *testing.T) {
			t.Parallel()
			b, c := newClientBed(t, client.backend, anyPack, containerdtest.V24, nil)
			before := b.li.served(b.reg)
			end := client.run(b, c, fmt.Sprintf("lazy%d%s", os.Getpid(), client.name))
			b.lazyThenWhole(before)
			end()
			b.nothingUsed()
		})
	}
}

// By default the packs of a repository are believed for images that a client
// names by tag, though it tells the manifest's digest too.
func TestLazyClientsTrust(t *testing.T) {
	t.Parallel()
	b, c := newClientBed(t, "erofs", "", containerdtest.V24, nil)
	before := b.li.served(b.reg)
	c.Ctr("images", "pull", "--plain-http", "--snapshotter", "dewpoint", b.li.Ref)
	if n := b.li.served(b.reg) - before; n > 0 {
		t.Errorf("%d bytes of the layer were fetched by a pull", n)
	}
	// the layers are kept for a minute, for a client that is about to use them
	c.Ctr("images", "rm", "--sync", b.li.Ref)
}

// anyPack believes what the repository has; see TestLazyClientsTrust.
const anyPack = noLearn + "trust = \"repository\"\n"

// newClientBed starts a node on a containerd of its own, and a registry with the
// lazy image and pods' own.
func newClientBed(t *testing.T, backend, config string, v containerdtest.Version,
	cri *containerdtest.CRI) (*lazyBed, *containerdtest.Containerd) {
	t.Helper()
	b := newStillBed(t, backend, config)
	dir := filepath.Join(filepath.Dir(b.root), "c")
	if err := errors.Join(os.MkdirAll(b.state, 0o755), os.MkdirAll(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	if cri != nil {
		cri.Sandbox = b.reg.PushImage("pause:1", appLayers(t, 0), appOptions("sleep", "10m")).Ref
	}
	c := containerdtest.StartCRI(t, v, dir, filepath.Join(b.state, "snapshotter.sock"), cri)
	b.args = []string{"--containerd", c.Address}
	b.start()
	return b, c
}

// lazyThenWhole asserts that the container runs before its image is whole, that
// it reads what is absent, and that the image becomes whole. before is what the
// registry had given of the big layer before.
func (b *lazyBed) lazyThenWhole(before int64) {
	b.t.Helper()
	b.serves()
	size := b.li.Layers[len(b.li.Layers)-1].Size
	if n := b.li.served(b.reg) - before; n > size/4 {
		b.t.Errorf("%d of the layer's %d bytes were fetched before the container ran", n, size)
	}
	b.reads(file(30), file(60))
	if n := b.li.served(b.reg) - before; n == 0 || n >= size {
		b.t.Errorf("%d of the layer's %d bytes were fetched for two files", n, size)
	}
	b.eventually("the image is whole", func() bool {
		_, err := os.Stat(filepath.Join(b.layerDir(), "layer.json"))
		return err == nil
	})
	b.readsAll(b.port)
	b.checkLayers()
}

// serves waits until the container on the port answers.
func (b *lazyBed) serves() {
	b.t.Helper()
	b.eventually("the container serves", func() bool {
		r, err := http.Get("http://127.0.0.1:" + b.port + "/")
		if err == nil {
			r.Body.Close()
		}
		return err == nil
	})
}

// nothingUsed asserts that neither the kernel nor datafs has anything of the
// node's layers any more.
func (b *lazyBed) nothingUsed() {
	b.t.Helper()
	if left := gone(b.strangeMounts); len(left) > 0 {
		b.t.Errorf("mounts left: %v", left)
	}
	if left := gone(b.served); len(left) > 0 {
		b.t.Errorf("datafs still has %v", left)
	}
}
