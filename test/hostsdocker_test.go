//go:build hosts

package test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"dewpoint/testkit"
	"dewpoint/testkit/containerdtest"
	"dewpoint/testkit/registrytest"
)

// Docker with its image store in containerd: pull, run, commit, push, save and load on dewd's layers.
func TestHostsDocker(t *testing.T) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 1<<20), appOptions("sleep", "10m"))
	m, c := newHost(t, reg, containerdtest.V24, nil)
	dir := filepath.Dir(m.root)
	docker := startDocker(t, dir, c.Address, reg.Host())
	id := fmt.Sprintf("dock%d", os.Getpid())
	run := func(image string) {
		t.Helper()
		want(t, docker("run", "--rm", "--net", "none", "--entrypoint", "/app", image, "cat", "/etc/motd"), "above")
	}

	want(t, docker("info", "--format", "{{.Driver}}"), "dewpoint")
	m.must("pull", img.Ref)
	reg.Forget()
	docker("pull", img.Ref)
	if n := reg.Total(); n != 0 {
		t.Errorf("docker fetched %d bytes of an image that dew had pulled", n)
	}
	run(img.Ref)
	wantFiles(t, m, len(img.Layers))
	docker("run", "-d", "--net", "none", "--name", id, img.Ref)
	want(t, docker("exec", id, "/app", "cat", "/etc/motd"), "above")

	built := reg.Host() + "/built:1"
	m.must("pull", "--blobs", img.Ref) // for commit, push and save
	docker("commit", id, built)
	docker("rm", "-f", id)
	run(built)
	docker("push", built)
	saved := filepath.Join(dir, "saved.tar")
	docker("save", "-o", saved, built)
	docker("rmi", "-f", built)
	docker("load", "-i", saved)
	run(built)
	docker("rmi", "-f", built)
	docker("pull", built)
	run(built)
	docker("image", "prune", "--all", "--force")
	if left := strings.TrimSpace(docker("images", "-q")); left != "" {
		t.Errorf("images are left: %s", left)
	}
}

// startDocker starts a dockerd of the test's own on a containerd, without networks, and returns its client.
func startDocker(t *testing.T, dir, containerd, registry string) func(args ...string) string {
	t.Helper()
	socket, log := "unix://"+filepath.Join(dir, "docker.sock"), filepath.Join(dir, "docker.log")
	config := filepath.Join(dir, "daemon.json")
	err := os.WriteFile(config, []byte(
		`{"features": {"containerd-snapshotter": true}, "storage-driver": "dewpoint"}`), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(log)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd := exec.Command(containerdtest.Tool("docker-sid", "bin/dockerd"), "--config-file", config, "--containerd",
		containerd, "--data-root", filepath.Join(dir, "docker"), "--exec-root", filepath.Join(dir, "dx"), "--pidfile",
		filepath.Join(dir, "docker.pid"), "--host", socket, "--bridge", "none", "--iptables=false",
		"--ip6tables=false", "--userland-proxy=false", "--insecure-registry", registry)
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		if text, _ := os.ReadFile(log); t.Failed() {
			t.Logf("dockerd said:\n%s", text)
		}
	})
	client := func(args ...string) ([]byte, error) {
		return exec.CommandContext(t.Context(), containerdtest.Tool("docker-sid", "bin/docker"),
			append([]string{"--host", socket}, args...)...).CombinedOutput()
	}
	testkit.Eventually(t, "dockerd answers", func() bool {
		_, err := client("version")
		return err == nil
	})
	return func(args ...string) string {
		t.Helper()
		out, err := client(args...)
		if err != nil {
			t.Fatalf("docker %q: %v\n%s", args, err, out)
		}
		return string(out)
	}
}
