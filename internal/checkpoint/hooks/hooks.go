// Package hooks lets an application take part when its container is dumped and when it is started from a
// checkpoint. docs/use/uniqueness.md says what clones share and only the application can renew.
//
// # Commands
//
// A container has up to two commands for each event. They run in this order, inside it, as its user:
//
//	before a checkpoint   /etc/dewpoint/before-checkpoint, then the label dewpoint.checkpoint.before
//	after a restore       /etc/dewpoint/after-restore, then the label dewpoint.restore.after
//
// A label is split into words as a shell does, without expansion. The environment has DEWPOINT_EVENT,
// DEWPOINT_NAME, DEWPOINT_ADDRESS, DEWPOINT_IMAGE and, after a restore, DEWPOINT_CHECKPOINT. The first
// command that does not end with status 0 in time ends the event with an *Error: no checkpoint is made then,
// and a restored container is given up for one that boots.
//
// # Agents
//
// The label dewpoint.hooks asks for agents for Python, Node and the JVM, which reseed the generators of these
// interpreters. Install writes them below the node's root, Mounts mounts them read-only, Activate has the
// interpreters load them. Prepare makes what agents and node share, in a tmpfs that is dumped and restored:
//
//	generation    a random name, written anew after every restore
//	bell          a FIFO; an agent waits at its reading end
//	agents/NAME   one file per process: the generation that it has seen, and "ok" or what went wrong
//
// After a restore, before any command, After writes a new generation and rings: it opens the bell for writing
// and closes it, which wakes all readers, until each agent whose process lives has reported. That uses no
// clock, signal or watch, and a waiting agent costs nothing. Until After has returned, an application may
// draw from the old generators.
package hooks

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"time"
)

// The labels of images and containers that this package reads.
const (
	LabelBefore = "dewpoint.checkpoint.before"
	LabelAfter  = "dewpoint.restore.after"
	LabelAgents = "dewpoint.hooks" // python, node, jvm, with commas between
)

const (
	beforeFile = "/etc/dewpoint/before-checkpoint"
	afterFile  = "/etc/dewpoint/after-restore"
)

// Exec runs a command in a running container with variables added to its
// environment, copies both outputs to output, and returns the exit status. When
// ctx ends the command is killed.
type Exec func(ctx context.Context, args, env []string, output io.Writer) (status int, err error)

// Container is whose hooks are run.
type Container struct {
	Name       string
	Address    string            // "" if it has none
	Image      string            // as it was asked for
	Checkpoint string            // that it was restored from
	Labels     map[string]string // the image's, the container's own over them
	Root       string            // its root directory as the host sees it: /proc/PID/root
	Exec       Exec
}

// Runner runs hooks. The zero value is ready.
type Runner struct {
	Limit  time.Duration // of one command; default 30 s
	Answer time.Duration // until every agent has reported; default 5 s
}

// Error says which hook went wrong, and how.
type Error struct {
	Hook   string // a command, or an agent's report
	Status int    // of a command that ended
	Output string // its end
	Err    error  // when the command did not end by itself
}

func (e *Error) Error() string {
	s := "hook " + e.Hook
	if e.Err != nil {
		s += ": " + e.Err.Error()
	} else if e.Status != 0 {
		s += fmt.Sprintf(": status %d", e.Status)
	}
	if e.Output != "" {
		s += ": " + e.Output
	}
	return s
}

func (e *Error) Unwrap() error { return e.Err }

// Check reads the labels without running anything: an error is the author's.
func Check(labels map[string]string) error {
	for _, l := range []string{LabelBefore, LabelAfter} {
		if _, err := words(labels[l]); err != nil {
			return fmt.Errorf("label %s: %w", l, err)
		}
	}
	_, err := ParseAgents(labels[LabelAgents])
	return err
}

// Before runs what is to run before a dump. It refuses a container that asked for
// an agent which no process of it runs: its clones would not be what it wants.
func (r Runner) Before(ctx context.Context, c Container) error {
	if err := present(c); err != nil {
		return err
	}
	return r.run(ctx, c, "before-checkpoint", beforeFile, LabelBefore)
}

// After is called when a restored container runs and before it is announced. Once
// it returns nil every agent has reseeded its process and every command has
// ended well. After an error the container is not to be used.
func (r Runner) After(ctx context.Context, c Container) error {
	ctxAgents, cancel := context.WithTimeout(ctx, cmp.Or(r.Answer, 5*time.Second))
	defer cancel()
	if err := renew(ctxAgents, c); err != nil {
		return err
	}
	return r.run(ctx, c, "after-restore", afterFile, LabelAfter)
}

func (r Runner) run(ctx context.Context, c Container, event, file, label string) error {
	commands, err := commands(c, file, label)
	if err != nil {
		return err
	}
	env := []string{"DEWPOINT_EVENT=" + event, "DEWPOINT_NAME=" + c.Name, "DEWPOINT_ADDRESS=" + c.Address,
		"DEWPOINT_IMAGE=" + c.Image, "DEWPOINT_CHECKPOINT=" + c.Checkpoint}
	for _, args := range commands {
		if err := r.command(ctx, c, args, env); err != nil {
			return err
		}
	}
	return nil
}

func (r Runner) command(ctx context.Context, c Container, args, env []string) error {
	limit := cmp.Or(r.Limit, 30*time.Second)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done after %v", limit))
	defer cancel()
	var out tail
	status, err := c.Exec(ctx, args, env, &out)
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err == nil && status == 0 {
		return nil
	}
	return &Error{Hook: strings.Join(args, " "), Status: status, Output: out.String(), Err: err}
}

// commands are what is to run for an event, in order.
func commands(c Container, file, label string) ([][]string, error) {
	var found [][]string
	there, err := executable(c.Root, file)
	if err != nil {
		return nil, &Error{Hook: file, Err: err}
	}
	if there {
		found = append(found, []string{file})
	}
	args, err := words(c.Labels[label])
	if err != nil {
		return nil, fmt.Errorf("label %s: %w", label, err)
	}
	if len(args) > 0 {
		found = append(found, args)
	}
	return found, nil
}

// words splits as a shell does, without expansion: blanks separate, quotes and
// backslashes keep.
func words(s string) ([]string, error) {
	if strings.IndexByte(s, 0) >= 0 {
		return nil, fmt.Errorf("%q has a zero byte", s)
	}
	var all []string
	var word []byte
	inWord, quote := false, byte(0)
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case c == '\\' && quote != '\'':
			if i++; i == len(s) {
				return nil, fmt.Errorf("nothing follows the backslash in %q", s)
			}
			if quote == '"' && !strings.ContainsRune("\"\\$`", rune(s[i])) {
				word = append(word, c)
			}
			word, inWord = append(word, s[i]), true
		case quote != 0 && c == quote:
			quote = 0
		case quote == 0 && (c == '\'' || c == '"'):
			quote, inWord = c, true
		case quote == 0 && strings.IndexByte(" \t\n", c) >= 0:
			if inWord {
				all = append(all, string(word))
			}
			word, inWord = nil, false
		default:
			word, inWord = append(word, c), true
		}
	}
	if quote != 0 {
		return nil, fmt.Errorf("%q has an open %c", s, quote)
	}
	if inWord {
		all = append(all, string(word))
	}
	return all, nil
}

// tail keeps the end of what is written to it. It is used by one writer at a time.
type tail struct{ b []byte }

const tailSize = 2048

func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if over := len(t.b) - tailSize; over > 0 {
		t.b = append(t.b[:0], t.b[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	return strings.ToValidUTF8(string(bytes.TrimSpace(t.b)), "?")
}
