package criu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"dewpoint/internal/checkpoint"
)

// found is what a container consists of.
type found struct {
	processes, threads int
	watched            []string // paths
}

// examine looks at the processes of a container by /proc, and gives an
// *UnfitError for what CRIU would refuse. It need not see all: what comes into
// being meanwhile, CRIU finds.
func examine(c checkpoint.Container) (found, error) {
	var f found
	if c.TTY {
		return f, &checkpoint.UnfitError{What: "the container has a terminal", Remedy: "run it without one"}
	}
	pids, err := members(c.PID)
	if err != nil {
		return f, err
	}
	others := !hasCapability(unix.CAP_SYS_RESOURCE)
	for _, pid := range pids {
		st, err := readStatus(pid)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it has ended
		}
		if err == nil {
			err = st.fit(pid, c.PID, others)
		}
		if err == nil {
			err = fitFiles(pid)
		}
		if err != nil {
			return f, err
		}
		f.processes++
		f.threads += st.threads
	}
	f.watched = watchPaths(c.PID, pids)
	return f, nil
}

// members are the processes of the container whose first process is root.
func members(root int) ([]int, error) {
	ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", root))
	if err != nil {
		return nil, fmt.Errorf("processes of the container: %w", err)
	}
	all, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, d := range all {
		pid, err := strconv.Atoi(d.Name())
		if err != nil {
			continue
		}
		if its, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid)); err == nil && its == ns {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// status is of a process what proc(5) calls so.
type status struct {
	name     string
	uids     []string
	innerPid []string // in each process namespace, the container's last
	inParent bool     // its parent is in the container
	threads  int
}

func readStatus(pid int) (status, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return status{}, err
	}
	var st status
	for line := range strings.Lines(string(b)) {
		key, value, _ := strings.Cut(line, ":")
		words := strings.Fields(value)
		switch {
		case len(words) == 0:
		case key == "Name":
			st.name = words[0]
		case key == "Uid":
			st.uids = words
		case key == "NSpid":
			st.innerPid = words
		case key == "Threads":
			st.threads, _ = strconv.Atoi(words[0])
		case key == "PPid":
			parent, _ := strconv.Atoi(words[0])
			st.inParent = sameNamespace(pid, parent)
		}
	}
	return st, nil
}

func sameNamespace(a, b int) bool {
	x, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", a))
	if err != nil {
		return false
	}
	y, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", b))
	return err == nil && x == y
}

func (st status) fit(pid, root int, onlyRoot bool) error {
	if pid != root && !st.inParent {
		return &checkpoint.UnfitError{
			What:   fmt.Sprintf("process %d (%s) was started by exec from outside", pid, st.name),
			Remedy: "wait for its end",
		}
	}
	notRoot := func(uid string) bool { return uid != "0" }
	if onlyRoot && slices.ContainsFunc(st.uids, notRoot) {
		return &checkpoint.UnfitError{
			What:   fmt.Sprintf("process %d (%s) runs as user %s", pid, st.name, st.uids[0]),
			Remedy: "CRIU reads such a process's limits only with CAP_SYS_RESOURCE, which this node's dewd lacks; give it, or run the processes as root",
		}
	}
	return nil
}

// anonymous are the kinds of descriptors without a file that CRIU cannot dump,
// by how their names begin.
var anonymous = []struct{ begins, what, remedy string }{
	{"anon_inode:[io_uring]", "uses io_uring", "run the container dumpable, without io_uring"},
	{"anon_inode:[perf_event]", "measures by perf events", "end that before"},
	{"anon_inode:bpf", "has loaded a BPF program", "end that before"},
	{"anon_inode:[userfaultfd]", "handles its own page faults (userfaultfd)", "end that before"},
	{"anon_inode:kvm", "runs a virtual machine", "such a container can only boot"},
	{"anon_inode:[landlock", "confines itself by Landlock", "such a container can only boot"},
	{"/dev/pts/", "has a terminal", "run it without one"},
	{"/dev/ptmx", "has a terminal", "run it without one"},
}

// harmless are the devices that every container has.
var harmless = []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/shm",
	"/dev/mqueue"}

func fitFiles(pid int) error {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	fds, err := os.ReadDir(dir)
	if err != nil {
		return nil // it has ended, or CRIU will say why
	}
	for _, fd := range fds {
		to, err := os.Readlink(filepath.Join(dir, fd.Name()))
		if err != nil {
			continue
		}
		if what, remedy := unfitFile(to); what != "" {
			st, _ := readStatus(pid)
			return &checkpoint.UnfitError{What: fmt.Sprintf("process %d (%s) %s", pid, st.name, what), Remedy: remedy}
		}
	}
	return nil
}

// unfitFile says what is wrong with an open file, by what /proc shows of it.
func unfitFile(to string) (what, remedy string) {
	for _, a := range anonymous {
		if strings.HasPrefix(to, a.begins) {
			return a.what, a.remedy
		}
	}
	if !strings.HasPrefix(to, "/dev/") || slices.ContainsFunc(harmless, func(h string) bool {
		return to == h || strings.HasPrefix(to, h+"/")
	}) {
		return "", ""
	}
	return "uses the device " + to, "such a container can only boot"
}

// hasCapability says whether this process has a capability in effect.
func hasCapability(c int) bool {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var d [2]unix.CapUserData
	return unix.Capget(&h, &d[0]) == nil && d[c/32].Effective&(1<<(c%32)) != 0
}
