package volumes

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/testkit"

	"golang.org/x/sys/unix"
)

func none() (map[string][]string, error) { return nil, nil }

// use has a container come and go.
func use(t *testing.T, s *Store, name string, fill func(string) error) {
	t.Helper()
	release, err := s.Use(name, fill)
	if err != nil {
		t.Fatal(err)
	}
	release()
}

func TestVolumes(t *testing.T) {
	s := New(filepath.Join(t.TempDir(), "volumes"))
	if all, err := s.List(nil); len(all) > 0 || err != nil {
		t.Errorf("at first: %+v, %v", all, err)
	}
	fills := 0
	fill := func(dir string) error { fills++; return os.WriteFile(dir+"/f", nil, 0o600) }
	use(t, s, "data", fill)
	use(t, s, "data", fill)
	if _, err := os.Stat(s.Path("data") + "/f"); err != nil || fills != 1 {
		t.Errorf("filled %d times, %v", fills, err)
	}
	if _, err := s.Use("bad", func(dir string) error {
		return errors.Join(os.WriteFile(dir+"/half", nil, 0o600), unix.EIO)
	}); !errors.Is(err, unix.EIO) {
		t.Error(err)
	}
	left := filepath.Join(s.dir, unfinished+"cut") // by a dewd that was killed
	if err := os.MkdirAll(left+"/half", 0o700); err != nil {
		t.Fatal(err)
	}
	use(t, s, "cut", fill)
	if _, err := os.Stat(s.Path("cut") + "/half"); err == nil {
		t.Error("a volume begins with what was left of another")
	}
	all, err := s.List(map[string][]string{"data": {"web"}})
	if err != nil || len(all) != 2 || all[0].Name != "cut" || all[1].Name != "data" || len(all[1].Containers) != 1 ||
		all[1].Path != s.Path("data") || all[1].Changed.IsZero() {
		t.Errorf("%+v, %v", all, err)
	}
	for _, name := range []string{"", "..", ".new-x", "a/b", "-x"} {
		if _, err := s.Use(name, fill); err == nil {
			t.Errorf("%q is a volume", name)
		}
		if err := s.Remove(name, none); !errors.Is(err, ErrNotFound) {
			t.Errorf("remove %q: %v", name, err)
		}
	}
}

// What a container has, or is being made with, stays.
func TestRemove(t *testing.T) {
	s := New(t.TempDir())
	release, err := s.Use("data", func(string) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Remove("data", none); !errors.Is(err, ErrInUse) {
		t.Errorf("held: %v", err)
	}
	release()
	by := func() (map[string][]string, error) { return map[string][]string{"data": {"web"}}, nil }
	if err := s.Remove("data", by); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), "web") {
		t.Errorf("used: %v", err)
	}
	unknown := func() (map[string][]string, error) { return nil, unix.EIO }
	if err := s.Remove("data", unknown); !errors.Is(err, unix.EIO) {
		t.Errorf("unknown: %v", err)
	}
	if err := s.Remove("data", none); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(s.dir); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// A volume that was made by itself is filled by its first container, unless somebody has put files there.
func TestMadeByItself(t *testing.T) {
	s := New(t.TempDir())
	for _, name := range []string{"empty", "full", "empty"} {
		if err := s.Make(name); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(s.Path("full")+"/mine", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"empty", "full", "empty"} {
		use(t, s, name, func(dir string) error { return os.WriteFile(dir+"/image's", nil, 0o600) })
	}
	for name, want := range map[string]string{"empty": "image's", "full": "mine"} {
		if files, _ := os.ReadDir(s.Path(name)); len(files) != 1 || files[0].Name() != want {
			t.Errorf("%s has %v", name, files)
		}
	}
	if left, _ := filepath.Glob(s.dir + "/.*"); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// A fill that fails is tried again, and the mark of a volume that is gone is not the next one's.
func TestFillsAreTriedAgain(t *testing.T) {
	s := New(filepath.Join(t.TempDir(), "volumes"))
	if err := s.Make("data"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Use("data", func(string) error { return unix.ENOSPC }); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a full disk: %v", err)
	}
	fill := func(dir string) error { return os.WriteFile(dir+"/image's", nil, 0o600) }
	use(t, s, "data", fill)
	if files, _ := os.ReadDir(s.Path("data")); len(files) != 1 {
		t.Errorf("it was not filled: %v", files)
	}
	if err := os.WriteFile(s.mark("other"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	use(t, s, "other", func(string) error { return nil })
	use(t, s, "other", fill)
	if files, _ := os.ReadDir(s.Path("other")); len(files) != 0 {
		t.Errorf("a volume that a container has had was made anew: %v", files)
	}
	if fi, err := os.Stat(s.dir); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("others reach what containers have made: %v, %v", fi.Mode(), err)
	}
}

func TestFromImage(t *testing.T) {
	testkit.NeedRoot(t, "it makes files of other users")
	root, dir := t.TempDir(), t.TempDir()
	outside := t.TempDir()
	for _, err := range []error{
		os.WriteFile(outside+"/secret", nil, 0o600),
		os.MkdirAll(root+"/srv/data/sub", 0o755),
		os.Chown(root+"/srv/data", 12, 34),
		unix.Chmod(root+"/srv/data", 0o1770),
		os.WriteFile(root+"/srv/data/f", []byte("image"), 0o640),
		os.Link(root+"/srv/data/f", root+"/srv/data/sub/hard"),
		os.Symlink("/f", root+"/srv/data/link"),
		unix.Setxattr(root+"/srv/data/f", "user.colour", []byte("red"), 0),
		os.Symlink("/srv", root+"/var"),
		os.Symlink(outside, root+"/out"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := FromImage(dir, root, "/var/data"); err != nil {
		t.Fatal(err)
	}
	var st, f, hard unix.Stat_t
	for path, to := range map[string]*unix.Stat_t{"": &st, "/f": &f, "/sub/hard": &hard} {
		if err := unix.Lstat(dir+path, to); err != nil {
			t.Fatal(err)
		}
	}
	to, _ := os.Readlink(dir + "/link")
	text, _ := os.ReadFile(dir + "/f")
	colour := make([]byte, 3)
	_, err := unix.Getxattr(dir+"/f", "user.colour", colour)
	if st.Uid != 12 || st.Gid != 34 || st.Mode&0o7777 != 0o1770 || f.Mode&0o777 != 0o640 || f.Ino != hard.Ino ||
		to != "/f" || string(text) != "image" || string(colour) != "red" || err != nil {
		t.Errorf("directory %+v, file %+v, link to %q, text %q, attribute %q, %v", st, f, to, text, colour, err)
	}
	for _, target := range []string{"/none", "/srv/data/f", "/out"} {
		empty := t.TempDir()
		if err := FromImage(empty, root, target); err != nil {
			t.Errorf("%s: %v", target, err)
		}
		if files, _ := os.ReadDir(empty); len(files) > 0 {
			t.Errorf("%s gives %v", target, files)
		}
	}
}
