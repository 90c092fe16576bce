package criu

import (
	"bufio"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// inode names a file as /proc and stat(2) both can.
type inode struct {
	dev uint64 // as the kernel has it, not as stat(2) tells
	ino uint64
}

// watchPaths are the paths of what the processes watch by inotify in the
// container's root. CRIU needs them where overlayfs cannot open a file by its
// handle, which it only does with nfs_export. Elsewhere (volumes, tmpfs) CRIU
// finds them itself.
func watchPaths(root int, pids []int) []string {
	dir := fmt.Sprintf("/proc/%d/root/", root)
	var st unix.Stat_t
	if unix.Stat(dir, &st) != nil {
		return nil
	}
	dev := kernelDev(st.Dev)
	wanted := make(map[inode]bool)
	for _, pid := range pids {
		for _, w := range watches(pid) {
			if w.dev == dev {
				wanted[w] = true
			}
		}
	}
	var paths []string
	// Most watch directories, of which there are few.
	for _, files := range []bool{false, true} {
		if len(wanted) > 0 {
			paths = append(paths, search(dir, dev, wanted, files)...)
		}
	}
	return paths
}

func kernelDev(dev uint64) uint64 { return uint64(unix.Major(dev))<<20 | uint64(unix.Minor(dev)) }

// watches reads what a process watches: lines such as
//
//	inotify wd:1 ino:a1c0e1 sdev:27 mask:100 ignored_mask:0 …
func watches(pid int) []inode {
	fds, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	var all []inode
	for _, fd := range fds {
		if to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name())); to != "anon_inode:inotify" {
			continue
		}
		f, err := os.Open(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, fd.Name()))
		if err != nil {
			continue
		}
		for s := bufio.NewScanner(f); s.Scan(); {
			if w, ok := parseWatch(s.Text()); ok {
				all = append(all, w)
			}
		}
		f.Close()
	}
	return all
}

func parseWatch(line string) (inode, bool) {
	var w inode
	if !strings.HasPrefix(line, "inotify ") {
		return w, false
	}
	for _, word := range strings.Fields(line) {
		key, value, _ := strings.Cut(word, ":")
		n, err := strconv.ParseUint(value, 16, 64)
		switch {
		case err != nil:
		case key == "ino":
			w.ino = n
		case key == "sdev":
			w.dev = n
		}
	}
	return w, w.ino != 0
}

// search walks the container's root and returns the paths of what is wanted,
// which it takes from the set. Without files it looks at directories only.
func search(root string, dev uint64, wanted map[inode]bool, files bool) []string {
	var paths []string
	_ = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() && !files {
			return nil
		}
		var st unix.Stat_t
		if unix.Lstat(p, &st) != nil {
			return nil
		}
		if d.IsDir() && kernelDev(st.Dev) != dev {
			return fs.SkipDir // another mount
		}
		if w := (inode{dev, st.Ino}); wanted[w] {
			delete(wanted, w)
			paths = append(paths, "/"+strings.TrimPrefix(p, root))
		}
		if len(wanted) == 0 {
			return fs.SkipAll
		}
		return nil
	})
	return paths
}
