// Package doctor finds out what a node can do, what it lacks, and the remedy.
//
// It tries things rather than reading versions, and it changes nothing that
// it does not undo.
package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"dewpoint/internal/inflate"

	"golang.org/x/sys/unix"
)

// Level says how much a finding matters.
type Level string

const (
	OK   Level = "ok"
	Note Level = "note" // works, though better is possible
	Bad  Level = "bad"  // something does not work
)

// Finding is one thing that was looked at.
type Finding struct {
	What   string `json:"what"`
	Level  Level  `json:"level"`
	Detail string `json:"detail"`
	Remedy string `json:"remedy,omitempty"`
}

// Config says what to look at.
type Config struct {
	Root       string // the store's directory
	Containerd string // of the engine in use: version and socket, or why there is none
	CNI        string // directory of the CNI plugins
}

// Examine looks at the node. What the parts of dewd know better themselves
// (mount backends, the engine) they add.
func Examine(ctx context.Context, cfg Config) []Finding {
	return []Finding{
		kernel(), memory(), disk(cfg.Root), cgroups(), inflater(),
		program(ctx, "runc", "--version", "apt-get install runc"),
		plugins(cfg.CNI), iptables(ctx),
	}
}

func kernel() Finding {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return Finding{"kernel", Bad, err.Error(), ""}
	}
	str := func(b []byte) string { return string(bytes.TrimRight(b, "\x00")) }
	f := Finding{"kernel", OK, str(u.Release[:]) + " " + str(u.Machine[:]), ""}
	fs, err := os.ReadFile("/proc/filesystems")
	if err == nil && !strings.Contains(string(fs), "\toverlay\n") {
		f.Level, f.Detail, f.Remedy = Bad, f.Detail+", no overlayfs", "modprobe overlay, or a kernel with CONFIG_OVERLAY_FS"
	}
	return f
}

func memory() Finding {
	var s unix.Sysinfo_t
	if err := unix.Sysinfo(&s); err != nil {
		return Finding{"memory", Bad, err.Error(), ""}
	}
	total := uint64(s.Totalram) * uint64(s.Unit) >> 20
	f := Finding{"memory", OK, fmt.Sprintf("%d MiB", total), ""}
	if total < 400 {
		f.Level, f.Remedy = Note, "dewd and containerd take about 100 MiB together; keep the rest for containers"
	}
	return f
}

// lowDisk is the free space below which pulls are likely to fail.
const lowDisk = 512 << 20

func disk(root string) Finding {
	var s unix.Statfs_t
	dir := root
	for unix.Statfs(dir, &s) != nil && dir != "/" {
		dir = filepath.Dir(dir)
	}
	free := s.Bavail * uint64(s.Bsize)
	f := Finding{"disk", OK, fmt.Sprintf("%d MiB free for %s", free>>20, root), ""}
	if free < lowDisk {
		f.Level, f.Remedy = Bad, "free some space: \"dew prune\" removes what nothing uses"
	}
	return f
}

func cgroups() Finding {
	var s unix.Statfs_t
	switch err := unix.Statfs("/sys/fs/cgroup", &s); {
	case err != nil:
		return Finding{"cgroups", Bad, err.Error(), "mount the cgroup file systems"}
	case s.Type == unix.CGROUP2_SUPER_MAGIC:
		return Finding{"cgroups", OK, "version 2", ""}
	}
	if _, err := os.Stat("/sys/fs/cgroup/memory"); err != nil {
		return Finding{"cgroups", Note, "version 1 without the memory controller: --memory has no effect", "boot with cgroup_enable=memory"}
	}
	return Finding{"cgroups", OK, "version 1", ""}
}

func inflater() Finding {
	e := inflate.Engine()
	f := Finding{"inflater", OK, e, ""}
	if e == "go" {
		f.Level, f.Remedy = Note, "a build with ISA-L inflates faster: apt-get install libisal-dev, then make build"
	}
	return f
}

func program(ctx context.Context, name, arg, remedy string) Finding {
	path, err := exec.LookPath(name)
	if err != nil {
		return Finding{name, Bad, "not found in PATH", remedy}
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, arg).CombinedOutput()
	line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	if err != nil {
		return Finding{name, Bad, fmt.Sprintf("%s: %v: %s", path, err, line), remedy}
	}
	return Finding{name, OK, path + ": " + line, ""}
}

func plugins(dir string) Finding {
	var missing []string
	for _, p := range []string{"bridge", "host-local", "portmap", "loopback"} {
		if _, err := os.Stat(filepath.Join(dir, p)); errors.Is(err, os.ErrNotExist) {
			missing = append(missing, p)
		}
	}
	if len(missing) > 0 {
		return Finding{"CNI plugins", Note, fmt.Sprintf("missing in %s: %s; --net bridge and -p do not work", dir, strings.Join(missing, ", ")),
			"apt-get install containernetworking-plugins"}
	}
	return Finding{"CNI plugins", OK, dir, ""}
}

func iptables(ctx context.Context) Finding {
	f := program(ctx, "iptables", "--version", "apt-get install iptables")
	if f.Level == Bad {
		f.Level = Note
		f.Detail += "; --net bridge and -p do not work"
	}
	return f
}
