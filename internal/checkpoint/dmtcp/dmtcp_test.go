package dmtcp

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"dewpoint/internal/checkpoint"
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
	calls         []string
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

func (f *fake) Exec(_ context.Context, _ string, args []string, out io.Writer) (int, error) {
	f.calls = append(f.calls, filepath.Base(args[0]))
	_, err := io.WriteString(out, "what it says\n")
	if f.nothing || f.status != 0 {
		return f.status, err
	}
	file := f.images + "/ckpt_app_1.dmtcp"
	err = errors.Join(err, os.WriteFile(file, []byte("image"), 0o600), os.WriteFile(f.images+"/dmtcp_restart_script.sh", nil, 0o700))
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
	return f, New(Config{Containers: f, Dir: dir})
}

func TestWrittenAgainWhenFilesChange(t *testing.T) {
	f, e := newFake(t)
	f.writes = tries - 1
	var d checkpoint.Dumped
	if _, err := e.write(t.Context(), "a", &d); err != nil {
		t.Fatal(err)
	}
	want := []string{"dmtcp_command", "pause", "resume", "dmtcp_command", "pause", "resume", "dmtcp_command", "pause"}
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
	if _, err := e.write(t.Context(), "a", &d); err == nil || !strings.Contains(err.Error(), "status 2: what it says") {
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
	e, dir := New(Config{}), t.TempDir()
	if _, err := e.Restart(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v", err)
	}
	write(t, dir+"/ckpt_b.dmtcp")
	args, err := e.Restart(dir)
	if err != nil || args[0] != "/bin/sh" || args[len(args)-1] != ImagesDir+"/ckpt_b.dmtcp" {
		t.Errorf("%q, %v", args, err)
	}
	if args = e.Boot([]string{"app", "-x"}); !slices.Equal(args[len(args)-2:], []string{"app", "-x"}) {
		t.Errorf("%q", args)
	}
}

// A process of the host's is not one that carries DMTCP.
func TestExamine(t *testing.T) {
	var d checkpoint.Dumped
	var unfit *checkpoint.UnfitError
	if err := examineProcess(os.Getpid(), &d); !errors.As(err, &unfit) || !strings.Contains(err.Error(), "does not carry DMTCP") {
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
	if _, err := New(Config{}).Probe(t.Context()); !errors.Is(err, checkpoint.ErrUnable) {
		t.Errorf("error %v", err)
	}
}
