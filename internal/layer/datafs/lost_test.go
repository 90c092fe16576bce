package datafs

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"dewpoint/testkit"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// TestServerCannotStart kills a datafs when no other can take its place: readers of absent pages get errors,
// pages that the kernel has are read, and mounts made after the cause has gone are well.
func TestServerCannotStart(t *testing.T) {
	for name, spoil := range map[string]func(*bed) (mend func()){
		"the program is gone":        withoutProgram,
		"the state directory's full": withFullState,
		"the socket's place taken":   withoutSocket,
		"each one dies soon":         withMortal,
	} {
		t.Run(name, func(t *testing.T) {
			both(t, func(t *testing.T, show func(*testLayer) *testLayer) { testCannotStart(t, spoil, show) })
		})
	}
}

func testCannotStart(t *testing.T, spoil func(*bed) func(), show func(*testLayer) *testLayer) {
	state := t.TempDir()
	if err := unix.Mount("state", state, "tmpfs", 0, "nr_inodes=32"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(state, unix.MNT_DETACH) })
	b := newBed(t)
	b.cfg.State = state
	b.cfg.patience = 500 * time.Millisecond
	b.cfg.Exec[0] = filepath.Join(b.dir, "program")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, b.cfg.Exec[0]); err != nil {
		t.Fatal(err)
	}
	healed := make(chan digest.Digest, 1)
	b.cfg.Healed = func(id digest.Digest) { healed <- id }
	l := show(b.start().layer(tarOf(20, 64<<10, 64<<10, 64<<10)))
	l.put(l.at("f0").from, l.at("f0").to)
	known, err := os.Open(l.file("f0"))
	if err != nil {
		t.Fatal(err)
	}
	defer known.Close()
	reads := func() {
		got := make([]byte, 64<<10)
		if _, err := known.ReadAt(got, 0); err != nil || !bytes.Equal(got, l.content("f0")) {
			t.Errorf("what the kernel has is not read: %v", err)
		}
	}
	reads()
	absent := []*reader{startReader(t, "read", l.file("f1"), 0, 64<<10),
		startReader(t, "read", l.file("f2"), 0, 4096)}
	testkit.Eventually(t, "wants", func() bool { return len(l.wanted(l.id)) >= 2 })

	mend := spoil(b)
	unix.Kill(b.serverPID(), unix.SIGKILL)
	for _, r := range absent {
		if err := r.ends(t, testkit.Limit); err == nil {
			t.Errorf("a read of absent bytes went well: %s", r.out.String())
		}
	}
	testkit.Eventually(t, "the loss to be said", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return slices.Contains(b.lost, l.id)
	})
	reads()
	if err := startReader(t, "read", l.file("f1"), 0, 4096).ends(t, testkit.Limit); err == nil {
		t.Error("bytes are read that nobody brought")
	}
	testkit.Eventually(t, "that a layer cannot be added", func() bool {
		_, err := b.client.Add(l.id, l.data, l.present.File())
		return errors.Is(err, ErrUnusable) && b.client.Down()
	})

	known.Close()
	mend()
	testkit.Eventually(t, "that it can be added again", func() bool {
		_, err := b.client.Add(l.id, l.data, l.present.File())
		return err == nil
	})
	if id := testkit.Receive(t, "a datafs", healed); id != l.id {
		t.Errorf("%s has healed", id)
	}
	unix.Unmount(l.target, unix.MNT_DETACH)
	show(l)
	l.putAll()
	for _, f := range []string{"f0", "f1", "f2"} {
		startReader(t, "read", l.file(f), 0, 64<<10).right(t, l.content(f))
	}
}

func withoutProgram(b *bed) func() {
	if err := os.Rename(b.cfg.Exec[0], b.cfg.Exec[0]+".away"); err != nil {
		b.t.Fatal(err)
	}
	return func() { os.Rename(b.cfg.Exec[0]+".away", b.cfg.Exec[0]) }
}

// withFullState leaves no room for the socket.
func withFullState(b *bed) func() {
	path := filepath.Join(b.cfg.State, socketName)
	if err := os.Rename(path, path+".stays"); err != nil {
		b.t.Fatal(err)
	}
	var made []string
	for {
		f, err := os.CreateTemp(b.cfg.State, "full")
		if err != nil {
			return func() {
				for _, path := range made {
					os.Remove(path)
				}
			}
		}
		f.Write(bytes.Repeat([]byte("x"), 4096))
		f.Close()
		made = append(made, f.Name())
	}
}

// withoutSocket puts a directory where the socket is to be.
func withoutSocket(b *bed) func() {
	path := filepath.Join(b.cfg.State, socketName)
	os.Remove(path)
	if err := os.MkdirAll(filepath.Join(path, "taken"), 0o700); err != nil {
		b.t.Fatal(err)
	}
	return func() { os.RemoveAll(path) }
}

// withMortal has each datafs die soon after it has said that it is there.
func withMortal(b *bed) func() {
	mend := withoutProgram(b)
	script := "#!/bin/sh\n\"$0.away\" \"$@\" &\nsleep 0.2\nkill -9 $!\n"
	if err := os.WriteFile(b.cfg.Exec[0], []byte(script), 0o700); err != nil {
		b.t.Fatal(err)
	}
	return func() {
		mend()
		testkit.Eventually(b.t, "a datafs that lives", func() bool {
			procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
			return slices.ContainsFunc(procs, func(p string) bool {
				line, _ := os.ReadFile(p)
				return bytes.HasPrefix(line, []byte(b.cfg.Exec[0]+"\x00"+roleServer))
			})
		})
	}
}
