// Package ready decides when a container serves.
//
// A Check is what to try: a TCP connection, an HTTP request, a command inside
// the container, a line of its output, or nothing. Wait tries it again and
// again, at first every millisecond, so that little is lost between the moment
// when the application serves and the moment when this is known, and ends at
// once when the container does.
//
// On the host's network the port of a check may be answered by somebody else.
// So Conflict refuses a port that is taken before the container starts, and
// Wait counts an answer only when a process of the container holds the
// listening socket.
package ready

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"dewpoint/internal/spec"
)

// Kind is the way of a check.
type Kind string

const (
	None    Kind = "none"
	TCP     Kind = "tcp"
	HTTP    Kind = "http"
	Command Kind = "cmd"
	Log     Kind = "log"
)

// Check is what makes a container ready. The zero value is None.
type Check struct {
	Kind    Kind
	Port    uint16         // TCP, HTTP
	Path    string         // HTTP, with the leading slash
	Args    []string       // Command
	Pattern *regexp.Regexp // Log

	// Of a health check: the time limit of one try, and how long
	// failures are borne before the container counts as unhealthy. 0 leaves
	// both to the context.
	TryTimeout time.Duration
	Patience   time.Duration
}

// String gives the check in the form that Parse reads, health checks too.
func (c Check) String() string {
	switch c.Kind {
	case TCP:
		return fmt.Sprintf("tcp:%d", c.Port)
	case HTTP:
		return fmt.Sprintf("http:%d%s", c.Port, c.Path)
	case Command:
		j, err := json.Marshal(c.Args)
		if err != nil {
			return "cmd:?"
		}
		return "cmd:" + string(j)
	case Log:
		return "log:" + c.Pattern.String()
	}
	return string(None)
}

// ImageHealthcheck reads the health check of a raw image configuration, nil
// if there is none.
func ImageHealthcheck(config []byte) (*spec.Health, error) {
	var c struct {
		Config struct{ Healthcheck *spec.Health } `json:"config"`
	}
	if err := json.Unmarshal(config, &c); err != nil {
		return nil, fmt.Errorf("image configuration: %w", err)
	}
	return c.Config.Healthcheck, nil
}

// Parse reads tcp:PORT, http:PORT/PATH, cmd:LINE (run by the container's
// /bin/sh), cmd:["ARG",…], log:RE and none. With none said the health check
// decides, and None if there is none.
func Parse(how string, hc *spec.Health) (Check, error) {
	if how == "" {
		return fromHealth(hc)
	}
	if !utf8.ValidString(how) {
		return Check{}, fmt.Errorf("readiness check %q is not UTF-8", how)
	}
	kind, arg, _ := strings.Cut(how, ":")
	c := Check{Kind: Kind(kind)}
	var err error
	switch c.Kind {
	case None:
		if how != string(None) {
			err = errors.New("none takes no argument")
		}
	case TCP:
		c.Port, err = port(arg)
	case HTTP:
		p, path, _ := strings.Cut(arg, "/")
		c.Path = "/" + path
		c.Port, err = port(p)
	case Command:
		c.Args, err = command(arg)
	case Log:
		if c.Pattern, err = regexp.Compile(arg); err == nil && arg == "" {
			err = errors.New("the expression is empty")
		}
	default:
		err = errors.New("the kind is unknown")
	}
	if err != nil {
		return Check{}, fmt.Errorf("readiness check %q: %w; want tcp:PORT, http:PORT/PATH, cmd:COMMAND, log:EXPRESSION or none", how, err)
	}
	return c, nil
}

func port(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("port %q is not between 1 and 65535", s)
	}
	return uint16(n), nil
}

func command(s string) ([]string, error) {
	if strings.TrimSpace(s) == "" {
		return nil, errors.New("the command is empty")
	}
	if !strings.HasPrefix(s, "[") {
		return []string{"/bin/sh", "-c", s}, nil
	}
	var args []string
	if err := json.Unmarshal([]byte(s), &args); err != nil {
		return nil, err
	}
	if len(args) == 0 {
		return nil, errors.New("the command is empty")
	}
	return args, nil
}

// fromHealth gives the health check Docker's limits: Retries failures,
// Interval apart, after StartPeriod. It is tried more often than that.
func fromHealth(hc *spec.Health) (Check, error) {
	if hc.None() {
		return Check{Kind: None}, nil
	}
	args, err := hc.Args()
	if err != nil {
		return Check{}, fmt.Errorf("%w; give --ready", err)
	}
	h := hc.Defaults()
	return Check{Kind: Command, Args: args, TryTimeout: h.Timeout,
		Patience: h.StartPeriod + time.Duration(h.Retries)*h.Interval}, nil
}

// Runner runs commands inside the container.
type Runner interface {
	// Run returns the exit status and the end of the output.
	Run(ctx context.Context, args []string) (status int, output []byte, err error)
}

// Target is the container that is waited for.
type Target struct {
	Host   bool       // it uses the host's network
	Addr   netip.Addr // its address where it has one of its own; default 127.0.0.1
	NetNS  string     // path of the network namespace to connect from; "" is ours
	Pid    int        // of its first process, on the host
	Logs   []string   // its output files
	Runner Runner     // for Command

	// Exited blocks until the container has ended, and returns its status,
	// or until ctx has ended.
	Exited func(ctx context.Context) (status int, err error)
}

func (t *Target) addr(port uint16) string {
	a := t.Addr
	if !a.IsValid() {
		a = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return netip.AddrPortFrom(a, port).String()
}

// ExitError says that the container ended before it was ready.
type ExitError struct {
	Status int
	Output string // its last lines
}

func (e *ExitError) Error() string {
	s := fmt.Sprintf("container exited with status %d before it was ready", e.Status)
	if e.Output != "" {
		s += "; its last lines:\n" + e.Output
	}
	return s
}

// NotReadyError says that time ran out.
type NotReadyError struct {
	Check  Check
	Last   error // of the last try, nil if none ended
	Reason error // context.DeadlineExceeded, context.Canceled, ErrUnhealthy
	Output string
}

// ErrUnhealthy is the reason when the image's own limits are exceeded.
var ErrUnhealthy = errors.New("health check failed for as long as the image allows")

func (e *NotReadyError) Error() string {
	s := fmt.Sprintf("not ready (%s): %v", e.Check, e.Reason)
	if e.Last != nil {
		s += "; last seen: " + e.Last.Error()
	}
	if e.Output != "" {
		s += "; the container's last lines:\n" + e.Output
	}
	return s
}

func (e *NotReadyError) Unwrap() error { return e.Reason }
