package layer_test

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

	"dewpoint/internal/durable"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/testkit"

	"golang.org/x/sys/unix"
)

const (
	crashEnv = "DEWPOINT_TEST_CRASH" // the number of the fsync to die at
	treeEnv  = "DEWPOINT_TEST_TREE"  // not empty: unpack
)

// crashChild pulls the sample of the directory given and kills itself at the
// fsync that the environment names.
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
	var l image.Layer
	b, err := os.ReadFile(filepath.Join(dir, "layer"))
	blob, err2 := os.ReadFile(filepath.Join(dir, "blob"))
	if err := errors.Join(err, err2, json.Unmarshal(b, &l)); err != nil {
		fmt.Println(err)
		return 3
	}
	s, err := layer.Open(layer.Config{Dir: filepath.Join(dir, "store"), Interval: 256 << 10,
		Tree: os.Getenv(treeEnv) != ""})
	if err != nil {
		fmt.Println(err)
		return 3
	}
	ctx := context.Background()
	if _, err := s.Fill(ctx, l, &source{blob: blob}).WaitComplete(ctx); err != nil {
		fmt.Println(err)
		return 3
	}
	return 0
}

// A pull that is killed at any of its fsyncs leaves nothing half-made visible,
// and the next one succeeds.
func TestKilledAtEachSync(t *testing.T) {
	testkit.Long(t)
	tarball := makeTar(t, 4<<20, 12)
	for _, c := range []image.Compression{image.Gzip, image.Zstd} {
		t.Run(string(c), func(t *testing.T) { killAtEachSync(t, pack(t, tarball, c), false) })
	}
	t.Run("tree", func(t *testing.T) { killAtEachSync(t, pack(t, tarball, image.Gzip), true) })
}

func killAtEachSync(t *testing.T, want sample, tree bool) {
	if tree {
		testkit.NeedRoot(t, "files of a tree get their owners")
	}
	check := func(l *layer.Layer) {
		t.Helper()
		if !tree {
			checkData(t, l, want)
			return
		}
		if fi, err := os.Stat(filepath.Join(l.Files().Tree, "d0", "f0")); err != nil || fi.Size() == 0 {
			t.Fatalf("the tree: %v", err)
		}
		if _, err := os.Stat(l.Files().Data); l.Complete() && !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("the tar lies beside the complete tree: %v", err)
		}
	}
	killed := 0
	for at := 1; ; at++ {
		dir := t.TempDir()
		b, _ := json.Marshal(want.layer)
		if err := errors.Join(os.WriteFile(filepath.Join(dir, "layer"), b, 0o600),
			os.WriteFile(filepath.Join(dir, "blob"), want.blob, 0o600)); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0], dir)
		cmd.Env = append(os.Environ(), crashEnv+"="+strconv.Itoa(at))
		if tree {
			cmd.Env = append(cmd.Env, treeEnv+"=1")
		}
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if err != nil && (!errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL) {
			t.Fatalf("the child failed of itself: %v\n%s", err, out)
		}
		s := open(t, filepath.Join(dir, "store"), layer.Config{Tree: tree})
		if l, gerr := s.Get(want.layer.DiffID); gerr == nil {
			check(l)
		} else if err == nil {
			t.Fatalf("the child had finished, yet: %v", gerr)
		}
		check(mustComplete(t, s, want.layer, &source{blob: want.blob}))
		s.Close()
		if err == nil {
			break
		}
		killed++
	}
	if killed < 5 {
		t.Errorf("only %d fsyncs were seen", killed)
	}
}

// A disk that fills up gives a clear error; when there is room again, the
// pull goes on.
func TestDiskFull(t *testing.T) {
	testkit.NeedRoot(t, "it mounts a small file system")
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=16m"); err != nil {
		t.Fatalf("this test needs root: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	want := pack(t, makeTar(t, 24<<20, 13), image.Gzip)
	s := open(t, dir, layer.Config{Interval: 1 << 20})
	defer s.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	first := &source{blob: want.blob}
	_, err := s.Fill(ctx, want.layer, first).Wait(ctx)
	if !errors.Is(err, syscall.ENOSPC) || !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("a full disk gave %v", err)
	}
	if _, err := s.Get(want.layer.DiffID); !errors.Is(err, layer.ErrUnknown) {
		t.Fatal("half a layer is visible")
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT, "size=64m"); err != nil {
		t.Fatal(err)
	}
	rest := &source{blob: want.blob}
	checkData(t, mustComplete(t, s, want.layer, rest), want)
	if rest.sent.Load() >= int64(len(want.blob)) {
		t.Error("the pull began from zero")
	}
}
