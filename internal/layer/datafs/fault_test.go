package datafs

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"dewpoint/testkit"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// TestServerKilled kills datafs under waiting readers, twice.
func TestServerKilled(t *testing.T) {
	both(t, func(t *testing.T, show func(*testLayer) *testLayer) {
		l := show(newBed(t).start().layer(tarOf(10, 64<<10, 64<<10, 64<<10)))
		l.put(l.at("f2").from, l.at("f2").to)
		a := startReader(t, "read", l.file("f0"), 0, 64<<10)
		b := startReader(t, "mmap", l.file("f1"), 4096, 8192)
		testkit.Eventually(t, "wants", func() bool { return len(l.wanted(l.id)) >= 2 })
		for range 2 {
			before := len(l.wanted(l.id))
			pid := l.serverPID()
			unix.Kill(pid, unix.SIGKILL)
			testkit.Eventually(t, "the wants of those who still wait", func() bool { return len(l.wanted(l.id)) >= before+2 })
			if l.serverPID() == pid {
				t.Error("datafs was not killed")
			}
			startReader(t, "read", l.file("f2"), 100, 60<<10).right(t, l.content("f2")[100:100+60<<10])
		}
		l.putAll()
		a.right(t, l.content("f0"))
		b.right(t, l.content("f1")[4096:12288])
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.lost) > 0 {
			t.Errorf("lost %v", l.lost)
		}
	})
}

// TestServerKilledForGood is about a kernel that cannot resend.
func TestServerKilledForGood(t *testing.T) {
	b := newBed(t)
	b.cfg.noResend = true
	l := b.start().layer(tarOf(11, 64<<10, 64<<10)).mount()
	r := startReader(t, "read", l.file("f0"), 0, 4096)
	testkit.Eventually(t, "a want", func() bool { return len(l.wanted(l.id)) > 0 })
	unix.Kill(l.serverPID(), unix.SIGKILL)
	if err := r.ends(t, 5*time.Second); err == nil || r.out.Len() == 0 {
		t.Errorf("the read went well: %v, %s", err, r.out.String())
	}
	testkit.Eventually(t, "the loss to be said", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return slices.Contains(l.lost, l.id)
	})
	unix.Unmount(l.target, unix.MNT_DETACH)
	testkit.Eventually(t, "the new mount", func() bool { _, err := os.Stat(l.path); return err == nil })
	l.mount()
	l.putAll()
	startReader(t, "read", l.file("f0"), 0, 64<<10).right(t, l.content("f0"))
}

// dewdProcess is a dewd that adds one layer and waits to be killed. Its
// arguments are the state directory and the layer's.
func dewdProcess(args []string) int {
	data, err1 := os.OpenFile(filepath.Join(args[1], "data"), os.O_RDWR, 0)
	present, err2 := os.OpenFile(filepath.Join(args[1], "present"), os.O_RDWR, 0)
	c, err3 := Start(context.Background(), Config{State: args[0], Exec: []string{"/proc/self/exe", roleServer},
		Want: func(_ digest.Digest, from, to int64) { fmt.Println("want", from, to) }})
	if err1 != nil || err2 != nil || err3 != nil {
		fmt.Println(err1, err2, err3)
		return 1
	}
	if _, err := c.Add(digest.Digest(args[2]), data, present); err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("ready")
	select {}
}

// TestDewdKilled kills the process that fetches.
func TestDewdKilled(t *testing.T) {
	b := newBed(t)
	l := b.start().layer(tarOf(12, 64<<10, 64<<10))
	l.put(l.at("f1").from, l.at("f1").to)
	l.client.Close()
	out := filepath.Join(t.TempDir(), "out")
	log, err := os.Create(out)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	dewd := exec.Command("/proc/self/exe", roleDewd, b.cfg.State, l.dir, string(l.id))
	dewd.Stdout, dewd.Stderr = log, log
	dewd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := dewd.Start(); err != nil {
		t.Fatal(err)
	}
	said := func(s string) func() bool {
		return func() bool { b, _ := os.ReadFile(out); return strings.Contains(string(b), s) }
	}
	testkit.Eventually(t, "the other dewd", said("ready"))
	l.mount()
	r := startReader(t, "read", l.file("f0"), 0, 64<<10)
	testkit.Eventually(t, "its want", said("want"))
	dewd.Process.Kill()
	dewd.Wait()
	startReader(t, "read", l.file("f1"), 0, 64<<10).right(t, l.content("f1"))
	select {
	case <-r.done:
		t.Fatalf("a read of absent bytes ended: %s", r.out.String())
	case <-time.After(100 * time.Millisecond):
	}
	b.start()
	if got := b.client.Layers(); len(got) != 1 || got[0] != l.id {
		t.Errorf("the next dewd is told of %v", got)
	}
	if len(l.wanted(l.id)) > 0 {
		t.Error("a want was told before its layer was added")
	}
	if _, err := b.client.Add(l.id, l.data, l.present.File()); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the want that stands", func() bool { return len(l.wanted(l.id)) > 0 })
	unix.Kill(b.serverPID(), unix.SIGKILL) // a client can replace what it has not started
	startReader(t, "read", l.file("f1"), 0, 64<<10).right(t, l.content("f1"))
	l.putAll()
	r.right(t, l.content("f0"))
}

