package spec

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// ReadyKind is the way of a ReadyCheck.
type ReadyKind string

const (
	ReadyNone    ReadyKind = "none"
	ReadyTCP     ReadyKind = "tcp"
	ReadyHTTP    ReadyKind = "http"
	ReadyCommand ReadyKind = "cmd"
	ReadyLog     ReadyKind = "log"
)

// ReadyCheck is what makes a container ready. The zero value is ReadyNone.
type ReadyCheck struct {
	Kind    ReadyKind
	Port    uint16         // of ReadyTCP, ReadyHTTP
	Path    string         // of ReadyHTTP, with the leading slash
	Args    []string       // of ReadyCommand
	Pattern *regexp.Regexp // of ReadyLog

	// Of a health check: the time limit of one try, and how long
	// failures are borne before the container counts as unhealthy. 0 leaves
	// both to the context.
	TryTimeout time.Duration
	Patience   time.Duration
}

// String gives the check in the form that ParseReadyCheck reads, health checks too.
func (c ReadyCheck) String() string {
	switch c.Kind {
	case ReadyTCP:
		return fmt.Sprintf("tcp:%d", c.Port)
	case ReadyHTTP:
		return fmt.Sprintf("http:%d%s", c.Port, c.Path)
	case ReadyCommand:
		j, err := json.Marshal(c.Args)
		if err != nil {
			return "cmd:?"
		}
		return "cmd:" + string(j)
	case ReadyLog:
		return "log:" + c.Pattern.String()
	}
	return string(ReadyNone)
}

// ParseReadyCheck reads tcp:PORT, http:PORT/PATH, cmd:LINE (run by the container's
// /bin/sh), cmd:["ARG",…], log:RE and none. With none said the health check
// decides, and ReadyNone if there is none.
func ParseReadyCheck(how string, hc *Health) (ReadyCheck, error) {
	if how == "" {
		return fromHealth(hc)
	}
	if !utf8.ValidString(how) {
		return ReadyCheck{}, fmt.Errorf("%q does not say when the container is ready: it is not UTF-8", how)
	}
	kind, arg, _ := strings.Cut(how, ":")
	c := ReadyCheck{Kind: ReadyKind(kind)}
	var err error
	switch c.Kind {
	case ReadyNone:
		if how != string(ReadyNone) {
			err = errors.New("none takes no argument")
		}
	case ReadyTCP:
		c.Port, err = portOf(arg)
	case ReadyHTTP:
		p, path, _ := strings.Cut(arg, "/")
		c.Path = "/" + path
		c.Port, err = portOf(p)
	case ReadyCommand:
		c.Args, err = commandOf(arg)
	case ReadyLog:
		if c.Pattern, err = regexp.Compile(arg); err == nil && arg == "" {
			err = errors.New("the expression is empty")
		}
	default:
		err = errors.New("the kind is unknown")
	}
	if err != nil {
		return ReadyCheck{}, fmt.Errorf("%q does not say when the container is ready: %w; want tcp:PORT, http:PORT/PATH, cmd:COMMAND, log:EXPRESSION or none", how, err)
	}
	return c, nil
}

func portOf(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("port %q is not between 1 and 65535", s)
	}
	return uint16(n), nil
}

func commandOf(s string) ([]string, error) {
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
func fromHealth(hc *Health) (ReadyCheck, error) {
	if hc.None() {
		return ReadyCheck{Kind: ReadyNone}, nil
	}
	args, err := hc.Args()
	if err != nil {
		return ReadyCheck{}, fmt.Errorf("%w; give --ready", err)
	}
	h := hc.Defaults()
	patience := time.Duration(math.MaxInt64)
	if h.Interval <= (patience-h.StartPeriod)/time.Duration(h.Retries) {
		patience = h.StartPeriod + time.Duration(h.Retries)*h.Interval
	}
	return ReadyCheck{Kind: ReadyCommand, Args: args, TryTimeout: h.Timeout, Patience: patience}, nil
}
