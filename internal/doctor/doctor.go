// Package doctor finds out what a node can do, what it lacks, and the remedy.
//
// It tries things rather than reading versions, and it changes nothing that
// it does not undo.
package doctor

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"dewpoint/internal/inflate"
	"dewpoint/internal/node"

	"golang.org/x/sys/unix"
)

// Config says what to look at.
type Config struct {
	Root string   // the store's directory
	CNI  []string // directories of the CNI plugins
}

func finding(what, level, detail, remedy string) node.Finding {
	return node.Finding{What: what, Level: level, Detail: detail, Remedy: remedy}
}

// Examine looks at the node. What the parts of dewd know better themselves
// (mount backends, the engine) they add.
func Examine(ctx context.Context, cfg Config) []node.Finding {
	return []node.Finding{
		kernel(), memory(), disk(cfg.Root), cgroups(), inflater(),
		program(ctx, "runc", "--version", "apt-get install runc"),
		plugins(cfg.CNI), iptables(ctx),
	}
}

func kernel() node.Finding {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return finding("kernel", node.LevelBad, err.Error(), "")
	}
	str := func(b []byte) string { return string(bytes.TrimRight(b, "\x00")) }
	f := finding("kernel", node.LevelOK, str(u.Release[:])+" "+str(u.Machine[:]), "")
	fs, err := os.ReadFile("/proc/filesystems")
	if err == nil && !strings.Contains(string(fs), "\toverlay\n") {
		f.Level, f.Detail, f.Remedy = node.LevelBad, f.Detail+", no overlayfs", "modprobe overlay, or a kernel with CONFIG_OVERLAY_FS"
	}
	return f
}

func memory() node.Finding {
	var s unix.Sysinfo_t
	if err := unix.Sysinfo(&s); err != nil {
		return finding("memory", node.LevelBad, err.Error(), "")
	}
	total := uint64(s.Totalram) * uint64(s.Unit) >> 20
	f := finding("memory", node.LevelOK, fmt.Sprintf("%d MiB", total), "")
	if total < 400 {
		f.Level, f.Remedy = node.LevelNote, "dewd and containerd take about 100 MiB together; keep the rest for containers"
	}
	return f
}

// lowDisk is the free space below which pulls are likely to fail.
const lowDisk = 512 << 20

func disk(root string) node.Finding {
	var s unix.Statfs_t
	dir := root
	for unix.Statfs(dir, &s) != nil && dir != "/" {
		dir = filepath.Dir(dir)
	}
	free := s.Bavail * uint64(s.Bsize)
	f := finding("disk", node.LevelOK, fmt.Sprintf("%d MiB free for %s", free>>20, root), "")
	if free < lowDisk {
		f.Level, f.Remedy = node.LevelBad, "free some space: \"dew prune\" removes what nothing uses"
	}
	return f
}

func cgroups() node.Finding {
	var s unix.Statfs_t
	switch err := unix.Statfs("/sys/fs/cgroup", &s); {
	case err != nil:
		return finding("cgroups", node.LevelBad, err.Error(), "mount the cgroup file systems")
	case s.Type == unix.CGROUP2_SUPER_MAGIC:
		return finding("cgroups", node.LevelOK, "version 2", "")
	}
	if _, err := os.Stat("/sys/fs/cgroup/memory"); err != nil {
		return finding("cgroups", node.LevelNote, "version 1 without the memory controller: --memory has no effect", "boot with cgroup_enable=memory")
	}
	return finding("cgroups", node.LevelOK, "version 1", "")
}

func inflater() node.Finding {
	e := inflate.Engine()
	f := finding("inflater", node.LevelOK, e, "")
	if e == "go" {
		f.Level, f.Remedy = node.LevelNote, "a build with ISA-L inflates faster: apt-get install libisal-dev, then make build"
	}
	return f
}

func program(ctx context.Context, name, arg, remedy string) node.Finding {
	path, err := exec.LookPath(name)
	if err != nil {
		return finding(name, node.LevelBad, "not found in PATH", remedy)
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, arg).CombinedOutput()
	line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	if err != nil {
		return finding(name, node.LevelBad, fmt.Sprintf("%s: %v: %s", path, err, line), remedy)
	}
	return finding(name, node.LevelOK, path+": "+line, "")
}

func plugins(dirs []string) node.Finding {
	dir := strings.Join(dirs, ":")
	var missing []string
	for _, p := range []string{"bridge", "host-local", "portmap", "loopback"} {
		if !found(dirs, p) {
			missing = append(missing, p)
		}
	}
	if len(missing) > 0 {
		return finding("CNI plugins", node.LevelNote, fmt.Sprintf("missing in %s: %s; --net bridge and -p do not work", dir, strings.Join(missing, ", ")),
			"apt-get install containernetworking-plugins")
	}
	return finding("CNI plugins", node.LevelOK, dir, "")
}

func found(dirs []string, name string) bool {
	for _, d := range dirs {
		if _, err := os.Stat(filepath.Join(d, name)); err == nil {
			return true
		}
	}
	return false
}

func iptables(ctx context.Context) node.Finding {
	f := program(ctx, "iptables", "--version", "apt-get install iptables")
	if f.Level == node.LevelBad {
		f.Level = node.LevelNote
		f.Detail += "; --net bridge and -p do not work"
	}
	return f
}
