package testbed

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"dewpoint/testkit"
)

// farEcho is a server behind a distance; it sends everything back, and its own
// end when the client's has come.
func farEcho(t *testing.T, rtt time.Duration) (address string) {
	t.Helper()
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	go func() {
		for {
			conn, err := server.Accept()
			if err != nil {
				return
			}
			go func() { io.Copy(conn, conn); conn.Close() }()
		}
	}()
	return relay(t, rtt, server.Addr().String())
}

func relay(t *testing.T, rtt time.Duration, to string) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := NewRelay(l, func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", to)
	})
	f.Delay(rtt)
	t.Cleanup(func() { f.Close() })
	return l.Addr().String()
}

// The first exchange of a connection takes two round trips, each further one
// takes one. A busy machine only adds to it, so the shortest of some tries counts.
func TestDistanceCostsRoundTrips(t *testing.T) {
	testkit.Long(t)
	const rtt = 100 * time.Millisecond
	wants := []time.Duration{2 * rtt, rtt, rtt}
	address := farEcho(t, rtt)
	testkit.Retry(t, "exchanges in time", func() error {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		for i, want := range wants {
			start := time.Now()
			if _, err := conn.Write([]byte("ping")); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(conn, make([]byte, 4)); err != nil {
				t.Fatal(err)
			}
			took := time.Since(start)
			if took < want-10*time.Millisecond {
				t.Fatalf("exchange %d took %s, no less than %s is possible", i, took, want)
			}
			if took > want+60*time.Millisecond {
				err = errors.Join(err, fmt.Errorf("exchange %d took %s, want %s", i, took, want))
			}
		}
		return err
	})
}

// 64 MiB there and back take little longer over a distance than without, in
// order, and an end of the stream passes on.
func TestDistanceCostsNoBandwidth(t *testing.T) {
	testkit.Long(t)
	const rtt = 200 * time.Millisecond
	near, far := throughput(t, 0), throughput(t, rtt)
	if far > 2*near+4*rtt {
		t.Errorf("64 MiB took %s without and %s with round trips of %s", near, far, rtt)
	}
	if far < 2*rtt {
		t.Errorf("%s are less than two round trips", far)
	}
}

func throughput(t *testing.T, rtt time.Duration) time.Duration {
	t.Helper()
	content := make([]byte, 64<<20)
	for i := range content {
		content[i] = byte(i * i >> 7)
	}
	conn, err := net.Dial("tcp", farEcho(t, rtt))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	start := time.Now()
	go func() {
		io.Copy(conn, bytes.NewReader(content))
		conn.(*net.TCPConn).CloseWrite()
	}()
	h := sha256.New()
	if _, err := io.Copy(h, conn); err != nil {
		t.Fatal(err)
	}
	took := time.Since(start)
	if want := sha256.Sum256(content); !bytes.Equal(h.Sum(nil), want[:]) {
		t.Error("what came back is not what was sent")
	}
	return took
}

func TestDistanceToNobody(t *testing.T) {
	conn, err := net.Dial("tcp", relay(t, time.Millisecond, "127.0.0.1:1"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(5 * time.Second))
	if n, err := conn.Read(make([]byte, 1)); err == nil || n > 0 {
		t.Errorf("read %d bytes, %v", n, err)
	}
}
