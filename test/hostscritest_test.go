//go:build hosts

package test

import (
	"cmp"
	"encoding/xml"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/testkit/containerdtest"
	"dewpoint/testkit/registrytest"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Kubernetes's own tests of images, containers and pods: none may fail on dewd's layers that passes on
// overlayfs, in the same run.
func TestHostsCritest(t *testing.T) {
	reg := registrytest.New(t)
	pushTestImages(t, reg)
	over, ours := critest(t, reg, "overlayfs"), critest(t, reg, "dewpoint")
	passed := map[string]int{}
	for name, status := range over {
		if status == "passed" && ours[name] != "passed" {
			t.Errorf("passes on overlayfs, %s on dewpoint: %s", cmp.Or(ours[name], "not run"), name)
		}
		passed["overlayfs "+status]++
		passed["dewpoint "+ours[name]]++
		if status == "failed" {
			t.Logf("fails on overlayfs, %s on dewpoint: %s", ours[name], name)
		}
	}
	if passed["overlayfs passed"] < 50 {
		t.Errorf("few cases passed on overlayfs")
	}
	t.Log(passed)
}

// critest runs the cases on a containerd whose CRI has a snapshotter, and gives what each came to.
func critest(t *testing.T, reg *registrytest.Server, snapshotter string) map[string]string {
	dir := t.TempDir()
	hosts := filepath.Join(dir, "hosts")
	for _, host := range []string{"registry.k8s.io", "k8s.gcr.io", "gcr.io"} {
		at := filepath.Join(hosts, host)
		if err := os.MkdirAll(at, 0o755); err != nil {
			t.Fatal(err)
		}
		text := fmt.Sprintf("server = %[1]q\n[host.%[1]q]\n  capabilities = [\"pull\", \"resolve\"]\n", reg.URL())
		if err := os.WriteFile(filepath.Join(at, "hosts.toml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m := newMachine(t, reg)
	m.config = strings.Replace(m.config, "[registries]\n", fmt.Sprintf("[registries]\nhosts_dirs = [%q]\n", hosts), 1)
	c := startHost(t, m, containerdtest.V24, &containerdtest.CRI{Sandbox: "registry.k8s.io/pause:3.9",
		Snapshotter: snapshotter, Hosts: hosts, CNI: pairs(t, dir)})
	dialCRI(t, c.Address) // is there
	report := filepath.Join(dir, "report.xml")
	out, err := exec.CommandContext(t.Context(), containerdtest.Tool("critest-1.37.0", "critest.test"),
		"--runtime-endpoint", "unix://"+c.Address, "--ginkgo.junit-report", report, "--ginkgo.no-color",
		"--ginkgo.focus", "Image|Container|PodSandbox|Idempotence|Runtime info",
		"--ginkgo.skip", "Multiple Containers|Security Context|Networking|Streaming|portforward").CombinedOutput()
	text, rerr := os.ReadFile(report)
	if rerr != nil {
		t.Fatalf("critest: %v\n%s", err, out)
	}
	var doc struct {
		Suites []struct {
			Cases []struct {
				Name   string `xml:"name,attr"`
				Status string `xml:"status,attr"`
				Failed string `xml:"failure"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	came := map[string]string{}
	for _, s := range doc.Suites {
		for _, k := range s.Cases {
			if strings.HasPrefix(k.Name, "[It]") && k.Status != "skipped" {
				came[k.Name] = k.Status
			}
			if k.Status == "failed" {
				t.Logf("%s: %s: %.600s", snapshotter, k.Name, k.Failed)
			}
		}
	}
	return came
}

// pairs has CNI give each pod a pair of devices.
func pairs(t *testing.T, dir string) string {
	t.Helper()
	cni := filepath.Join(dir, "cni")
	if err := os.Mkdir(cni, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, plugin := range []string{"ptp", "host-local", "loopback"} {
		if err := os.Symlink(filepath.Join("/usr/lib/cni", plugin), filepath.Join(cni, plugin)); err != nil {
			t.Fatal(err)
		}
	}
	text := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "critest", "plugins": [{"type": "ptp", "ipam":
		{"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.88.251.0/24"}]]}}]}`,
		filepath.Join(dir, "ipam"))
	if err := os.WriteFile(filepath.Join(cni, "10-pairs.conflist"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return cni
}

// pushTestImages makes what critest pulls, of Debian's busybox.
func pushTestImages(t *testing.T, reg *registrytest.Server) {
	t.Helper()
	program, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	list, err := exec.Command("/bin/busybox", "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	files := []registrytest.File{{Name: "bin/", Mode: 0o755}, {Name: "etc/", Mode: 0o755},
		{Name: "tmp/", Mode: 0o1777}, {Name: "root/", Mode: 0o700}, {Name: "var/", Mode: 0o755}, {Name: "home/", Mode: 0o755},
		{Name: "bin/busybox", Body: string(program), Mode: 0o755},
		{Name: "etc/passwd", Body: "root:x:0:0::/root:/bin/sh\nwww-data:x:33:33::/var:/bin/sh\n" +
			"default-user:x:1000:1000::/home:/bin/sh\n"},
		{Name: "etc/group", Body: "root:x:0:\nwww-data:x:33:\ndefault-user:x:1000:\n" +
			"group-defined-in-image:x:50000:default-user\n"}}
	for applet := range strings.FieldsSeq(string(list)) {
		if applet != "busybox" {
			files = append(files, registrytest.File{Name: "bin/" + applet, Link: "busybox"})
		}
	}
	base := registrytest.Layer{Tar: registrytest.Tar(files...)}
	push := func(ref, user string, marks ...string) {
		layers := []registrytest.Layer{base}
		for _, m := range marks {
			layers = append(layers, registrytest.Layer{Tar: registrytest.Tar(registrytest.File{Name: m, Body: m})})
		}
		reg.PushImage(ref, layers, registrytest.Options{Config: ocispec.ImageConfig{User: user,
			Cmd: []string{"sh"}, Env: []string{"PATH=/bin"}}})
	}
	push("e2e-test-images/busybox:1.29-2", "")
	reg.PushImage("pause:3.9", appLayers(t, 0), appOptions("sleep", "1h"))
	const k = "k8s-staging-cri-tools/test-image-"
	for user, name := range map[string]string{"1002": "user-uid", "www-data": "user-username",
		"1003:22222": "user-uid-group", "www-data:100": "user-username-group", "1000": "predefined-group"} {
		push(k+name+":latest", user, name)
	}
	for _, name := range []string{"latest:latest", "tag:test", "tag:all", "1:latest", "2:latest", "3:latest"} {
		push(k+name, "", name)
	}
	for _, tag := range []string{"1", "2", "3"} {
		push(k+"tags:"+tag, "", "tags")
	}
}
