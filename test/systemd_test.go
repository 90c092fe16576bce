package test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// heard are the states that a service manager is told.
type heard struct {
	t    *testing.T
	conn *net.UnixConn
}

func (h heard) await(want string) {
	h.t.Helper()
	b := make([]byte, 4096)
	h.conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	for {
		n, err := h.conn.Read(b)
		if err != nil {
			h.t.Fatalf("the service manager did not hear %s: %v", want, err)
		}
		if strings.HasPrefix(string(b[:n]), want) {
			return
		}
	}
}

// dewd as dist/dewd.service runs it: it says when it is ready, lives, reads its configuration again and
// stops; and calls of containerd wait in the socket while it is down.
func TestServiceManager(t *testing.T) {
	m := newMachine(t, nil)
	if err := os.MkdirAll(m.state, 0o711); err != nil {
		t.Fatal(err)
	}
	notify, snapshots := m.root+".notify", filepath.Join(m.state, "snapshotter.sock")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notify, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: snapshots, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	m.files = []*os.File{f}
	m.under = []string{"sh", "-c", fmt.Sprintf("export LISTEN_PID=$$ LISTEN_FDS=1 NOTIFY_SOCKET=%s "+
		`WATCHDOG_PID=$$ WATCHDOG_USEC=600000; exec "$0" "$@"`, notify)}
	manager := heard{t, conn}

	m.start()
	manager.await("READY=1")
	manager.await("WATCHDOG=1")
	manager.await("WATCHDOG=1")
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", m.privateContainerd()))
	if err != nil || strings.Contains(string(env), "NOTIFY_SOCKET") || strings.Contains(string(env), "LISTEN_FDS") {
		t.Errorf("containerd has dewd's own environment: %v\n%s", err, env)
	}

	reload := func(config string) {
		t.Helper()
		if err := os.WriteFile(m.root+".toml", []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		m.cmd.Process.Signal(unix.SIGHUP)
		manager.await("RELOADING=1")
		manager.await("READY=1")
	}
	reload(m.config + "[link]\nlimit = \"5Mbit\"\n[cache]\nmax_bytes = \"1GB\"\n\n[lazy]\nmode = \"never\"\n")
	reload(m.config + "[link]\nlimit = \"a lot\"\n")
	said, _ := os.ReadFile(m.log)
	for _, want := range []string{"changed=\"[cache.max_bytes link.limit]\"", "keys=[lazy.mode]",
		"the one in force stays"} {
		if !strings.Contains(string(said), want) {
			t.Errorf("the log does not say %q", want)
		}
	}

	m.stop()
	manager.await("STOPPING=1")
	answer := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	client, err := grpc.NewClient("unix://"+snapshots, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	client.Connect()
	go func() {
		_, err := snapshotsapi.NewSnapshotsClient(client).Stat(ctx, &snapshotsapi.StatSnapshotRequest{Key: "none"})
		answer <- errgrpc.ToNative(err)
	}()
	m.start()
	if err := <-answer; !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("a call while dewd was down was answered with %v", err)
	}
}

func TestCheckConfiguration(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "dewd.toml")
	for config, want := range map[string]string{"[link]\nlimit = \"5Mbit\"\n": "", "[link]\nlimt = 5\n": "line 2"} {
		if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(filepath.Join(programs, "dewd"), "--check", "--config", file).CombinedOutput()
		if (err == nil) != (want == "") || !strings.Contains(string(out), want) {
			t.Errorf("%q: %v\n%s", config, err, out)
		}
	}
}
