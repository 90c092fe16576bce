package sched

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// sliceOf is what the kernel gives a thread at once, in nanoseconds.
func sliceOf(t *testing.T, pid int) uint64 {
	t.Helper()
	a, err := unix.SchedGetAttr(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	return a.Runtime
}

// kernelKnowsSlices says whether slices can be asked for here; where not, asking does nothing and fails
// nobody.
func kernelKnowsSlices(t *testing.T) bool {
	t.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	v := strings.SplitN(unix.ByteSliceToString(u.Release[:]), ".", 3)
	major, _ := strconv.Atoi(v[0])
	minor, _ := strconv.Atoi(v[1])
	return major > 6 || major == 6 && minor >= 12
}

func TestPrompt(t *testing.T) {
	own := sliceOf(t, 0)
	if err := Prompt(); err != nil {
		t.Fatal(err)
	}
	want := own
	if kernelKnowsSlices(t) {
		want = slice
	}
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, th := range threads {
		id, _ := strconv.Atoi(th.Name())
		if got := sliceOf(t, id); got != want {
			t.Errorf("thread %d has a slice of %d ns, want %d", id, got, want)
		}
	}

	// What is started as any other process has what it had before, however many are started at once, ...
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			cmd := exec.Command("sleep", "60")
			if err := Start(cmd); err != nil {
				t.Error(err)
				return
			}
			defer cmd.Wait()
			defer cmd.Process.Kill()
			if a, err := unix.SchedGetAttr(cmd.Process.Pid, 0); err != nil || a.Runtime != own {
				t.Errorf("a process started as any other: %+v %v, want a slice of %d ns", a, err, own)
			}
		})
	}
	all.Wait()

	// ... and who started it is prompt again.
	threads, err = os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, th := range threads {
		id, _ := strconv.Atoi(th.Name())
		if got := sliceOf(t, id); got != want {
			t.Errorf("afterwards thread %d has a slice of %d ns, want %d", id, got, want)
		}
	}
}
