package lazypages

import (
	"context"
	"encoding/binary"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// SendTask sends what CRIU sends of one process: the number 1, and a descriptor.
func SendTask(dir string) error {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: filepath.Join(dir, SocketName), Net: "unix"})
	if err != nil {
		return err
	}
	if _, err := conn.Write(binary.NativeEndian.AppendUint32(nil, 1)); err != nil {
		return err
	}
	null, err := os.Open("/dev/null")
	if err != nil {
		return err
	}
	_, _, err = conn.WriteMsgUnix([]byte{0}, unix.UnixRights(int(null.Fd())), nil)
	return err
}

// A process that has ended before its server heard of it does not fail the restore: it has no memory
// any more, and its number may be another's.
func TestTaskThatHasEnded(t *testing.T) {
	dir := t.TempDir()
	l, err := listen(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cmd := exec.Command("/proc/self/exe", "task", dir)
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	conn, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	s := server(t, dir)
	if finished, err := s.receiveOne(conn); finished || err != nil {
		t.Errorf("%v, %v", finished, err)
	}
	for _, task := range s.tasks {
		if err := unix.PidfdSendSignal(task.pidfd, 0, nil, 0); err != unix.ESRCH {
			t.Errorf("somebody else is taken for the process: %v", err)
		}
	}
	s.wg.Wait()
	closeTasks(s.tasks)
}

// Of a kernel that does not tell the process the memory is served all the same.
func TestTaskThatIsNotKnown(t *testing.T) {
	s := server(t, t.TempDir())
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.admit(1, -1, null); err != nil {
		t.Error(err)
	}
	s.wg.Wait()
	if len(s.tasks) != 0 || s.stats.Processes != 1 {
		t.Errorf("%d processes to be killed, %+v", len(s.tasks), s.stats)
	}
}

// server is one to which CRIU has sent everything but processes without any memory.
func server(t *testing.T, dir string) *Server {
	s := &Server{cfg: withDefaults(Config{Dir: dir}), procs: map[*process]struct{}{}, finished: true}
	s.ctx, s.cancel = context.WithCancel(t.Context())
	s.plan.init(nil)
	return s
}
