package api_test

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

// newContainer is a client and a container that runs.
func newContainer(t *testing.T) *api.Client {
	t.Helper()
	_, _, c := newNode(t)
	if _, err := c.Deploy(t.Context(), spec.Request{Image: "nginx:1", Name: "web", Cmd: []string{"sleep"}},
		spec.Watch{}); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestExecSeparatesItsOutput(t *testing.T) {
	c := newContainer(t)
	var out, errs bytes.Buffer
	status, err := c.Exec(t.Context(), "web", spec.ExecRequest{Args: strings.Fields("echo a warn b exit 9")},
		spec.ExecIO{Stdout: &out, Stderr: &errs})
	if err != nil || status != 9 || out.String() != "a\n" || errs.String() != "b\n" {
		t.Errorf("status %d, %v, stdout %q, stderr %q", status, err, &out, &errs)
	}
}

func TestExecPassesMuchInput(t *testing.T) {
	c := newContainer(t)
	in := bytes.Repeat([]byte("0123456789abcdef"), 1<<18) // 4 MiB, above all limits of a message
	var out bytes.Buffer
	status, err := c.Exec(t.Context(), "web", spec.ExecRequest{Args: []string{"cat"}},
		spec.ExecIO{Stdin: bytes.NewReader(in), Stdout: &out})
	if err != nil || status != 0 || !bytes.Equal(out.Bytes(), in) {
		t.Errorf("status %d, %v, %d bytes of %d", status, err, out.Len(), len(in))
	}
}

func TestExecWithInputThatNobodyReads(t *testing.T) {
	c := newContainer(t)
	r, w := io.Pipe()
	defer w.Close()
	go func() { _, _ = io.Copy(w, zeros{}) }()
	begin := time.Now()
	status, err := c.Exec(t.Context(), "web", spec.ExecRequest{Args: []string{"exit", "4"}},
		spec.ExecIO{Stdin: r, Stdout: io.Discard})
	if err != nil || status != 4 {
		t.Errorf("status %d, %v", status, err)
	}
	if d := time.Since(begin); d > 500*time.Millisecond {
		t.Errorf("took %v: the daemon waits for the client's input", d)
	}
	r.Close()
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

func TestExecTerminalChangesSize(t *testing.T) {
	c := newContainer(t)
	r, w := io.Pipe()
	sizes := make(chan spec.Size)
	go func() {
		sizes <- spec.Size{Rows: 30, Cols: 100}
		time.Sleep(100 * time.Millisecond)
		w.Close()
	}()
	var out bytes.Buffer
	req := spec.ExecRequest{Args: []string{"size"}, TTY: true, Size: spec.Size{Rows: 24, Cols: 80}}
	if _, err := c.Exec(t.Context(), "web", req,
		spec.ExecIO{Stdin: r, Stdout: &out, Resize: sizes}); err != nil {
		t.Fatal(err)
	}
	if out.String() != "80x24\r\n100x30\r\n" {
		t.Errorf("sizes %q", &out)
	}
}

func TestExecErrors(t *testing.T) {
	c := newContainer(t)
	std := spec.ExecIO{Stdout: io.Discard, Stderr: io.Discard}
	_, err := c.Exec(t.Context(), "none", spec.ExecRequest{Args: []string{"cat"}}, std)
	wantCode(t, err, api.NotFound, api.ExitNotFound)
	_, err = c.Exec(t.Context(), "web", spec.ExecRequest{}, std)
	wantCode(t, err, api.BadRequest, api.ExitUsage)
	_, err = c.Exec(t.Context(), "web", spec.ExecRequest{Args: []string{"missing"}}, std)
	wantCode(t, err, api.CommandMissing, api.ExitNoCommand)
	_, err = c.Exec(t.Context(), "web", spec.ExecRequest{Args: []string{"panic"}}, std)
	wantCode(t, err, api.Internal, api.ExitFailure)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = c.Exec(ctx, "web", spec.ExecRequest{Args: []string{"sleep"}}, std)
	wantCode(t, err, api.Deadline, api.ExitFailure)
}
