package peer

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"dewpoint/testkit"

	"github.com/opencontainers/go-digest"
)

// saying is a node of the PoP that answers each request with text, and hangs up.
func saying(t *testing.T, auth *Auth, text string) string {
	return raw(t, func(c net.Conn) {
		s := tls.Server(c, auth.server)
		if _, err := http.ReadRequest(bufio.NewReader(s)); err != nil {
			return
		}
		io.WriteString(s, text)
		s.Close() // with a close_notify: the end that TLS calls clean
	})
}

// drain asks for everything and returns what came and why it ended.
func drain(ctx context.Context, c *Client, what, addr string) (string, error) {
	id := digest.FromString("x")
	var r io.ReadCloser
	var err error
	switch what {
	case "range":
		r, err = c.Range(ctx, addr, id, 10, 20)
	case "table":
		b, err := c.Table(ctx, addr, id)
		return string(b), err
	case "pack":
		r, err = c.Pack(ctx, addr, id)
	case "records":
		b, err := c.Records(ctx, addr, id)
		return string(b), err
	case "data":
		r, err = c.Data(ctx, addr, id, 10)
	case "follow":
		r, _, err = c.Follow(ctx, addr, id, 5)
	}
	if err != nil {
		return "", err
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	return string(b), err
}

func head(status string, lines ...string) string {
	return "HTTP/1.1 " + status + "\r\n" + strings.Join(append(lines, "", ""), "\r\n")
}

// followHead begins an answer to a follow from 5.
func followHead(size string) string {
	return head("200 OK", "Dewpoint-From: 5", "Dewpoint-Size: "+size, "Transfer-Encoding: chunked",
		"Trailer: Dewpoint-More, Dewpoint-End")
}

// What a node must not say, and what becomes of it. None of it may end like a whole answer.
func TestNonsense(t *testing.T) {
	auth := newAuth(t)
	partial := []string{"Content-Range: bytes 10-19/*"}
	for i, says := range []struct {
		what, text string
		want       error
	}{
		{"range", head("206 x", "Content-Length: 9", partial[0]) + "123456789", ErrProtocol},
		{"range", head("206 x", "Content-Length: 11", partial[0]) + "12345678901", ErrProtocol},
		{"range", head("206 x", partial[0]) + "1234567890", ErrProtocol},
		{"range", head("206 x", "Transfer-Encoding: chunked", partial[0]) + "a\r\n1234567890\r\n0\r\n\r\n",
			ErrProtocol},
		{"range", head("200 x", "Content-Length: 10") + "1234567890", ErrProtocol},
		{"range", head("206 x", "Content-Length: 10", "Content-Range: bytes 0-9/*") + "1234567890", ErrProtocol},
		{"range", head("206 x", "Content-Length: 10", partial[0]) + "12345", io.ErrUnexpectedEOF},
		{"range", head("302 x", "Content-Length: 0", "Location: /v1/elsewhere"), ErrProtocol},
		{"range", "SSH-2.0-OpenSSH\r\n", ErrAway},
		{"range", head("200 x", "X: "+strings.Repeat("x", 1<<20)), ErrAway},
		{"range", strings.Repeat(head("103 x"), 10000), ErrAway},
		{"table", head("200 x", fmt.Sprint("Content-Length: ", MaxTable+1)) + "x", ErrProtocol},
		{"table", head("200 x") + "x", ErrProtocol},
		{"table", head("200 x", "Content-Length: 5") + "1234", io.ErrUnexpectedEOF},
		{"table", head("500 x", "Content-Length: 5000000") + "why", io.ErrUnexpectedEOF},
		{"table", head("418 x", "Content-Length: 3") + "tea", ErrProtocol},
		{"pack", head("200 x", "Content-Length: 101") + strings.Repeat("x", 101), ErrProtocol},
		{"pack", head("200 x", "Transfer-Encoding: chunked") + strings.Repeat("a\r\n1234567890\r\n", 11),
			ErrProtocol},
		{"pack", head("200 x", "Transfer-Encoding: chunked") + strings.Repeat("a\r\n1234567890\r\n", 9),
			io.ErrUnexpectedEOF},
		{"pack", head("200 x") + "1234567890", ErrProtocol},
		{"pack", head("204 x"), ErrProtocol},
		{"records", head("200 x", fmt.Sprint("Content-Length: ", MaxRecords+1)) + "x", ErrProtocol},
		{"data", head("200 x", "Content-Length: 11") + "12345678901", ErrProtocol},
		{"data", head("200 x", "Transfer-Encoding: chunked") + "a\r\n1234567890\r\n0\r\n\r\n", ErrProtocol},
		{"data", head("200 x", "Content-Length: 10") + "12345", io.ErrUnexpectedEOF},
		{"follow", followHead("10") + "6\r\n123456\r\n0\r\nDewpoint-End: 11\r\n\r\n", ErrProtocol},
		{"follow", followHead("10") + "4\r\n1234\r\n0\r\nDewpoint-End: 9\r\n\r\n", io.ErrUnexpectedEOF},
		{"follow", followHead("10") + "4\r\n1234\r\n0\r\nDewpoint-End: 10\r\n\r\n", io.ErrUnexpectedEOF},
		{"follow", followHead("-1") + "4\r\n1234\r\n0\r\nDewpoint-End: 10\r\n\r\n", io.ErrUnexpectedEOF},
		{"follow", followHead("10") + "5\r\n12345\r\n0\r\n\r\n", io.ErrUnexpectedEOF},
		{"follow", followHead("10") + "5\r\n12345\r\n0\r\nDewpoint-More: 1\r\nDewpoint-End: 9\r\n\r\n",
			ErrProtocol},
		{"follow", followHead("10") + "5\r\n12345\r\n", io.ErrUnexpectedEOF},
		{"follow", followHead("10") + strings.Repeat("a\r\n1234567890\r\n", 100), ErrProtocol},
		{"follow", followHead("4") + "0\r\n\r\n", ErrProtocol},
		{"follow", followHead("-2") + "0\r\n\r\n", ErrProtocol},
		{"follow", followHead(fmt.Sprint(MaxLayer+1)) + "0\r\n\r\n", ErrProtocol},
		{"follow", head("200 x", "Dewpoint-From: 0", "Dewpoint-Size: 10", "Content-Length: 0"), ErrProtocol},
		{"follow", head("200 x", "Dewpoint-From: 5", "Dewpoint-Size: 10", "Content-Length: 5") + "12345",
			ErrProtocol},
		{"follow", head("206 x", "Dewpoint-From: 5", "Dewpoint-Size: 10", "Content-Length: 5") + "12345",
			ErrProtocol},
	} {
		c := client(t, Config{Auth: auth})
		c.maxPack = 100
		got, err := drain(t.Context(), c, says.what, saying(t, auth, says.text))
		if !errors.Is(err, says.want) || len(got) > 100 {
			t.Errorf("%d, %s: %d bytes, %v; want %v", i, says.what, len(got), err, says.want)
		}
	}
	for what, text := range map[string]string{ // the same bed, and good answers
		"range":  head("206 x", "Content-Length: 10", partial[0]) + "1234567890",
		"follow": followHead("15") + "a\r\n1234567890\r\n0\r\nDewpoint-End: 15\r\n\r\n",
		"pack":   head("200 x", "Content-Length: 10") + "1234567890",
		"table":  head("200 x", "Content-Length: 10") + "1234567890",
		"data":   head("200 x", "Content-Length: 10") + "1234567890",
	} {
		if got, err := drain(t.Context(), client(t, Config{Auth: auth}), what,
			saying(t, auth, text)); got != "1234567890" || err != nil {
			t.Errorf("%s: %q, %v", what, got, err)
		}
	}
}

// A node that dies ends its connections without a word.
func TestCutStreams(t *testing.T) {
	auth := newAuth(t)
	for what, text := range map[string]string{
		"range":  head("206 x", "Content-Length: 10", "Content-Range: bytes 10-19/*") + "1234",
		"follow": followHead("15") + "4\r\n1234\r\n",
		"pack":   head("200 x", "Transfer-Encoding: chunked") + "4\r\n1234\r\n",
	} {
		addr := raw(t, func(c net.Conn) {
			s := tls.Server(c, auth.server)
			if _, err := http.ReadRequest(bufio.NewReader(s)); err == nil {
				io.WriteString(s, text)
			}
		})
		got, err := drain(t.Context(), client(t, Config{Auth: auth}), what, addr)
		if !errors.Is(err, io.ErrUnexpectedEOF) || !errors.Is(err, ErrAway) || got != "1234" {
			t.Errorf("%s: %q, %v", what, got, err)
		}
	}
}

// A node that stops in the middle of an answer is left after Stall.
func TestStalledStreams(t *testing.T) {
	auth := newAuth(t)
	addr := raw(t, func(c net.Conn) {
		s := tls.Server(c, auth.server)
		if _, err := http.ReadRequest(bufio.NewReader(s)); err == nil {
			io.WriteString(s, followHead("15")+"4\r\n1234\r\n")
			io.Copy(io.Discard, s)
		}
	})
	got, err := drain(t.Context(), client(t, Config{Auth: auth, Stall: 100 * time.Millisecond}), "follow", addr)
	wants(t, err, ErrAway, io.ErrUnexpectedEOF)
	if got != "1234" {
		t.Errorf("%q", got)
	}
}

// A node that says again and again that there is more gets no more requests than it has to.
func TestEmptyPromises(t *testing.T) {
	auth := newAuth(t)
	addr := saying(t, auth, followHead("-1")+"0\r\nDewpoint-More: 1\r\n\r\n")
	c := client(t, Config{Auth: auth, Patience: 10 * pause})
	_, err := drain(t.Context(), c, "follow", addr)
	wants(t, err, ErrAway)
	if n := c.Stats().Requests; n > 12 {
		t.Error(n, "requests")
	}
}

// A follower that is told to come again later does so.
func TestFollowerOfABusyNode(t *testing.T) {
	auth := newAuth(t)
	answers := make(chan string, 3)
	answers <- followHead("10") + "2\r\n12\r\n0\r\nDewpoint-More: 1\r\n\r\n"
	answers <- head("503 x", "Retry-After: 1", "Content-Length: 0")
	answers <- strings.Replace(followHead("10"), "From: 5", "From: 7", 1) +
		"3\r\n345\r\n0\r\nDewpoint-End: 10\r\n\r\n"
	addr := raw(t, func(c net.Conn) {
		s := tls.Server(c, auth.server)
		if _, err := http.ReadRequest(bufio.NewReader(s)); err == nil {
			io.WriteString(s, <-answers)
			s.Close()
		}
	})
	got, err := drain(t.Context(), client(t, Config{Auth: auth}), "follow", addr)
	if got != "12345" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

// What is no request of the protocol never reaches Content.
func TestBadRequests(t *testing.T) {
	n := newNode()
	id, _ := n.whole(100)
	auth := newAuth(t)
	_, addr := serve(t, Config{Auth: auth, Content: n})
	path := "/v1/layers/" + string(id)
	for line, want := range map[string]int{
		"GET " + path:                                  400,
		"GET " + path + "?follow=1":                    400,
		"GET " + path + "?follow=2&from=0":             400,
		"GET " + path + "?follow=1&from=-1":            400,
		"GET " + path + "?follow=1&from=+1":            400,
		"GET " + path + "?follow=1&from=9000000000000": 400,
		"HEAD " + path + "?follow=1&from=0":            400,
		"POST " + path + "?follow=1&from=0":            405,
		"GET /v1/layers/sha256:abc/table":              400,
		"GET /v1/layers/..%2f..%2fetc/table":           400,
		"GET /v1/packs/sha512:abc":                     400,
		"GET /v2/":                                     404,
		"GET " + path + "/table":                       200,
		"GET " + path + "/progress":                    200,
		"GET /v1/layers/sha256:abc/progress":           400,
	} {
		if got := status(t, auth, addr, line, ""); got != want {
			t.Errorf("%s: %d, want %d", line, got, want)
		}
	}
	for header, want := range map[string]int{
		"Range: bytes=0-9": 206, "Range: bytes=0-": 400, "Range: bytes=-9": 400, "Range: bytes=9-0": 400,
		"Range: bytes=0-1,3-4":                400,
		"Range: bytes=0-99999999999999999999": 400, "Range: bytes=0-999999999999999": 400, "Range: items=0-9": 400,
		"Content-Length: 5":                 400,
		"X: " + strings.Repeat("x", 64<<10): 431,
	} {
		if got := status(t, auth, addr, "GET "+path, header); got != want {
			t.Errorf("%.40s: %d, want %d", header, got, want)
		}
	}
}

// status sends a request as it is and returns the answer's status.
func status(t *testing.T, auth *Auth, addr, line, header string) int {
	t.Helper()
	c, err := tls.Dial("tcp", addr, auth.client)
	check(t, err)
	defer c.Close()
	if header != "" {
		header += "\r\n"
	}
	// A server that has heard enough may hang up during the write.
	io.WriteString(c, line+" HTTP/1.1\r\nHost: x\r\n"+header+"\r\n")
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	check(t, err)
	return res.StatusCode
}

// Strangers who only connect do not keep the server's memory.
func TestConnectionsAreBounded(t *testing.T) {
	n := newNode()
	id, _ := n.whole(10)
	auth := newAuth(t)
	_, addr := serve(t, Config{Auth: auth, Content: n, Conns: 5}) // three of them of one address
	var idle []net.Conn
	for range 3 {
		c, err := net.Dial("tcp", addr)
		check(t, err)
		defer c.Close()
		idle = append(idle, c)
	}
	wants(t, askOnce(t, auth, addr, id), ErrAway)
	idle[1].Close()
	testkit.Eventually(t, "there is room again", func() bool { return askOnce(t, auth, addr, id) == nil })
}
