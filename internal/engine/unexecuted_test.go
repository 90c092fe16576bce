package engine

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/internal/engine/program"
	"dewpoint/internal/spec"
)

// A program that the kernel does not execute is told as that, by the error and in the
// container's output, whichever runtime finds it out and when.
func TestUnexecuted(t *testing.T) {
	two := containerds(t)["2.x"]
	for _, runtime := range []string{RuntimeRunc, RuntimeCrun} {
		t.Run(runtime, func(t *testing.T) {
			b := newBedOf(t, two, runtime)
			for cmd, want := range map[string]struct {
				kind error
				text string
			}{
				"/bad/empty":  {ErrNotExecutable, "/bad/empty is an empty file"},
				"/bad/text":   {ErrNotExecutable, "/bad/text is neither a program"},
				"/bad/other":  {ErrNotExecutable, "/bad/other is a program of another architecture (s390x)"},
				"/bad/script": {ErrNoCommand, `/bad/script is a script for "/bin/none"`},
				"/bad/plain":  {ErrNotExecutable, ""},
				"/etc":        {ErrNotExecutable, ""},
				"/probe/x":    {ErrNoCommand, ""},
				"/none":       {ErrNoCommand, ""},
				"none":        {ErrNoCommand, ""},
			} {
				b.refuses(cmd, want.kind, want.text)
			}
			b.runs()
		})
	}
}

// refuses runs a command that cannot be executed.
func (b *bed) refuses(cmd string, kind error, text string) {
	b.t.Helper()
	ctx := b.t.Context()
	_, err := b.Create(ctx,
		Spec{Name: "bad", Image: b.img, Net: NetNone, Options: spec.Options{User: "web"},
			Entrypoint: []string{cmd}})
	if err != nil {
		if !errors.Is(err, kind) || !strings.Contains(err.Error(), text) {
			b.t.Errorf("%s: %v", cmd, err)
		}
		return
	}
	defer func() {
		if err := b.Remove(ctx, "bad", true); err != nil {
			b.t.Error(err)
		}
	}()
	if err := b.Engine.Start(ctx, "bad"); err != nil {
		b.t.Errorf("%s: %v", cmd, err)
		return
	}
	var followed, read bytes.Buffer
	if err := b.Logs(ctx, "bad", LogOptions{Follow: true, Stderr: &followed}); err != nil {
		b.t.Error(err)
	}
	x, err := b.Wait(ctx, "bad")
	if err != nil {
		b.t.Fatal(err)
	}
	if err := b.Unexecuted(ctx, "bad", x.Status); !errors.Is(err, kind) || !strings.Contains(err.Error(), text) {
		b.t.Errorf("%s: %v", cmd, err)
	}
	if err := b.Logs(ctx, "bad", LogOptions{Stderr: &read}); err != nil {
		b.t.Error(err)
	}
	if s := read.String(); s != followed.String() || strings.Count(s, "\n"+told) != 1 ||
		!strings.HasSuffix(s, "\n") || !strings.Contains(s, text) {
		b.t.Errorf("%s: its output is %q, followed %q", cmd, s, followed.String())
	}
}

// runs runs commands that are executed, the first in a directory that only root may search, and others that
// end badly.
func (b *bed) runs() {
	b.t.Helper()
	if out, errs, _ := b.output(Spec{Name: "ran", Net: NetNone, Options: spec.Options{User: "web"},
		Entrypoint: []string{"/shut/probe"},
		Cmd:        []string{"id"}}); out != "33 34 [40]\n" {
		b.t.Errorf("%q, %q", out, errs)
	}
	for _, status := range []string{"1", "255"} {
		_, errs, _ := b.output(Spec{Name: "ran", Net: NetNone, Cmd: []string{"exit", status}})
		if errs != "last words\n" {
			b.t.Errorf("with status %s: %q", status, errs)
		}
	}
}

// What a runtime says as the last of a container's output is told from what programs say.
func TestUnexecutedSays(t *testing.T) {
	crun := func(msg string) string { return "{\n  \"msg\": \"" + msg + "\",\n  \"level\": \"error\"\n}" }
	for said, want := range map[string][2]string{
		"exec /bin/a b: exec format error": {"/bin/a b",
			"exec format error"},
		"first\nexec /a: no such file or directory": {"/a",
			"no such file or directory"},
		"exec /a: exec format error\nand then": {},
		"x exec /a: exec format error":         {},
		"exec /a: some error":                  {},
		crun("exec container process `\\/a`: Exec format error"): {"/a",
			"Exec format error"},
		"x\n" + crun("exec container process `/a`: Permission denied"): {"/a",
			"Permission denied"},
		crun("exec container process (missing dynamic library?) `/a`: No such file or directory"): {"/a",
			"No such file or directory"},
		"exec container process `/a`: Exec format error": {"/a",
			"Exec format error"},
		crun("exec container process `/a`: Exec format error") + " and then": {},
		crun("select: Bad file descriptor"):                                  {},
		"{":                                                                  {},
		"":                                                                   {},
	} {
		if file, why := program.Unexecuted(said); [2]string{file, why} != want {
			t.Errorf("%q: %q, %q", said, file, why)
		}
	}
}

// A container that was made and never started goes at once: nobody waits for the end of its output.
func TestRemoveUnstarted(t *testing.T) {
	two := containerds(t)["2.x"]
	for _, runtime := range []string{RuntimeRunc, RuntimeCrun} {
		t.Run(runtime, func(t *testing.T) {
			b := newBedOf(t, two, runtime)
			b.run(Spec{Name: "stays", Net: NetNone}) // and its shim, with what that has said
			for _, force := range []bool{false, true} {
				if _, err := b.Create(t.Context(), Spec{Name: "idle", Image: b.img, Net: NetNone}); err != nil {
					t.Fatal(err)
				}
				if err := b.Remove(t.Context(), "idle", force); err != nil {
					t.Error(err)
				}
			}
			logs, _ := filepath.Glob(filepath.Join(b.cfg.shimsDir(), "*", "log"))
			if len(logs) == 0 {
				t.Error("no shim has a log")
			}
			for _, p := range logs {
				if said, err := os.ReadFile(p); err != nil || bytes.Contains(said, []byte("failed to drain")) {
					t.Errorf("%v: %s", err, said)
				}
			}
		})
	}
}
