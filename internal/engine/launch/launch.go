// Package launch executes crun for containerd's shims, which know a runtime by
// the path of one program.
//
// A launcher is a directory that [Make] makes. The shim is told to execute
// [Path] in it, a link to cmd/containerd-shim-dewpoint-v1, which becomes crun
// then, in the process that the shim started:
//
//   - crun may have to be executed by a loader of its own, when it was unpacked
//     from a newer suite than the system's: the file argv has its arguments.
//   - crun executes itself once more from a read-only mount, so that a container
//     cannot write to the program that enters it. Ours executes it from such a
//     mount in the first place, which crun sees.
//   - crun makes no container where any controller is under cgroup v2 beside v1,
//     though the container needs none of it. If there is a file named empty in
//     the directory, "create" runs where that lies over the list of those
//     controllers, in a mount namespace of its own.
//   - "start" does not become crun, which would write one byte into the pipe at
//     which the container's process waits: the launcher writes it, where all is
//     as crun leaves it and nothing else is to be done.
//   - "checkpoint" becomes runc, which knows CRIU. What it has to know of the
//     container is put into its state directory before.
package launch

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// Name is how the program is called when it is to be crun.
const Name = "crun"

// Trial is how the program is called in a container that crun is tried with, and
// Wanted what it says there if all is well.
const (
	Trial  = "trial"
	Wanted = "process 1 of host trial, system calls filtered: 2\n"
)

// The files of a launcher.
const (
	// how to execute it, then a line for each argument before those of the shim; the first is a path
	argvFile  = "argv"
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
