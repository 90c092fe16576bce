package test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/internal/spec"
	"dewpoint/testkit/registrytest"
)

// Several options in one container: what its process sees is what was asked for.
func TestOptions(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", append(appLayers(t, 0), registrytest.Layer{Tar: registrytest.Tar(
		registrytest.File{Name: "etc/passwd", Body: "root:x:0:0::/:\nweb:x:33:34::/:\n"},
		registrytest.File{Name: "etc/group", Body: "root:x:0:\nweb:x:34:\n"})}), appOptions())
	m := newMachine(t, reg).start()
	vars, id := filepath.Join(t.TempDir(), "vars"), filepath.Join(t.TempDir(), "id")
	if err := os.WriteFile(vars, []byte("# of the site\nFROM_FILE=yes\nBOTH=file\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	port, udp, name := freePort(t), freePort(t), fmt.Sprintf("opt%d", os.Getpid())
	m.must("run", "-d", "--name", name, "-p", "127.0.0.1:"+port+":8080", "-p", udp+":53/udp", "--user", "web",
		"--workdir", "/etc", "--hostname", "box", "--dns", "10.9.8.7", "--dns-search", "example", "--add-host",
		"db:10.0.0.2", "--read-only", "--tmpfs", "/scratch:size=1m", "--shm-size", "1m", "--ulimit",
		"nofile=100", "--sysctl", "net.core.somaxconn=77", "--cap-drop", "ALL", "--cap-add", "KILL",
		"--security-opt", "no-new-privileges", "--device", "/dev/null:/dev/nothing", "--env-file", vars, "-e",
		"BOTH=flag", "--cidfile", id, "--ready", "http:8080/", img.Ref, "serve", "8080")
	for file, wants := range map[string][]string{
		"/proc/self/status": {"\nUid:\t33\t33\t33\t33\n", "\nGid:\t34\t34", "\nNoNewPrivs:\t1\n",
			"\nCapBnd:\t0000000000000020\n"},
		"/proc/self/limits":            {"Max open files            100                  100"},
		"/proc/self/environ":           {"FROM_FILE=yes\x00", "BOTH=flag\x00"},
		"/proc/self/mounts":            {" / overlay ro,", "tmpfs /scratch tmpfs rw,nosuid,nodev,noexec,", "shm /dev/shm tmpfs"},
		"/proc/sys/kernel/hostname":    {"box\n"},
		"/proc/sys/net/core/somaxconn": {"77\n"},
		"/etc/hosts":                   {"\tbox\n", "10.0.0.2\tdb\n"},
		"/etc/resolv.conf":             {"nameserver 10.9.8.7\n", "search example\n"},
		"motd":                         {"above\n"},
		"/dev/nothing":                 {""},
	} {
		got := get(t, "http://127.0.0.1:"+port+"/cat?"+file)
		for _, want := range wants {
			if !strings.Contains(got, want) || want == "" && got != "" {
				t.Errorf("%s lacks %q: %s", file, want, got)
			}
		}
	}
	if b, err := os.ReadFile(id); err != nil || string(b) != name {
		t.Errorf("--cidfile has %q, %v", b, err)
	}
	if rules := strings.Join(rulesOf(t, name), "\n"); !strings.Contains(rules, "-p udp") {
		t.Errorf("the port for UDP is not published: %s", rules)
	}
	for want, args := range map[string][]string{
		"no matching entries":  {"run", "-d", "--user", "nobody", img.Ref, "serve", "8081"},
		"/dev/there-is-none":   {"run", "-d", "--device", "/dev/there-is-none", img.Ref, "serve", "8081"},
		"CAP_EVERYTHING":       {"run", "-d", "--cap-add", "EVERYTHING", img.Ref, "serve", "8081"},
		"net.core.somaxconn":   {"run", "-d", "--sysctl", "net.core.somaxconn=1", img.Ref, "serve", "8081"},
		"there is such a file": {"run", "-d", "--cidfile", id, img.Ref, "serve", "8081"},
	} {
		if r := m.dew(args...); r.code != 2 || !strings.Contains(r.err, want) {
			t.Errorf("%q: %+v", args, r)
		}
	}
	if r := m.dew("run", "-d", "--pull", "never", reg.Host()+"/other:1"); r.code != 4 ||
		!strings.Contains(r.err, "--pull never") {
		t.Errorf("--pull never: %+v", r)
	}
	m.must("rm", "-f", name)
	// The tag means another image now: only who asks the registry learns that.
	other := reg.PushImage("app:1", appLayers(t, 0), appOptions("exit", "3"))
	for policy, digest := range map[string]string{"missing": img.Digest.String(), "never": img.Digest.String()} {
		if rec := m.record("run", "-d", "--name", "p", "--net", "none", "--pull", policy, img.Ref, "sleep", "1h"); rec.Digest != digest {
			t.Errorf("--pull %s: %s", policy, rec.Digest)
		}
		m.must("rm", "-f", "p")
	}
	if rec := m.record("run", "-d", "--name", "p", "--net", "none", "--pull", "always", img.Ref, "sleep", "1h"); rec.Digest != other.Digest.String() {
		t.Errorf("--pull always: %s", rec.Digest)
	}
	m.must("rm", "-f", "p")
	namedVolumes(t, reg, m)
	if r := m.dew("run", "--rm", "--privileged", img.Ref, "cat", "/proc/self/status"); r.code != 0 ||
		!strings.Contains(r.out, "\nSeccomp:\t0\n") {
		t.Errorf("--privileged: %+v", r)
	}
}

// namedVolumes has a volume begin with what the image has there, outlast its containers, and go.
func namedVolumes(t *testing.T, reg *registrytest.Server, m *machine) {
	t.Helper()
	img := reg.PushImage("vol:1", append(appLayers(t, 0), registrytest.Layer{Tar: registrytest.Tar(
		registrytest.File{Name: "srv/", Mode: 0o755}, registrytest.File{Name: "srv/data/", Mode: 0o1770},
		registrytest.File{Name: "srv/data/f", Body: "image\n"})}), appOptions())
	data := []string{"run", "--rm", "-v", "data:/srv/data", img.Ref}
	m.must(append(data, "append", "/srv/data/f", "mine\n")...)
	if out := m.must(append(data, "cat", "/srv/data/f")...); out != "image\nmine\n" {
		t.Errorf("the volume has %q", out)
	}
	var all []spec.VolumeInfo
	if err := json.Unmarshal([]byte(m.must("--json", "volume", "ls")), &all); err != nil || len(all) != 1 {
		t.Fatalf("%+v, %v", all, err)
	}
	if fi, err := os.Stat(all[0].Path); err != nil || fi.Mode() != os.ModeDir|os.ModeSticky|0o770 {
		t.Errorf("the volume is %+v, %v", fi, err)
	}
	ro := []string{"run", "--rm", "--mount", "type=volume,source=data,target=/d,readonly", img.Ref}
	if r := m.dew(append(ro, "append", "/d/f", "x")...); r.code == 0 || !strings.Contains(r.err, "read-only") {
		t.Errorf("a volume that is read-only was written: %+v", r)
	}
	m.must("run", "-d", "--name", "has", "--net", "none", "-v", "data:/d", img.Ref, "sleep", "1h")
	if r := m.dew("volume", "rm", "data"); r.code != 10 || !strings.Contains(r.err, "has") {
		t.Errorf("a volume that a container has: %+v", r)
	}
	m.must("rm", "-f", "has")
	m.must("volume", "rm", "data")
	if _, err := os.Stat(all[0].Path); err == nil || strings.Contains(m.must("volume", "ls"), all[0].Path) {
		t.Errorf("the volume is there: %v, %s", err, m.must("volume", "ls"))
	}
}
