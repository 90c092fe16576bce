package engine

import (
	"bytes"
	"context"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Of what a container writes the disk keeps so much, while it writes on, and who
// follows it misses nothing of what comes.
func TestOutputIsBounded(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		const most = 1 << 20
		ctx := t.Context()
		b.run(Spec{Name: "much", Net: NetNone, Cmd: []string{"much", "60000"}}) // lines of 100 bytes
		var followed lines
		done := make(chan error, 1)
		go func() { done <- b.Logs(ctx, "much", LogOptions{Follow: true, Stdout: &followed}) }()
		stdout, _ := b.cfg.places().Output("much")
		sizes := map[string]int64{}
		for ended := false; !ended; {
			i, err := b.Inspect(ctx, "much")
			if err != nil {
				t.Fatal(err)
			}
			ended = i.Status == Stopped
			if sizes, _, err = b.cutOutput(sizes, most); err != nil {
				t.Fatal(err)
			}
			time.Sleep(5 * time.Millisecond)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if _, _, err := b.cutOutput(map[string]int64{}, most); err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(stdout)
		if err != nil || st.Size() != 60000*100 {
			t.Errorf("%v, %v", st.Size(), err)
		}
		if took := st.Sys().(*syscall.Stat_t).Blocks * 512; took > most {
			t.Errorf("it takes %d bytes", took)
		}
		// Who is too slow misses what was cut off, whole lines, and never the end.
		if followed.bad != "" || followed.last != 59999 {
			t.Errorf("the last that was followed is %d; %q", followed.last, followed.bad)
		}
		var read lines
		if err := b.Logs(ctx, "much", LogOptions{Stdout: &read}); err != nil || read.bad != "" || read.cut > 0 ||
			read.last != 59999 || read.n < most/2/100 || read.n > most/100 {
			t.Errorf("%d lines are left, up to %d: %q, %v", read.n, read.last, read.bad, err)
		}
		var tail bytes.Buffer
		if err := b.Logs(context.Background(), "much", LogOptions{Tail: 2, Stdout: &tail}); err != nil ||
			!strings.HasPrefix(tail.String(), "59998 ") || strings.Count(tail.String(), "\n") != 2 {
			t.Errorf("%q, %v", tail.String(), err)
		}
	})
}

// lines checks that what is written to it are lines of "much", in order.
type lines struct {
	rest    string
	last, n int
	cut     int // lines of which the end is lacking
	bad     string
}

func (l *lines) Write(p []byte) (int, error) {
	l.rest += string(p)
	for {
		line, rest, ok := strings.Cut(l.rest, "\n")
		if !ok {
			return len(p), nil
		}
		l.rest = rest
		if len(line) < 99 {
			l.cut++
			continue
		}
		word, _, _ := strings.Cut(line, " ")
		n, err := strconv.Atoi(word)
		if err != nil || len(line) != 99 || n <= l.last && l.n > 0 {
			l.bad = line
		}
		l.last = n
		l.n++
	}
}
