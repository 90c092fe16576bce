//go:build hosts

// What is costly to have, and changes seldom: "make test-hosts". docs/operate/hosts.md has the results.

package test

import (
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/testkit"
	"dewpoint/testkit/containerdtest"
	"dewpoint/testkit/registrytest"
)

// The versions between those of every test.
var between = []containerdtest.Version{containerdtest.V17, containerdtest.V20}

func TestHostsClients(t *testing.T) {
	for _, v := range between {
		t.Run(string(v), func(t *testing.T) { testClients(t, v) })
	}
}

func TestHostsCRI(t *testing.T) {
	for _, v := range between {
		t.Run(string(v), func(t *testing.T) {
			b, d := newClientBed(t, "erofs", anyPack, v, new(containerdtest.CRI))
			testCRI(t, b, dialCRI(t, d.Address))
		})
	}
}

// newHost is a node on a containerd of its own.
func newHost(t *testing.T, reg *registrytest.Server, v containerdtest.Version,
	cri *containerdtest.CRI) (*machine, *containerdtest.Containerd) {
	t.Helper()
	m := newMachine(t, reg)
	return m, startHost(t, m, v, cri)
}

// startHost starts a containerd, and the node beside it.
func startHost(t *testing.T, m *machine, v containerdtest.Version,
	cri *containerdtest.CRI) *containerdtest.Containerd {
	t.Helper()
	dir := filepath.Join(filepath.Dir(m.root), "c")
	if err := errors.Join(os.MkdirAll(m.state, 0o755), os.MkdirAll(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	c := containerdtest.StartCRI(t, v, dir, filepath.Join(m.state, "snapshotter.sock"), cri)
	m.args = []string{"--containerd", c.Address}
	m.start()
	return c
}

// A day with nerdctl: run, exec, commit, save, load, push, compose, prune, on images that dewd has brought.
func TestHostsNerdctl(t *testing.T) {
	for _, v := range []containerdtest.Version{containerdtest.V17, containerdtest.V24} {
		t.Run(string(v), func(t *testing.T) { testNerdctl(t, v) })
	}
}

func testNerdctl(t *testing.T, v containerdtest.Version) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 1<<20), appOptions("sleep", "10m"))
	m, c := newHost(t, reg, v, nil)
	nerdctl := func(args ...string) string {
		t.Helper()
		return c.Nerdctl(append([]string{"--insecure-registry"}, args...)...)
	}
	id := fmt.Sprintf("nerd%d", os.Getpid())
	motd := []string{"/app", "cat", "/etc/motd"}
	m.must("pull", img.Ref)
	nerdctl("pull", img.Ref)
	nerdctl("run", "-d", "--net", "none", "--name", id, img.Ref)
	want(t, nerdctl(append([]string{"exec", id}, motd...)...), "above")

	built := reg.Host() + "/built:1"
	nerdctl("commit", id, built)
	nerdctl("rm", "-f", id)
	run := []string{"run", "--rm", "--net", "none", "--name", id, "--entrypoint", "/app", built, "cat",
		"/etc/motd"}
	want(t, nerdctl(run...), "above")

	saved := filepath.Join(filepath.Dir(m.root), "saved.tar")
	nerdctl("save", "-o", saved, built)
	nerdctl("push", built)
	nerdctl("rmi", "-f", built)
	nerdctl("load", "-i", saved)
	want(t, nerdctl(run...), "above")
	nerdctl("rmi", "-f", built)
	nerdctl("pull", built)
	want(t, nerdctl(run...), "above")

	file := filepath.Join(filepath.Dir(m.root), "compose.yaml")
	compose := fmt.Sprintf("name: %s\nservices:\n  a:\n    image: %s\n    network_mode: none\n", id, img.Ref)
	if err := os.WriteFile(file, []byte(compose), 0o600); err != nil {
		t.Fatal(err)
	}
	nerdctl("compose", "-f", file, "up", "-d")
	want(t, nerdctl("compose", "-f", file, "ps"), id)
	nerdctl("compose", "-f", file, "down")

	nerdctl("image", "prune", "--all", "--force")
	if left := strings.TrimSpace(nerdctl("images", "-q")); left != "" {
		t.Errorf("images are left: %s", left)
	}
}

