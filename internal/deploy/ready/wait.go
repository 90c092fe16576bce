package ready

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/engine/logfile"
	"dewpoint/internal/engine/network"
	"dewpoint/internal/spec"
)

// The pause between tries grows from first to last, so that a container which
// is ready soon is found within a millisecond or two, and one which takes
// minutes costs nothing.
const (
	firstPause    = time.Millisecond
	lastPause     = 50 * time.Millisecond
	firstRunPause = 10 * time.Millisecond // of commands, each of which costs a process
	lastRunPause  = time.Second
	tryTimeout    = 10 * time.Second
	lastLines     = 10
)

// Wait returns nil once the check succeeds. It returns an *ExitError as soon
// as the container ends, and a *NotReadyError, which says what was seen last,
// when ctx does.
func Wait(ctx context.Context, c spec.ReadyCheck, t Target) error {
	if c.Kind == spec.ReadyNone || c.Kind == "" {
		return nil
	}
	wctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	if t.Exited != nil {
		wg.Go(func() {
			status, err := t.Exited(wctx)
			if wctx.Err() != nil {
				return
			}
			if err != nil {
				cancel(fmt.Errorf("watch the container: %w", err))
				return
			}
			cancel(&ExitError{Status: status})
		})
	}
	if c.Patience > 0 {
		stop := time.AfterFunc(c.Patience, func() { cancel(ErrUnhealthy) })
		defer stop.Stop()
	}
	last, err := attempt(wctx, c, t)
	if err == nil {
		return nil
	}
	return explain(wctx, c, t, last, err)
}

// explain makes the error of a wait that ended with err.
func explain(ctx context.Context, c spec.ReadyCheck, t Target, last, err error) error {
	if ctx.Err() == nil {
		return err // the check cannot be made at all
	}
	reason := context.Cause(ctx)
	var exit *ExitError
	if errors.As(reason, &exit) {
		exit.Output = output(t.Logs)
		return exit
	}
	return &NotReadyError{Check: c, Last: last, Reason: reason, Output: output(t.Logs)}
}

// output is the end of what the container wrote, standard error last.
func output(logs []string) string {
	var parts []string
	for _, p := range logs {
		if s := logfile.Tail(p, lastLines); s != "" {
			parts = append(parts, s)
		}
	}
	return strings.Join(parts, "\n")
}

// attempt tries until success or the end of ctx. last is the last failure
// that was not due to ctx.
func attempt(ctx context.Context, c spec.ReadyCheck, t Target) (last, err error) {
	switch c.Kind {
	case spec.ReadyTCP:
		return poll(ctx, firstPause, lastPause, func() error { return tryTCP(ctx, c, &t) })
	case spec.ReadyHTTP:
		client := httpClient(&t)
		defer client.CloseIdleConnections()
		return poll(ctx, firstPause, lastPause, func() error { return tryHTTP(ctx, client, c, &t) })
	case spec.ReadyCommand:
		if t.Runner == nil {
			return nil, errors.New("readiness by command: nothing runs commands in this container")
		}
		return poll(ctx, firstRunPause, lastRunPause, func() error { return tryCommand(ctx, c, &t) })
	case spec.ReadyLog:
		return nil, awaitLine(ctx, c, &t)
	}
	return nil, fmt.Errorf("readiness check of kind %q", c.Kind)
}

func poll(ctx context.Context, pause, most time.Duration, try func() error) (last, err error) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	<-timer.C
	for {
		err := try()
		if err == nil {
			return nil, nil
		}
		if over(ctx) {
			return cmp.Or(last, err), ctx.Err()
		}
		last = err
		timer.Reset(pause)
		select {
		case <-ctx.Done():
			return last, ctx.Err()
		case <-timer.C:
		}
		pause = min(pause+pause/8+1, most)
	}
}

// over says whether ctx has ended. Dialers see its deadline pass a little
// before it ends; what they say then is no news of the container.
func over(ctx context.Context) bool {
	if d, ok := ctx.Deadline(); ok && !time.Now().Before(d) {
		<-ctx.Done()
	}
	return ctx.Err() != nil
}

