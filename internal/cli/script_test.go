package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/apitest"
)

// leakless also fails when goroutines are left.
type leakless struct{ *testing.M }

func (m leakless) Run() int {
	code := m.M.Run()
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return max(code, 1)
	}
	return code
}

func TestMain(m *testing.M) {
	testscript.Main(leakless{m}, map[string]func(){"dew": func() {
		os.Exit(Main(context.Background(), os.Args[1:], Config{
			Version: "v0.0-test", Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		}))
	}})
}

func image(name string) spec.Image {
	digit := func(d string) string { return "sha256:" + strings.Repeat(d, 64) }
	return spec.Image{Name: name, Digest: digit("a"), Size: 3_100_000, Disk: 9_000_000,
		Created: time.Now().Add(-90 * time.Minute), Layers: []spec.Layer{
			{Digest: digit("1"), DiffID: digit("2"), Size: 100_000, Disk: 1_000_000, State: spec.StateComplete},
			{Digest: digit("3"), DiffID: digit("4"), Size: 3_000_000, Disk: 8_000_000, State: spec.StateComplete},
		}}
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:   "testdata",
		Setup: setup,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"fail": fail, "await": await, "says": says, "status": exits, "stopdaemon": stopDaemon,
		},
	})
}

type nodeKey struct{}
type serverKey struct{}

// setup gives every script a daemon of its own, with two images to pull.
func setup(env *testscript.Env) error {
	n := &apitest.Node{Step: 15 * time.Millisecond}
	n.Add(image("nginx:1"), image("redis:7"))
	dir, err := os.MkdirTemp("", "dew")
	if err != nil {
		return err
	}
	s, err := apitest.Start(filepath.Join(dir, "s"), n)
	if err != nil {
		return err
	}
	env.Values[nodeKey{}], env.Values[serverKey{}] = n, s
	env.Setenv(HostVariable, s.Host)
	env.Setenv("GORACE", "atexit_sleep_ms=0") // else every dew takes a second to exit under -race
	env.Defer(func() {
		n.Close()
		s.Stop()
		os.RemoveAll(dir)
	})
	return nil
}

// fail [-after] METHOD CODE MESSAGE lets the node's next call fail.
func fail(ts *testscript.TestScript, _ bool, args []string) {
	n := ts.Value(nodeKey{}).(*apitest.Node)
	f := n.Fail
	if args[0] == "-after" {
		f, args = n.FailAfter, args[1:]
	}
	f(args[0], api.New(api.Code(args[1]), args[2]))
}

// [!] await CONTAINER waits until it runs, or does not.
func await(ts *testscript.TestScript, not bool, args []string) {
	n := ts.Value(nodeKey{}).(*apitest.Node)
	for end := time.Now().Add(testkit.Limit); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		list, err := n.List(context.Background(), false)
		ts.Check(err)
		found := false
		for _, c := range list {
			found = found || c.Name == args[0]
		}
		if found != not {
			return
		}
	}
	ts.Fatalf("%s: not in time", args[0])
}

// says FILE REGEXP waits until a line of the file, which a program in the background writes, matches.
func says(ts *testscript.TestScript, _ bool, args []string) {
	line, err := regexp.Compile("(?m)" + args[1])
	ts.Check(err)
	for end := time.Now().Add(testkit.Limit); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if text, _ := os.ReadFile(ts.MkAbs(args[0])); line.Match(text) { // it comes a moment after the program
			return
		}
	}
	ts.Fatalf("%s: not in time", args[1])
}

func stopDaemon(ts *testscript.TestScript, _ bool, _ []string) {
	ts.Value(serverKey{}).(*apitest.Server).Stop()
}

// status N COMMAND… runs a command and wants its exit status to be N.
func exits(ts *testscript.TestScript, _ bool, args []string) {
	err := ts.Exec(args[1], args[2:]...)
	got := "0"
	var exit interface{ ExitCode() int }
	if errors.As(err, &exit) {
		got = fmt.Sprint(exit.ExitCode())
	} else if err != nil {
		got = err.Error()
	}
	if got != args[0] {
		ts.Fatalf("status %s, want %s", got, args[0])
	}
}
