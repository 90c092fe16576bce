package shimgroup_test

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/api/runtime/task/v2"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"dewpoint/internal/engine/shimgroup"
	"dewpoint/testkit"
	"dewpoint/testkit/shimtest"
)

const scheme = "unix://"

// bed is a group with a shim that counts what it is told, and a bundle.
type bed struct {
	t                               *testing.T
	group, bundle, containers, said string
	socket                          string
}

func newBed(t *testing.T) *bed {
	t.Helper()
	tmp := t.TempDir()
	program, err := shimtest.Build(tmp, "../../..")
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{t: t, group: filepath.Join(tmp, "group"), bundle: filepath.Join(tmp, "bundle"),
		containers: filepath.Join(tmp, "containers"),
		said:       filepath.Join(tmp, "said"), socket: filepath.Join(tmp, "s")}
	real := filepath.Join(tmp, "real")
	script := "#!/bin/sh\necho $PWD $* $TTRPC_ADDRESS $(cat) >> " + b.said + "\nprintf %s " + scheme + b.socket +
		"\n"
	err = errors.Join(os.Mkdir(b.bundle, 0o700), os.Mkdir(b.containers, 0o700),
		os.WriteFile(real, []byte(script), 0o755),
		shimgroup.Make(b.group, program, real, b.containers))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// call executes the program in the bundle, as containerd does.
func (b *bed) call(args ...string) string {
	b.t.Helper()
	cmd := exec.Command(shimgroup.Path(b.group), args...)
	cmd.Dir, cmd.Env, cmd.Stdin = b.bundle, append(os.Environ(), "TTRPC_ADDRESS=env"), strings.NewReader("in")
	out, err := cmd.Output()
	if err != nil {
		b.t.Fatalf("%v: %v", args, err)
	}
	return string(out)
}

// told is what the real shim was told.
func (b *bed) told() string {
	out, err := os.ReadFile(b.said)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		b.t.Fatal(err)
	}
	return string(out)
}

// The first start starts a shim, later ones take it while its socket listens,
// and the group takes the socket with it.
func TestStart(t *testing.T) {
	b := newBed(t)
	listen := func() net.Listener {
		l, err := net.Listen("unix", b.socket)
		if err != nil {
			t.Fatal(err)
		}
		l.(*net.UnixListener).SetUnlinkOnClose(false) // as of a process that was killed
		return l
	}
	want, once := scheme+b.socket, b.group+" -id a start env in\n"
	l := listen()
	for range 3 {
		if got := b.call("-id", "a", "start"); got != want || b.told() != once {
			t.Fatalf("start says %q, the shim was told %q", got, b.told())
		}
	}
	spec, err := os.ReadFile(filepath.Join(b.group, "config.json"))
	if err != nil || !strings.HasPrefix(string(spec), `{"annotations":{"io.containerd.runc.v2.group":"group.`) {
		t.Errorf("config.json: %s, %v", spec, err)
	}
	a := shimgroup.ReadAsked(b.group)
	if a == nil || !slices.Equal(a.Args, []string{"-id", "a", "start"}) ||
		!slices.Contains(a.Env, "TTRPC_ADDRESS=env") || string(a.Input) != "in" {
		t.Errorf("noted: %+v", a)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if got := b.call("-id", "a", "start"); got != want || b.told() != once+once {
		t.Errorf("behind a dead shim start says %q, the shim was told %q", got, b.told())
	}
	if _, err := os.Lstat(b.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a dead shim's socket is left: %v", err)
	}
	if err := os.WriteFile(filepath.Join(b.group, "address"), []byte("there"), 0o600); err != nil {
		t.Fatal(err)
	}
	defer listen().Close()
	b.call("-id", "a", "start")
	if a, err := os.ReadFile(filepath.Join(b.bundle, "address")); string(a) != "there" {
		t.Errorf("the bundle's address: %q, %v", a, err)
	}
	for range 2 {
		if err := shimgroup.Remove(b.group); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []string{b.group, b.socket} {
		if _, err := os.Lstat(p); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", p, err)
		}
	}
}

// Only where something is left the real shim cleans up.
func TestDelete(t *testing.T) {
	testkit.NeedRoot(t, "it makes cgroups")
	b := newBed(t)
	args := []string{"-namespace", "n", "-id", "a", "-bundle", b.bundle, "delete"}
	if err := os.WriteFile(filepath.Join(b.bundle, "init.pid"), []byte("4711"), 0o600); err != nil {
		t.Fatal(err)
	}
	var said task.DeleteResponse
	before := time.Now().Add(-time.Second)
	if err := proto.Unmarshal([]byte(b.call(args...)), &said); err != nil {
		t.Fatal(err)
	}
	if at := said.ExitedAt.AsTime(); said.Pid != 4711 || said.ExitStatus != 137 || at.Before(before) ||
		at.After(time.Now()) {
		t.Errorf("it says %v", &said)
	}
	if b.told() != "" {
		t.Fatalf("the real shim was told %q", b.told())
	}
	rootfs, state := filepath.Join(b.bundle, "rootfs"), filepath.Join(b.containers, "a")
	if err := errors.Join(os.Mkdir(rootfs, 0o700), os.Mkdir(state, 0o700)); err != nil {
		t.Fatal(err)
	}
	once := b.bundle + " " + strings.Join(args, " ") + " env in\n"
	if b.call(args...); b.told() != once {
		t.Errorf("with the runtime's state there the real shim was told %q", b.told())
	}
	if err := errors.Join(os.Remove(state), unix.Mount("none", rootfs, "tmpfs", 0, "")); err != nil {
		t.Fatal(err)
	}
	b.call(args...)
	if err := unix.Unmount(rootfs, 0); err != nil {
		t.Fatal(err)
	}
	if b.told() != once+once {
		t.Errorf("with a mount there the real shim was told %q", b.told())
	}
	if b.call(args...); b.told() != once+once {
		t.Errorf("with nothing left the real shim was told %q", b.told())
	}
	if err := os.Remove(b.containers); err != nil {
		t.Fatal(err)
	}
	if b.call(args...); b.told() != once+once+once {
		t.Errorf("with no directory of states the real shim was told %q", b.told())
	}
}

// Who is ended while a shim starts takes it along, and who wants to know of the
// shim waits for it.
func TestStartIsKilled(t *testing.T) {
	b := newBed(t)
	real, err := filepath.EvalSymlinks(filepath.Join(b.group, "shim"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(real, []byte("#!/bin/sh\necho $$ >> "+b.said+"\nexec sleep 1000\n"),
		0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(shimgroup.Path(b.group), "-id", "a", "start")
	cmd.Dir = b.bundle
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the shim starts", func() bool { return b.told() != "" })
	locked := make(chan struct{})
	go func() {
		shimgroup.Lock(t.Context(), b.group)()
		close(locked)
	}()
	select {
	case <-locked:
		t.Fatal("a group whose shim starts is not locked")
	case <-time.After(50 * time.Millisecond):
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	<-locked
	testkit.Eventually(t, "the shim ends", func() bool {
		status, err := os.ReadFile("/proc/" + strings.TrimSpace(b.told()) + "/status")
		return err != nil || strings.Contains(string(status), "\nState:\tZ")
	})
}
