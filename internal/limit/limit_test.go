package limit_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"dewpoint/internal/limit"
	"dewpoint/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func listen(t *testing.T, all, each int, h http.Handler) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: h, Protocols: new(http.Protocols)}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(limit.Listener(l, all, each))
	}()
	t.Cleanup(func() { s.Close(); <-done })
	return l.Addr().String()
}

// from connects from an address of this machine's, and reports whether it is served.
func from(t *testing.T, ip, to string) (c net.Conn, served bool) {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}, Timeout: time.Minute}
	c, err := d.Dial("tcp", to)
	if err != nil {
		return nil, false // it has hung up already
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return c, false
	}
	res.Body.Close()
	return c, true
}

// Connections are bounded, of all and of each address; who hangs up makes room.
func TestListener(t *testing.T) {
	addr := listen(t, 3, 2, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	var kept net.Conn
	for i, try := range []struct {
		ip   string
		want bool
	}{{"127.0.0.1", true}, {"127.0.0.1", true}, {"127.0.0.1", false}, {"127.0.0.2", true},
		{"127.0.0.2", false}, {"127.0.0.3", false}} {
		c, got := from(t, try.ip, addr)
		if got != try.want {
			t.Errorf("connection %d, of %s: served %t", i, try.ip, got)
		}
		if i == 0 {
			kept = c
		}
	}
	kept.Close()
	testkit.Eventually(t, "there is room again", func() bool {
		_, ok := from(t, "127.0.0.3", addr)
		return ok
	})
}

func TestShares(t *testing.T) {
	s := limit.Shares{All: 3, Each: 2}
	for i, try := range []struct {
		who  string
		want bool
	}{{"a", true}, {"a", true}, {"a", false}, {"b", true}, {"c", false}} {
		if got := s.Enter(try.who); got != try.want {
			t.Errorf("%d, %s: %t", i, try.who, got)
		}
	}
	s.Leave("a")
	if !s.Enter("c") || s.Enter("a") {
		t.Error("what was given back is not there for others")
	}
}

// An answer that nobody reads ends; one that is quiet for longer, and read, does not.
func TestWrites(t *testing.T) {
	testkit.Long(t)
	const patience = 200 * time.Millisecond
	ended := make(chan error, 1)
	flood := limit.Writes(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for {
			if _, err := w.Write(make([]byte, 64<<10)); err != nil {
				ended <- err
				return
			}
			if err := http.NewResponseController(w).Flush(); err != nil {
				ended <- err
				return
			}
		}
	}), patience)
	quiet := limit.Writes(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for range 2 {
			fmt.Fprint(w, "x")
			w.(http.Flusher).Flush()
			select {
			case <-time.After(3 * patience):
			case <-r.Context().Done():
				return
			}
		}
		fmt.Fprint(w, "end")
	}), patience)
	mux := http.NewServeMux()
	mux.Handle("/flood", flood)
	mux.Handle("/quiet", quiet)
	addr := listen(t, 10, 0, mux)
	for _, two := range []bool{false, true} {
		tr := &http.Transport{Protocols: new(http.Protocols)}
		tr.Protocols.SetHTTP1(!two)
		tr.Protocols.SetUnencryptedHTTP2(two)
		defer tr.CloseIdleConnections()
		c := &http.Client{Transport: tr}
		res, err := c.Get("http://" + addr + "/flood")
		if err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-ended:
			if !two && !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("HTTP/%d: it ended with %v", res.ProtoMajor, err)
			}
		case <-time.After(time.Minute):
			t.Errorf("HTTP/%d: an answer that nobody reads is kept", res.ProtoMajor)
		}
		res.Body.Close()
		res, err = c.Get("http://" + addr + "/quiet")
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(res.Body)
		res.Body.Close()
		if string(b) != "xxend" || err != nil {
			t.Errorf("HTTP/%d: a quiet answer: %q, %v", res.ProtoMajor, b, err)
		}
	}
}
