package api

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Half a body is waited for no longer than it may take, over HTTP/1.1 and by whoever it is sent; a whole one,
// and a call that then takes longer, are served.
func TestHalfABody(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := Listen(socket, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	const limit = 300 * time.Millisecond
	read := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b := make([]byte, 10)
		n, err := r.Body.Read(b)
		for err == nil {
			var more int
			more, err = r.Body.Read(b[n:])
			n += more
		}
		if errors.Is(err, io.EOF) {
			select {
			case <-time.After(2 * limit):
			case <-r.Context().Done():
				err = r.Context().Err()
			}
		}
		fmt.Fprintf(w, "%d %v", n, err)
	})
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- serve(ctx, l, bounded(read, limit)) }()
	for sent, want := range map[string]string{"whole": "5 EOF", "hal": "i/o timeout"} {
		c, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprintf(c, "POST /dewpoint.v1.Node/List HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n%s", sent)
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		r, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(sent, err)
		}
		b := make([]byte, 100)
		n, _ := r.Body.Read(b)
		r.Body.Close()
		if !strings.Contains(string(b[:n]), want) {
			t.Errorf("%s: %q; want %s", sent, b[:n], want)
		}
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
