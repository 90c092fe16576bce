package cgroup

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"dewpoint/testkit"

	"golang.org/x/sys/unix"
)

// TestFreezerOfVersion2 stops a process by cgroup version 2, which a machine that has its controllers
// in version 1 has beside it.
func TestFreezerOfVersion2(t *testing.T) {
	testkit.NeedRoot(t, "it makes a cgroup")
	root := "/sys/fs/cgroup"
	if !Unified() {
		root += "/unified"
	}
	var st unix.Statfs_t
	if err := unix.Statfs(root, &st); err != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
		t.Fatalf("there is no cgroup version 2 at %s: %v", root, err)
	}
	dir, err := os.MkdirTemp(root, "dewpoint-freeze-")
	if err != nil {
		t.Fatal(err)
	}
	p := exec.Command("sleep", "1000")
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = p.Process.Kill()
		_ = p.Wait()
		testkit.Retry(t, "the group goes", func() error { return unix.Rmdir(dir) })
	}()
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(p.Process.Pid)),
		0); err != nil {
		t.Fatal(err)
	}
	f := freezerIn(dir)
	for _, frozen := range []bool{false, true, true, false, true, false} {
		if err := f.Set(frozen); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, fmt.Sprintf("it is frozen: %v", frozen), func() bool {
			got, err := f.Frozen()
			if err != nil {
				t.Fatal(err)
			}
			return got == frozen
		})
	}
}
