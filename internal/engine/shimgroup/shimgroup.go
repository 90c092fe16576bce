// Package shimgroup lets several containers share one of containerd's shims.
//
// For each container containerd executes a shim's program with the argument
// "start", in the container's bundle, and reads from its output the address of
// a socket where the container can be made. containerd-shim-runc-v2 then leaves
// a server behind, which is most of what a container costs: two starts of a
// large program, and 10 MB. That server can carry many containers, which
// Kubernetes has it do for those of a pod.
//
// A group is a directory that [Make] makes, with three links: "start", to the
// small program that containerd is told to execute
// (cmd/containerd-shim-dewpoint-v1), "shim", to the one that serves, and "containers",
// to where the runtime keeps its containers' states. The first start in a group
// executes the real shim in the group's directory, where a config.json of ours
// names the group, and keeps what it says; each later one repeats that, once the
// socket has taken a connection.
//
// When a task has been deleted containerd executes the program once more, with
// "delete", as it does to clean up behind a shim that died. Mostly nothing is
// left to do then: the runtime does not know the container, and nothing is
// mounted in its bundle. The program sees that for itself; only where something
// is left it becomes the real shim.
//
// Who assigns containers to groups keeps this in mind: a shim ends when its last
// container has been deleted, also while another is on its way to it; it makes
// one container after the other; and with it end the containers of the group.
package shimgroup

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Program is the name of the small program.
const Program = "containerd-shim-dewpoint-v1"

// Real is the name of the shim that serves.
const Real = "containerd-shim-runc-v2"

// The files of a group's directory. The program makes more: config.json, which
// names the group, log, the shim's own, and address, which shims of containerd
// 1.6 write and look for in each bundle.
const (
	startLink      = "start"      // to Program
	shimLink       = "shim"       // to Real
	containersLink = "containers" // to the runtime's state: a directory for each container
	bootFile       = "boot"       // what that said when it started
	askedFile      = "asked"      // how it was asked to
)

// Make makes the directory of a group. program, real and containers are
// absolute paths.
func Make(dir, program, real, containers string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return errors.Join(
		os.Symlink(real, filepath.Join(dir, shimLink)),
		os.Symlink(containers, filepath.Join(dir, containersLink)),
		os.Symlink(program, filepath.Join(dir, startLink)))
}

// Path is the runtime path by which containerd gets the group's shim.
func Path(dir string) string { return filepath.Join(dir, startLink) }

// Lock keeps the program from starting a shim in the group until unlock, and
// waits for one that it is starting, unless ctx ends before.
func Lock(ctx context.Context, dir string) (unlock func()) {
	d, err := os.Open(dir)
	if err != nil {
		return func() {}
	}
	for syscall.Flock(int(d.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == syscall.EWOULDBLOCK {
		select {
		case <-ctx.Done():
			return func() { d.Close() }
		case <-time.After(5 * time.Millisecond):
		}
	}
	return func() { d.Close() }
}

// Remove removes a group whose shim has no containers, and the socket that a
// shim may leave. It is not an error if there is no such group.
func Remove(dir string) error {
	if socket := Socket(dir); socket != "" {
		_ = os.Remove(socket)
	}
	return os.RemoveAll(dir)
}

const scheme = "unix://"

// Socket is where the shim of a group listens, or has listened; "" if none was started.
func Socket(dir string) string {
	b, err := os.ReadFile(filepath.Join(dir, bootFile))
	if err != nil {
		return ""
	}
	return socketIn(b)
}

// Asked is how containerd asked for a group's shim. Asking for another group's
// in the same way, by its [Path], starts one that containerd can take later.
type Asked struct {
	Args, Env []string // of the program
	Input     []byte   // what its standard input is to be
}

// ReadAsked reads how a group's shim was asked for; nil if none was started.
func ReadAsked(dir string) *Asked {
	b, err := os.ReadFile(filepath.Join(dir, askedFile))
	if err != nil {
		return nil
	}
	a := new(Asked)
	for _, list := range []*[]string{&a.Args, &a.Env} {
		for {
			s, rest, ok := bytes.Cut(b, []byte{0})
			if !ok {
				return nil
			}
			if b = rest; len(s) == 0 {
				break
			}
			*list = append(*list, string(s))
		}
	}
	a.Input = b
	return a
}

// socketIn finds the path of the socket in what a shim said when it started: the
// bare address (containerd 1.6), JSON, or a message of protobuf.
func socketIn(boot []byte) string {
	i := bytes.Index(boot, []byte(scheme))
	if i < 0 {
		return ""
	}
	path := string(boot[i+len(scheme):])
	end := strings.IndexFunc(path, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' ||
			strings.ContainsRune("/._-", r))
	})
	if end >= 0 {
		path = path[:end]
	}
	return path
}
