package test

import (
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"dewpoint/internal/spec"
	"dewpoint/testkit/containerdtest"
	"dewpoint/testkit/registrytest"
)

// testAdopt has images that ctr has pulled into overlayfs become images of dewd: from containerd's blobs, and
// by the link where a blob is gone. Then they run, by any client, without the registry, which it ends.
func testAdopt(t *testing.T, m *machine, c *containerdtest.Containerd, reg *registrytest.Server) {
	push := func(name string, seed uint64) registrytest.Pushed {
		return reg.PushImage(name, append(appLayers(t, 0),
			registrytest.Layer{Tar: registrytest.RandomTar(seed, 3, 100_000)}), appOptions())
	}
	old, gone := push("old:1", 11), push("gone:1", 12)
	ctr := func(ns string, args ...string) string { return c.Ctr(append([]string{"-n", ns}, args...)...) }
	pull := []string{"images", "pull", "--plain-http", "--snapshotter", "overlayfs"}
	if c.Version != containerdtest.V16 {
		pull = append(pull, "--local")
	}
	ctr("default", append(pull, old.Ref)...)
	ctr("k8s.io", append(pull, old.Ref)...)
	ctr("moby", append(pull, gone.Ref)...)
	lost := gone.Layers[len(gone.Layers)-1]
	ctr("moby", "content", "rm", lost.Digest.String())
	ctr("moby", "images", "tag", gone.Ref, "away:1")
	ctr("moby", "images", "rm", "--sync", "away:1") // collects the blob

	reg.Forget()
	priced := adoptions(t, m.must("--json", "adopt"))
	if a := priced[old.Ref]; a.State != spec.AdoptNew || a.Link != 0 || a.Store == 0 || a.Disk == 0 ||
		fmt.Sprint(a.Namespaces) != "[default k8s.io]" {
		t.Errorf("before: %+v", a)
	}
	if a := priced[gone.Ref]; a.State != spec.AdoptNew || a.Link != lost.Size || reg.Total() != 0 {
		t.Errorf("before: %+v, %d bytes fetched", a, reg.Total())
	}
	m.must("adopt", old.Ref)
	if n := len(reg.Requests()); n != 0 {
		t.Errorf("%d requests for an image that was there", n)
	}
	m.must("adopt", "--all")
	if n := reg.Total(); n != lost.Size {
		t.Errorf("%d bytes fetched, want the %d of the blob that was gone", n, lost.Size)
	}
	after := adoptions(t, m.must("--json", "adopt"))
	if a, b := after[old.Ref], after[gone.Ref]; a.State != spec.Adopted || b.State != spec.Adopted {
		t.Errorf("after: %+v, %+v", a, b)
	}

	reg.Close()
	for _, img := range []registrytest.Pushed{old, gone} {
		want(t, m.must("run", "--rm", img.Ref, "cat", "/etc/motd"), "above")
	}
	id := fmt.Sprintf("adopted%d", os.Getpid())
	for ns, img := range map[string]registrytest.Pushed{"default": old, "k8s.io": old, "moby": gone} {
		want(t, ctr(ns, "run", "--rm", "--snapshotter", "dewpoint", img.Ref, id, "/app", "cat", "/etc/motd"), "above")
		want(t, ctr(ns, "run", "--rm", "--snapshotter", "overlayfs", img.Ref, id, "/app", "cat", "/etc/motd"), "above")
	}
}

// adoptions are those that dew adopt lists, by their names.
func adoptions(t *testing.T, list string) map[string]spec.Adoption {
	t.Helper()
	var all []spec.Adoption
	if err := json.Unmarshal([]byte(list), &all); err != nil {
		t.Fatalf("%v: %s", err, list)
	}
	by := map[string]spec.Adoption{}
	for _, a := range all {
		by[a.Image] = a
	}
	return by
}
