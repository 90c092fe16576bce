package dmtcp

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"go.uber.org/goleak"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/engine"
	"dewpoint/internal/image"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func write(t *testing.T, file string) {
	t.Helper()
	if err := os.WriteFile(file, []byte("image"), 0o600); err != nil {
		t.Fatal(err)
	}
}

// fake is a container whose processes carry DMTCP and do as told.
type fake struct {
	upper, images string
	status        int
	writes        int // of the next dumps, how many a file changes after
	nothing       bool
	gone          error // of Exec
	calls         []string
	answers       []string // what the coordinator says next
}

func (f *fake) Pause(context.Context, string) error {
	f.calls = append(f.calls, "pause")
	return nil
}

func (f *fake) Resume(string) error {
	f.calls = append(f.calls, "resume")
	return nil
}

func (f *fake) Upper(context.Context, string) (string, error) { return f.upper, nil }

func (f *fake) OwnDir(string) string { return f.images }

func (f *fake) Exec(_ context.Context, _ string, s engine.ExecSpec) (int, error) {
	f.calls = append(f.calls, filepath.Base(s.Args[0]))
	if f.gone != nil {
		return 0, f.gone
	}
	if len(f.answers) > 0 {
		said := f.answers[0]
		f.answers = f.answers[1:]
		_, err := io.WriteString(s.Stdout, said)
		return 0, err
	}
	_, err := io.WriteString(s.Stdout, "what it says\n")
	if f.nothing || f.status != 0 {
		return f.status, err
	}
	file := f.images + "/ckpt_app_1.dmtcp"
	err = errors.Join(err, os.WriteFile(file, []byte("image"), 0o600),
		os.WriteFile(f.images+"/dmtcp_restart_script.sh", nil, 0o700))
	if f.writes > 0 {
		f.writes--
		time.Sleep(20 * time.Millisecond)
		err = errors.Join(err, os.WriteFile(f.upper+"/data", nil, 0o600))
	} else {
		err = errors.Join(err, os.Chtimes(file, time.Time{}, time.Now().Add(time.Minute)))
	}
	return 0, err
}

func newFake(t *testing.T) (*fake, *Engine) {
	dir := t.TempDir()
	f := &fake{upper: dir + "/upper", images: dir + "/a"}
	for _, d := range []string{f.upper, f.images} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return f, New(Config{Containers: f})
}

func TestWrittenAgainWhenFilesChange(t *testing.T) {
	f, e := newFake(t)
	f.writes = tries - 1
	var d checkpoint.Dumped
	if _, err := e.write(t.Context(), "a", &d); err != nil {
		t.Fatal(err)
	}
	want := []string{"dmtcp_command", "pause", "resume", "dmtcp_command", "pause", "resume", "dmtcp_command",
		"pause"}
	if !slices.Equal(f.calls, want) {
		t.Errorf("calls %q", f.calls)
	}
	f.calls, f.writes = nil, tries
	var unfit *checkpoint.UnfitError
	if _, err := e.write(t.Context(), "a", &d); !errors.As(err, &unfit) || f.calls[len(f.calls)-1] != "resume" {
		t.Errorf("error %v, calls %q", err, f.calls)
	}
}

func TestNoImages(t *testing.T) {
	f, e := newFake(t)
	f.nothing = true
	var d checkpoint.Dumped
	var unfit *checkpoint.UnfitError
	if _, err := e.write(t.Context(), "a", &d); !errors.As(err, &unfit) || len(f.calls) != 1 {
		t.Errorf("error %v, calls %q", err, f.calls)
	}
	f.status = 2
	if _, err := e.write(t.Context(), "a", &d); err == nil ||
		!strings.Contains(err.Error(), "status 2: what it says") {
		t.Errorf("error %v", err)
	}
}

func TestImagesAreMoved(t *testing.T) {
	f, _ := newFake(t)
	for _, name := range []string{"ckpt_a_1.dmtcp", "dmtcp_restart_script.sh"} {
		write(t, filepath.Join(f.images, name))
	}
	to := t.TempDir()
	var d checkpoint.Dumped
	if err := moveImages(f.images, to, &d); err != nil || d.Pages != int64(len("image")) {
		t.Errorf("%+v, %v", d, err)
	}
	left, _ := os.ReadDir(f.images)
	moved, _ := os.ReadDir(to)
	if len(left) != 0 || len(moved) != 1 {
		t.Errorf("left %v, moved %v", left, moved)
	}
}

func TestCommands(t *testing.T) {
	dir := t.TempDir()
	if _, err := restart(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v", err)
	}
	write(t, dir+"/ckpt_b.dmtcp")
	args, err := restart(dir)
	if err != nil || args[0] != "/bin/sh" || args[len(args)-1] != ImagesDir+"/ckpt_b.dmtcp" {
		t.Errorf("%q, %v", args, err)
	}
}

func someSpec() engine.Spec {
	img := &image.Image{}
	img.Spec.Config.Entrypoint = []string{"app", "-x"}
	return engine.Spec{Image: img, Net: engine.NetBridge, Mounts: []specs.Mount{{Destination: "/a"}}}
}

