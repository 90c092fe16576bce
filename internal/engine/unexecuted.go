package engine

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"dewpoint/internal/engine/logfile"
	"dewpoint/internal/engine/program"
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
	file, why := program.Unexecuted(said)
	if file == "" {
		return nil
	}
	text, err := e.explain(name, file, why)
	if !known {
		if werr := logfile.AddLine(stderr, told+text); werr != nil {
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
