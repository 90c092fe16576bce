package lazypages_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"dewpoint/internal/checkpoint/lazypages"
	"dewpoint/testkit"
)

// bundle is a container of the victim, on the host's network.
type bundle struct {
	dir, name string
	conf      string // lines for CRIU
}

func newBundle(t *testing.T, port int) *bundle {
	t.Helper()
	dir := t.TempDir()
	b := &bundle{dir: dir, name: "lazypages-" + strconv.Itoa(os.Getpid()), conf: filepath.Join(dir, "criu.conf")}
	for _, d := range []string{"rootfs/proc", "rootfs/dev", "rootfs/tmp"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command("gcc", "-O2", "-static", "-pthread", "-o", filepath.Join(dir, "rootfs/victim"),
		"testdata/victim.c").CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v: %s", err, out)
	}
	kinds := []map[string]string{{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}}
	spec := map[string]any{
		"ociVersion": "1.0.2",
		"process": map[string]any{"cwd": "/", "user": map[string]int{"uid": 0, "gid": 0}, "env": []string{"PATH=/"},
			"args": []string{"/victim", "64", "2", "/tmp/filed", strconv.Itoa(port)}},
		"root":        map[string]any{"path": "rootfs"},
		"mounts":      []map[string]any{{"destination": "/proc", "type": "proc", "source": "proc"}},
		"linux":       map[string]any{"namespaces": kinds, "cgroupsPath": "/" + b.name},
		"annotations": map[string]string{"org.criu.config": b.conf},
	}
	raw, err := json.Marshal(spec)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), raw, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	b.configure(t, "tcp-close")
	t.Cleanup(func() { b.runc("delete", "--force", b.name) })
	return b
}

func (b *bundle) configure(t *testing.T, lines string) {
	t.Helper()
	if err := os.WriteFile(b.conf, []byte(lines+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

// runc gives the container a pipe for what it says: CRIU wants no host's file.
func (b *bundle) runc(args ...string) error {
	cmd := exec.Command("runc",
		append([]string{"--root", filepath.Join(b.dir, "state"), "--log", filepath.Join(b.dir, "runc.log")},
			args...)...)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(criuPath())+":"+os.Getenv("PATH"))
	cmd.Dir = b.dir
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd.Stdout, cmd.Stderr = w, w
	err = cmd.Run()
	w.Close()
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(b.dir, "runc.log"))
		return fmt.Errorf("runc %s: %w: %s", args[0], err, tail(log, 5))
	}
	return nil
}

// The recipe of the package's documentation.
func TestThroughRunc(t *testing.T) {
	testkit.NeedRoot(t, "runc runs a container")
	port := testkit.FreePort(t)
	b := newBundle(t, port)
	dir := t.TempDir()
	img := dumped{dir: filepath.Join(dir, "img"), pages: lazypages.Dir(filepath.Join(dir, "pages")), port: port}
	work := filepath.Join(dir, "a work directory whose path is longer than the address of a socket may be",
		"so that its name must be taken relative to it")
	untilLazy(t, func() int64 {
		for _, d := range []string{img.dir, string(img.pages), work} {
			if err := errors.Join(os.RemoveAll(d), os.MkdirAll(d, 0o700)); err != nil {
				t.Fatal(err)
			}
		}
		if err := b.runc("run", "-d", b.name); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "it answers", func() bool {
			got, err := img.ask("ping")
			return err == nil && got == "ok"
		})
		if err := b.runc("checkpoint", "--image-path", img.dir, "--work-path", work, b.name); err != nil {
			t.Fatal(err)
		}
		img.strip(t)
		return img.lazy
	})
	b.configure(t, "tcp-close\nlazy-pages")
	ctx, cancel := context.WithCancel(t.Context())
	s, err := lazypages.Serve(ctx,
		lazypages.Config{Dir: img.dir, Work: work, Source: img.pages, Rate: 64 << 20, Guard: guard()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { cancel(); <-s.Done() }()
	if err := b.runc("restore", "-d", "--image-path", img.dir, "--work-path", work, b.name); err != nil {
		log, _ := os.ReadFile(filepath.Join(work, "restore.log"))
		t.Fatal(err, tail(log, 10))
	}
	img.must(t, "ping")
	if st := s.Stats(); st.Filled != 0 || st.Processes != 3 {
		t.Errorf("%+v: that was not lazy", st)
	}
	img.must(t, "churn")
	if err := s.Wait(); err != nil {
		t.Fatal(err)
	}
}
