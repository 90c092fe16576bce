package criu

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// yards are the empty directories that CRIU makes in order to mount what it restores; it removes them
// when it is done, unless it is killed.
const yards = "/tmp/.criu.mntns.*"

// sweepYards removes those that no CRIU which runs can have made: the ones that are there before none is seen
// to.
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

// isCRIU tells CRIU, and what it restores as long as that is not itself yet. Arguments do not say it: CRIU
// writes over them what it does (libbsd's setproctitle), and a dynamic loader may run it.
func isCRIU(pid int) bool {
	named := func(path string) bool { return filepath.Base(path) == "criu" }
	return slices.ContainsFunc(argsOf(pid), named) || slices.ContainsFunc(mappedBy(pid), named)
}

// mappedBy are the files that a process has in its memory; none if it has ended.
func mappedBy(pid int) (files []string) {
	b, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "maps"))
	for line := range bytes.Lines(b) {
		if at := bytes.IndexByte(line, '/'); at >= 0 {
			files = append(files, strings.TrimSuffix(string(bytes.TrimSpace(line[at:])), " (deleted)"))
		}
	}
	return slices.Compact(files)
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
