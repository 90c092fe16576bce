package test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/spec"
)

// A container whose image is not all here is saved, and clones start from it on layers that are not either:
// on this node, and on one that has the checkpoint and nothing of the image. What nobody has read before
// comes when it is read, also of a file that the processes have open.
func TestCheckpointLazyImage(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"erofs", "tree"} { // which serve what is absent each in its own way
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			testCheckpointLazyImage(t, backend)
		})
	}
}

func testCheckpointLazyImage(t *testing.T, backend string) {
	b := newLazyBed(t, backend, off+noLearn)
	const open = 7
	start := func(name, restore string) (spec.Record, string) {
		t.Helper()
		port := freePort(t)
		rec := b.record("run", "-d", "--name", name, "-p", "127.0.0.1:"+port+":80", "--ready", "http:80/",
			"--restore", restore,
			"-e", "OPEN="+file(open), b.li.Ref, "slow", "80")
		return rec, "http://127.0.0.1:" + port
	}
	reads := func(what, url string) { // a file that is not here
		t.Helper()
		n := 63
		for ; n > open && b.here(file(n)) == 1; n-- {
		}
		path := file(n)
		if n == open {
			t.Fatalf("%s: all is here", what)
		}
		if got := answerOf(url+"/sum?"+path, time.Minute); got != b.li.files[path] {
			t.Errorf("%s: %s reads %q, not %s", what, path, got, b.li.files[path])
		}
	}
	rec, url := start("first", "never")
	if rec.Way.Pull != "lazy" {
		t.Fatalf("%+v", rec.Way)
	}
	born := get(t, url+"/born")
	reads("the first", url)
	b.must("checkpoint", "first")
	reads("the first, when it was saved", url)
	b.must("rm", "-f", "first")

	for i, what := range []string{"a clone", "a clone where nothing of the image was"} {
		if i == 1 {
			b.forget()
		}
		rec, url := start("clone", "always")
		if rec.Way.Start != "restore" || i == 1 && rec.Way.Pull != "lazy" || get(t, url+"/born") != born {
			t.Errorf("%s: %+v", what, rec.Way)
		}
		reads(what, url)
		if got := answerOf(url+"/opened", time.Minute); got != b.li.files[file(open)] {
			t.Errorf("%s: the file that it has open reads %q", what, got)
		}
		if got := get(t, url+"/cat?/state"); got != born {
			t.Errorf("%s: what was written reads %q, not %q", what, got, born)
		}
		if _, err := os.Stat(filepath.Join(b.layerDir(), "layer.json")); err == nil {
			t.Errorf("%s: the layer is whole", what)
		}
		b.must("rm", "-f", "clone")
	}
	b.must("rmi", b.li.Ref)
	b.must("prune")
	b.nothingUsed()
}

// forget takes all from the node but what was saved.
func (b *lazyBed) forget() {
	b.t.Helper()
	b.stop() // which takes the bridge away
	b.reboot()
	keep := func(dir string, stays func(name string) bool) {
		entries, err := os.ReadDir(filepath.Join(b.root, dir))
		if err != nil {
			b.t.Fatal(err)
		}
		for _, e := range entries {
			if stays(e.Name()) {
				continue
			}
			if err := os.RemoveAll(filepath.Join(b.root, dir, e.Name())); err != nil {
				b.t.Fatal(err)
			}
		}
	}
	keep("", func(name string) bool { return name == "checkpoints" || name == "layers" })
	keep("layers", func(name string) bool {
		return !slices.ContainsFunc(b.li.Layers, func(l image.Layer) bool {
			return strings.HasPrefix(name, l.DiffID.Encoded())
		})
	})
	b.start()
}
