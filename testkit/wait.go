// Package testkit has what tests of every package share: waiting, with one limit, and ports that nobody else
// takes. The packages below it are fakes, beds and contract suites.
package testkit

import (
	"errors"
	"os"
	"strconv"
	"testing"
	"time"
)

// Limit is how long a test waits for what must come: a minute, times DEWPOINT_PATIENCE. It ends a test that
// hangs, and expects nothing of the machine's speed.
var Limit = limit(os.Getenv("DEWPOINT_PATIENCE"))

func limit(patience string) time.Duration {
	if f, err := strconv.ParseFloat(patience, 64); err == nil && f > 0 {
		return time.Duration(f * float64(time.Minute))
	}
	return time.Minute
}

// Long leaves a test of seconds out of "make check" (go test -short).
func Long(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("takes seconds")
	}
}

// Eventually waits until ok, and fails the test at the Limit.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	Retry(t, what, func() error {
		if !ok() {
			return errNotYet
		}
		return nil
	})
}

var errNotYet = errors.New("not yet")

// Retry tries until there is no error, and fails the test with the last one at the Limit.
func Retry(t testing.TB, what string, try func() error) {
	t.Helper()
	for begin := time.Now(); ; {
		err := try()
		if err == nil {
			return
		}
		waited := time.Since(begin)
		if waited > Limit {
			t.Fatalf("%s: after %s still: %v", what, Limit, err)
		}
		time.Sleep(min(max(waited/100, 2*time.Millisecond), 50*time.Millisecond))
	}
}

// Receive is what comes through a channel, or the zero value once it is closed. It fails at the Limit.
func Receive[T any](t testing.TB, what string, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(Limit):
		t.Fatalf("%s: not within %s", what, Limit)
		panic("unreachable")
	}
}
