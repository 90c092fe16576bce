package hooks

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"dewpoint/testkit"
)

// ran is an Exec that keeps what it was given and ends as told.
type ran struct {
	args   [][]string
	env    []string
	status map[string]int // by a command's first word
}

func (r *ran) exec(ctx context.Context, args, env []string, output io.Writer) (int, error) {
	r.args, r.env = append(r.args, args), env
	if args[0] == "hang" {
		<-ctx.Done()
		return 0, ctx.Err()
	}
	_, err := io.WriteString(output, strings.Repeat("x", 3*tailSize)+"the end of "+args[0]+"\n")
	return r.status[args[0]], err
}

// program puts an executable into a root.
func program(t *testing.T, root, file string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(root+file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(root+file, nil, mode); err != nil {
		t.Fatal(err)
	}
}

func TestCommandsRunInOrder(t *testing.T) {
	root, r := t.TempDir(), &ran{}
	program(t, root, beforeFile, 0o755)
	program(t, root, "/opt/after", 0o755)
	if err := os.Symlink("/opt/after", root+afterFile); err != nil {
		t.Fatal(err)
	}
	c := Container{Name: "a", Address: "10.0.0.2", Image: "i:1", Checkpoint: "c", Root: root, Exec: r.exec,
		Labels: map[string]string{LabelBefore: `sh -c 'save it'`, LabelAfter: `load "a b" c\ d ""`}}
	if err := errors.Join((Runner{}).Before(t.Context(), c), (Runner{}).After(t.Context(), c)); err != nil {
		t.Fatal(err)
	}
	want := [][]string{{beforeFile}, {"sh", "-c", "save it"}, {afterFile}, {"load", "a b", "c d", ""}}
	if !slices.EqualFunc(r.args, want, slices.Equal) {
		t.Errorf("ran %q, want %q", r.args, want)
	}
	env := []string{"DEWPOINT_EVENT=after-restore", "DEWPOINT_NAME=a", "DEWPOINT_ADDRESS=10.0.0.2",
		"DEWPOINT_IMAGE=i:1", "DEWPOINT_CHECKPOINT=c"}
	if !slices.Equal(r.env, env) {
		t.Errorf("environment %q", r.env)
	}
}

func TestStatusEndsTheEvent(t *testing.T) {
	root, r := t.TempDir(), &ran{status: map[string]int{beforeFile: 3}}
	program(t, root, beforeFile, 0o755)
	err := Runner{}.Before(t.Context(),
		Container{Root: root, Exec: r.exec, Labels: map[string]string{LabelBefore: "second"}})
	var he *Error
	if !errors.As(err, &he) || he.Hook != beforeFile || he.Status != 3 ||
		!strings.HasSuffix(err.Error(), "the end of "+beforeFile) {
		t.Errorf("error %v", err)
	}
	if len(he.Output) > tailSize || len(r.args) != 1 {
		t.Errorf("%d bytes of output are kept, ran %q", len(he.Output), r.args)
	}
}

func TestCommandHasALimit(t *testing.T) {
	r := &ran{}
	err := Runner{Limit: 20 * time.Millisecond}.Before(t.Context(),
		Container{Root: t.TempDir(), Exec: r.exec, Labels: map[string]string{LabelBefore: "hang"}})
	if err == nil || !strings.Contains(err.Error(), "not done after 20ms") {
		t.Errorf("error %v", err)
	}
}

func TestHookThatCannotRun(t *testing.T) {
	root := t.TempDir()
	program(t, root, beforeFile, 0o644)
	err := Runner{}.Before(t.Context(), Container{Root: root, Exec: noExec})
	if err == nil || !strings.Contains(err.Error(), "not an executable file") {
		t.Errorf("error %v", err)
	}
}

// A container cannot lead the node to a file of the host's.
func TestLinksStayInside(t *testing.T) {
	root, host := t.TempDir(), t.TempDir()
	program(t, host, "/program", 0o755)
	if err := os.MkdirAll(root+"/etc/dewpoint", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(host+"/program", root+beforeFile); err != nil {
		t.Fatal(err)
	}
	if there, err := executable(root, beforeFile); there || err != nil {
		t.Errorf("executable: %v %v", there, err)
	}
	if err := os.MkdirAll(root+"/run/dewpoint", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(host, root+StateDir); err != nil {
		t.Fatal(err)
	}
	if err := Prepare(root); err == nil {
		t.Error("the state was made in the host's directory")
	}
}

// What a container puts in the place of the shared files harms nobody.
func TestHostileState(t *testing.T) {
	root, host := t.TempDir(), t.TempDir()
	state := root + StateDir
	if err := os.MkdirAll(state, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := Prepare(root); err != nil {
		t.Fatal(err)
	}
	program(t, host, "/secret", 0o600)
	for name, made := range map[string]error{
		"generation.tmp": os.Symlink(host+"/secret", state+"/generation.tmp"),
		"bell":           errors.Join(os.Remove(state+"/bell"), os.Symlink(host+"/secret", state+"/bell")),
		"a FIFO":         unix.Mkfifo(state+"/agents/python-1", 0o666),
		"a link":         os.Symlink(host+"/secret", state+"/agents/node-..-0"),
	} {
		if made != nil {
			t.Fatal(name, made)
		}
	}
	err := Runner{Answer: 20 * time.Millisecond}.After(t.Context(), Container{Root: root, Exec: noExec})
	if err == nil || !strings.Contains(err.Error(), "python-1") || !strings.Contains(err.Error(), "node-..-0") {
		t.Errorf("error %v", err)
	}
	if text, err := os.ReadFile(host + "/secret"); len(text) > 0 || err != nil {
		t.Errorf("the host's file holds %q (%v)", text, err)
	}
}

func TestAgentThatFailed(t *testing.T) {
	testkit.NeedRoot(t, "only root may ring")
	root := t.TempDir()
	if err := os.MkdirAll(root+StateDir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := Prepare(root); err != nil {
		t.Fatal(err)
	}
	program(t, root, "/proc/1/stat", 0o644)
	program(t, root, "/proc/8/stat", 0o644)
	for _, name := range []string{"python-7", "python-8"} { // 7 is gone
		program(t, root, StateDir+"/agents/"+name, 0o644)
	}
	done := make(chan struct{})
	go func() { // answers like an agent that could not do it all
		defer close(done)
		bell, _ := os.Open(root + StateDir + "/bell")
		bell.Close()
		generation, _ := os.ReadFile(root + StateDir + "/generation")
		_ = os.WriteFile(root+StateDir+"/agents/python-8",
			[]byte(strings.TrimSpace(string(generation))+" no numpy"), 0o644)
	}()
	err := Runner{}.After(t.Context(), Container{Root: root, Exec: noExec})
	<-done
	if err == nil || !strings.Contains(err.Error(), "python-8: no numpy") {
		t.Errorf("error %v", err)
	}
}

func TestAgentsThatAreMissing(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(root+StateDir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := Prepare(root); err != nil {
		t.Fatal(err)
	}
	c := Container{Root: root, Exec: noExec, Labels: map[string]string{LabelAgents: "python, jvm"}}
	if err := (Runner{}).Before(t.Context(), c); err == nil ||
		!strings.Contains(err.Error(), "dewpoint.hooks=python") {
		t.Errorf("error %v", err)
	}
}

func TestCheck(t *testing.T) {
	for label, value := range map[string]string{LabelBefore: `sh -c 'open`, LabelAfter: `x\`,
		LabelAgents: "python,perl"} {
		if err := Check(map[string]string{label: value}); err == nil || !strings.Contains(err.Error(), label) {
			t.Errorf("%s=%s: error %v", label, value, err)
		}
	}
	if err := Check(map[string]string{LabelBefore: "a 'b'", LabelAgents: "node, python"}); err != nil {
		t.Error(err)
	}
}

func TestActivateKeepsWhatIsSet(t *testing.T) {
	got := Activate([]string{"A=1", "PYTHONPATH=/app", "NODE_OPTIONS=--max-old-space-size=64"},
		[]Agent{Python, Node, JVM})
	want := []string{"A=1", "DEWPOINT_STATE=/run/dewpoint/state", "PYTHONPATH=/run/dewpoint/agents/python:/app",
		"NODE_OPTIONS=--require=/run/dewpoint/agents/node.js --max-old-space-size=64",
		"JAVA_TOOL_OPTIONS=-javaagent:/run/dewpoint/agents/jvm.jar"}
	if !slices.Equal(got, want) {
		t.Errorf("environment %q", got)
	}
}

// The image's own sitecustomize still runs, and a Python without state starts as ever.
func TestPythonChains(t *testing.T) {
	b := newBed(t)
	b.activate([]string{"PYTHONPATH=" + b.root}, Python)
	if err := os.WriteFile(b.root+"/sitecustomize.py", []byte("import sys; sys.theirs = __file__\n"),
		0o644); err != nil {
		t.Fatal(err)
	}
	for _, env := range [][]string{b.env, {b.env[1]}} {
		cmd := exec.Command("/usr/bin/python3", "-c",
			"import sys, sitecustomize; print(sys.theirs, sitecustomize.__file__)")
		cmd.Env = env
		out, err := cmd.CombinedOutput()
		theirs := b.root + "/sitecustomize.py"
		if err != nil || string(out) != theirs+" "+theirs+"\n" {
			t.Errorf("%v\n%s", err, out)
		}
	}
}

func TestInstallIsRepeated(t *testing.T) {
	root := t.TempDir()
	one, err := Install(root)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(root+"/.agents-left", 0o755); err != nil {
		t.Fatal(err)
	}
	two, err := Install(root)
	if err != nil || one != two {
		t.Errorf("%s, then %s (%v)", one, two, err)
	}
	if entries, _ := os.ReadDir(root); len(entries) != 1 {
		t.Errorf("root holds %v", entries)
	}
}

func FuzzWords(f *testing.F) {
	f.Add(`sh -c 'a "b"' "c\"d" e\ f`)
	f.Fuzz(func(t *testing.T, s string) {
		all, err := words(s)
		if err != nil {
			return
		}
		quoted := ""
		for _, w := range all {
			quoted += " '" + strings.ReplaceAll(w, "'", `'\''`) + "'"
		}
		again, err := words(quoted)
		if err != nil || !slices.Equal(all, again) {
			t.Errorf("%q gives %q, and quoted %q (%v)", s, all, again, err)
		}
	})
}

// FuzzReports takes what a container has put where its agents report.
func FuzzReports(f *testing.F) {
	f.Add("java-1", "G ok\n")
	f.Add("py-1-2", "G it went wrong\xff")
	f.Add("-", "")
	f.Add("\x8c-", "G \xff")
	f.Fuzz(func(t *testing.T, name, report string) {
		root := t.TempDir()
		agents := filepath.Join(root, StateDir, "agents")
		if err := os.MkdirAll(agents, 0o700); err != nil {
			t.Fatal(err)
		}
		if strings.ContainsAny(name, "/\x00") || os.WriteFile(filepath.Join(agents, name), []byte(report), 0o600) != nil {
			return
		}
		state, err := open(root, StateDir, unix.O_DIRECTORY)
		if err != nil {
			t.Fatal(err)
		}
		defer state.Close()
		waiting, err := unanswered(state, root, "G")
		if len(waiting) > 0 && (err != nil || waiting[0] != name || strings.HasPrefix(report, "G ok")) {
			t.Errorf("waits for %q: %v", waiting, err)
		}
		if err != nil && (!utf8.ValidString(err.Error()) || len(err.Error()) > 2048) {
			t.Errorf("%q", err)
		}
	})
}
