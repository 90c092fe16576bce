package store_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/durable"
)

var ctx = context.Background()

const crashEnv = "DEWPOINT_TEST_CRASH" // the number of the fsync to die at

// crashChild puts the checkpoint of the directory given over another one, which goes, notes a failure,
// and kills itself at the fsync that the environment names.
func crashChild() int {
	dir := os.Args[1]
	at, _ := strconv.Atoi(os.Getenv(crashEnv))
	var n atomic.Int32
	durable.OnSync(func(string) {
		if int(n.Add(1)) == at {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	})
	var r store.Record
	b, err := os.ReadFile(filepath.Join(dir, "record"))
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	s, oerr := store.Open(store.Config{Dir: filepath.Join(dir, "store"), Node: "here", Keep: 1})
	if err := errors.Join(err, oerr); err != nil {
		fmt.Println(err)
		return 3
	}
	file := filepath.Join(dir, "store", "pack-0.tmp")
	b, err = os.ReadFile(filepath.Join(dir, "data"))
	if err == nil {
		err = os.WriteFile(file, b, 0o600)
	}
	if err == nil {
		r, err = s.Put(ctx, r, file)
	}
	if err != nil {
		fmt.Println(err)
		return 3
	}
	s.Fail(ctx, r.ID, "why")
	return 0
}

// Put that is killed at any of its fsyncs leaves the old checkpoint or the new one, or both,
// whole, and nothing else.
func TestKilledAtEachSync(t *testing.T) {
	packer := open(t, store.Config{Dir: t.TempDir()})
	old, oldFile := sample(t, packer, "old")
	next, nextFile := sample(t, packer, "new")
	old.Created, next.Created = time.Now().Add(-time.Hour), time.Now()
	text, err := json.Marshal(next)
	data, err2 := os.ReadFile(nextFile)
	oldData, err3 := os.ReadFile(oldFile)
	if err := errors.Join(err, err2, err3); err != nil {
		t.Fatal(err)
	}
	for at, done := 1, false; !done; at++ {
		dir := t.TempDir()
		root := filepath.Join(dir, "store")
		s := open(t, store.Config{Dir: root})
		file := filepath.Join(root, "pack-1.tmp")
		if err := errors.Join(os.WriteFile(filepath.Join(dir, "record"), text, 0o600),
			os.WriteFile(filepath.Join(dir, "data"), data, 0o600), os.WriteFile(file, oldData, 0o600)); err != nil {
			t.Fatal(err)
		}
		was, err := s.Put(t.Context(), old, file)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0], dir)
		cmd.Env = append(os.Environ(), fmt.Sprint(crashEnv, "=", at))
		out, err := cmd.CombinedOutput()
		done = err == nil
		var ended *exec.ExitError
		if err != nil && (!errors.As(err, &ended) || !ended.Sys().(syscall.WaitStatus).Signaled()) {
			t.Fatalf("%v: %s", err, out)
		}
		s = open(t, store.Config{Dir: root})
		all, err := s.List(t.Context(), "")
		if err != nil || len(all) == 0 || done && (len(all) != 1 || all[0].ID == was.ID || all[0].Failures != 1) {
			t.Fatalf("at %d: %+v, %v", at, all, err)
		}
		want := 0
		for _, l := range all {
			want += 2
			if l.Failures > 0 {
				want++
			}
			restorable(t, s, l.Record, map[bool]string{true: "old", false: "new"}[l.ID == was.ID])
			if err := s.Verify(t.Context(), l.ID); err != nil {
				t.Errorf("at %d: %v", at, err)
			}
		}
		if err := os.RemoveAll(filepath.Join(root, "cache")); err != nil {
			t.Fatal(err)
		}
		if got := files(t, root); len(got) != want {
			t.Errorf("at %d: left %v", at, got)
		}
		if done && at < 7 {
			t.Errorf("only %d fsyncs", at-1)
		}
	}
}
