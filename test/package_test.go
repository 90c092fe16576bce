package test

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"
)

// The package is the same bytes each time, installs beside Debian's containerd, runs containers, is
// upgraded and downgraded beneath them, is not removed while one runs from its layers, and leaves nothing
// when it is purged.
func TestPackage(t *testing.T) {
	t.Parallel()
	deb := buildDeb(t, "1.2.3")
	if !bytes.Equal(deb, buildDeb(t, "1.2.3")) {
		t.Error("two builds differ")
	}
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newOverlaid(t)
	m.write("/dewpoint.deb", string(deb))
	m.must("dpkg-deb -R /dewpoint.deb /newer; sed -i 's/^Version: .*/Version: 1.2.4/' /newer/DEBIAN/control; " +
		"dpkg-deb -Zgzip -z1 -b /newer; rm -r /newer")
	m.write("/etc/containerd/config.toml", "version = 2\n")
	before := m.changes()

	m.must("apt-get install -y --no-install-recommends /dewpoint.deb")
	for _, f := range []string{"/usr/bin/dewd", "/usr/bin/dew", "/usr/bin/containerd-shim-dewpoint-v1",
		"/usr/lib/systemd/system/dewd.service", "/usr/lib/systemd/system/dewd.socket", "/usr/share/man/man1/dew.1.gz",
		"/usr/share/man/man8/dewd.8.gz", "/usr/share/man/man5/dewd.toml.5.gz",
		"/usr/share/bash-completion/completions/dew", "/usr/share/zsh/vendor-completions/_dew",
		"/usr/share/fish/vendor_completions.d/dew.fish", "/etc/dewpoint/dewd.toml", "/etc/default/dewpoint",
		"/usr/share/doc/dewpoint/copyright", "/usr/share/doc/dewpoint/THIRD-PARTY-NOTICES.gz",
		"/usr/share/doc/dewpoint/dewd.cdx.json", "/usr/share/doc/dewpoint/dew.cdx.json"} {
		if st, err := os.Stat(m.root + f); err != nil || st.Size() == 0 {
			t.Errorf("%s: %v", f, err)
		}
	}
	want(t, m.must("dewd --check; dewd --version"), "/etc/dewpoint/dewd.toml valid\ndewd v1.2.3\n")
	want(t, m.must("zcat /usr/share/man/man8/dewd.8.gz"), ".B \\-\\-root directory\ndirectory for what survives a reboot")
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Logf("the units are not verified: %v", err)
	} else if out, err := m.run("systemd-analyze verify dewd.service dewd.socket"); out != "" {
		t.Errorf("the units: %v\n%s", err, out)
	}
	// Every key of the file is one that dewd knows. Those that need a file that is not here are left out.
	m.must("sed '1,2d; s/^#//' /etc/dewpoint/dewd.toml | grep -vE '\"/etc/|^listen' >/run/all.toml; " +
		"dewd --check --config /run/all.toml")
	m.must("dew setup containerd; grep -q proxy_plugins.dewpoint /etc/containerd/config.toml; echo more >/etc/dewpoint/own")

	// Layers cannot lie on an overlay. The package's scripts learn of the directories where the unit does.
	m.write("/etc/default/dewpoint", "DEWD_OPTIONS=\"--root /srv/dewpoint --state="+m.state+"\"\n")
	m.write("/etc/dewpoint/dewd.toml", fmt.Sprintf("[registry.%q]\nplain_http = true\n", reg.Host()))
	end := m.startDewd()
	m.must("dew run -d --name web --net none " + img.Ref + " sleep 1h")
	want(t, m.must("dew ps"), "web")
	if out, err := m.run("apt-get purge -y dewpoint"); err == nil || !strings.Contains(out, "/web: stop and remove") {
		t.Errorf("a container runs, and the package is purged: %v\n%s", err, out)
	}
	const pid = "dew --json inspect web | grep -oE '\"pid\": ?[0-9]+'"
	started := m.must(pid)
	for _, u := range []struct{ file, version string }{{"/newer.deb", "1.2.4"}, {"/dewpoint.deb", "1.2.3"}} {
		m.must("apt-get install -y --no-install-recommends --allow-downgrades " + u.file)
		end()
		end = m.startDewd()
		want(t, m.must("dpkg-query -W dewpoint"), "dewpoint\t"+u.version+"\n")
		if now := m.must(pid); now != started {
			t.Errorf("a container of before %s was installed was %s and is %s", u.version, started, now)
		}
	}
	m.must("dew rm -f web")
	end()
	m.must("apt-get purge -y dewpoint")
	if left := m.must("grep -e /srv/dewpoint/ -e " + m.state + "/ /proc/self/mountinfo || true"); left != "" {
		t.Errorf("mounts are left: %s", left)
	}
	if left, _ := m.run("pgrep -af " + m.state + "/"); strings.Contains(left, "containerd") {
		t.Errorf("processes are left: %s", left)
	}
	if after := m.changes(); after != before {
		t.Errorf("what there was before\n%s\nand is after a purge\n%s", before, after)
	}
}

