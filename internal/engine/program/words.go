package program

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// ErrNoCommand and ErrNotExecutable say that the container has no such
// program, or cannot run it.
var (
	ErrNoCommand     = errors.New("command not found in the container")
	ErrNotExecutable = errors.New("command cannot be executed")
)

// BadCommand finds in the runtime's words that the command itself is at fault.
func BadCommand(err error) error {
	_, why, ok := strings.Cut(err.Error(), "unable to start container process: exec: ")
	if !ok {
		return crunBad(err)
	}
	why = strings.TrimSuffix(why, ": unknown")
	switch {
	case strings.Contains(why, "no such file or directory"), strings.Contains(why, "not found"),
		strings.Contains(why, "not a directory"):
		return fmt.Errorf("%w: %s", ErrNoCommand, why)
	case strings.Contains(why, "permission denied"), strings.Contains(why, "exec format error"),
		strings.Contains(why, "is a directory"):
		return fmt.Errorf("%w: %s", ErrNotExecutable, why)
	}
	return err
}

var (
	crunNoCommand     = regexp.MustCompile("executable file `[^`]*` not found( in \\$PATH)?|open `[^`]*`: Not a directory")
	crunNotExecutable = regexp.MustCompile("the path `[^`]*` (exists but it is not executable|is not a regular file)|exec container process `[^`]*`: .*")
)

// crunBad is BadCommand for crun.
func crunBad(err error) error {
	if why := crunNoCommand.FindString(err.Error()); why != "" {
		return fmt.Errorf("%w: %s", ErrNoCommand, why)
	}
	if why := crunNotExecutable.FindString(err.Error()); why != "" {
		return fmt.Errorf("%w: %s", ErrNotExecutable, strings.TrimSuffix(why, ": unknown"))
	}
	return err
}

// Both runtimes let a container start whose program the kernel then does not
// execute. They write that to the container's standard error, each in its own
// words, and end with a status that says nothing; runc looks before whether the
// container's user may reach the program, crun does not.
var (
	runcUnexecuted = regexp.MustCompile(`^exec (/.*): (exec format error|no such file or directory|permission denied)$`)
	crunUnexecuted = regexp.MustCompile("^exec container process (?:\\(missing dynamic library\\?\\) )?`(/.*)`: ([A-Z].*)$")
)

// Unexecuted finds in the end of a container's output that the runtime could not execute
// a file, and why; "" if it does not say so.
func Unexecuted(said string) (file, why string) {
	last := said[strings.LastIndexByte(said, '\n')+1:]
	if m := runcUnexecuted.FindStringSubmatch(last); m != nil {
		return m[1], m[2]
	}
	if i := strings.LastIndex(said, "{"); i >= 0 { // as crun writes when it was told to log JSON
		var line struct{ Msg string }
		if json.Unmarshal([]byte(said[i:]), &line) == nil {
			last = line.Msg
		}
	}
	if m := crunUnexecuted.FindStringSubmatch(last); m != nil {
		return m[1], m[2]
	}
	return "", ""
}
