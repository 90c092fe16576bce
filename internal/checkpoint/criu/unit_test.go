package criu

import (
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"

	"dewpoint/internal/checkpoint"
	"dewpoint/testkit"
)

// Daemons that start at once all keep what CRIU knows of the kernel, whole.
func TestDaemonsKeepFeaturesAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "criu", "criu.kdat")
	content := make([]byte, 4096)
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			if err := keepFeatures(path, content); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if b, err := os.ReadFile(path); err != nil || len(b) != len(content) {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}

// What CRIU was killed over goes, unless a CRIU runs whose it may be.
func TestSweepYards(t *testing.T) {
	dir := t.TempDir()
	empty, used := filepath.Join(dir, "yard.1"), filepath.Join(dir, "yard.2")
	if err := errors.Join(os.Mkdir(empty, 0o700), os.MkdirAll(used+"/x", 0o700)); err != nil {
		t.Fatal(err)
	}
	for _, runs := range []bool{true, false} {
		sweepUnless(filepath.Join(dir, "yard.*"), func() bool { return runs })
		if _, err := os.Stat(empty); (err == nil) != runs {
			t.Errorf("a CRIU runs: %v; %v", runs, err)
		}
		if _, err := os.Stat(used); err != nil {
			t.Error(err)
		}
	}
	script := filepath.Join(dir, "criu")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nread line\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(script, "swrk", "3")
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	// Started, says Go, before the kernel shows the new arguments.
	for range 500 {
		if len(argsOf(cmd.Process.Pid)) == 4 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if !isCRIU(cmd.Process.Pid) || isCRIU(os.Getpid()) {
		t.Errorf("%q is CRIU: %v, %q: %v", argsOf(cmd.Process.Pid), isCRIU(cmd.Process.Pid), argsOf(os.Getpid()),
			isCRIU(os.Getpid()))
	}
	in.Close()
	_ = cmd.Wait()

	// A CRIU that restores says so in place of its arguments.
	program, err := os.ReadFile("/bin/cat")
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "bin-criu"), program, 0o755)
	}
	if err == nil {
		err = os.Rename(filepath.Join(dir, "bin-criu"), script)
	}
	if err != nil {
		t.Fatal(err)
	}
	titled := exec.Cmd{Path: script, Args: []string{"restore --rpc"}}
	if in, err = titled.StdinPipe(); err == nil {
		err = titled.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "CRIU is seen by its program", func() bool { return isCRIU(titled.Process.Pid) })
	if err := os.Remove(script); err != nil || !isCRIU(titled.Process.Pid) {
		t.Errorf("a CRIU whose program was replaced is none: %v", err)
	}
	in.Close()
	_ = titled.Wait()
}

