package api

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"

	dewpointv1 "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

// Code names a kind of failure. Programs may rely on it.
type Code string

const (
	Internal       Code = "internal"
	BadRequest     Code = "bad_request"
	NoDaemon       Code = "no_daemon"
	Stopping       Code = "stopping"
	NotFound       Code = "not_found"
	Unauthorized   Code = "unauthorized"
	Forbidden      Code = "forbidden"
	Unreachable    Code = "unreachable"
	RateLimited    Code = "rate_limited"
	RegistryFault  Code = "registry_fault"
	Mismatch       Code = "mismatch"
	BadImage       Code = "bad_image"
	DiskFull       Code = "disk_full"
	NotReady       Code = "not_ready"
	Exited         Code = "exited"
	NameInUse      Code = "name_in_use"
	PortInUse      Code = "port_in_use"
	Running        Code = "running"
	NotRunning     Code = "not_running"
	InUse          Code = "in_use"
	Permission     Code = "permission"
	Unsupported    Code = "unsupported"
	NotExecutable  Code = "not_executable"
	CommandMissing Code = "command_missing"
	StatusUnknown  Code = "status_unknown"
	Canceled       Code = "canceled"
	Deadline       Code = "deadline"
	Busy           Code = "busy"
	NoMemory       Code = "no_memory"
	KeyReused      Code = "key_reused"
)

// The exit codes of commands, listed in docs/use/cli.md.
const (
	ExitFailure      = 1
	ExitUsage        = 2
	ExitNoDaemon     = 3
	ExitNotFound     = 4
	ExitUnauthorized = 5
	ExitRegistry     = 6
	ExitIntegrity    = 7
	ExitDiskFull     = 8
	ExitNotReady     = 9
	ExitConflict     = 10
	ExitPermission   = 11
	ExitUnsupported  = 12
	ExitBusy         = 13
	ExitUnknown      = 125
	ExitNotExec      = 126
	ExitNoCommand    = 127
	ExitInterrupted  = 130
)

// meaning is what a code is to the surfaces: an exit code, the nearest Connect
// code, and the remedy where the error itself has none; no code is without one.
type meaning struct {
	exit   int
	rpc    connect.Code
	remedy string
}

