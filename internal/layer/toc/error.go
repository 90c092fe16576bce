package toc

import (
	"errors"
	"fmt"
)

// Reasons for which an archive is refused; every Error wraps one of them, or
// what the underlying reader said.
var (
	ErrCorrupt = errors.New("corrupt layer archive")
	ErrUnsafe  = errors.New("unsafe name in layer archive")
	ErrLimit   = errors.New("layer archive exceeds a limit")
)

// Error says which entry of an archive was refused and why. Repeating the read
// does not help unless Err is an error of the underlying reader.
type Error struct {
	Name   string // of the entry as the archive has it; "" if its header is unreadable
	Offset int64  // of the entry's header in the tar; -1 if not known
	Why    string
	Err    error
}

func (e *Error) Error() string {
	s := e.Err.Error()
	if e.Offset >= 0 {
		s += fmt.Sprintf(" at byte %d", e.Offset)
	}
	if e.Name != "" {
		s += fmt.Sprintf(": entry %q", e.Name)
	}
	if e.Why != "" {
		s += ": " + e.Why
	}
	return s
}

func (e *Error) Unwrap() error { return e.Err }