// What Carry adds, Bare takes away; what the caller shares with others stays.
func TestCarryAndBare(t *testing.T) {
	e, s := New(Config{Prefix: "/opt/dmtcp"}), someSpec()
	before := s
	if err := e.Carry(&s); err != nil {
		t.Fatal(err)
	}
	args, err := s.Args()
	if err != nil || args[0] != "/bin/sh" || s.Own.Target != ImagesDir || s.Own.From != "" ||
		len(before.Mounts) != 1 || len(s.Mounts) != 2 {
		t.Errorf("%q, %+v, %v", args, s, err)
	}
	o := &specs.Spec{Process: &specs.Process{Args: args},
		Mounts: append(s.Mounts, specs.Mount{Destination: ImagesDir})}
	bare := e.Bare(o)
	if !slices.Equal(bare.Process.Args, []string{"app", "-x"}) || len(bare.Mounts) != 1 || len(o.Mounts) != 3 ||
		len(o.Process.Args) != len(args) {
		t.Errorf("bare: %q, %+v", bare.Process.Args, bare.Mounts)
	}
	if bare := e.Bare(bare); !slices.Equal(bare.Process.Args, []string{"app", "-x"}) {
		t.Errorf("what carries nothing: %q", bare.Process.Args)
	}
}

func TestNotCarried(t *testing.T) {
	for says, change := range map[string]func(s *engine.Spec){
		"host's network":         func(s *engine.Spec) { s.Net = "" },
		"user www-data":          func(s *engine.Spec) { s.User = "www-data:adm" },
		"user 5 is not root":     func(s *engine.Spec) { s.Image.Spec.Config.User = "5" },
		"it is on the host's ne": func(s *engine.Spec) { s.Net = engine.NetHost },
	} {
		s := someSpec()
		change(&s)
		var unfit *checkpoint.UnfitError
		if err := New(Config{}).Carry(&s); !errors.As(err, &unfit) || !strings.Contains(unfit.What, says) ||
			unfit.Remedy == "" || s.Own != nil || s.Entrypoint != nil {
			t.Errorf("%s: %v, %+v", says, err, s)
		}
	}
	s := someSpec()
	s.User = "0:0"
	if err := New(Config{}).Carry(&s); err != nil {
		t.Error(err)
	}
}

// Where DMTCP's own programs do not run, the shell starts the application as it is.
func TestFirstProcessWithoutDMTCP(t *testing.T) {
	out, err := exec.Command("/bin/sh", boot([]string{"echo", "as", "it is"})[1:]...).Output()
	if err != nil || string(out) != "as it is\n" {
		t.Errorf("%q, %v", out, err)
	}
}

func TestAwake(t *testing.T) {
	f, e := newFake(t)
	f.answers = []string{"Status...\n  NUM_PEERS=0\n  RUNNING=no\n", "Status...\n  NUM_PEERS=1\n  RUNNING=yes\n"}
	if err := e.Awake(t.Context(), "a"); err != nil || len(f.calls) != 2 {
		t.Errorf("%v, calls %q", err, f.calls)
	}
	f.gone = engine.ErrNotRunning
	if err := e.Awake(t.Context(), "a"); !errors.Is(err, engine.ErrNotRunning) {
		t.Errorf("it has ended: %v", err)
	}
	f.gone = errors.New("no coordinator yet")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := e.Awake(ctx, "a"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("it never runs on: %v", err)
	}
}

// A process of the host's is not one that carries DMTCP.
func TestExamine(t *testing.T) {
	var d checkpoint.Dumped
	var unfit *checkpoint.UnfitError
	if err := examineProcess(os.Getpid(), &d); !errors.As(err, &unfit) ||
		!strings.Contains(err.Error(), "does not carry DMTCP") {
		t.Errorf("error %v", err)
	}
	if _, err := examine(checkpoint.Container{PID: os.Getpid(), TTY: true}); !errors.As(err, &unfit) {
		t.Errorf("error %v", err)
	}
	if !isCoordinator("0100007F:1E63") || isCoordinator("0100007F:1E64") {
		t.Error("7779 is the coordinator's port")
	}
}

func TestProbeSaysWhatIsMissing(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(dir+"/bin", 0o755); err != nil {
		t.Fatal(err)
	}
	fails := func(prefix, says string) {
		t.Helper()
		if _, err := New(Config{Prefix: prefix}).Probe(t.Context()); !errors.Is(err, checkpoint.ErrUnable) ||
			!strings.Contains(err.Error(), says) {
			t.Errorf("error %v, want %q", err, says)
		}
	}
	fails("", "DMTCP is not installed: no suite of Debian has it: build")
	fails(dir, "bin/dmtcp_launch: no such file")
	for _, p := range programs {
		if err := os.Symlink("/bin/echo", filepath.Join(dir, "bin", p)); err != nil {
			t.Fatal(err)
		}
	}
	fails(dir, `says "`)
	if err := os.Remove(dir + "/bin/dmtcp_restart"); err != nil {
		t.Fatal(err)
	}
	fails(dir, "bin/dmtcp_restart: no such file")
}
