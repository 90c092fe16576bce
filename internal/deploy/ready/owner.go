package ready

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"dewpoint/internal/spec"
)

// TakenError says that somebody listens on the port of a check already.
type TakenError struct {
	Port uint16
	By   string // "pid 12 (nginx)", or "another process"
}

func (e *TakenError) Error() string {
	return fmt.Sprintf("port %d is taken by %s", e.Port, e.By)
}

// Conflict returns a *TakenError when the check's port on the host's network
// is listened on. To be asked before the container starts.
func Conflict(c spec.ReadyCheck) error {
	if c.Kind != spec.ReadyTCP && c.Kind != spec.ReadyHTTP {
		return nil
	}
	socks, err := listeners("/proc/self/net", c.Port)
	if err != nil || len(socks) == 0 {
		return err
	}
	return &TakenError{c.Port, holder(socks)}
}

// owns returns nil if a process of the container listens on the port.
func (t *Target) owns(port uint16) error {
	if t.Pid <= 0 {
		return nil
	}
	socks, err := listeners("/proc/self/net", port)
	if err != nil {
		return err
	}
	pids, err := members(t.Pid)
	if err != nil {
		return err
	}
	for _, p := range pids {
		if holds(p, socks) {
			return nil
		}
	}
	return &TakenError{port, holder(socks)}
}

// listeners gives the inodes of the TCP sockets that listen on port, in the
// form in which /proc/PID/fd names them.
func listeners(dir string, port uint16) (map[string]bool, error) {
	socks := make(map[string]bool)
	suffix := fmt.Sprintf(":%04X", port)
	for _, table := range []string{"tcp", "tcp6"} {
		f, err := os.Open(filepath.Join(dir, table))
		if errors.Is(err, os.ErrNotExist) {
			continue // no IPv6
		}
		if err != nil {
			return nil, err
		}
		sc := bufio.NewScanner(f)
		for sc.Scan() {
			if past(sc.Text()) {
				break
			}
			if inode, ok := listening(sc.Text(), suffix); ok {
				socks["socket:["+inode+"]"] = true
			}
		}
		err = sc.Err()
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", table, err)
		}
	}
	return socks, nil
}

// listening reads a line of /proc/net/tcp: the second field is the local
// address, the fourth the state (0A listens), the tenth the inode.
func listening(line, suffix string) (inode string, ok bool) {
	f := strings.Fields(line)
	if len(f) < 10 || f[3] != "0A" || !strings.HasSuffix(f[1], suffix) {
		return "", false
	}
	return f[9], true
}

// past says that a line is beyond the listening sockets, which the kernel
// lists first.
func past(line string) bool {
	f := strings.Fields(line)
	return len(f) >= 10 && f[0] != "sl" && f[3] != "0A"
}

func holds(pid int, socks map[string]bool) bool {
	dir := "/proc/" + strconv.Itoa(pid) + "/fd"
	d, err := os.Open(dir)
	if err != nil {
		return false
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	for _, n := range names {
		if l, err := os.Readlink(path.Join(dir, n)); err == nil && socks[l] {
			return true
		}
	}
	return false
}

// holder names a process that has one of the sockets.
func holder(socks map[string]bool) string {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		pid, err := strconv.Atoi(filepath.Base(d))
		if err != nil || !holds(pid, socks) {
			continue
		}
		comm, _ := os.ReadFile(d + "/comm")
		return fmt.Sprintf("pid %d (%s)", pid, strings.TrimSpace(string(comm)))
	}
	return "another process"
}

// members are the processes of a container, found by the cgroup of its first
// process: in the pids hierarchy of cgroup v1, else in v2's.
func members(pid int) ([]int, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if err != nil {
		return nil, err
	}
	dir := cgroupDir(string(b))
	if dir == "" {
		return nil, fmt.Errorf("cgroup of pid %d is not understood", pid)
	}
	var pids []int
	err = filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil || d.Name() != "cgroup.procs" {
			return nil // what goes away meanwhile has no processes
		}
		procs, _ := os.ReadFile(p)
		for _, f := range strings.Fields(string(procs)) {
			if n, err := strconv.Atoi(f); err == nil {
				pids = append(pids, n)
			}
		}
		return nil
	})
	return pids, err
}

// cgroupDir finds the directory in the lines of /proc/PID/cgroup.
func cgroupDir(lines string) string {
	unified := ""
	for _, l := range strings.Split(lines, "\n") {
		f := strings.SplitN(l, ":", 3)
		if len(f) != 3 || f[2] == "/" {
			continue
		}
		if f[1] == "pids" {
			return path.Join("/sys/fs/cgroup/pids", f[2])
		}
		if f[0] == "0" {
			unified = path.Join("/sys/fs/cgroup", f[2])
		}
	}
	return unified
}