var meanings = map[Code]meaning{
	Internal: {ExitFailure, connect.CodeInternal, "see dewd's log, and report what that does not explain"},
	BadRequest: {ExitUsage, connect.CodeInvalidArgument,
		"\"dew COMMAND --help\", or the description of the API, /openapi.yaml, says what a call takes"},
	NoDaemon: {ExitNoDaemon, connect.CodeUnavailable, "start dewd, as root, or name its socket with -H"},
	Stopping: {ExitNoDaemon, connect.CodeUnavailable, "try again when it runs"},
	NotFound: {ExitNotFound, connect.CodeNotFound,
		"\"dew ps -a\", \"dew images\" and \"dew deployments\" show what is here"},
	Unauthorized: {ExitUnauthorized, connect.CodeUnauthenticated,
		"log in to the registry as the user who runs dewd"},
	Forbidden:     {ExitUnauthorized, connect.CodePermissionDenied, "the login has no right to this image"},
	Unreachable:   {ExitRegistry, connect.CodeUnavailable, "check the network and the registry's address"},
	RateLimited:   {ExitRegistry, connect.CodeResourceExhausted, "wait, or log in for a higher limit"},
	RegistryFault: {ExitRegistry, connect.CodeUnavailable, "the registry is in trouble, try again later"},
	Mismatch: {ExitIntegrity, connect.CodeDataLoss,
		"nothing of it was kept; pull again, and if it stays so the registry's copy is damaged"},
	BadImage: {ExitIntegrity, connect.CodeFailedPrecondition,
		"the image itself is at fault: build or push it anew"},
	DiskFull: {ExitDiskFull, connect.CodeResourceExhausted,
		"free some space, for instance with \"dew prune\", and try again"},
	NotReady: {ExitNotReady, connect.CodeDeadlineExceeded,
		"see \"dew logs\", or allow more time with --ready-timeout"},
	Exited: {ExitNotReady, connect.CodeAborted,
		"see its output above, or \"dew logs\" unless --rm was given"},
	NameInUse: {ExitConflict, connect.CodeAlreadyExists,
		"choose another --name, or remove it with \"dew rm -f\""},
	PortInUse:      {ExitConflict, connect.CodeAlreadyExists, "end what has the port, or use another one"},
	Running:        {ExitConflict, connect.CodeFailedPrecondition, "stop it first, or use \"dew rm -f\""},
	NotRunning:     {ExitConflict, connect.CodeFailedPrecondition, "see \"dew ps -a\""},
	InUse:          {ExitConflict, connect.CodeFailedPrecondition, "remove the containers that use it first"},
	Permission:     {ExitPermission, connect.CodePermissionDenied, "use sudo"},
	Unsupported:    {ExitUnsupported, connect.CodeUnimplemented, "\"dew doctor\" says what the node lacks"},
	NotExecutable:  {ExitNotExec, connect.CodeFailedPrecondition, "check the command and its architecture"},
	CommandMissing: {ExitNoCommand, connect.CodeNotFound, "check the command and the image's PATH"},
	StatusUnknown:  {ExitUnknown, connect.CodeUnavailable, "see \"dew ps -a\""},
	Canceled:       {ExitInterrupted, connect.CodeCanceled, "ask again, if it is still wanted"},
	Deadline:       {ExitFailure, connect.CodeDeadlineExceeded, "allow it more time, or try again"},
	Busy:           {ExitBusy, connect.CodeResourceExhausted, "try again in a few seconds"},
	NoMemory: {ExitBusy, connect.CodeResourceExhausted,
		"end something that runs, or ask for less with --memory"},
	KeyReused: {ExitConflict, connect.CodeAlreadyExists, "take another key for what is not the same"},
}

// Error is a failure as every surface shows it.
type Error struct {
	Code    Code   `json:"code"`
	Message string `json:"message"`          // one line: what happened
	Remedy  string `json:"remedy,omitempty"` // what to do
	Exit    int    `json:"exit"`             // exit code of a command that fails for this
	Err     error  `json:"-"`                // what it was made of; nil on the client's side
}

// Failure is the Error in terms of package spec.
func (e *Error) Failure() *spec.Failure {
	return &spec.Failure{Code: string(e.Code), Message: e.Message, Remedy: e.Remedy, Exit: e.Exit}
}

// FromFailure is the Error of a failure.
func FromFailure(f *spec.Failure) *Error {
	return &Error{Code: Code(f.Code), Message: f.Message, Remedy: f.Remedy, Exit: f.Exit, Err: f}
}

// New is an Error with the code's exit code and remedy.
func New(code Code, message string) *Error {
	m, ok := meanings[code]
	if !ok {
		m.exit = ExitFailure
	}
	return &Error{Code: code, Message: message, Remedy: m.remedy, Exit: m.exit}
}

// Of is New for an error. A remedy of the error's own goes before the code's.
func Of(code Code, err error) *Error {
	e := New(code, oneLine(err.Error()))
	e.Err = err
	var r interface{ Remedy() string }
	if errors.As(err, &r) && r.Remedy() != "" {
		e.Remedy = r.Remedy()
	}
	return e
}

// Error is one line: what happened and what to do.
func (e *Error) Error() string {
	if e.Remedy == "" || strings.Contains(e.Message, e.Remedy) {
		return e.Message
	}
	return e.Message + "; " + e.Remedy
}

func (e *Error) Unwrap() error { return e.Err }

// advised is New with a remedy that fits better than the code's.
func advised(code Code, message, remedy string) *Error {
	e := New(code, message)
	e.Remedy = remedy
	return e
}

