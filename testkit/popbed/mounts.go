package popbed

import (
	"errors"
	"fmt"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
)

// shared makes the bed's directory a mount whose mounts its nodes see in their mount namespaces, too.
func (b *Bed) shared() error {
	if err := unix.Mount(b.cfg.Dir, b.cfg.Dir, "", unix.MS_BIND, ""); err != nil {
		return &os.PathError{Op: "mount", Path: b.cfg.Dir, Err: err}
	}
	if err := unix.Mount("", b.cfg.Dir, "", unix.MS_SHARED, ""); err != nil {
		return &os.PathError{Op: "share", Path: b.cfg.Dir, Err: err}
	}
	return nil
}

// newMounts is a copy of this process's mount namespace, to which goes what is mounted here in
// future, and from which nothing comes back. It lasts as long as the file or a process in it.
func newMounts() (_ *os.File, err error) {
	// Not by a thread of this program: /proc/self is its first one, wherever that has gone.
	cmd := exec.Command("unshare", "--mount", "--propagation", "slave", "cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, in.Close(), cmd.Wait()) }()
	if _, err := in.Write([]byte("in\n")); err != nil {
		return nil, err
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		return nil, fmt.Errorf("unshare: %w", err)
	}
	return os.Open(fmt.Sprintf("/proc/%d/ns/mnt", cmd.Process.Pid))
}

// boot gives the node a mount table of its own, unless it has one: what its dewd mounts is seen by
// its own programs alone, and goes when halt is called and none of these is left.
func (n *Node) boot() (err error) {
	if n.mounts == nil {
		n.mounts, err = newMounts()
	}
	return err
}

func (n *Node) halt() error {
	if n.mounts == nil {
		return nil
	}
	err := n.mounts.Close()
	n.mounts = nil
	return err
}

// mountsPath is where nsenter finds the node's mount namespace while this process lives.
func (n *Node) mountsPath() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.mounts.Fd()) }
