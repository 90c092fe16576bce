package testkit

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

func TestLimit(t *testing.T) {
	for patience, want := range map[string]time.Duration{"": time.Minute, "2.5": 150 * time.Second,
		"x": time.Minute, "-1": time.Minute, "0": time.Minute} {
		if got := limit(patience); got != want {
			t.Errorf("%q gives %s", patience, got)
		}
	}
}

func TestRetry(t *testing.T) {
	left := 3
	Retry(t, "it counts", func() error {
		if left--; left > 0 {
			return errors.New("not yet")
		}
		return nil
	})
	ch := make(chan int, 1)
	ch <- 7
	if left != 0 || Receive(t, "a number", ch) != 7 {
		t.Errorf("%d are left", left)
	}
}

// failed is a test that fails without the one that runs.
type failed struct {
	testing.TB
	text string
}

func (f *failed) Fatalf(format string, args ...any) {
	f.text = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// What gives up says why.
func TestRetryInVain(t *testing.T) {
	defer func(l time.Duration) { Limit = l }(Limit)
	Limit = time.Millisecond
	said := &failed{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		Retry(said, "the thing", func() error { return errors.New("its reason") })
	}()
	<-done
	if !strings.Contains(said.text, "the thing") || !strings.Contains(said.text, "its reason") {
		t.Errorf("it says %q", said.text)
	}
}

// Ports that are reserved differ, and nobody listens on them, also with another address.
func TestFreePort(t *testing.T) {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("connections have %s", b)
	taken := map[int]bool{}
	for range 200 {
		p := FreePort(t)
		if taken[p] {
			t.Errorf("%d twice", p)
		}
		taken[p] = true
	}
	l, err := net.Listen("tcp", FreeAddress(t))
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	port, release, err := ReservePort()
	if err != nil || taken[port] {
		t.Fatal(port, err)
	}
	release()
}
