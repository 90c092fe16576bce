package criu

import "golang.org/x/sys/unix"

// cgroupMode is "v2", or "v1", or "hybrid" if version 2 is there too.
func cgroupMode() string {
	is2 := func(dir string) bool {
		var st unix.Statfs_t
		return unix.Statfs(dir, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
	}
	switch {
	case is2("/sys/fs/cgroup"):
		return "v2"
	case is2("/sys/fs/cgroup/unified"):
		return "hybrid"
	}
	return "v1"
}