func TestRemoveAndRelease(t *testing.T) {
	both(t, func(t *testing.T, show func(*testLayer) *testLayer) {
		l := newBed(t).start().layer(tarOf(13, 64<<10))
		l.putAll()
		if show(l); l.target == "" {
			t.Fatal("not shown")
		}
		user, err := os.Open(l.file("f0"))
		if err != nil {
			t.Fatal(err)
		}
		l.client.Remove(l.id)
		testkit.Eventually(t, "the name to go", func() bool { _, err := os.Stat(l.path); return os.IsNotExist(err) })
		got := make([]byte, 64<<10)
		if _, err := user.ReadAt(got, 0); err != nil || !bytes.Equal(got, l.content("f0")) {
			t.Errorf("read of what was removed: %v", err)
		}
		time.Sleep(100 * time.Millisecond)
		if l.isReleased() {
			t.Error("released while it is used")
		}
		user.Close()
		unix.Unmount(l.target, 0)
		testkit.Eventually(t, "the release", l.isReleased)
		l.path, err = l.client.Add(l.id, l.data, l.present.File())
		if err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(l.path); err != nil || !bytes.Equal(b, l.tar) {
			t.Errorf("added again: %d bytes, %v", len(b), err)
		}
	})
}

func (l *testLayer) isReleased() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Contains(l.released, l.id)
}

// TestHostileMessages sends what no dewd sends.
func TestHostileMessages(t *testing.T) {
	b := newBed(t).start()
	l := b.layer(tarOf(14, 64<<10)).mount()
	l.putAll()
	id := strings.Repeat("a", idLength)
	for _, m := range [][]byte{
		nil, {1}, make([]byte, messageSize), make([]byte, messageSize+10),
		(&message{kind: lastKind}).encode(), (&message{kind: kindAdd, id: id}).encode(),
		(&message{kind: kindTree, id: id}).encode(), (&message{kind: kindTree, id: l.id.Encoded()}).encode(),
		(&message{kind: kindPresent, id: l.id.Encoded(), from: -1 << 62, to: 1 << 62}).encode(),
		(&message{kind: kindFail, id: l.id.Encoded(), from: 5, to: -5}).encode(),
		(&message{kind: kindAdd, id: strings.Repeat("/", idLength), number: 1}).encode(),
		(&message{kind: kindResend}).encode(), (&message{kind: kindHello}).encode(),
	} {
		b.client.mu.Lock()
		if b.client.link != nil {
			b.client.link.conn.Write(m)
		}
		b.client.mu.Unlock()
		startReader(t, "read", l.path, 0, 4096).right(t, l.tar[:4096])
		testkit.Eventually(t, "the connection", func() bool {
			b.client.mu.Lock()
			defer b.client.mu.Unlock()
			return b.client.link != nil
		})
	}
}

// TestIdle is about a datafs that nobody needs any more, and one that is used.
func TestIdle(t *testing.T) {
	b := newBed(t)
	b.cfg.Exec = append(b.cfg.Exec, "-idle", "200ms")
	l := b.start().layer(tarOf(15, 64<<10)).mount()
	l.putAll()
	mountpoint := filepath.Join(b.cfg.State, "datafs")
	pid := b.serverPID()
	b.client.Close()
	b.client = nil
	time.Sleep(700 * time.Millisecond)
	if got, err := os.ReadFile(l.file("f0")); err != nil || !bytes.Equal(got, l.content("f0")) {
		t.Errorf("a mount whose dewd is gone: %d bytes, %v", len(got), err)
	}
	if err := unix.Unmount(l.target, 0); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the unused datafs to end", func() bool {
		var st unix.WaitStatus
		got, _ := unix.Wait4(pid, &st, unix.WNOHANG, nil)
		return got == pid
	})
	if entries, err := os.ReadDir(mountpoint); err != nil || len(entries) > 0 {
		t.Errorf("its mount: %v, %v", entries, err)
	}
	b.start() // a new one takes the place
}

