package sender_test

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"dewpoint/internal/sender"
)

// TestMain is also a process that sends a byte through its descriptor 3.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "send" {
		if _, err := unix.Write(3, []byte{1}); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// sent is what a process that has ended since sent, and its number.
func sent(t *testing.T) ([]unix.SocketControlMessage, int) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	theirs := os.NewFile(uintptr(pair[1]), "theirs")
	defer theirs.Close()
	if err := sender.Ask(pair[0]); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", "send")
	cmd.ExtraFiles = []*os.File{theirs}
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	oob := make([]byte, sender.Room)
	_, n, _, _, err := unix.Recvmsg(pair[0], make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	control, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil {
		t.Fatal(err)
	}
	return control, cmd.Process.Pid
}

// A process that has ended before its message was read is nobody, or the one that it was.
func TestSenderThatHasEnded(t *testing.T) {
	control, pid := sent(t)
	p := sender.Of(control, sender.Now())
	if p.PID != pid {
		t.Errorf("the sender is %d, not %d", p.PID, pid)
	}
	if p.FD < 0 {
		return
	}
	defer unix.Close(p.FD)
	if err := unix.PidfdSendSignal(p.FD, 0, nil, 0); err != unix.ESRCH {
		t.Errorf("a signal to a process that has ended: %v", err)
	}
}

// The kernel may put an error's number where the descriptor would be, and old kernels give a number alone.
func TestOf(t *testing.T) {
	cred := unix.UnixCredentials(&unix.Ucred{Pid: int32(os.Getpid())})
	all, err := unix.ParseSocketControlMessage(cred)
	if err != nil {
		t.Fatal(err)
	}
	failed := binary.NativeEndian.AppendUint32(nil, ^uint32(0)-uint32(unix.ESRCH)+1)
	bad := append(all[:1:1], unix.SocketControlMessage{
		Header: unix.Cmsghdr{Level: unix.SOL_SOCKET, Type: unix.SCM_PIDFD}, Data: failed})
	if p := sender.Of(bad, sender.Now()); p.FD >= 0 || p.PID != os.Getpid() {
		t.Errorf("an error in place of a descriptor gives %+v", p)
	}
	if p := sender.Of(nil, sender.Now()); p.FD >= 0 || p.PID != 0 {
		t.Errorf("nothing gives %+v", p)
	}
	p := sender.Of(all, sender.Now())
	if p.FD < 0 {
		t.Fatalf("a number of a process that runs gives %+v", p)
	}
	defer unix.Close(p.FD)
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", p.FD))
	if err != nil || !strings.Contains(string(info), fmt.Sprintf("Pid:\t%d\n", os.Getpid())) {
		t.Errorf("%s, %v", info, err)
	}
	if p := sender.Of(all, 1); p.FD >= 0 {
		t.Errorf("a process that was started after the message was sent is taken for its sender")
	}
}
