package testkit

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"testing"
)

// FreePort is a TCP port that is free on all addresses. Nobody takes it before the test ends: no connection,
// since it is below the ports that the kernel gives them; no other test, of this process or another.
func FreePort(t testing.TB) int {
	t.Helper()
	port, release, err := ReservePort()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return port
}

// FreeAddress is a FreePort of 127.0.0.1.
func FreeAddress(t testing.TB) string {
	t.Helper()
	return fmt.Sprintf("127.0.0.1:%d", FreePort(t))
}

// ReservePort is FreePort without a test. The port stays reserved until release, or the end of the process.
func ReservePort() (port int, release func(), err error) {
	low, high := portRange()
	for range 1000 {
		port = low + rand.IntN(high-low)
		// An abstract name exists once in a network namespace, as a port does, and ends with its process.
		name, err := net.Listen("unix", fmt.Sprintf("@dewpoint/test/port/%d", port))
		if err != nil {
			continue
		}
		if l, err := net.Listen("tcp", fmt.Sprintf(":%d", port)); err == nil {
			l.Close()
			return port, func() { name.Close() }, nil
		}
		name.Close()
	}
	return 0, nil, errors.New("no port is free")
}

// portRange is the ports from low on and below high.
func portRange() (low, high int) {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err == nil {
		_, err = fmt.Sscan(string(b), &high)
	}
	if err != nil || high < 12000 { // connections have nearly all
		high = 32768
	}
	return max(high-20000, 10000), high
}
