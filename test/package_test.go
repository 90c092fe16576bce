package test

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"dewpoint/testkit"
)

// The package is the same bytes each time, installs beside Debian's containerd, is not removed while a
// container runs from dewd's layers, and leaves nothing when it is purged.
func TestPackage(t *testing.T) {
	deb := buildDeb(t)
	if !bytes.Equal(deb, buildDeb(t)) {
		t.Error("two builds differ")
	}
	m := newOverlaid(t)
	m.write("/dewpoint.deb", string(deb))
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

	// The package's scripts learn of dewd's directories where its unit does.
	m.write("/etc/default/dewpoint", "DEWD_OPTIONS=\"--containerd /run/c.sock --root /srv/dewpoint --state=/run/dew2\"\n")
	m.must("cd /srv; mkdir -p dewpoint /run/c/default/web/rootfs /run/dew2 /var/lib/dewpoint; touch /run/dew2/lock /var/lib/dewpoint/x; " +
		"mount -t tmpfs tmpfs dewpoint; mkdir dewpoint/u dewpoint/w; " +
		"mount -t overlay -o lowerdir=/usr,upperdir=/srv/dewpoint/u,workdir=/srv/dewpoint/w overlay /run/c/default/web/rootfs")
	if out, err := m.run("apt-get purge -y dewpoint"); err == nil || !strings.Contains(out, "default/web: stop and remove") {
		t.Errorf("a container runs, and the package is purged: %v\n%s", err, out)
	}
	want(t, m.must("cat /etc/containerd/config.toml; dewd --version"), "proxy_plugins.dewpoint")
	m.must("umount /run/c/default/web/rootfs; mkdir /srv/dewpoint/m; mount -t tmpfs tmpfs /srv/dewpoint/m; apt-get purge -y dewpoint")
	want(t, m.must("grep -c ' /srv/dewpoint' /proc/self/mountinfo; umount /srv/dewpoint; rmdir /srv/dewpoint"), "1\n")
	if after := m.changes(); after != before {
		t.Errorf("what there was before\n%s\nand is after a purge\n%s", before, after)
	}
}

func buildDeb(t *testing.T) []byte {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "../scripts/package", "deb")
	cmd.Env = append(os.Environ(), "ARCHES="+runtime.GOARCH, "OUT="+dir, "VERSION=1.2.3", "SOURCE_DATE_EPOCH=1700000000")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	b, err := os.ReadFile(filepath.Join(dir, "dewpoint_1.2.3_"+runtime.GOARCH+".deb"))
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
}

func newOverlaid(t *testing.T) *overlaid {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-ec", `
		mount -t tmpfs tmpfs "$1"
		cd "$1"
		mkdir upper work root
		mount -t overlay -o lowerdir=/,upperdir=$1/upper,workdir=$1/work overlay root
		mount -t proc proc root/proc
		mount --rbind /dev root/dev
		mount -t tmpfs tmpfs root/run
		mount -t tmpfs tmpfs root/tmp
		printf '#!/bin/sh\nexit 101\n' >root/usr/sbin/policy-rc.d
		chmod 755 root/usr/sbin/policy-rc.d
		grep -rl path-exclude root/etc/dpkg/dpkg.cfg.d | xargs -r rm # images of Debian leave manuals out
		rm -f root/var/lib/man-db/auto-update # else each step makes the index of all manuals
		touch ready
		exec sleep infinity`, "sh", dir)
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	m := &overlaid{t: t, pid: fmt.Sprint(cmd.Process.Pid), at: dir + "/root"}
	within := "/proc/" + m.pid + "/root" + dir
	m.root, m.upper = within+"/root", within+"/upper"
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	t.Cleanup(func() {
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

// run runs a script there.
func (m *overlaid) run(script string) (string, error) {
	out, err := exec.Command("nsenter", "--target", m.pid, "--mount", "chroot", m.at, "env", "-i",
		"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive", "sh", "-ec", script).CombinedOutput()
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
