// Package ready decides when a container serves.
//
// A spec.ReadyCheck is what to try: a TCP connection, an HTTP request, a command inside
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

	"dewpoint/internal/spec"
)

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
	Check  spec.ReadyCheck
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
