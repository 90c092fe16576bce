package hooks

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// A container may have put anything into its files, links that lead out of it
// above all: every path is resolved below its root, and what lies in the state
// directory is opened as what it must be or not at all.

// Prepare makes what the agents wait at, in a container that is created and has
// not started. root is its root directory as the host sees it.
func Prepare(root string) error {
	state, err := open(root, StateDir, unix.O_DIRECTORY)
	if err != nil {
		return fmt.Errorf("state of the agents: %w", err)
	}
	defer state.Close()
	fd := int(state.Fd())
	for _, err := range []error{
		unix.Mkfifoat(fd, "bell", 0o444), unix.Fchmodat(fd, "bell", 0o444, 0),
		unix.Mkdirat(fd, "agents", 0o777), unix.Fchmodat(fd, "agents", 0o1777, 0),
	} {
		if err != nil && err != unix.EEXIST {
			return fmt.Errorf("state of the agents: %w", err)
		}
	}
	return writeGeneration(state, rand.Text())
}

// present finds an agent of each kind that c asks for.
func present(c Container) error {
	asked, err := ParseAgents(c.Labels[LabelAgents])
	if err != nil || len(asked) == 0 {
		return err
	}
	state, err := open(c.Root, StateDir, unix.O_DIRECTORY)
	if err != nil {
		return fmt.Errorf("state of the agents: %w", err)
	}
	defer state.Close()
	agents, err := living(state, c.Root)
	if err != nil {
		return err
	}
	for _, a := range asked {
		if !slices.ContainsFunc(agents, func(name string) bool { return strings.HasPrefix(name, string(a)+"-") }) {
			return &Error{Hook: LabelAgents + "=" + string(a),
				Err: errors.New("no process of the container runs this agent")}
		}
	}
	return nil
}

// renew gives c a new generation and waits until its agents have taken it up.
func renew(ctx context.Context, c Container) error {
	state, err := open(c.Root, StateDir, unix.O_DIRECTORY)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it has not asked for agents
	}
	if err != nil {
		return fmt.Errorf("state of the agents: %w", err)
	}
	defer state.Close()
	generation := rand.Text()
	if err := writeGeneration(state, generation); err != nil {
		return err
	}
	for {
		ring(state)
		waiting, err := unanswered(state, c.Root, generation)
		if err != nil || len(waiting) == 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return &Error{Hook: "agents " + strings.Join(waiting, ", "),
				Err: fmt.Errorf("no report after the restore: %w", ctx.Err())}
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// unanswered are the living agents that have not reported generation. A report
// of something that went wrong is an error.
func unanswered(state *os.File, root, generation string) ([]string, error) {
	agents, err := living(state, root)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(agents, func(name string) bool {
		said, result, _ := strings.Cut(readReport(state, name), " ")
		if said != generation {
			return false
		}
		if result != "ok" {
			err = &Error{Hook: "agent " + name, Err: errors.New(result)}
		}
		return true
	}), err
}

// maxAgents bounds what is read of a container's own directory.
const maxAgents = 4096

// living are the agents' names, KIND-PID or KIND-PID-THREAD, without those whose
// process is known to be gone.
func living(state *os.File, root string) ([]string, error) {
	fd, err := unix.Openat(int(state.Fd()), "agents",
		unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("list agents: %w", err)
	}
	dir := os.NewFile(uintptr(fd), "agents")
	defer dir.Close()
	names, err := dir.Readdirnames(maxAgents)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("list agents: %w", err)
	}
	hasProc := exists(root, "/proc/1")
	return slices.DeleteFunc(names, func(name string) bool {
		parts := strings.Split(name, "-")
		return strings.HasSuffix(name, ".tmp") || len(parts) < 2 || !utf8.ValidString(name) ||
			hasProc && !exists(root, path.Join("/proc", path.Base(parts[1])))
	}), nil
}

func readReport(state *os.File, name string) string {
	fd, err := unix.Openat(int(state.Fd()), "agents/"+name,
		unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	b, _ := io.ReadAll(io.LimitReader(f, 1024))
	return strings.ToValidUTF8(strings.TrimSpace(string(b)), "?")
}

func writeGeneration(state *os.File, generation string) error {
	fd := int(state.Fd())
	_ = unix.Unlinkat(fd, "generation.tmp", 0)
	n, err := unix.Openat(fd, "generation.tmp", unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return fmt.Errorf("write generation: %w", err)
	}
	f := os.NewFile(uintptr(n), "generation.tmp")
	_, err = f.WriteString(generation + "\n")
	err = errors.Join(err, f.Chmod(0o644), f.Close(), unix.Renameat(fd, "generation.tmp", fd, "generation"))
	if err != nil {
		return fmt.Errorf("write generation: %w", err)
	}
	return nil
}

// ring wakes who waits at the bell; without anybody it does nothing.
func ring(state *os.File) {
	fd, err := unix.Openat(int(state.Fd()), "bell", unix.O_WRONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC,
		0)
	if err == nil {
		_ = unix.Close(fd)
	}
}

// executable reports whether a container has a program at file. One that is there
// and cannot be run is an error.
func executable(root, file string) (bool, error) {
	f, err := open(root, file, unix.O_PATH)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	i, err := f.Stat()
	if err == nil && (!i.Mode().IsRegular() || i.Mode()&0o111 == 0) {
		err = errors.New("not an executable file")
	}
	return err == nil, err
}

func exists(root, file string) bool {
	f, err := open(root, file, unix.O_PATH)
	if err == nil {
		f.Close()
	}
	return err == nil
}

// open opens a path as a process whose root directory is root would.
func open(root, file string, flags int) (*os.File, error) {
	dir, err := os.OpenFile(root, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	how := unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC),
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
	for {
		fd, err := unix.Openat2(int(dir.Fd()), file, &how)
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if err != nil {
			return nil, &os.PathError{Op: "open", Path: file, Err: err}
		}
		return os.NewFile(uintptr(fd), file), nil
	}
}