func TestExplain(t *testing.T) {
	failed := errors.New("runc failed")
	for line, what := range map[string]string{
		"(00.1) Error (criu/sk-inet.c:137): inet: Unsupported proto 262 for socket 61cda7":            "multipath",
		"(00.1)     12: Error (criu/sk-inet.c:200): Connected TCP socket, consider using":             "client",
		"(00.1) Error (criu/files-reg.c:930): Can't dump ghost file /x of 300 size, increase limit":   "removed",
		"(00.1) Error (criu/fsnotify.c:284): fsnotify: \tCan't dump that handle":                      "watches",
		"Error (criu/seize.c:560): Unable to freeze cgroup /sys/fs/cgroup/freezer/x (100 x 100ms ...": "sleeps in the kernel",
	} {
		log := filepath.Join(t.TempDir(), "dump.log")
		text := "(00.0) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n" + line + "\n(00.2) Error (criu/cr-dump.c:1975): Dumping FAILED.\n"
		if err := os.WriteFile(log, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		var unfit *checkpoint.UnfitError
		if err := explain(log, failed); !errors.As(err, &unfit) || !strings.Contains(unfit.What, what) ||
			unfit.Remedy == "" {
			t.Errorf("%s: %v", line, err)
		}
	}
	log := filepath.Join(t.TempDir(), "dump.log")
	if err := os.WriteFile(log,
		[]byte("(00.2) Error (criu/page-xfer.c:254): page-xfer: Unable to spice data: No space left on device\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	if err := explain(log, failed); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a full disk: %v", err)
	}
	if err := explain("/nothing", failed); !errors.Is(err, failed) {
		t.Error(err)
	}
}

func TestParseWatch(t *testing.T) {
	w, ok := parseWatch("inotify wd:1 ino:a1c0e1 sdev:27 mask:100 ignored_mask:0 fhandle-bytes:20 fhandle-type:f8")
	if !ok || w.ino != 0xa1c0e1 || w.dev != 0x27 {
		t.Errorf("%+v, %v", w, ok)
	}
	for _, line := range []string{"", "pos:\t0", "inotify wd:1", "inotify ino:zz sdev:27"} {
		if _, ok := parseWatch(line); ok {
			t.Errorf("%q is a watch", line)
		}
	}
}

// filesImage is a list of files with one timer.
func filesImage(nanos, every uint64) []byte {
	number := func(b []byte, n protowire.Number, v uint64) []byte {
		return protowire.AppendVarint(protowire.AppendTag(b, n, protowire.VarintType), v)
	}
	var timer []byte
	for n, v := range []uint64{1: 5, 2: 0, 4: 1, 5: 1, 6: 0, timerSeconds: 0, timerNanos: nanos,
		periodSeconds: 0, periodNanos: every} {
		if n > 0 && n != 3 {
			timer = number(timer, protowire.Number(n), v)
		}
	}
	entry := protowire.AppendBytes(protowire.AppendTag(number(number(nil, 1, 12), 2, 5), fileTimer,
		protowire.BytesType), timer)
	b := binary.LittleEndian.AppendUint32(nil, commonMagic)
	b = binary.LittleEndian.AppendUint32(b, 0x56303138)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(entry)))
	return append(b, entry...)
}

func TestRearmTimers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "files.img")
	for _, c := range []struct {
		image, want []byte
	}{
		{filesImage(0, 20), filesImage(1, 20)}, // periodic, and over
		{filesImage(7, 20), filesImage(7, 20)}, // still to come
		{filesImage(0, 0), filesImage(0, 0)},   // not set
	} {
		if err := os.WriteFile(path, c.image, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := rearmTimers(path); err != nil {
			t.Fatal(err)
		}
		if got, _ := os.ReadFile(path); !slices.Equal(got, c.want) {
			t.Errorf("%x is not %x", got, c.want)
		}
	}
	whole := filesImage(0, 20)
	for n := range whole[:len(whole)-1] {
		if err := os.WriteFile(path, whole[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		if err := rearmTimers(path); err == nil && n != 8 {
			t.Errorf("%d bytes of it are understood", n)
		}
	}
}

func TestUnfitFile(t *testing.T) {
	for to, unfit := range map[string]bool{
		"/dev/null": false, "/dev/shm/x": false, "/dev/urandom": false, "/data/dev/x": false, "socket:[1]": false,
		"anon_inode:[eventpoll]": false,
		"anon_inode:[io_uring]":  true, "/dev/pts/0": true, "/dev/fuse": true, "/dev/nvidia0": true,
		"anon_inode:bpf-prog": true, "/dev/nullx": true,
	} {
		if what, remedy := unfitFile(to); (what != "") != unfit || unfit && remedy == "" {
			t.Errorf("%s: %q, %q", to, what, remedy)
		}
	}
}

func TestNewEnough(t *testing.T) {
	for v, want := range map[string]bool{"4.2": true, "4.2.1": true, "4.10": true, "5.0": true, "4.1.1": false,
		"3.17.1": false, "": false, "x": false} {
		if newEnough(v) != want {
			t.Errorf("%q: %v", v, !want)
		}
	}
}
