package tree

import (
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// TestMain has the tests unpack into memory where that file system takes all
// attributes (tmpfs from Linux 6.6 on): ext4 spends seconds of CPU time on
// looking for inodes that were not just deleted.
func TestMain(m *testing.M) {
	if takesAttributes("/dev/shm") {
		os.Setenv("TMPDIR", "/dev/shm")
	}
	goleak.VerifyTestMain(m)
}

func takesAttributes(dir string) bool {
	f, err := os.CreateTemp(dir, "dewpoint-")
	if err != nil {
		return false
	}
	defer os.Remove(f.Name())
	defer f.Close()
	return unix.Lsetxattr(filepath.Clean(f.Name()), "user.dewpoint", []byte("1"), 0) == nil
}