// TestOtherFiles adds a layer again whose bytes have come to other files, while
// a read waits for them.
func TestOtherFiles(t *testing.T) {
	b := newBed(t).start()
	raw := tarOf(16, 64<<10)
	l := b.layer(raw).mount()
	r := startReader(t, "read", l.file("f0"), 0, 64<<10)
	testkit.Eventually(t, "a want", func() bool { return len(l.wanted(l.id)) > 0 })
	other := b.layer(raw)
	r2 := startReader(t, "mmap", l.file("f0"), 0, 64<<10)
	other.putAll()
	r.right(t, l.content("f0"))
	r2.right(t, l.content("f0"))
	unix.Kill(b.serverPID(), unix.SIGKILL)
	startReader(t, "read", l.file("f0"), 1, 60<<10).right(t, l.content("f0")[1:1+60<<10])
}

// Neither datafs nor dewd keeps files of layers that are gone open, also where a
// layer got other files meanwhile.
func TestFilesAreClosed(t *testing.T) {
	both(t, func(t *testing.T, show func(*testLayer) *testLayer) {
		b := newBed(t).start()
		cycle := func(seed uint64) {
			t.Run("", func(sub *testing.T) { // whose end closes the test's own files
				b.t = sub
				raw := tarOf(seed, 16<<10)
				l := b.layer(raw)
				show(l)
				b.layer(raw).putAll()
				if got, err := os.ReadFile(l.file("f0")); err != nil || !bytes.Equal(got, l.content("f0")) {
					sub.Errorf("%d bytes, %v", len(got), err)
				}
				b.client.Remove(l.id)
				unix.Unmount(l.target, 0)
				testkit.Eventually(sub, "the release", l.isReleased)
			})
			b.t = t
		}
		cycle(0)
		server := b.serverPID()
		mine, its := openFiles(t, os.Getpid()), openFiles(t, server)
		for seed := range uint64(20) {
			cycle(1 + seed)
		}
		if now := openFiles(t, os.Getpid()); now > mine {
			t.Errorf("dewd has %d files open, it had %d", now, mine)
		}
		if now := openFiles(t, server); now > its {
			t.Errorf("datafs has %d files open, it had %d", now, its)
		}
	})
}

// openFiles is how many files a process has open.
func openFiles(t *testing.T, pid int) int {
	t.Helper()
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// A message's word for its sender's number is not believed: the process that would be killed is its sender.
func TestForgedNumber(t *testing.T) {
	dir := t.TempDir()
	innocent := exec.Command("sleep", "1000")
	if err := innocent.Start(); err != nil {
		t.Fatal(err)
	}
	defer reap(innocent, true)
	l, err := net.ListenUnix("unixpacket",
		&net.UnixAddr{Name: filepath.Join(dir, socketName), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	before, said := openFiles(t, os.Getpid()), make(chan struct{})
	go func() {
		defer close(said)
		conn, err := l.AcceptUnix()
		if err != nil {
			return
		}
		defer conn.Close()
		for _, m := range []message{{kind: kindKernel},
			{kind: kindHello, from: int64(innocent.Process.Pid), files: []*os.File{null}}, {kind: kindReady}} {
			if err := sendMessage(conn, &m); err != nil {
				t.Error(err)
			}
		}
	}()
	p, err := dial(t.Context(), dir, func(message) {})
	if err != nil {
		t.Fatal(err)
	}
	if p.pidfd < 0 {
		t.Fatal("the sender is not known")
	}
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", p.pidfd))
	if err != nil || !strings.Contains(string(info), fmt.Sprintf("Pid:\t%d\n", os.Getpid())) {
		t.Errorf("it takes %s for the sender, %v", info, err)
	}
	p.release()
	<-said
	if now := openFiles(t, os.Getpid()); now > before {
		t.Errorf("%d files are open, %d before", now, before)
	}
}
