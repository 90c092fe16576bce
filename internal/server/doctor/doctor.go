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

	"dewpoint/internal/layer/inflate"
	"dewpoint/internal/spec"

	"golang.org/x/sys/unix"
)

// Config says what to look at.
type Config struct {
	Root string   // the store's directory
	CNI  []string // directories of the CNI plugins
	Host string   // before the paths of other programs' configuration; "" is the machine's own
}

func finding(what, level, detail, remedy string) spec.Finding {
	return spec.Finding{What: what, Level: level, Detail: detail, Remedy: remedy}
}

// Examine looks at the node. What the parts of dewd know better themselves
// (mount backends, the engine) they add.
func Examine(ctx context.Context, cfg Config) []spec.Finding {
	return []spec.Finding{
		kernel(), memory(), disk(cfg.Root), cgroups(), inflater(),
		program(ctx, "runc", "--version", "apt-get install runc"),
		plugins(cfg.CNI), iptables(ctx), joined(ctx, cfg.Host, Knows),
	}
}

func kernel() spec.Finding {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return finding("kernel", spec.LevelBad, err.Error(), "")
	}
	str := func(b []byte) string { return string(bytes.TrimRight(b, "\x00")) }
	f := finding("kernel", spec.LevelOK, str(u.Release[:])+" "+str(u.Machine[:]), "")
	fs, err := os.ReadFile("/proc/filesystems")
	if err == nil && !strings.Contains(string(fs), "\toverlay\n") {
		f.Level, f.Detail, f.Remedy = spec.LevelBad, f.Detail+", no overlayfs",
			"modprobe overlay, or a kernel with CONFIG_OVERLAY_FS"
	}
	return f
}

func memory() spec.Finding {
	var s unix.Sysinfo_t
	if err := unix.Sysinfo(&s); err != nil {
		return finding("memory", spec.LevelBad, err.Error(), "")
	}
	total := uint64(s.Totalram) * uint64(s.Unit) >> 20
	f := finding("memory", spec.LevelOK, fmt.Sprintf("%d MiB", total), "")
	if total < 400 {
		f.Level, f.Remedy = spec.LevelNote,
			"dewd and containerd take about 100 MiB together; keep the rest for containers"
	}
	return f
}

// lowDisk is the free space below which pulls are likely to fail.
const lowDisk = 512 << 20

func disk(root string) spec.Finding {
	var s unix.Statfs_t
	dir := root
	for unix.Statfs(dir, &s) != nil && dir != "/" {
		dir = filepath.Dir(dir)
	}
	free := s.Bavail * uint64(s.Bsize)
	f := finding("disk", spec.LevelOK, fmt.Sprintf("%d MiB free for %s", free>>20, root), "")
	if free < lowDisk {
		f.Level, f.Remedy = spec.LevelBad, "free some space: \"dew prune\" removes what nothing uses"
	}
	return f
}

func cgroups() spec.Finding {
	var s unix.Statfs_t
	switch err := unix.Statfs("/sys/fs/cgroup", &s); {
	case err != nil:
		return finding("cgroups", spec.LevelBad, err.Error(), "mount the cgroup file systems")
	case s.Type == unix.CGROUP2_SUPER_MAGIC:
		return finding("cgroups", spec.LevelOK, "version 2", "")
	}
	if _, err := os.Stat("/sys/fs/cgroup/memory"); err != nil {
		return finding("cgroups", spec.LevelNote, "version 1 without the memory controller: --memory has no effect",
			"boot with cgroup_enable=memory")
	}
	return finding("cgroups", spec.LevelOK, "version 1", "")
}

func inflater() spec.Finding {
	e := inflate.Engine()
	f := finding("inflater", spec.LevelOK, e, "")
	if e == "go" {
		f.Level, f.Remedy = spec.LevelNote,
			"a build with ISA-L inflates faster: apt-get install libisal-dev, then make build"
	}
	return f
}

func program(ctx context.Context, name, arg, remedy string) spec.Finding {
	path, err := exec.LookPath(name)
	if err != nil {
		return finding(name, spec.LevelBad, "not found in PATH", remedy)
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, arg).CombinedOutput()
	line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	if err != nil {
		return finding(name, spec.LevelBad, fmt.Sprintf("%s: %v: %s", path, err, line), remedy)
	}
	return finding(name, spec.LevelOK, path+": "+line, "")
}

func plugins(dirs []string) spec.Finding {
	dir := strings.Join(dirs, ":")
	var missing []string
	for _, p := range []string{"bridge", "host-local", "portmap", "loopback"} {
		if !found(dirs, p) {
			missing = append(missing, p)
		}
	}
	if len(missing) > 0 {
		return finding("CNI plugins", spec.LevelNote,
			fmt.Sprintf("missing in %s: %s; --net bridge and -p do not work", dir, strings.Join(missing, ", ")),
			"apt-get install containernetworking-plugins")
	}
	return finding("CNI plugins", spec.LevelOK, dir, "")
}

func found(dirs []string, name string) bool {
	for _, d := range dirs {
		if _, err := os.Stat(filepath.Join(d, name)); err == nil {
			return true
		}
	}
	return false
}

func iptables(ctx context.Context) spec.Finding {
	f := program(ctx, "iptables", "--version", "apt-get install iptables")
	if f.Level == spec.LevelBad {
		f.Level = spec.LevelNote
		f.Detail += "; --net bridge and -p do not work"
	}
	return f
}