// errStopping is the cause of contexts that end because the daemon stops.
var errStopping = New(Stopping, "dewd is stopping")

// Classify makes an Error of any error. An error says by a method Code() Code
// or Kind() string what it is; it may have a Remedy() string. Others are known
// by what the operating system and the context say.
func Classify(err error) *Error {
	var e *Error
	var coder interface{ Code() Code }
	var kinder interface{ Kind() string }
	var failed *spec.Failure
	switch {
	case errors.As(err, &e):
		return e
	case errors.As(err, &failed):
		return FromFailure(failed)
	case errors.As(err, &coder):
		return Of(coder.Code(), err)
	case errors.As(err, &kinder):
		return Of(Code(kinder.Kind()), err)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return Of(DiskFull, err)
	case errors.Is(err, fs.ErrPermission):
		return Of(Permission, err)
	case errors.Is(err, context.Canceled):
		return Of(Canceled, err)
	case errors.Is(err, context.DeadlineExceeded):
		return Of(Deadline, err)
	}
	if e := unstartable(err); e != nil {
		return e
	}
	return Of(Internal, err)
}

// unstartable knows by its words, as it has nothing else, the error of a
// container runtime that could not run a command: "… exec: "nginx": executable
// file not found in $PATH: unknown".
func unstartable(err error) *Error {
	s := err.Error()
	i := strings.LastIndex(s, "exec: \"")
	if i < 0 {
		return nil
	}
	s = oneLine(strings.TrimSuffix(s[i:], ": unknown"))
	var e *Error
	switch {
	case strings.Contains(s, "not found in $PATH"), strings.Contains(s, "no such file or directory"):
		e = New(CommandMissing, s)
	case strings.Contains(s, "permission denied"), strings.Contains(s, "exec format error"),
		strings.Contains(s, "is a directory"):
		e = New(NotExecutable, s)
	default:
		return nil
	}
	e.Err = err
	return e
}

// errLate is what ends a call at the time that its caller has set.
var errLate = advised(Deadline,
	"the call took longer than its caller allows (Connect-Timeout-Ms, grpc-timeout)",
	"allow it more time; what it had begun is undone, as if the caller had gone")

// slow is what ends a call that the node itself limits.
func slow(limit time.Duration) *Error {
	return advised(Deadline, fmt.Sprintf("the call took longer than %v, the most that the node gives it", limit),
		"try again when the node has less to do; \"dew doctor\" says what is wrong with it")
}

// wire makes a Connect error with the Error as its detail.
func (e *Error) wire() *connect.Error {
	rpc := connect.CodeUnknown
	if m, ok := meanings[e.Code]; ok {
		rpc = m.rpc
	}
	ce := connect.NewError(rpc, errors.New(e.Message))
	e.addTo(ce)
	return ce
}

func (e *Error) addTo(ce *connect.Error) {
	d, err := connect.NewErrorDetail(&dewpointv1.Error{
		Code: string(e.Code), Message: e.Message, Remedy: e.Remedy, Exit: int32(e.Exit),
	})
	if err == nil {
		ce.AddDetail(d)
	}
}

// unwire is the Error of a Connect error; nil if it carries none.
func unwire(ce *connect.Error) *Error {
	for _, d := range ce.Details() {
		v, err := d.Value()
		if err != nil {
			continue
		}
		if m, ok := v.(*dewpointv1.Error); ok {
			return &Error{Code: Code(m.Code), Message: m.Message, Remedy: m.Remedy, Exit: int(m.Exit)}
		}
	}
	return nil
}

// oneLine keeps an error from spreading over a terminal. Of several lines, as
// when an error ends with a program's output, the first and the last stay.
func oneLine(s string) string {
	s = strings.ToValidUTF8(strings.TrimSpace(s), "?")
	if i, j := strings.IndexByte(s, '\n'), strings.LastIndexByte(s, '\n'); i >= 0 {
		s = s[:i] + " " + s[j+1:]
	}
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
	const most = 1000
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}
