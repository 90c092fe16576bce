package api

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"testing"
)

type coded struct{}

func (coded) Error() string  { return "layer sha256:12 is not what was asked" }
func (coded) Code() Code     { return Mismatch }
func (coded) Remedy() string { return "ask somebody else" }

type kinded struct{}

func (kinded) Error() string { return "too many requests" }
func (kinded) Kind() string  { return "rate_limited" }

func TestClassify(t *testing.T) {
	for _, c := range []struct {
		err  error
		code Code
		exit int
	}{
		{New(NameInUse, "x"), NameInUse, ExitConflict},
		{fmt.Errorf("pull: %w", coded{}), Mismatch, ExitIntegrity},
		{fmt.Errorf("pull: %w", kinded{}), RateLimited, ExitRegistry},
		{&os.PathError{Op: "write", Path: "data", Err: syscall.ENOSPC}, DiskFull, ExitDiskFull},
		{fmt.Errorf("write: %w", syscall.EDQUOT), DiskFull, ExitDiskFull},
		{&os.PathError{Op: "open", Path: "data", Err: syscall.EACCES}, Permission, ExitPermission},
		{fs.ErrPermission, Permission, ExitPermission},
		{context.Canceled, Canceled, ExitInterrupted},
		{context.DeadlineExceeded, Deadline, ExitFailure},
		{errors.New("anything"), Internal, ExitFailure},
		{errors.New(`OCI runtime create failed: runc create failed: unable to start container process: exec: "x": executable file not found in $PATH: unknown`), CommandMissing, ExitNoCommand},
		{errors.New(`OCI runtime exec failed: exec failed: unable to start container process: exec: "/x": stat /x: no such file or directory: unknown`), CommandMissing, ExitNoCommand},
		{errors.New(`unable to start container process: exec: "/etc/passwd": permission denied: unknown`),
			NotExecutable, ExitNotExec},
	} {
		e := Classify(c.err)
		if e.Code != c.code || e.Exit != c.exit {
			t.Errorf("%v: code %s, exit %d; want %s, %d", c.err, e.Code, e.Exit, c.code, c.exit)
		}
	}
}

func TestErrorIsOneLineWithOneRemedy(t *testing.T) {
	e := Of(Mismatch, fmt.Errorf("a\nb\x1b[31m: %w", coded{}))
	if got := e.Error(); strings.ContainsAny(got, "\n\x1b") || !strings.HasSuffix(got, "; ask somebody else") {
		t.Errorf("%q", got)
	}
	e.Message += "; ask somebody else"
	if got := e.Error(); strings.Count(got, "ask somebody else") != 1 {
		t.Errorf("%q", got)
	}
	if got := Of(Exited,
		errors.New("exited; its last lines:\nstarting\nno such user\n")).Message; got != "exited; its last lines: no such user" {
		t.Errorf("%q", got)
	}
	if got := Of(Internal, errors.New(strings.Repeat("ä", 5000))).Message; len(got) > 1100 {
		t.Errorf("%d bytes", len(got))
	}
}

func TestErrorsSurviveTheWire(t *testing.T) {
	for code, m := range meanings {
		e := New(code, "message of "+string(code))
		got := unwire(e.wire())
		if m.remedy == "" {
			t.Errorf("%s has no remedy", code)
		}
		if got == nil || got.Code != e.Code || got.Message != e.Message || got.Remedy != e.Remedy ||
			got.Exit != m.exit {
			t.Errorf("%+v became %+v", e, got)
		}
	}
	if len(meanings) < 25 {
		t.Errorf("only %d codes have a meaning", len(meanings))
	}
}
