package registry

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"dewpoint/testkit"
)

// unread is how many bytes the kernel holds for readers of connections to addr.
func unread(t *testing.T, addr string) (most int64) {
	t.Helper()
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	n, _ := strconv.Atoi(port)
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line)
		if len(f) < 5 || !strings.HasSuffix(f[2], fmt.Sprintf(":%04X", n)) {
			continue
		}
		_, rx, _ := strings.Cut(f[4], ":")
		v, err := strconv.ParseInt(rx, 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		most = max(most, v)
	}
	return most
}

// A stream with a window that is not read takes no more than that of the link,
// also after one without, and the other way round.
func TestWindow(t *testing.T) {
	const window = 64 << 10
	b := newBed(t, 16<<20)
	c := client(t, Config{MaxIdle: 1}, b.reg)
	for _, w := range []int{0, window, 0, window} {
		s, err := c.Open(t.Context(), b.ref, b.blob, 0, -1, OpenOptions{Window: w})
		if err != nil {
			t.Fatal(err)
		}
		first := make([]byte, len(b.data)/2) // the kernel lets the window grow with what is read
		if _, err := io.ReadFull(s, first); err != nil {
			t.Fatal(err)
		}
		var got int64
		for end := time.Now().Add(testkit.Limit); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			if n := unread(t, b.reg.Host()); n > 0 && n == got {
				break // it does not grow any more
			} else {
				got = n
			}
		}
		if bounded := got <= 2*window; bounded != (w > 0) {
			t.Errorf("with a window of %d, %d bytes wait to be read", w, got)
		}
		rest, err := io.ReadAll(s)
		all := append(first, rest...)
		if err != nil || !bytes.Equal(all, b.data) {
			t.Errorf("with a window of %d, %d bytes came, %v", w, len(all), err)
		}
		s.Close()
	}
}
