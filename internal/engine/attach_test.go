package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/spec"
	"dewpoint/testkit"
)

// attached is a caller of Attach.
type attached struct {
	t    *testing.T
	in   *io.PipeWriter
	size chan WinSize
	done chan struct{} // closed once exit and err are there
	exit Exit
	err  error
	away context.CancelFunc

	mu  sync.Mutex
	out bytes.Buffer // guarded by mu
}

func (a *attached) Write(p []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.out.Write(p)
}

func (b *bed) attach(t *testing.T, name string) *attached {
	t.Helper()
	r, w := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	a := &attached{t: t, in: w, size: make(chan WinSize, 1), done: make(chan struct{}), away: cancel}
	go func() {
		defer close(a.done)
		a.exit, a.err = b.Attach(ctx, name, AttachSpec{Stdin: r, Stdout: a, Stderr: a, Resize: a.size})
		r.Close()
	}()
	t.Cleanup(func() { a.leave() })
	return a
}

// leave goes away without a word.
func (a *attached) leave() {
	a.in.CloseWithError(errors.New("away"))
	a.away()
	<-a.done
}

func (a *attached) types(line string) {
	a.t.Helper()
	if _, err := io.WriteString(a.in, line+"\n"); err != nil {
		a.t.Fatal(err)
	}
}

func (a *attached) shows(text string) {
	a.t.Helper()
	testkit.Retry(a.t, fmt.Sprintf("%q comes", text), func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if got := a.out.String(); !strings.Contains(got, text) {
			return fmt.Errorf("there is %q", got)
		}
		return nil
	})
}

func (a *attached) ends(status int) {
	a.t.Helper()
	<-a.done
	if a.err != nil || a.exit.Status != status {
		a.t.Errorf("it ended with %+v, %v; want %d", a.exit, a.err, status)
	}
}

// reopen is a death of the daemon, as containers see it, and its next start.
func (b *bed) reopen(t *testing.T) {
	t.Helper()
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	var err error
	if b.Engine, err = Start(t.Context(), b.cfg); err != nil {
		t.Fatal(err)
	}
}

func (b *bed) logsOf(t *testing.T, name string) string {
	t.Helper()
	var out bytes.Buffer
	if err := b.Logs(t.Context(), name, LogOptions{Stdout: &out, Stderr: &out}); err != nil {
		t.Error(err)
	}
	return out.String()
}

// A terminal, and an input without one, outlive who is attached and the daemon, and can be come back to. An
// end of the input ends that of a container without a terminal.
func TestAttach(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		ctx := t.Context()
		pipes := Spec{Name: "pipes", Net: NetNone, Cmd: []string{"talk"},
			Options: spec.Options{Stdin: true}}
		tty := Spec{Name: "tty", Net: NetNone, Cmd: []string{"talk"},
			Options: spec.Options{TTY: true, Stdin: true}}
		silent := Spec{Name: "mute", Net: NetNone, Cmd: []string{"sleep"}, Options: spec.Options{Stdin: true}}
		for _, s := range []Spec{pipes, tty, silent} {
			b.run(s)
		}
		at, ap := b.attach(t, "tty"), b.attach(t, "pipes")
		at.size <- WinSize{Width: 100, Height: 30}
		testkit.Retry(t, "the terminal has its size", func() error {
			at.types("size")
			if !strings.Contains(b.logsOf(t, "tty"), "100x30") {
				return errors.New("not yet")
			}
			return nil
		})
		at.shows("100x30\r\n")
		ap.types("one")
		ap.shows("got one\n")
		at.leave()
		ap.leave()
		b.reopen(t)

		at, ap = b.attach(t, "tty"), b.attach(t, "pipes")
		at.types("two")
		at.shows("got two\r\n")
		at.types("exit 7")
		at.ends(7)
		ap.types("three")
		ap.shows("got three\n")
		ap.in.Close()
		ap.shows("end\n")
		ap.ends(0)
		if got := b.logsOf(t, "tty"); !strings.HasPrefix(got, "terminal: true xterm\r\n") ||
			!strings.HasSuffix(got, "got two\r\nexit 7\r\n") {
			t.Errorf("a terminal's logs are %q", got)
		}
		if got := b.logsOf(t, "pipes"); got != "terminal: false \ngot one\ngot three\nend\n" {
			t.Errorf("a container's logs are %q", got)
		}

		if err := b.Engine.Start(ctx, "tty"); err != nil {
			t.Fatal(err)
		}
		at = b.attach(t, "tty")
		at.types("again")
		at.shows("got again\r\n")
		if got := b.logsOf(t, "tty"); strings.Contains(got, "two") || !strings.Contains(got, "got again") {
			t.Errorf("after a second start a terminal's logs are %q", got)
		}
		gone := b.attach(t, "tty")
		gone.types("exit 3")
		gone.ends(3)
		at.ends(3)

		mute := b.attach(t, "mute")
		mute.in.Close()
		testkit.Retry(t, "its input ends", func() error {
			f, err := os.OpenFile(b.cfg.places().Stdin("mute"), os.O_WRONLY|unix.O_NONBLOCK, 0)
			if err == nil {
				f.Close()
				return errors.New("not yet")
			}
			return nil
		})
		again := make(chan error)
		go func() {
			ctx, cancel := context.WithCancel(ctx) // a deadline containerd would see before us, and say in words
			defer cancel()
			defer time.AfterFunc(300*time.Millisecond, cancel).Stop()
			_, err := b.Attach(ctx, "mute", AttachSpec{Stdin: strings.NewReader("")})
			again <- err
		}()
		if err := <-again; !errors.Is(err, context.Canceled) {
			t.Errorf("attach to what has no more input: %v", err)
		}
		if err := b.Remove(ctx, "mute", true); err != nil {
			t.Fatal(err)
		}
		mute.ends(137)
		if _, err := b.Attach(ctx, "tty", AttachSpec{}); !errors.Is(err, ErrNotRunning) {
			t.Errorf("attach to what has ended: %v", err)
		}
		if _, err := b.Attach(ctx, "nobody", AttachSpec{}); !errors.Is(err, ErrNotFound) {
			t.Errorf("attach to nothing: %v", err)
		}
	})
}
