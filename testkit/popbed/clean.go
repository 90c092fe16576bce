package popbed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// mountsBelow are the mount points at dir or below it, the newest first.
func mountsBelow(dir string) ([]string, error) {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var at []string
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) > 4 && (f[4] == dir || strings.HasPrefix(f[4], dir+"/")) {
			at = append(at, f[4])
		}
	}
	slices.Reverse(at)
	return at, nil
}

// unmountBelow detaches what is mounted below a directory.
func unmountBelow(dir string) error {
	return until(context.Background(), 10*time.Second, func() error {
		at, err := mountsBelow(dir)
		if err != nil || len(at) == 0 {
			return err
		}
		for _, m := range at {
			unix.Unmount(m, unix.MNT_DETACH)
		}
		if at, err = mountsBelow(dir); err == nil && len(at) > 0 {
			err = fmt.Errorf("still mounted: %v", at)
		}
		return err
	})
}

// removeDir removes a bed's directory with all mounts in it. It does not touch
// what a mount that cannot be taken away shows.
func removeDir(dir string) error {
	if err := unmountBelow(dir); err != nil {
		return err
	}
	return until(context.Background(), 10*time.Second, func() error { return os.RemoveAll(dir) })
}

// removeStaleDirs removes the directories of beds whose process is gone.
// testbed.RemoveStale has ended what ran in them.
func removeStaleDirs(log *slog.Logger) {
	dirs, _ := filepath.Glob("/var/tmp/dwp*p*")
	for _, dir := range dirs {
		var pid, bed int
		if n, _ := fmt.Sscanf(filepath.Base(dir), "dwp%dp%d", &pid, &bed); n == 2 &&
			errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			log.Info("remove the directory of a dead bed", "dir", dir)
			if err := errors.Join(endNodes(dir), removeDir(dir)); err != nil {
				log.Warn("it stays", "err", err)
			}
		}
	}
}

// endNodes ends the containers of a dead bed's nodes.
func endNodes(dir string) error {
	var errs []error
	for i := range maxNodes {
		name := fmt.Sprintf("n%d", i+1)
		n := &Node{NodeInfo: NodeInfo{Name: name, Dir: filepath.Join(dir, name)}}
		sockets := n.shimSockets()
		errs = append(errs, n.endContainers(), n.removeCgroups())
		for _, s := range sockets {
			os.Remove(s)
		}
	}
	return errors.Join(errs...)
}

// Leftovers lists what the machine has of the bed: mounts, namespaces, loop
// devices, processes, cgroups and files. After Close it is empty.
func (b *Bed) Leftovers() []string {
	left, err := mountsBelow(b.cfg.Dir)
	if err != nil {
		left = append(left, err.Error())
	}
	patterns := []string{"/run/netns/" + b.name + "-*", b.cfg.Dir}
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		patterns = append(patterns, fmt.Sprintf("%s/dewpoint-%d-%s-*", root, os.Getpid(), b.name))
		for i := range maxNodes {
			patterns = append(patterns, root+"/"+ParentCgroup(filepath.Join(b.cfg.Dir, fmt.Sprintf("n%d", i+1), "s")))
		}
	}
	for _, p := range patterns {
		at, _ := filepath.Glob(p)
		left = append(left, at...)
	}
	return append(left, saying(b.cfg.Dir, "/sys/block/loop*/loop/backing_file", "/proc/[0-9]*/cmdline")...)
}

// saying are the files that name a directory, with what they say.
func saying(dir string, patterns ...string) (found []string) {
	for _, p := range patterns {
		files, _ := filepath.Glob(p)
		for _, f := range files {
			if raw, _ := os.ReadFile(f); strings.Contains(string(raw), dir+"/") {
				found = append(found, f+": "+strings.ReplaceAll(string(raw), "\x00", " "))
			}
		}
	}
	return found
}
