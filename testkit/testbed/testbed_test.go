package testbed

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"dewpoint/testkit"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"golang.org/x/sys/unix"
)

// The registry of a Bed is this program: "registry -dir DIR -listen ADDRESS -pushed DIR".
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "registry" {
		ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
		defer stop()
		l, err := net.Listen("tcp", os.Args[5])
		if err == nil {
			err = Serve(ctx, os.Args[3], os.Args[7], l)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// putBlob leaves a blob of so many bytes in a layout.
func putBlob(t *testing.T, dir string, size int) (digest string, content []byte) {
	t.Helper()
	content = bytes.Repeat([]byte("0123456789abcdef"), size/16)
	sum := sha256.Sum256(content)
	digest = hex.EncodeToString(sum[:])
	if err := os.MkdirAll(filepath.Join(dir, "blobs", "sha256"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "blobs", "sha256", digest), content, 0o644); err != nil {
		t.Fatal(err)
	}
	return digest, content
}

func TestBedShapesItsLinkAndCleansUp(t *testing.T) {
	testkit.NeedRoot(t, "it makes network namespaces")
	images := t.TempDir()
	digest, _ := putBlob(t, images, 1<<20)
	bed, err := New(t.Context(),
		Config{Images: images, Dir: filepath.Join(t.TempDir(), "bed"), Self: os.Args[:1]})
	if err != nil {
		t.Fatal(err)
	}
	closed := false
	defer func() {
		if !closed {
			bed.Close()
		}
	}()
	url := "http://" + Address + "/v2/x/blobs/sha256:" + digest
	fast := fetchTime(t, bed, url)
	if err := bed.Rate(t.Context(), 8); err != nil {
		t.Fatal(err)
	}
	before, _ := bed.Received()
	slow := fetchTime(t, bed, url)
	after, _ := bed.Received()
	if slow < 800*time.Millisecond || slow > 3*time.Second || fast > slow/2 {
		t.Errorf("1 MiB took %s on the whole link and %s at 8 Mbit/s", fast, slow)
	}
	if n := after - before; n < 1<<20 || n > 1<<20*11/10 {
		t.Errorf("%d bytes were counted for a blob of 1 MiB", n)
	}
	closed = true
	if err := bed.Close(); err != nil {
		t.Fatal(err)
	}
	for _, ns := range []string{bed.node, bed.registry} {
		if _, err := os.Stat("/run/netns/" + ns); err == nil {
			t.Errorf("network namespace %s is left", ns)
		}
	}
}

func fetchTime(t *testing.T, bed *Bed, url string) time.Duration {
	t.Helper()
	start := time.Now()
	if err := bed.Get(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	return time.Since(start)
}

func TestGroupCountsAndEndsWhatItsProgramsStart(t *testing.T) {
	testkit.NeedRoot(t, "it makes cgroups")
	g, err := NewGroup("test")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "sh", "-c",
		`sleep 300 & head -c 20000000 /dev/zero | tail > /dev/null; trap '' TERM; sleep 300`)
	if err := g.Start(cmd); err != nil {
		t.Fatal(err)
	}
	memory := g.Watch()
	if _, err := g.Run(exec.Command("sh", "-c",
		"i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done")); err != nil {
		t.Fatal(err)
	}
	memory.Stop()
	if cpu, err := g.CPU(); err != nil || cpu < 20*time.Millisecond {
		t.Errorf("CPU time %s, %v", cpu, err)
	}
	if memory.Peak < 1<<20 || memory.PerOf["sh"] == 0 {
		t.Errorf("peak %d bytes, by program %v", memory.Peak, memory.PerOf)
	}
	pids := g.pids()
	g.main.Process.Kill() // it ignores TERM; what it started does not end with it
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	if len(pids) < 2 {
		t.Errorf("the group had processes %v, want the shell and its child", pids)
	}
	if _, err := os.Stat(g.path); err == nil {
		t.Errorf("%s is left", g.path)
	}
}

func TestGroupIsKilledFrozenAndUsedAgain(t *testing.T) {
	testkit.NeedRoot(t, "it makes cgroups")
	g, err := NewGroup("again")
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	for range 2 {
		if err := g.Start(exec.CommandContext(t.Context(), "sleep", "300")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond)
		if pids := g.Processes("sleep"); len(pids) != 1 {
			t.Fatalf("the group has %v, want one sleep", pids)
		}
		if err := g.Freeze(true); err != nil {
			t.Error(err)
		}
		if err := g.Kill(); err != nil {
			t.Error(err)
		}
		if pids := g.Processes(""); len(pids) > 0 {
			t.Errorf("processes %v were killed and are there", pids)
		}
	}
	if err := g.Start(exec.CommandContext(t.Context(), "sleep", "300")); err != nil {
		t.Fatal(err)
	}
	if err := g.Stop(t.Context(), unix.SIGTERM); err != nil {
		t.Error(err)
	}
	<-g.Ended()
}

func TestRunFailsWithTheOutput(t *testing.T) {
	testkit.NeedRoot(t, "it makes cgroups")
	g, err := NewGroup("fails")
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	_, err = g.Run(exec.Command("sh", "-c", "echo what went wrong >&2; exit 3"))
	if err == nil || !bytes.Contains([]byte(err.Error()), []byte("what went wrong")) {
		t.Errorf("error %v", err)
	}
}

func TestRegistryServesRanges(t *testing.T) {
	dir := t.TempDir()
	digest, content := putBlob(t, dir, 1<<16)
	h, err := newRegistry(dir, dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		header string
		status int
		want   []byte
	}{
		{"", 200, content},
		{"bytes=100-199", 206, content[100:200]},
		{"bytes=65000-", 206, content[65000:]},
		{"bytes=70000-", 416, nil},
	} {
		req := httptest.NewRequest(http.MethodGet, "/v2/x/blobs/sha256:"+digest, nil)
		if c.header != "" {
			req.Header.Set("Range", c.header)
		}
		resp := httptest.NewRecorder()
		h.ServeHTTP(resp, req)
		if resp.Code != c.status || (c.want != nil && !bytes.Equal(resp.Body.Bytes(), c.want)) {
			t.Errorf("range %q: status %d, %d bytes", c.header, resp.Code, resp.Body.Len())
		}
	}
	resp := httptest.NewRecorder()
	h.ServeHTTP(resp, httptest.NewRequest(http.MethodGet, "/v2/x/blobs/sha256:"+digest[:60]+"0000", nil))
	if resp.Code != http.StatusNotFound {
		t.Errorf("an absent blob: status %d", resp.Code)
	}
}

func TestRegistryTakesPushes(t *testing.T) {
	dir := t.TempDir()
	putBlob(t, dir, 16)
	h, err := newRegistry(dir, dir)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(h)
	defer server.Close()
	ref, err := name.ParseReference(server.Listener.Addr().String() + "/some/image:1")
	if err != nil {
		t.Fatal(err)
	}
	img, err := random.Image(4096, 3)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, img); err != nil {
		t.Fatal(err)
	}
	back, err := remote.Image(ref)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := back.Layers()
	if err != nil || len(layers) != 3 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	for _, l := range layers {
		r, err := l.Compressed()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, r); err != nil {
			t.Errorf("a pushed layer comes back wrong: %v", err)
		}
		r.Close()
	}
}

// What a process has started in a group ends with the process, also where it is a daemon.
func TestGroupOfTheKilled(t *testing.T) {
	testkit.NeedRoot(t, "it makes cgroups")
	if os.Getenv("TESTBED_DAEMON") != "" {
		g, err := NewGroup("dies")
		if err != nil {
			t.Fatal(err)
		}
		out, err := g.Run(exec.Command("sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"))
		if err != nil {
			t.Fatal(err)
		}
		os.Stderr.Write(out)
		unix.Kill(os.Getpid(), unix.SIGKILL)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestGroupOfTheKilled$")
	cmd.Env = append(os.Environ(), "TESTBED_DAEMON=1")
	var said bytes.Buffer
	cmd.Stderr = &said
	cmd.Run()
	pid, err := strconv.Atoi(strings.TrimSpace(said.String()))
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the daemon ends", func() bool { return unix.Kill(pid, 0) == unix.ESRCH })
	killStale(slog.New(slog.DiscardHandler))
}
