package shimgroup

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
)

func TestSocketIn(t *testing.T) {
	for name, said := range map[string]string{
		"containerd 1.6": "unix:///run/containerd/s/0af3",
		"JSON":           `{"version":2,"address":"unix:///run/containerd/s/0af3","protocol":"ttrpc"}`,
		"protobuf":       "\x08\x03\x12\x1dunix:///run/containerd/s/0af3\x1a\x05ttrpc",
	} {
		if got := socketIn([]byte(said)); got != "/run/containerd/s/0af3" {
			t.Errorf("%s: %q", name, got)
		}
	}
	for _, said := range []string{"", "unix:/", "nothing"} {
		if got := socketIn([]byte(said)); got != "" {
			t.Errorf("%q: %q", said, got)
		}
	}
}

// A group is usable while its socket listens, and takes the socket with it.
func TestSocketOfAGroup(t *testing.T) {
	tmp := t.TempDir()
	dir, socket := filepath.Join(tmp, "g"), filepath.Join(tmp, "s")
	if err := Make(dir, "/bin/true", "/bin/false"); err != nil {
		t.Fatal(err)
	}
	if l, err := filepath.EvalSymlinks(Path(dir)); err != nil || filepath.Base(l) != "true" {
		t.Errorf("start leads to %s: %v", l, err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // as of a process that was killed
	boot := []byte(scheme + socket)
	if !answers(boot) {
		t.Error("a socket that listens does not answer")
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if answers(boot) {
		t.Error("a dead socket answers")
	}
	if err := os.WriteFile(filepath.Join(dir, bootFile), boot, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := Remove(dir); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []string{dir, socket} {
		if _, err := os.Lstat(p); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", p, err)
		}
	}
}