func buildDeb(t *testing.T, version string) []byte {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "../scripts/package", "deb")
	cmd.Env = append(os.Environ(), "ARCHES="+runtime.GOARCH, "OUT="+dir, "VERSION="+version, "SOURCE_DATE_EPOCH=1700000000")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	b, err := os.ReadFile(filepath.Join(dir, "dewpoint_"+version+"_"+runtime.GOARCH+".deb"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// overlaid is this machine seen through an overlay: what a test does to its files stays in a tmpfs. It lies
// in a mount namespace that ends with its first process.
type overlaid struct {
	t           *testing.T
	pid         string // of the first process
	root, upper string // as this process sees them
	at          string // where the first process sees the root
	state       string // a directory of its own in /run
}

func newOverlaid(t *testing.T) *overlaid {
	t.Helper()
	dir := t.TempDir()
	data, err := os.MkdirTemp("/var/tmp", "dewpkg")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(data) })
	cmd := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-ec", `
		mount -t tmpfs tmpfs "$1"
		cd "$1"
		mkdir upper work root
		mount -t overlay -o lowerdir=/,upperdir=$1/upper,workdir=$1/work overlay root
		mount -t proc proc root/proc
		mount --rbind /sys root/sys
		mount --rbind /dev root/dev
		mount -t tmpfs tmpfs root/run
		mount -t tmpfs tmpfs root/tmp
		mkdir root/srv/dewpoint
		mount --bind "$2" root/srv/dewpoint
		printf '#!/bin/sh\nexit 101\n' >root/usr/sbin/policy-rc.d
		chmod 755 root/usr/sbin/policy-rc.d
		grep -rl path-exclude root/etc/dpkg/dpkg.cfg.d | xargs -r rm # images of Debian leave manuals out
		rm -f root/var/lib/man-db/auto-update # else each step makes the index of all manuals
		touch ready
		exec sleep infinity`, "sh", dir, data)
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	m := &overlaid{t: t, pid: fmt.Sprint(cmd.Process.Pid), at: dir + "/root", state: "/run/" + filepath.Base(data)}
	within := "/proc/" + m.pid + "/root" + dir
	m.root, m.upper = within+"/root", within+"/upper"
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	t.Cleanup(func() {
		_, _ = m.run("dewd teardown --root /srv/dewpoint --state " + m.state)
		_ = cmd.Process.Kill()
		<-ended
	})
	testkit.Eventually(t, "the machine is there", func() bool {
		select {
		case <-ended:
			t.Fatalf("the machine ended: %s", said.String())
		default:
		}
		_, err := os.Stat(within + "/ready")
		return err == nil
	})
	return m
}

// command runs a script there.
func (m *overlaid) command(ctx context.Context, script string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", "--target", m.pid, "--mount", "chroot", m.at, "env", "-i",
		"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive",
		"DEWPOINT_HOST=unix://"+m.state+"/dewd.sock", "sh", "-ec", script)
}

func (m *overlaid) run(script string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*testkit.Limit)
	defer cancel()
	out, err := m.command(ctx, script).CombinedOutput()
	return string(out), err
}

func (m *overlaid) must(script string) string {
	m.t.Helper()
	out, err := m.run(script)
	if err != nil {
		m.t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return out
}

func (m *overlaid) write(path, text string) {
	m.t.Helper()
	if err := os.MkdirAll(filepath.Dir(m.root+path), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(m.root+path, []byte(text), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

// startDewd runs dewd as its unit would, until it answers, and returns what ends it.
func (m *overlaid) startDewd() (end func()) {
	m.t.Helper()
	var said bytes.Buffer
	cmd := m.command(context.Background(), ". /etc/default/dewpoint; exec dewd $DEWD_OPTIONS")
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	end = func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Signal(syscall.SIGTERM)
			_ = cmd.Wait()
		}
	}
	m.t.Cleanup(func() {
		end()
		if m.t.Failed() {
			m.t.Logf("dewd said:\n%s", said.String())
		}
	})
	testkit.Eventually(m.t, "dewd answers", func() bool {
		_, err := m.run("dew ps")
		return err == nil
	})
	return end
}

// changes are the files that the machine does not have, and those that it has with other contents.
// What apt, dpkg and their triggers note for themselves is left out.
func (m *overlaid) changes() string {
	m.t.Helper()
	var all strings.Builder
	err := filepath.WalkDir(m.upper, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path, m.upper)
		for _, own := range []string{"/var/lib/dpkg", "/var/lib/apt", "/var/cache", "/var/log"} {
			if name == own {
				return fs.SkipDir
			}
		}
		old, oldErr := os.Lstat(filepath.Join("/", name))
		switch {
		case oldErr != nil:
			fmt.Fprintf(&all, "%s is new\n", name)
		case d.Type() != old.Mode().Type():
			fmt.Fprintf(&all, "%s is %s\n", name, d.Type())
		case d.Type().IsRegular():
			was, _ := os.ReadFile(filepath.Join("/", name))
			if is, err := os.ReadFile(path); err != nil || !bytes.Equal(is, was) {
				fmt.Fprintf(&all, "%s is changed: %q\n", name, is[:min(len(is), 1000)])
			}
		}
		return nil
	})
	if err != nil {
		m.t.Fatal(err)
	}
	return all.String()
}
