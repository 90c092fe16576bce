package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"dewpoint/internal/engine/logfile"
	"dewpoint/internal/engine/program"
)

// Both runtimes let a container start whose program the kernel then does not
// execute. They write that to the container's standard error, each in its own
// words, and end with a status that says nothing; runc looks before whether the
// container's user may reach the program, crun does not.
var (
	runcUnexecuted = regexp.MustCompile(`^exec (/.*): (exec format error|no such file or directory|permission denied)$`)
	crunUnexecuted = regexp.MustCompile("^exec container process (?:\\(missing dynamic library\\?\\) )?`(/.*)`: ([A-Z].*)$")
)

// told is before what dewd itself adds to a container's output.
const told = "dewd: "

// Unexecuted says why a container's program was not executed, which ended with that
// status: ErrNotExecutable or ErrNoCommand, with what is wrong and what to do. It is
// nil of one that has run. The container's standard error has it as its last line then.
func (e *outputs) Unexecuted(ctx context.Context, name string, status int) error {
	if status != 1 && status != 255 { // crun's and runc's; runc's of old is 1 too
		return nil
	}
	_, stderr := e.cfg.places().Output(name)
	if logfile.Written(ctx, stderr) != nil {
		return nil
	}
	e.telling.Lock()
	defer e.telling.Unlock()
	said := logfile.Tail(stderr, 8)
	i := strings.LastIndexByte(said, '\n') + 1
	known := i > 0 && strings.HasPrefix(said[i:], told)
	if known {
		said = said[:i-1]
	}
	file, why := unexecuted(said)
	if file == "" {
		return nil
	}
	text, err := e.explain(name, file, why)
	if !known {
		if werr := addLine(stderr, told+text); werr != nil {
			e.log.Warn("write to a container's output", "container", name, "err", werr)
		}
	}
	return fmt.Errorf("%w: %s", err, text)
}

// explain says what is wrong with a program that the kernel did not execute, since why.
func (e *outputs) explain(name, file, why string) (string, error) {
	if strings.EqualFold(why, "permission denied") {
		return file + ": the container's user may not search one of its directories, or not execute it: change its mode in the image, or have another user run it", ErrNotExecutable
	}
	kind := ErrNotExecutable
	if strings.EqualFold(why, "no such file or directory") {
		kind = ErrNoCommand
	}
	if text := program.Why(filepath.Join(e.cfg.bundle(name), "rootfs"), file); text != "" {
		return text, kind
	}
	return file + ": " + strings.ToLower(why), kind
}

// unexecuted finds in the end of a container's output that the runtime could not execute
// a file, and why; "" if it does not say so.
func unexecuted(said string) (file, why string) {
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

// addLine appends a line to a file that nobody writes to any more.
func addLine(path, line string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var text bytes.Buffer
	if st, err := f.Stat(); err == nil && st.Size() > 0 {
		end := make([]byte, 1)
		if _, err := f.ReadAt(end, st.Size()-1); err == nil && end[0] != '\n' {
			text.WriteByte('\n')
		}
	}
	text.WriteString(line + "\n")
	_, err = f.Write(text.Bytes())
	return err
}
