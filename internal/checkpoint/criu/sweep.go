package criu

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// sweepProbe ends what a probe has left that was ended in the middle: CRIU, which is known by the
// probe's directory among its arguments, and the process that it dumps or has restored. What CRIU
// has not met yet ends by itself (sleepTime).
func sweepProbe(dir string) {
	for _, pid := range processes() {
		args := argsOf(pid)
		if !slices.Contains(args, dir) {
			continue
		}
		if at := slices.Index(args, "-t"); at >= 0 && at+1 < len(args) {
			if target, err := strconv.Atoi(args[at+1]); err == nil {
				endSleeper(target)
			}
		}
		for _, child := range processes() {
			if parentOf(child) == pid {
				endSleeper(child)
			}
		}
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	// CRIU may have ended with the daemon, and what it has restored not.
	if b, err := os.ReadFile(filepath.Join(dir, pidFile)); err == nil {
		if pid, err := strconv.Atoi(string(bytes.TrimSpace(b))); err == nil {
			for range 100 { // until it is itself
				endSleeper(pid)
				if unix.Kill(pid, 0) != nil || len(argsOf(pid)) > 0 && !isCRIU(pid) {
					break
				}
				time.Sleep(10 * time.Millisecond)
			}
		}
	}
}

// endSleeper kills a process that is a probe's, and no other that may have its number by now.
func endSleeper(pid int) {
	if slices.Equal(argsOf(pid), []string{"sleep", sleepTime}) {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

// yards are the empty directories that CRIU makes in order to mount what it restores; it removes them
// when it is done, unless it is killed.
const yards = "/tmp/.criu.mntns.*"

// sweepYards removes those that no CRIU which runs can have made: the ones that are there before none is seen to.
func sweepYards() {
	sweepUnless(yards, func() bool { return slices.ContainsFunc(processes(), isCRIU) })
}

func sweepUnless(pattern string, runs func() bool) {
	all, _ := filepath.Glob(pattern)
	if len(all) == 0 || runs() {
		return
	}
	for _, y := range all {
		_ = unix.Rmdir(y) // what has something in it stays
	}
}

// isCRIU tells CRIU, and what it restores as long as that is not itself yet.
func isCRIU(pid int) bool {
	return slices.ContainsFunc(argsOf(pid), func(arg string) bool { return filepath.Base(arg) == "criu" })
}

func processes() (pids []int) {
	all, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range all {
		if pid, err := strconv.Atoi(filepath.Base(p)); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// argsOf is a process's command line; nil if there is none.
func argsOf(pid int) (args []string) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
	if err != nil || len(b) == 0 {
		return nil
	}
	for _, a := range bytes.Split(bytes.TrimSuffix(b, []byte{0}), []byte{0}) {
		args = append(args, string(a))
	}
	return args
}

// parentOf is 0 if the process is gone.
func parentOf(pid int) int {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0
	}
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:]) // state, parent, …
	if len(f) < 2 {
		return 0
	}
	parent, _ := strconv.Atoi(string(f[1]))
	return parent
}