// dial connects from where the target can be reached, and makes sure that it
// is the target that answers.
func (t *Target) dial(ctx context.Context, port uint16) (net.Conn, error) {
	d := net.Dialer{Timeout: tryTimeout}
	var c net.Conn
	connect := func() (err error) {
		c, err = d.DialContext(ctx, "tcp", t.addr(port))
		return err
	}
	var err error
	if t.NetNS != "" && !t.Addr.IsValid() {
		err = network.Do(t.NetNS, connect)
	} else {
		err = connect()
	}
	if err != nil {
		return nil, err
	}
	if t.Host {
		if err := t.owns(port); err != nil {
			c.Close()
			return nil, err
		}
	}
	return c, nil
}

func tryTCP(ctx context.Context, c spec.ReadyCheck, t *Target) error {
	conn, err := t.dial(ctx, c.Port)
	if err != nil {
		return err
	}
	return conn.Close()
}

func httpClient(t *Target) *http.Client {
	return &http.Client{
		Timeout: tryTimeout,
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
				_, p, err := net.SplitHostPort(addr)
				if err != nil {
					return nil, err
				}
				n, err := strconv.ParseUint(p, 10, 16)
				if err != nil {
					return nil, err
				}
				return t.dial(ctx, uint16(n))
			},
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

func tryHTTP(ctx context.Context, client *http.Client, c spec.ReadyCheck, t *Target) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+t.addr(c.Port)+c.Path, nil)
	if err != nil {
		return err
	}
	req.Host = "localhost"
	req.Header.Set("User-Agent", "dewpoint")
	r, err := client.Do(req)
	if err != nil {
		return err
	}
	_, _ = io.CopyN(io.Discard, r.Body, 4<<10)
	r.Body.Close()
	if r.StatusCode < 200 || r.StatusCode > 399 {
		return fmt.Errorf("HTTP status %s", r.Status)
	}
	return nil
}

func tryCommand(ctx context.Context, c spec.ReadyCheck, t *Target) error {
	if c.TryTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.TryTimeout)
		defer cancel()
	}
	status, out, err := t.Runner.Run(ctx, c.Args)
	if err != nil {
		return err
	}
	if status != 0 {
		return fmt.Errorf("command exited with status %d: %s", status, strings.TrimSpace(string(out)))
	}
	return nil
}

// maxLine bounds the part of a line that a log check sees.
const maxLine = 64 << 10

// matcher looks for the pattern in lines, also in one that is not finished.
type matcher struct {
	check spec.ReadyCheck
	line  []byte
	found context.CancelFunc
}

var errFound = errors.New("found")

func (m *matcher) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		rest := p
		var ended bool
		if i := slices.Index(p, '\n'); i >= 0 {
			rest, p, ended = p[:i], p[i+1:], true
		} else {
			p = nil
		}
		if room := maxLine - len(m.line); room > 0 {
			m.line = append(m.line, rest[:min(len(rest), room)]...)
		}
		if m.check.Pattern.Match(m.line) {
			m.found()
			return n, errFound
		}
		if ended {
			m.line = m.line[:0]
		}
	}
	return n, nil
}

// awaitLine follows the output files until one has a line that matches.
func awaitLine(ctx context.Context, c spec.ReadyCheck, t *Target) error {
	if len(t.Logs) == 0 {
		return errors.New("readiness by log: the container has no output files")
	}
	lctx, found := context.WithCancel(ctx)
	defer found()
	never := make(chan struct{})
	errs := make(chan error, len(t.Logs))
	for _, p := range t.Logs {
		go func() { errs <- logfile.Copy(lctx, p, &matcher{check: c, found: found}, 0, never) }()
	}
	var first error
	matched := false
	for range t.Logs {
		err := <-errs
		matched = matched || errors.Is(err, errFound)
		if err != nil && !errors.Is(err, context.Canceled) && first == nil {
			first = err
			found()
		}
	}
	switch {
	case matched:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case first != nil:
		return first
	}
	return errors.New("readiness by log: the output files are gone")
}