// crictl does to a private image what a kubelet does. CRI does not tell the snapshotter its credentials:
// without a login of its own, dewd leaves the fetch to containerd; with one it brings the layers itself.
func TestHostsCrictl(t *testing.T) {
	for _, v := range []containerdtest.Version{containerdtest.V16, containerdtest.V17, containerdtest.V24} {
		t.Run(string(v), func(t *testing.T) { testCrictl(t, v) })
	}
}

func testCrictl(t *testing.T, v containerdtest.Version) {
	login := t.TempDir()
	t.Setenv("DOCKER_CONFIG", login)
	reg := registrytest.New(t)
	push := func(name string, seed uint64) registrytest.Pushed {
		return reg.PushImage(name, append(appLayers(t, 0),
			registrytest.Layer{Tar: registrytest.RandomTar(seed, 3, 100_000)}), appOptions("sleep", "10m"))
	}
	theirs, ours := push("theirs:1", 21), push("ours:1", 22)
	pause := reg.PushImage("pause:1", appLayers(t, 0), appOptions("sleep", "10m"))
	_, c := newHost(t, reg, v, &containerdtest.CRI{Sandbox: pause.Ref})
	dialCRI(t, c.Address) // is there
	crictl := func(args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), containerdtest.Tool("crictl-1.37.0", "crictl"),
			append([]string{"--runtime-endpoint", "unix://" + c.Address}, args...)...)
		out, err := cmd.Output()
		if err != nil {
			var e *exec.ExitError
			errors.As(err, &e)
			t.Fatalf("crictl %q: %v\n%s%s", args, err, out, e.Stderr)
		}
		return strings.TrimSpace(string(out))
	}
	crictl("pull", pause.Ref)
	reg.Require(registrytest.Auth{Mode: registrytest.Bearer, User: "u", Password: "secret"})
	pod := writeFile(t, "pod.json", `{"metadata":{"name":"p","uid":"u","namespace":"default"},
		"linux":{"security_context":{"namespace_options":{"network":2}}}}`)
	started := func(img registrytest.Pushed) {
		t.Helper()
		crictl("pull", "--creds", "u:secret", img.Ref)
		container := writeFile(t, "c.json", fmt.Sprintf(`{"metadata":{"name":"c"},"image":{"image":%q},"linux":{}}`,
			img.Ref))
		p := crictl("runp", pod)
		id := crictl("create", p, container, pod)
		crictl("start", id)
		want(t, crictl("exec", "--sync", id, "/app", "cat", "/etc/motd"), "above")
		testkit.Eventually(t, "the container's statistics", func() bool {
			return strings.Contains(crictl("stats", "--output", "json", "--id", id), `"usageBytes"`)
		})
		crictl("stopp", p)
		crictl("rmp", p)
	}
	started(theirs)

	auth := base64.StdEncoding.EncodeToString([]byte("u:secret"))
	err := os.WriteFile(filepath.Join(login, "config.json"), fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`,
		reg.Host(), auth), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	reg.Forget()
	started(ours)
	top := ours.Layers[len(ours.Layers)-1]
	if n := reg.Served(top.Digest); n != top.Size {
		t.Errorf("%d bytes of a layer of %d were fetched", n, top.Size)
	}
	if strings.Contains(c.Ctr("-n", "k8s.io", "content", "ls", "-q"), top.Digest.String()) {
		t.Error("containerd fetched a layer that dewd has a login for")
	}
	crictl("rmi", theirs.Ref)
	crictl("rmi", ours.Ref)
}

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
