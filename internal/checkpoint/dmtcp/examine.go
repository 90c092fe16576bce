package dmtcp

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/checkpoint"
)

// unfit is what DMTCP drops without a word, or waits for without an end, by what
// the link of an open file begins with.
var unfit = []struct{ link, what, remedy string }{
	{"anon_inode:[io_uring]", "it uses io_uring", "turn that off in the application"},
	{"anon_inode:[pidfd]", "it holds a process by a pidfd", byCRIU},
	{"anon_inode:[timerfd]", "it uses a timerfd", byCRIU},
	{"anon_inode:[userfaultfd]", "it uses userfaultfd", byCRIU},
	{"anon_inode:inotify", "it watches files by inotify", byCRIU},
	{"/memfd:", "it holds an anonymous file (memfd)", byCRIU},
}

const byCRIU = "checkpoint it by CRIU"

// examine counts the processes and threads that belong to the application, and
// gives an *UnfitError for what is known not to start again. A connection to a
// program without DMTCP has the coordinator wait for ever with all processes
// stopped.
func examine(c checkpoint.Container) (checkpoint.Dumped, error) {
	var d checkpoint.Dumped
	if c.TTY {
		return d, &checkpoint.UnfitError{What: "the container has a terminal", Remedy: "run it without one"}
	}
	ns, err := os.Readlink(pidDir(c.PID) + "/ns/pid")
	if err != nil {
		return d, fmt.Errorf("processes of the container: %w", err)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return d, err
	}
	for _, f := range entries {
		pid, err := strconv.Atoi(f.Name())
		if err != nil || pid == c.PID {
			continue
		}
		if its, err := os.Readlink(pidDir(pid) + "/ns/pid"); err != nil || its != ns {
			continue
		}
		if err := examineProcess(pid, &d); err != nil {
			return d, err
		}
	}
	if n := connected(c.PID); n > 0 {
		return d, &checkpoint.UnfitError{What: fmt.Sprintf("it has open connections (%d ends)", n),
			Remedy: "checkpoint when they are closed; CRIU closes them in the clones"}
	}
	return d, nil
}

func examineProcess(pid int, d *checkpoint.Dumped) error {
	program, _ := os.Readlink(pidDir(pid) + "/exe")
	if strings.HasPrefix(filepath.Base(program), "dmtcp_") {
		return nil
	}
	maps, err := os.ReadFile(pidDir(pid) + "/maps")
	if err != nil || len(maps) == 0 {
		return nil // it has ended
	}
	if !strings.Contains(string(maps), "/libdmtcp") {
		return &checkpoint.UnfitError{What: fmt.Sprintf("process %d (%s) does not carry DMTCP", pid,
			filepath.Base(program)),
			Remedy: "wait until what exec started has ended; programs that are linked statically need CRIU"}
	}
	if err := examineFiles(pid); err != nil {
		return err
	}
	threads, _ := os.ReadDir(pidDir(pid) + "/task")
	d.Processes++
	d.Threads += max(len(threads)-1, 1) // one is DMTCP's own
	return nil
}

// protected is the first of the descriptors that are DMTCP's own.
const protected = 820

func examineFiles(pid int) error {
	files, _ := os.ReadDir(pidDir(pid) + "/fd")
	for _, f := range files {
		if n, err := strconv.Atoi(f.Name()); err != nil || n >= protected {
			continue
		}
		link, _ := os.Readlink(filepath.Join(pidDir(pid), "fd", f.Name()))
		for _, u := range unfit {
			if strings.HasPrefix(link, u.link) {
				return &checkpoint.UnfitError{What: u.what, Remedy: u.remedy}
			}
		}
		if info, _ := os.ReadFile(filepath.Join(pidDir(pid), "fdinfo", f.Name())); strings.Contains(string(info),
			"\nlock:") {
			return &checkpoint.UnfitError{What: "it holds a lock on " + link, Remedy: byCRIU}
		}
	}
	return nil
}

// connected counts the ends of TCP connections that are established in the network of a
// process, without those to the coordinator.
func connected(pid int) int {
	n := 0
	for _, file := range []string{"tcp", "tcp6"} {
		table, _ := os.ReadFile(filepath.Join(pidDir(pid), "net", file))
		for line := range strings.Lines(string(table)) {
			f := strings.Fields(line)
			if len(f) > 3 && f[3] == "01" && !isCoordinator(f[1]) && !isCoordinator(f[2]) {
				n++
			}
		}
	}
	return n
}

func isCoordinator(address string) bool {
	_, p, _ := strings.Cut(address, ":")
	n, err := strconv.ParseUint(p, 16, 16)
	return err == nil && strconv.FormatUint(n, 10) == port
}

func changeTime(file string) (time.Time, error) {
	var st unix.Stat_t
	if err := unix.Lstat(file, &st); err != nil {
		return time.Time{}, &os.PathError{Op: "stat", Path: file, Err: err}
	}
	return time.Unix(st.Ctim.Unix()), nil
}
