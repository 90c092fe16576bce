// Package stdio prepares what a container's process reads and writes: files of its output and, where they
// were asked for, a terminal and a FIFO of its input.
package stdio

import (
	"errors"
	"os"
	"strings"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"golang.org/x/sys/unix"

	"dewpoint/internal/engine/state"
)

// Label says of a container that it has a terminal, or a standard input that can be written to.
const Label = "dewpoint.stdio"

// Has is what Label says.
type Has struct{ TTY, Stdin bool }

func (h Has) String() string {
	var words []string
	if h.Stdin {
		words = append(words, "stdin")
	}
	if h.TTY {
		words = append(words, "tty")
	}
	return strings.Join(words, " ")
}

// Of reads a container's labels.
func Of(labels map[string]string) Has {
	words := labels[Label]
	return Has{TTY: strings.Contains(words, "tty"), Stdin: strings.Contains(words, "stdin")}
}

// Prepare makes the files of a task's output and the FIFO of its input, and names them in the request. The
// shim writes the files, of a terminal too, and holds the FIFO open at both ends until CloseIO: so neither
// the output nor the input of a container ends with this process. What a terminal shows it writes from the
// beginning of the file on, where it appends what comes from pipes: the file has the output of one start.
func (h Has) Prepare(p state.Places, req *tasksapi.CreateTaskRequest) error {
	name, how := req.ContainerID, os.O_CREATE|os.O_WRONLY
	if req.Terminal = h.TTY; h.TTY {
		how |= os.O_TRUNC
	}
	req.Stdout, req.Stderr = p.Output(name)
	for _, path := range []string{req.Stdout, req.Stderr} {
		f, err := os.OpenFile(path, how, 0o640)
		if err != nil {
			return err
		}
		f.Close()
	}
	if !h.Stdin {
		return nil
	}
	req.Stdin = p.Stdin(name)
	if err := os.Remove(req.Stdin); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.NewSyscallError("mkfifo", unix.Mkfifo(req.Stdin, 0o600))
}
