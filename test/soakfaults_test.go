//go:build soak

package test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"dewpoint/testkit/registrytest"

	"golang.org/x/sys/unix"
)

// fault is something that goes wrong while an operation is under way.
type fault struct {
	name string
	// begin has it go wrong on node i; at is a number that chooses where. heal undoes it, and waits until the
	// node serves again.
	begin func(s *soak, i, at int) (heal func())
}

// soakFaults are those of a node, or of a PoP.
func soakFaults(nodes int) []fault {
	all := []fault{
		{"dewd is killed", func(s *soak, i, _ int) func() {
			s.must(s.KillDewd(s.t.Context(), i))
			return func() { s.must(s.StartDewd(s.t.Context(), i)) }
		}},
		{"containerd is killed", kills("/containerd\x00")},
		{"datafs is killed", kills("\x00datafs\x00")},
		{"power is cut", func(s *soak, i, _ int) func() {
			for _, c := range s.known[i] {
				c.running, c.cut = false, true
			}
			s.must(s.KillNode(i))
			return func() { s.must(s.RebootNode(s.t.Context(), i)) }
		}},
		{"dewd is killed at a sync", stopsAt("fsync,fdatasync,syncfs,sync_file_range", "signal=SIGKILL", 6)},
		{"a sync fails", stopsAt("fsync,fdatasync,syncfs", "error=EIO", 6)},
		{"the disk is full", stopsAt("pwrite64,fallocate,mkdirat,ftruncate", "error=ENOSPC", 12)},
		{"memory is short", shortOfMemory},
		{"the clock is another one", func(s *soak, i, at int) func() {
			s.must(s.KillDewd(s.t.Context(), i))
			s.clocks.set(i, []string{"", "1970", "2065"}[at%3])
			s.must(s.StartDewd(s.t.Context(), i))
			return func() {} // it stays so
		}},
		{"the node is frozen", func(s *soak, i, _ int) func() {
			s.must(s.FreezeNode(i))
			time.Sleep(time.Second)
			s.must(s.ThawNode(i))
			return func() {}
		}},
	}
	for _, f := range []registrytest.Fault{{Do: registrytest.Cut}, {Do: registrytest.Stall},
		{Do: registrytest.Slow}, {Do: registrytest.Flip}, {Do: registrytest.WrongBytes}, {Do: registrytest.Short},
		{Do: registrytest.IgnoreRange}, {Do: registrytest.Hang},
		{Do: registrytest.Status, Status: 503, Path: registrytest.Anywhere}} {
		all = append(all, fault{fmt.Sprintf("the registry fails by %d", f.Do), func(s *soak, _, at int) func() {
			f.At = int64(at)
			s.reg.Fail(f)
			return s.reg.Heal
		}})
	}
	if nodes == 1 {
		return all
	}
	ctx := context.Background()
	return append(all, fault{"Redis hangs", func(s *soak, _, _ int) func() {
		s.must(s.HangRedis(true))
		return func() { s.must(s.HangRedis(false)) }
	}}, fault{"Redis is killed", func(s *soak, _, at int) func() {
		s.must(s.KillRedis())
		return func() { s.must(s.StartRedis(ctx, at%2 == 0)) } // half of the time without its memory
	}}, fault{"Redis is out of reach", func(s *soak, i, _ int) func() {
		s.must(s.PartitionRedis(i))
		return func() { s.must(s.HealRedis(i)) }
	}}, fault{"the store is lost", func(s *soak, i, _ int) func() {
		s.must(s.LoseStore(i))
		return func() { s.must(s.MountStore(ctx, i)) }
	}}, fault{"the store is full", func(s *soak, _, _ int) func() {
		s.must(s.FillStore(ctx))
		return func() { s.must(s.FreeStore(ctx)) }
	}}, fault{"the node is cut off", func(s *soak, i, _ int) func() {
		s.must(s.LoseNode(i))
		return func() { s.must(s.ReturnNode(i)) }
	}}, fault{"another node's power is cut", func(s *soak, i, at int) func() {
		power := slices.IndexFunc(s.faults, func(f fault) bool { return f.name == "power is cut" })
		return s.faults[power].begin(s, (i+1)%len(s.Nodes), at)
	}}, fault{"another node is frozen", func(s *soak, i, _ int) func() {
		s.must(s.FreezeNode((i + 1) % len(s.Nodes)))
		return func() { s.must(s.ThawNode((i + 1) % len(s.Nodes))) }
	}})
}

// pids are the programs of a node whose command line has the word.
func (s *soak) pids(i int, word string) (pids []int) {
	for _, pid := range s.Nodes[i].Group().Processes("") {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if strings.Contains("\x00"+string(line), word) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// kills is a fault that kills one of the node's programs, which dewd starts again.
func kills(word string) func(*soak, int, int) func() {
	return func(s *soak, i, _ int) func() {
		for _, pid := range s.pids(i, word) {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		return func() {}
	}
}

// stopsAt is a fault of the kernel's: the system calls of dewd, from one of their next ones on, do what
// strace is told.
func stopsAt(calls, what string, wide int) func(*soak, int, int) func() {
	return func(s *soak, i, at int) func() {
		pids := s.pids(i, "/dewd\x00--config\x00")
		if len(pids) != 1 {
			s.t.Errorf("n%d has %d dewds", i+1, len(pids))
			return func() {}
		}
		cmd := exec.Command("strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace="+calls, "-e",
			fmt.Sprintf("inject=%s:%s:when=%d+", calls, what, 1+at%wide), "-p", strconv.Itoa(pids[0]))
		if err := s.Nodes[i].Group().StartBeside(cmd); err != nil {
			s.t.Error(err)
		}
		return func() {
			cmd.Process.Kill() // it heeds no other signal while dewd ends
			cmd.Wait()
			s.must(s.KillDewd(s.t.Context(), i))
			s.must(s.StartDewd(s.t.Context(), i))
		}
	}
}

// shortOfMemory has the dewd of a node and its children live with 8 to 40 MiB more than they have. If the
// kernel kills it, it is started again.
func shortOfMemory(s *soak, i, at int) func() {
	dir := fmt.Sprintf("/sys/fs/cgroup/memory/dewpoint-soak-%d-%d", os.Getpid(), i)
	write := func(file, what string) error { return os.WriteFile(filepath.Join(dir, file), []byte(what), 0) }
	s.must(os.Mkdir(dir, 0o755))
	s.must(write("memory.limit_in_bytes", strconv.Itoa((8+at%32)<<20)))
	for _, pid := range s.pids(i, "/dewd\x00") {
		_ = write("cgroup.procs", strconv.Itoa(pid)) // it may end
	}
	return func() {
		s.eventually("the node has its memory back", func() error {
			inside, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
			for _, pid := range strings.Fields(string(inside)) {
				_ = os.WriteFile(filepath.Join(filepath.Dir(dir), "cgroup.procs"), []byte(pid), 0)
			}
			return errors.Join(err, os.Remove(dir))
		})
		select {
		case <-s.Nodes[i].Group().Ended():
			s.t.Logf("the kernel has killed the dewd of n%d", i+1)
			s.must(s.KillDewd(s.t.Context(), i))
			s.must(s.StartDewd(s.t.Context(), i))
		case <-time.After(time.Second): // a kill is noticed by then
		}
	}
}

// must is for what the bed does.
func (s *soak) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Error(err)
	}
}
