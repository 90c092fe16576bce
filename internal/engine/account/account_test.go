package account

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/api/types"
	"golang.org/x/sys/unix"

	"dewpoint/testkit"
)

// overlayDirs makes layers, topmost first, and says how they are mounted.
func overlayDirs(t *testing.T, n int) ([]string, []*types.Mount) {
	t.Helper()
	var dirs []string
	for i := range n {
		d := filepath.Join(t.TempDir(), hex.EncodeToString([]byte{byte(i)}))
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
		dirs = append(dirs, d)
	}
	opts := []string{"upperdir=" + dirs[0], "lowerdir=" + strings.Join(dirs[1:], ":"), "workdir=/none"}
	return dirs, []*types.Mount{{Type: "overlay", Options: opts}}
}

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestUnmounted(t *testing.T) {
	testkit.NeedRoot(t, "it mounts file systems")
	const name = "etc/passwd"
	cases := map[string]struct {
		make func(t *testing.T, d []string)
		want string
	}{
		"none":   {func(*testing.T, []string) {}, ""},
		"lowest": {func(t *testing.T, d []string) { put(t, d[2]+"/"+name, "low") }, "low"},
		"topmost": {func(t *testing.T, d []string) {
			put(t, d[2]+"/"+name, "low")
			put(t, d[1]+"/"+name, "high")
		}, "high"},
		"whiteout": {func(t *testing.T, d []string) {
			put(t, d[2]+"/"+name, "low")
			put(t, d[1]+"/etc/x", "")
			if err := unix.Mknod(d[1]+"/"+name, unix.S_IFCHR, 0); err != nil {
				t.Fatal(err)
			}
		}, ""},
		"whiteout of the directory": {func(t *testing.T, d []string) {
			put(t, d[2]+"/"+name, "low")
			if err := unix.Mknod(d[1]+"/etc", unix.S_IFCHR, 0); err != nil {
				t.Fatal(err)
			}
		}, ""},
		"opaque": {func(t *testing.T, d []string) {
			put(t, d[2]+"/"+name, "low")
			put(t, d[1]+"/etc/x", "")
			if err := unix.Setxattr(d[1]+"/etc", "trusted.overlay.opaque", []byte("y"), 0); err != nil {
				t.Fatal(err)
			}
		}, ""},
		"link into another layer": {func(t *testing.T, d []string) {
			put(t, d[2]+"/usr/accounts", "linked")
			put(t, d[1]+"/etc/x", "")
			if err := os.Symlink("/usr/accounts", d[1]+"/"+name); err != nil {
				t.Fatal(err)
			}
		}, "linked"},
		"linked directory": {func(t *testing.T, d []string) {
			put(t, d[2]+"/real/passwd", "linked")
			if err := os.Symlink("real", d[1]+"/etc"); err != nil {
				t.Fatal(err)
			}
		}, "linked"},
	}
	for what, c := range cases {
		t.Run(what, func(t *testing.T) {
			dirs, mounts := overlayDirs(t, 3)
			c.make(t, dirs)
			got, err := Unmounted(t.TempDir(), mounts)(name)
			if err != nil || string(got) != c.want {
				t.Errorf("got %q, %v; want %q", got, err, c.want)
			}
		})
	}
}

// TestUnmountedStaysInside has a link that leads out of the container.
func TestUnmountedStaysInside(t *testing.T) {
	dir := t.TempDir()
	put(t, dir+"/outside", "secret")
	root := dir + "/root"
	if err := os.MkdirAll(root+"/etc", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../../outside", root+"/etc/passwd"); err != nil {
		t.Fatal(err)
	}
	b, err := Unmounted(dir, []*types.Mount{{Type: "bind", Source: root}})("etc/passwd")
	if err != nil || len(b) > 0 {
		t.Errorf("got %q, %v", b, err)
	}
}

// A passwd that anybody may have written makes nobody root.
func TestIDsAreBounded(t *testing.T) {
	for _, ids := range []string{"4294967296:1", "1:4294967296", "-1:1", "1:-4294967296"} {
		u, err := Lookup("web", func(string) ([]byte, error) { return []byte("web:x:" + ids + "::/:\n"), nil })
		if err == nil {
			t.Errorf("%s is %+v", ids, u)
		}
	}
}

func FuzzAccounts(f *testing.F) {
	f.Add("web:app", "root:x:0:0::/:\nweb:x:33:33::/:\n", "app:x:40:web\n")
	f.Fuzz(func(t *testing.T, spec, passwd, group string) {
		_, _ = Lookup(spec, func(name string) ([]byte, error) {
			if name == "etc/passwd" {
				return []byte(passwd), nil
			}
			return []byte(group), nil
		})
	})
}
