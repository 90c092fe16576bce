package containerdtest_test

import (
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"

	"dewpoint/testkit/containerdtest"
)

var versions = []containerdtest.Version{containerdtest.V16, containerdtest.V24}

// The transfer service of 2.x tells which image a layer belongs to: containerd
// fetches no layer.
func TestTransferService(t *testing.T) {
	n := newNode(t, containerdtest.V24)
	n.pull()
	n.wantKinds(3, 0)
	if n.blobs() != 0 || n.store.Calls("Fetch") != 3 {
		t.Errorf("containerd has %d blobs, %d fetches", n.blobs(), n.store.Calls("Fetch"))
	}
	n.greet(n.image.Ref)
	n.forget(n.image.Ref)
}

func TestTransferServiceWhenFetchFails(t *testing.T) {
	n := newNode(t, containerdtest.V24)
	n.store.Fail("Fetch", errors.New("429 Too Many Requests"))
	n.pull()
	n.wantKinds(3, 0) // by the diff plugin
	n.greet(n.image.Ref)
	n.forget(n.image.Ref)
}

// A client without labels: what containerd fetched becomes files through the
// diff plugin.
func TestDiffPlugin(t *testing.T) {
	n := newNode(t, containerdtest.V24)
	n.pull("--local")
	n.wantKinds(3, 0)
	if n.blobs() != 3 || n.store.Calls("Fetch") != 0 || n.store.Calls("Import") != 3 {
		t.Errorf("containerd has %d blobs, %d fetches, %d imports", n.blobs(), n.store.Calls("Fetch"),
			n.store.Calls("Import"))
	}
	n.greet(n.image.Ref)
	n.forget(n.image.Ref)
}

func TestDiffPluginWhenImportFails(t *testing.T) {
	n := newNode(t, containerdtest.V24)
	n.store.Fail("Import", errors.New("no space left on device"))
	n.pull("--local")
	n.wantKinds(0, 3)
	n.greet(n.image.Ref)
	n.forget(n.image.Ref)
}

// containerd 1.6 has neither labels nor diff plugins: directories.
func TestOldContainerd(t *testing.T) {
	n := newNode(t, containerdtest.V16)
	n.pull()
	n.wantKinds(0, 3)
	n.greet(n.image.Ref)
	n.forget(n.image.Ref)
}

// After a dew pull the layers are known by their chains.
func TestKnownChain(t *testing.T) {
	for _, v := range versions {
		t.Run(string(v), func(t *testing.T) {
			n := newNode(t, v)
			n.know()
			n.pull()
			n.wantKinds(3, 0)
			if n.store.Calls("Fetch")+n.store.Calls("Import") != 0 {
				t.Error("known layers were fetched")
			}
			n.greet(n.image.Ref)
			n.forget(n.image.Ref)
		})
	}
}

// Two namespaces of containerd share layers, and removing the image from one
// leaves it to the other.
func TestNamespaces(t *testing.T) {
	n := newNode(t, containerdtest.V24)
	n.pull()
	n.Ctr("-n", "other", "images", "pull", "--snapshotter", "dewpoint", "--plain-http", n.image.Ref)
	n.wantKinds(3, 0)
	n.Ctr("images", "rm", "--sync", n.image.Ref)
	n.wantKinds(3, 0)
	n.Ctr("-n", "other", "images", "rm", "--sync", n.image.Ref)
	n.wantKinds(0, 0)
}

func TestImport(t *testing.T) {
	for _, v := range versions {
		t.Run(string(v), func(t *testing.T) {
			n := newNode(t, v)
			n.Ctr("content", "fetch", "--plain-http", n.image.Ref)
			file := n.archive()
			n.Ctr("images", "rm", "--sync", n.image.Ref)
			n.Ctr("images", "import", "--snapshotter", "dewpoint", file)
			layers, dirs := n.kinds()
			if v == containerdtest.V24 && layers != 3 || v == containerdtest.V16 && dirs != 3 {
				t.Errorf("%d image layers, %d directories", layers, dirs)
			}
			n.greet(n.image.Ref)
			n.forget(n.image.Ref)
		})
	}
}

// What is built on the node stands on image layers as a directory.
func TestLocalCommit(t *testing.T) {
	for _, v := range versions {
		t.Run(string(v), func(t *testing.T) {
			n := newNode(t, v)
			n.know()
			n.pull()
			n.commitOn(n.topChain(), "greeting", "hello again\n")
			n.wantKinds(3, 1)
			n.wantView("built", "greeting", "hello again\n")
			n.Ctr("snapshots", "--snapshotter", "dewpoint", "rm", "built")
			n.forget(n.image.Ref)
		})
	}
}

// A container in a user namespace reads the image's files as its own root.
func TestUserNamespace(t *testing.T) {
	n := newNode(t, containerdtest.V24)
	n.pull()
	n.greet(n.image.Ref, "--remap-labels", "--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536")
	n.forget(n.image.Ref)
}

// Clients that need blobs say so.
func TestExportWithoutBlobs(t *testing.T) {
	n := newNode(t, containerdtest.V24)
	n.pull()
	elsewhere := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer elsewhere.Close()
	to := strings.TrimPrefix(elsewhere.URL, "http://") + "/greet:1"
	for _, args := range [][]string{
		{"export", n.dir + "/out.tar", n.image.Ref},
		{"push", "--plain-http", to, n.image.Ref},
		{"push", "--local", "--plain-http", to, n.image.Ref},
	} {
		out, err := n.Try(t.Context(), append([]string{"images"}, args...)...)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		if last := lines[len(lines)-1]; err == nil || !strings.Contains(last, "not found") {
			t.Errorf("%v: %v, %s", args, err, last)
		} else {
			t.Logf("%s: %s", args[0], last)
		}
	}
}
