package logfile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dewpoint/testkit"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// buffer is a bytes.Buffer for two goroutines.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) { b.mu.Lock(); defer b.mu.Unlock(); return b.b.Write(p) }
func (b *buffer) String() string              { b.mu.Lock(); defer b.mu.Unlock(); return b.b.String() }

func closed() <-chan struct{} { c := make(chan struct{}); close(c); return c }

func TestFollow(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var got buffer
	ended := make(chan struct{})
	done := make(chan error, 1)
	go func() { done <- Copy(context.Background(), path, &got, 0, ended) }()
	for _, s := range []string{"one\n", "two\n"} {
		if _, err := f.WriteString(s); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "the line comes", func() bool { return strings.HasSuffix(got.String(), s) })
	}
	close(ended)
	time.Sleep(20 * time.Millisecond)
	if _, err := f.WriteString("after the end"); err != nil { // the writer is still there
		t.Fatal(err)
	}
	f.Close()
	if err := <-done; err != nil || got.String() != "one\ntwo\nafter the end" {
		t.Errorf("got %q, %v", got.String(), err)
	}
}

func TestCancel(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(path, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	var b bytes.Buffer
	if err := Copy(ctx, path, &b, 0, make(chan struct{})); !errors.Is(err, context.DeadlineExceeded) ||
		b.String() != "x" {
		t.Errorf("%q, %v", b.String(), err)
	}
}

func TestTail(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	long := strings.Repeat("a line of some length\n", 10_000)
	for text, want := range map[string]string{"": "", "a": "a", "a\n": "a\n", "a\nb\nc\n": "b\nc\n",
		"a\nb\nc": "b\nc", "\n\n\n": "\n\n", long: "a line of some length\na line of some length\n"} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := Copy(t.Context(), path, &b, 2, closed()); err != nil || b.String() != want {
			t.Errorf("tail of %.20q is %q, %v", text, b.String(), err)
		}
		if got := Tail(path, 2); got != strings.TrimRight(want, "\n") {
			t.Errorf("Tail of %.20q is %q", text, got)
		}
	}
}

func TestAbsent(t *testing.T) {
	if err := Copy(t.Context(), filepath.Join(t.TempDir(), "none"), &bytes.Buffer{}, 0, closed()); err != nil {
		t.Error(err)
	}
	if s := Tail("/nonexistent", 3); s != "" {
		t.Error(s)
	}
}

// What is cut off at the beginning is neither on the disk nor read; who writes goes on, and who
// follows gets whole lines, but for the one that he was in the middle of.
func TestCut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const lines = 5 * cutUnit / 16
	line := func(i int) string { return fmt.Sprintf("%-15d\n", i) }
	var all strings.Builder
	for i := range lines {
		all.WriteString(line(i))
	}
	if _, err := f.WriteString(all.String()); err != nil {
		t.Fatal(err)
	}
	slow := &reader{f: open(t, path)}
	b := make([]byte, 20)
	if n, err := slow.Read(b); err != nil || string(b[:n]) != line(0)+"1   " {
		t.Fatalf("%q, %v", b[:n], err)
	}
	if err := Cut(path, 8*cutUnit); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b[:16]) != line(0) {
		t.Fatalf("a file that is small enough was cut: %q, %v", b[:16], err)
	}
	if err := Cut(path, 2*cutUnit); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(path)
	if err != nil || st.Size() != 5*cutUnit || st.Sys().(*syscall.Stat_t).Blocks*512 > 2*cutUnit {
		t.Fatalf("%+v, %v", st.Sys(), err)
	}
	if _, err := f.WriteString("the end\n"); err != nil {
		t.Fatal(err)
	}
	first := 4*cutUnit/16 + 1 // the one before may have been cut in its middle
	var want strings.Builder
	for i := first; i < lines; i++ {
		want.WriteString(line(i))
	}
	want.WriteString("the end\n")
	for _, tail := range []int{0, lines} {
		var got bytes.Buffer
		if err := Copy(t.Context(), path, &got, tail, nil); err != nil || got.String() != want.String() {
			t.Errorf("from line %d: %d bytes of %d, %.40q, %v", tail, got.Len(), want.Len(), got.String(), err)
		}
	}
	if rest, err := io.ReadAll(slow); err != nil || string(rest) != "\n"+want.String() {
		t.Errorf("behind a part of a line: %.40q, %v", rest, err)
	}
	if s := Tail(path, 2); s != line(lines-1)+"the end" {
		t.Errorf("%q", s)
	}
}

func open(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}
