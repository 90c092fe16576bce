// Package launch executes crun for containerd's shims, which know a runtime by
// the path of one program.
//
// A launcher is a directory that [Make] makes. The shim is told to execute
// [Path] in it, a link to the small program of package shimgroup, which calls
// [Run] then. Run becomes crun, in the process that the shim started:
//
//   - crun may have to be executed by a loader of its own, when it was unpacked
//     from a newer suite than the system's: the file argv has its arguments.
//   - crun executes itself once more from a read-only mount, so that a container
//     cannot write to the program that enters it. Run executes the program from
//     such a mount in the first place, which crun sees.
//   - crun makes no container where any controller is under cgroup v2 beside v1,
//     though the container needs none of it. If there is a file named empty in
//     the directory, "create" runs where that lies over the list of those
//     controllers, in a mount namespace of its own.
//   - "checkpoint" becomes runc, which knows CRIU. What it has to know of the
//     container is put into its state directory before.
//
// The package imports next to nothing, so that the program starts in a
// millisecond.
package launch

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"unsafe"
)

// Name is how the program is called when it is to be crun.
const Name = "crun"

// Trial is how the program is called in a container that crun is tried with, and
// Wanted what it says there if all is well.
const (
	Trial  = "trial"
	Wanted = "process 1 of host trial, system calls filtered: 2\n"
)

// Report says how the process finds itself.
func Report([]string, []string) error {
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	_, filtered, _ := strings.Cut(string(status), "\nSeccomp:\t")
	filtered, _, _ = strings.Cut(filtered, "\n")
	_, err = os.Stdout.WriteString("process " + strconv.Itoa(os.Getpid()) + " of host " + host + ", system calls filtered: " + filtered + "\n")
	return err
}

// The files of a launcher.
const (
	argvFile  = "argv"  // how to execute it, then a line for each argument before those of the shim; the first is a path
	runcLink  = "runc"  // to what executes "checkpoint"
	emptyFile = "empty" // only where the list of controllers is to be hidden
)

// The first line of argvFile.
const (
	sealed = "sealed" // from a read-only mount
	plain  = "plain"  // a script, which is opened once more by its interpreter
)

// controllers is what crun reads.
const controllers = "/sys/fs/cgroup/unified/cgroup.controllers"

// Crowded says whether crun refuses to make containers on this machine unless
// it does not see the list of controllers.
func Crowded() bool {
	b, err := os.ReadFile(controllers)
	return err == nil && len(strings.TrimSpace(string(b))) > 0
}

// Make makes a launcher in dir, or changes one that may be in use. program is
// the absolute path of the small program, argv how crun is executed, runc what
// makes checkpoints; hide says that the list of controllers is to be hidden.
func Make(dir, program string, argv []string, runc string, hide bool) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	how := plain
	if isELF(argv[0]) {
		how = sealed
	}
	err := errors.Join(
		replace(filepath.Join(dir, argvFile), func(p string) error {
			return os.WriteFile(p, []byte(how+"\n"+strings.Join(argv, "\n")+"\n"), 0o644)
		}),
		replace(filepath.Join(dir, runcLink), func(p string) error { return os.Symlink(runc, p) }),
		replace(filepath.Join(dir, Name), func(p string) error { return os.Symlink(program, p) }))
	empty := filepath.Join(dir, emptyFile)
	if hide {
		return errors.Join(err, os.WriteFile(empty, nil, 0o444))
	}
	if rerr := os.Remove(empty); !errors.Is(rerr, os.ErrNotExist) {
		err = errors.Join(err, rerr)
	}
	return err
}

func isELF(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	magic := make([]byte, 4)
	_, err = io.ReadFull(f, magic)
	return err == nil && string(magic) == "\x7fELF"
}

// replace makes a file where there may be one, which is whole at any time.
func replace(path string, make func(tmp string) error) error {
	tmp := path + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := make(tmp); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// Path is the program that the shim is told to execute.
func Path(dir string) string { return filepath.Join(dir, Name) }

// Run is the program: args[0] is a launcher's Path, the others are the shim's.
// It returns only on an error. The caller keeps to the process's first thread:
// on its end the kernel tells the process of its parent's.
func Run(args, env []string) error {
	dir := filepath.Dir(args[0])
	verb := verb(args[1:])
	if verb == "checkpoint" {
		runc := filepath.Join(dir, runcLink)
		return os.NewSyscallError("exec "+runc, syscall.Exec(runc, append([]string{runc}, args[1:]...), env))
	}
	b, err := os.ReadFile(filepath.Join(dir, argvFile))
	if err != nil {
		return err
	}
	how, rest, _ := strings.Cut(strings.TrimRight(string(b), "\n"), "\n")
	argv := append(strings.Split(rest, "\n"), args[1:]...)
	if verb == "create" {
		if err := hide(filepath.Join(dir, emptyFile)); err != nil {
			return err
		}
	}
	path := argv[0]
	if how == sealed {
		if fd := readOnly(path); fd >= 0 {
			path = "/proc/self/fd/" + strconv.Itoa(fd)
		}
	}
	return os.NewSyscallError("exec "+argv[0], syscall.Exec(path, argv, env))
}

// verb finds what the runtime is told to do, behind its general options.
func verb(args []string) string {
	for i := 0; i < len(args); i++ {
		switch a := args[i]; {
		case a == "--root" || a == "--log" || a == "--log-format":
			i++
		case !strings.HasPrefix(a, "-"):
			return a
		}
	}
	return ""
}

// hide puts the empty file over the list of controllers, for this process and
// what it starts. Without such a file it does nothing.
func hide(empty string) error {
	if _, err := os.Stat(empty); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err := syscall.Unshare(syscall.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	// All other mounts stay as they are to the rest of the machine.
	if err := syscall.Mount("", filepath.Dir(controllers), "", syscall.MS_PRIVATE, ""); err != nil {
		return os.NewSyscallError("mount "+filepath.Dir(controllers), err)
	}
	return os.NewSyscallError("mount "+controllers, syscall.Mount(empty, controllers, "", syscall.MS_BIND, ""))
}

// System calls that package syscall does not know, with the same numbers on
// every architecture, and their flags.
const (
	sysOpenTree     = 428
	sysMountSetattr = 442

	atFDCWD       = ^uintptr(99) // -100
	atEmptyPath   = 0x1000
	openTreeClone = 1
	mountReadOnly = 1
)

// readOnly opens a file on a mount of its own that cannot be written to; -1 if
// the kernel is too old for that.
func readOnly(path string) int {
	p, err := syscall.BytePtrFromString(path)
	if err != nil {
		return -1
	}
	fd, _, errno := syscall.Syscall(sysOpenTree, atFDCWD, uintptr(unsafe.Pointer(p)), openTreeClone|syscall.O_CLOEXEC)
	if errno != 0 {
		return -1
	}
	var none byte
	attr := struct{ set, clr, propagation, userns uint64 }{set: mountReadOnly}
	_, _, errno = syscall.Syscall6(sysMountSetattr, fd, uintptr(unsafe.Pointer(&none)), atEmptyPath,
		uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr), 0)
	if errno != 0 {
		return -1
	}
	return int(fd)
}
