// Package sched lets a process answer soon while all processors are busy: the
// kernel is told that its threads want the processor for short times only, and
// in return lets them run soon after they wake. Their share of the processor
// stays what it was.
//
// Linux 6.12 and newer take the time that a thread of SCHED_NORMAL wants at once
// as its slice (sched_setattr(2), sched_runtime; kernel document
// scheduler/sched-eevdf), which earlier kernels ignore.
package sched

import (
	"os"
	"os/exec"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// slice is what a thread asks for at once, in nanoseconds. The kernel takes
// 100 µs to 100 ms, and gives 3 ms to who does not ask.
const slice = 200_000

// Prompt makes the threads of this process prompt, and those that they start.
func Prompt() error {
	done := map[string]bool{}
	for { // a thread that was not prompt yet may have started another meanwhile
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return err
		}
		before := len(done)
		for _, t := range threads {
			if done[t.Name()] {
				continue
			}
			done[t.Name()] = true
			id, _ := strconv.Atoi(t.Name())
			if err := ask(id, slice); err != nil && err != unix.ESRCH {
				return os.NewSyscallError("sched_setattr", err)
			}
		}
		if len(done) == before {
			return nil
		}
	}
}

// Start starts cmd as a process that is as any other: its threads, and what it starts,
// have the kernel's own slice.
func Start(cmd *exec.Cmd) error {
	// The process inherits from the thread that makes it. Go starts no thread from one that is locked.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if ask(0, 0) == nil {
		defer ask(0, slice)
	}
	return cmd.Start()
}

// ask sets the slice of a thread in nanoseconds, 0 for the kernel's own, and leaves its priority as it is.
func ask(thread int, slice uint64) error {
	has, err := unix.SchedGetAttr(thread, 0)
	if err != nil {
		return err
	}
	if has.Policy != unix.SCHED_NORMAL && has.Policy != unix.SCHED_BATCH {
		return nil // whoever set this knows better
	}
	has.Runtime, has.Deadline, has.Period = slice, 0, 0
	return unix.SchedSetAttr(thread, has, 0)
}
