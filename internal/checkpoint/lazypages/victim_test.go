package lazypages_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	find "dewpoint/internal/checkpoint/criu"
	"dewpoint/internal/checkpoint/lazypages"
	"dewpoint/testkit"
)

var victimPath = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "victim")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "victim")
	out, err := exec.Command("gcc", "-O2", "-pthread", "-o", path, "testdata/victim.c").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("gcc: %w: %s", err, out)
	}
	return path, nil
})

// criuPath is the CRIU that dewd would take.
var criuPath = sync.OnceValue(func() string { return find.Find(context.Background(), "") })

// criu runs CRIU.
func criu(t testing.TB, work string, args ...string) error {
	t.Helper()
	cmd := exec.Command(criuPath(), append(args, "--work-dir", work, "-o", args[0]+".log", "-v4")...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(work, args[0]+".log"))
		return fmt.Errorf("criu %s: %w: %s%s", args[0], err, out, tail(log, 20))
	}
	return nil
}

func tail(b []byte, n int) string {
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return "\n" + strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// dumped is a dumped victim.
type dumped struct {
	dir   string // without files of pages
	pages lazypages.Dir
	pid   int
	port  int
	lazy  int64 // bytes
}

// dump starts a victim, lets it become ready, and dumps it, which ends it.
func dump(t testing.TB, megabytes, children int) (img dumped) {
	t.Helper()
	testkit.NeedRoot(t, "CRIU dumps")
	untilLazy(t, func() int64 {
		img = dumpOnce(t, megabytes, children)
		return img.lazy
	})
	return img
}

// untilLazy dumps until pages may come late. Where a thread's stack pointer happens to be a multiple of the
// page size, CRIU takes each page of its process for the end of a stack: another process is to be dumped.
func untilLazy(t testing.TB, dump func() (lazy int64)) {
	t.Helper()
	for range 16 {
		if dump() > 0 {
			return
		}
		t.Log("CRIU says that no page may come late")
	}
	t.Fatal("no dump has pages that may come late")
}

func dumpOnce(t testing.TB, megabytes, children int) dumped {
	t.Helper()
	path, err := victimPath()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	img := dumped{dir: filepath.Join(dir, "img"), pages: lazypages.Dir(filepath.Join(dir, "pages"))}
	img.pid, img.port = start(t, path, strconv.Itoa(megabytes), strconv.Itoa(children),
		filepath.Join(dir, "filed"))
	for _, d := range []string{img.dir, string(img.pages)} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := criu(t, dir, "dump", "-t", strconv.Itoa(img.pid), "-D", img.dir); err != nil {
		t.Fatal(err)
	}
	img.kill() // waits until the dumped ones are reaped
	img.strip(t)
	return img
}

// strip moves the files of pages away and puts those for lazy restores there.
func (img *dumped) strip(t testing.TB) {
	t.Helper()
	files, _ := filepath.Glob(filepath.Join(img.dir, "pages-*.img"))
	for _, f := range files {
		if err := os.Rename(f, filepath.Join(string(img.pages), filepath.Base(f))); err != nil {
			t.Fatal(err)
		}
	}
	eager, lazy, err := lazypages.Eager(t.Context(), img.dir, img.pages)
	if err != nil {
		t.Fatal(err)
	}
	if eager < 4<<20 {
		t.Fatalf("%d bytes eager, %d lazy", eager, lazy)
	}
	if img.lazy = lazy; lazy < eager {
		img.lazy = 0 // that of one process, not of all
	}
}

func start(t testing.TB, path string, args ...string) (pid, port int) {
	t.Helper()
	cmd := exec.Command(path, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 16)
	n, err := out.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	out.Close()
	t.Cleanup(func() { syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
	if port, err = strconv.Atoi(string(bytes.TrimSpace(line[:n]))); err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid, port
}

// restore restores img lazily. The victims are ended with the test.
func (img *dumped) restore(t testing.TB, cfg lazypages.Config) *lazypages.Server {
	t.Helper()
	s, err := img.tryRestore(t, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (img *dumped) tryRestore(t testing.TB, cfg lazypages.Config) (*lazypages.Server, error) {
	t.Helper()
	return img.serve(t, context.Background(), cfg)
}

func (img *dumped) restoreIn(t testing.TB, ctx context.Context, cfg lazypages.Config) *lazypages.Server {
	t.Helper()
	s, err := img.serve(t, ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (img *dumped) serve(t testing.TB, ctx context.Context, cfg lazypages.Config) (*lazypages.Server, error) {
	t.Helper()
	work := t.TempDir()
	cfg.Dir, cfg.Work = img.dir, work
	if cfg.Source == nil {
		cfg.Source = img.pages
	}
	ctx, cancel := context.WithCancel(ctx)
	s, err := lazypages.Serve(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		img.kill()
		cancel()
		<-s.Done()
	})
	return s, criu(t, work, "restore", "-d", "-D", img.dir, "--lazy-pages")
}

// kill ends all victims of the image, which are one session, and waits until
// their numbers are free.
func (img *dumped) kill() {
	for range 5000 {
		left := img.members()
		if len(left) == 0 {
			return
		}
		for _, pid := range left {
			syscall.Kill(pid, syscall.SIGKILL)
			syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
		}
		time.Sleep(time.Millisecond)
	}
}

// alive is who has not ended.
func (img *dumped) alive() []int { return img.session("Z", "X") }

func (img *dumped) members() []int { return img.session() }

// session is the processes of the image, without those in the given states.
func (img *dumped) session(states ...string) (pids []int) {
	all, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, f := range all {
		b, _ := os.ReadFile(f)
		_, rest, _ := strings.Cut(string(b), ") ")
		fields := strings.Fields(rest)
		if len(fields) > 3 && fields[3] == strconv.Itoa(img.pid) && !slices.Contains(states, fields[0]) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(f)))
			pids = append(pids, pid)
		}
	}
	return pids
}

// ask sends a command and returns the answer.
func (img *dumped) ask(cmd string) (string, error) {
	conn, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", img.port), 5*time.Second)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(60 * time.Second))
	if _, err := io.WriteString(conn, cmd); err != nil {
		return "", err
	}
	b, err := io.ReadAll(conn)
	return strings.TrimSpace(string(b)), err
}

func (img *dumped) must(t testing.TB, cmd string) {
	t.Helper()
	if got, err := img.ask(cmd); got != "ok" || err != nil {
		t.Fatalf("%s: %q, %v", cmd, got, err)
	}
}
