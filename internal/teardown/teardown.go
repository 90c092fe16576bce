// Package teardown takes away what a dewd that has ended leaves behind on a machine beside its files: the
// private containerd and other processes, mounts, the bridge with its rules, cgroups. The files stay, and a
// later dewd goes on with them. It refuses while containers run from dewd's layers, whoever has made them.
package teardown

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"dewpoint/internal/engine/cgroup"
	"dewpoint/internal/engine/network"
	"dewpoint/internal/engine/state"
)

// Node is the directories of a dewd. Both are absolute.
type Node struct {
	Root, State string
}

// InUse is the error of a node whose layers containers run from.
type InUse struct {
	Containers []string // NAMESPACE/NAME, or where its root is mounted
}

func (e *InUse) Error() string {
	return fmt.Sprintf("containers run from dewd's layers: %s: stop and remove them first",
		strings.Join(e.Containers, ", "))
}

// Check gives an InUse if containers run from the node's layers.
func (n Node) Check() error {
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return err
	}
	var in []string
	for _, m := range mounts {
		if m.FSType == "overlay" && n.isUnder(m.VFSOptions) && !strings.HasPrefix(m.Mountpoint, n.Root+"/") {
			in = append(in, nameOf(m.Mountpoint))
		}
	}
	if len(in) == 0 {
		return nil
	}
	slices.Sort(in)
	return &InUse{slices.Compact(in)}
}

// isUnder says whether an overlay of these options has a directory below the node's root.
func (n Node) isUnder(options string) bool {
	for _, o := range strings.FieldsFunc(options, func(r rune) bool { return strings.ContainsRune(",:=", r) }) {
		if strings.HasPrefix(o, n.Root+"/") {
			return true
		}
	}
	return false
}

// nameOf is the container whose root is mounted at path: containerd's bundles are …/NAMESPACE/ID/rootfs.
func nameOf(path string) string {
	dir, base := filepath.Split(path)
	if base != "rootfs" {
		return path
	}
	id := filepath.Clean(dir)
	return filepath.Join(filepath.Base(filepath.Dir(id)), filepath.Base(id))
}

// Run takes away what is left. The node's dewd has ended.
func (n Node) Run(ctx context.Context) error {
	lock, err := os.OpenFile(filepath.Join(n.State, "lock"), os.O_RDWR, 0o600)
	if errors.Is(err, os.ErrNotExist) { // no dewd ran since the machine started
		return n.Check()
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		return fmt.Errorf("%s is in use by a dewd: end it first", n.State)
	}
	if err := n.Check(); err != nil {
		return err
	}
	return errors.Join(n.endProcesses(ctx), n.removeBridge(), n.unmount(), n.removeCgroups())
}

// endProcesses ends the private containerd, shims that wait, and dewd's own children.
func (n Node) endProcesses(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	asked := time.Now()
	for {
		pids := n.processes()
		if len(pids) == 0 {
			return nil
		}
		signal := unix.SIGTERM
		if time.Since(asked) > 5*time.Second {
			signal = unix.SIGKILL
		}
		for _, pid := range pids {
			_ = unix.Kill(pid, signal) // it may have ended
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("processes %v do not end", pids)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// processes are those of containerd's and dewd's programs that name the node's state on their command line.
func (n Node) processes() []int {
	var pids []int
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range lines {
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		line, _ := os.ReadFile(file)
		program, _, _ := strings.Cut(string(line), "\x00")
		program = filepath.Base(program)
		if (program == "dewd" || strings.HasPrefix(program, "containerd")) && pid != os.Getpid() &&
			bytes.Contains(line, []byte(n.State+"/")) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// removeBridge removes the bridge and its rules. It knows the device by its alias.
func (n Node) removeBridge() error {
	dir := filepath.Join(n.State, "cni")
	devices, err := filepath.Glob("/sys/class/net/*/ifalias")
	for _, file := range devices {
		alias, _ := os.ReadFile(file)
		if strings.TrimSpace(string(alias)) == "dewpoint "+dir {
			name := filepath.Base(filepath.Dir(file))
			err = errors.Join(err, network.NewBridge(network.Config{Dir: dir, Bridge: name}).Destroy())
		}
	}
	return err
}

// unmount takes all mounts below the node's directories away, the newest first.
func (n Node) unmount() error {
	mounts, err := mountinfo.GetMounts(nil)
	for _, m := range slices.Backward(mounts) {
		if strings.HasPrefix(m.Mountpoint, n.Root+"/") || strings.HasPrefix(m.Mountpoint, n.State+"/") {
			if e := unix.Unmount(m.Mountpoint, unix.MNT_DETACH); e != nil && !errors.Is(e, unix.EINVAL) {
				err = errors.Join(err, fmt.Errorf("unmount %s: %w", m.Mountpoint, e))
			}
		}
	}
	return err
}

// removeCgroups removes the parent cgroup of the node's containers and what is empty below it.
func (n Node) removeCgroups() error {
	var errs []error
	for _, parent := range cgroup.Dirs(state.CgroupParent(n.State)) {
		for _, below := range []string{"/*/*", "/*", ""} {
			dirs, _ := filepath.Glob(parent + below)
			for _, d := range dirs {
				if st, err := os.Stat(d); err == nil && st.IsDir() {
					errs = append(errs, rmdir(d))
				}
			}
		}
	}
	return errors.Join(errs...)
}

// rmdir removes a cgroup. One whose last process is ending is busy for a moment.
func rmdir(dir string) (err error) {
	for range 100 {
		if err = unix.Rmdir(dir); err != unix.EBUSY {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err != nil {
		return fmt.Errorf("remove cgroup %s: %w", dir, err)
	}
	return nil
}
