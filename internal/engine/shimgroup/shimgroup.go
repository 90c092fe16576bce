// Package shimgroup lets several containers share one of containerd's shims.
//
// For each container containerd executes a shim's program with the argument
// "start", in the container's bundle, and reads from its output the address of
// a socket where the container can be made. containerd-shim-runc-v2 then leaves
// a server behind, which is most of what a container costs: two starts of a
// large program, and 10 MB. That server can carry many containers, which
// Kubernetes has it do for those of a pod.
//
// A group is a directory that [Make] makes, with two links: "start", to the
// small program that containerd is told to execute ([Run] is all of it), and
// "shim", to the real one. The first start in a group executes the real shim in
// the group's directory, where a config.json of ours names the group, and keeps
// what it says; each later one repeats that, once the socket has taken a
// connection. All that is not "start" (containerd also asks to clean up behind a
// shim that died) is the real shim's, unchanged.
//
// Who assigns containers to groups keeps this in mind: a shim ends when its last
// container has been deleted, also while another is on its way to it; it makes
// one container after the other; and with it end the containers of the group.
//
// The package imports next to nothing, so that the program starts in a
// millisecond.
package shimgroup

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Program is the name of the small program.
const Program = "containerd-shim-dewpoint-v1"

// Real is the name of the shim that serves.
const Real = "containerd-shim-runc-v2"

// annotation is where containerd-shim-runc-v2 looks for its group's name.
const annotation = "io.containerd.runc.v2.group"

// The files of a group's directory.
const (
	startLink = "start"       // to Program
	shimLink  = "shim"        // to Real
	bootFile  = "boot"        // what Real said when it started
	spec      = "config.json" // names the group
	logFile   = "log"         // the shim's own
	address   = "address"     // written by shims of containerd 1.6, which look for it in each bundle
)

// Make makes the directory of a group. program and real are absolute paths.
func Make(dir, program, real string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return errors.Join(os.Symlink(real, filepath.Join(dir, shimLink)), os.Symlink(program, filepath.Join(dir, startLink)))
}

// Path is the runtime path by which containerd gets the group's shim.
func Path(dir string) string { return filepath.Join(dir, startLink) }

// Remove removes a group whose shim has no containers, and the socket that a
// shim may leave. It is not an error if there is no such group.
func Remove(dir string) error {
	if b, err := os.ReadFile(filepath.Join(dir, bootFile)); err == nil {
		removeSocket(b)
	}
	return os.RemoveAll(dir)
}

// Run is the program: args[0] is a group's start, the last argument what to do.
// It returns only after a start.
func Run(args, env []string) error {
	dir := filepath.Dir(args[0])
	if args[len(args)-1] != "start" {
		return pass(dir, args, env)
	}
	d, err := os.Open(dir)
	if err != nil {
		return pass(dir, args, env)
	}
	defer d.Close()
	if err := syscall.Flock(int(d.Fd()), syscall.LOCK_EX); err != nil { // ends with the process
		return os.NewSyscallError("flock", err)
	}
	boot, err := os.ReadFile(filepath.Join(dir, bootFile))
	if err != nil || !answers(boot) {
		if boot, err = start(dir, boot, args, env); err != nil {
			return err
		}
	}
	if a, err := os.ReadFile(filepath.Join(dir, address)); err == nil {
		if err := os.WriteFile(address, a, 0o600); err != nil {
			return err
		}
	}
	_, err = os.Stdout.Write(boot)
	return err
}

// pass becomes the real shim.
func pass(dir string, args, env []string) error {
	real, err := filepath.EvalSymlinks(filepath.Join(dir, shimLink))
	if err != nil {
		return err
	}
	return os.NewSyscallError("exec "+real, syscall.Exec(real, append([]string{real}, args[1:]...), env))
}

// start has the real shim start in the group's directory. old is what an
// earlier one said, that is no more.
func start(dir string, old []byte, args, env []string) ([]byte, error) {
	removeSocket(old)
	real, err := filepath.EvalSymlinks(filepath.Join(dir, shimLink))
	if err != nil {
		return nil, err
	}
	// Another name each time: the socket is named for it, and one that dies
	// must not be found by who looks for a new one.
	name := filepath.Base(dir) + "." + strconv.FormatInt(time.Now().UnixNano(), 36)
	err = errors.Join(
		os.WriteFile(filepath.Join(dir, spec), []byte(`{"annotations":{"`+annotation+`":"`+name+`"}}`), 0o600),
		os.WriteFile(filepath.Join(dir, logFile), nil, 0o600))
	if err != nil {
		return nil, err
	}
	boot, err := output(dir, real, args, env)
	if err != nil {
		return nil, err
	}
	tmp := filepath.Join(dir, bootFile+".new")
	if err := os.WriteFile(tmp, boot, 0o600); err != nil {
		return nil, err
	}
	return boot, os.Rename(tmp, filepath.Join(dir, bootFile))
}

// output executes the real shim in dir and returns what it says; what it says
// of errors goes where ours does.
func output(dir, real string, args, env []string) ([]byte, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	p, err := os.StartProcess(real, append([]string{real}, args[1:]...),
		&os.ProcAttr{Dir: dir, Env: env, Files: []*os.File{os.Stdin, w, os.Stderr}})
	w.Close()
	if err != nil {
		return nil, err
	}
	out, rerr := io.ReadAll(r)
	st, err := p.Wait()
	if err != nil || rerr != nil {
		return nil, errors.Join(err, rerr)
	}
	if !st.Success() {
		os.Stderr.Write(out)
		return nil, errors.New(real + ": " + st.String())
	}
	return out, nil
}

const scheme = "unix://"

// socketIn finds the path of the socket in what a shim said when it started: the
// bare address (containerd 1.6), JSON, or a message of protobuf.
func socketIn(boot []byte) string {
	i := bytes.Index(boot, []byte(scheme))
	if i < 0 {
		return ""
	}
	path := string(boot[i+len(scheme):])
	end := strings.IndexFunc(path, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("/._-", r))
	})
	if end >= 0 {
		path = path[:end]
	}
	return path
}

// answers says whether something listens at the socket.
func answers(boot []byte) bool {
	path := socketIn(boot)
	if path == "" {
		return false
	}
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer syscall.Close(fd)
	return syscall.Connect(fd, &syscall.SockaddrUnix{Name: path}) == nil
}

func removeSocket(boot []byte) {
	if path := socketIn(boot); path != "" {
		_ = os.Remove(path)
	}
}
