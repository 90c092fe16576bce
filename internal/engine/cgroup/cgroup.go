// Package cgroup works on a container's control group, which has the same path below the mount of each
// hierarchy: one of cgroup version 2, or one for each controller of version 1.
package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/sched"
)

const mounts = "/sys/fs/cgroup"

// Unified says whether the machine has cgroup v2 alone.
func Unified() bool {
	var st unix.Statfs_t
	return unix.Statfs(mounts, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
}

// Dir is the directory of a cgroup in the hierarchy that carries controller.
func Dir(cgroup, controller string) string {
	if Unified() {
		return path.Join(mounts, cgroup)
	}
	return path.Join(mounts, controller, cgroup)
}

// Dirs are those of a cgroup that are there; on version 2 the one that it has, or would have.
func Dirs(cgroup string) []string {
	if Unified() {
		return []string{filepath.Join(mounts, cgroup)}
	}
	dirs, _ := filepath.Glob(filepath.Join(mounts, "*", cgroup))
	return dirs
}

// Remove removes a cgroup from every hierarchy where nothing is in it: the kernel refuses to remove another.
func Remove(cgroup string) {
	for _, d := range Dirs(cgroup) {
		_ = unix.Rmdir(d)
	}
}

// Processes are the numbers of those in a cgroup. The error is os.ErrNotExist if there is no such cgroup.
func Processes(cgroup string) ([]string, error) {
	procs, err := os.ReadFile(filepath.Join(Dir(cgroup, "freezer"), "cgroup.procs"))
	return strings.Fields(string(procs)), err
}

// Kill kills what is in a cgroup, in any hierarchy, and does not wait.
func Kill(cgroup string) {
	for _, d := range Dirs(cgroup) {
		b, _ := os.ReadFile(filepath.Join(d, "cgroup.procs"))
		for _, f := range strings.Fields(string(b)) {
			if pid, err := strconv.Atoi(f); err == nil && pid > 1 {
				_ = unix.Kill(pid, unix.SIGKILL) // it may be gone
			}
		}
	}
}

// End kills what is in a cgroup until nothing is, or ctx ends.
func End(ctx context.Context, cgroup string) error {
	for {
		procs, err := Processes(cgroup)
		if errors.Is(err, os.ErrNotExist) || err == nil && len(procs) == 0 {
			return nil
		}
		if err != nil {
			return err
		}
		Kill(cgroup)
		if !sched.Sleep(ctx, 5*time.Millisecond) {
			return fmt.Errorf("processes %s survive SIGKILL: %w", strings.Join(procs, ", "), ctx.Err())
		}
	}
}
