package mount_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/mount"
)

// TestProbe finds what works here, alone and forced, and leaves nothing behind.
func TestProbe(t *testing.T) {
	dir := t.TempDir()
	b, findings, err := mount.Probe(context.Background(), mount.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if len(findings) != 3 {
		t.Errorf("findings: %v", findings)
	}
	for _, f := range findings {
		t.Logf("%s (%v)", f, f.Took)
		forced, _, err := mount.Probe(context.Background(), mount.Config{Dir: dir, Force: f.Backend})
		if f.Works != (err == nil) || f.Works && forced.Name() != f.Backend {
			t.Errorf("%s forced: %v, %v", f.Backend, forced, err)
		}
	}
	if best := findings[0]; best.Works && b.Name() != best.Backend {
		t.Errorf("chosen: %s", b.Name())
	}
	clean(t, dir)
	if _, _, err := mount.Probe(context.Background(), mount.Config{Dir: dir, Force: "fuse"}); err == nil {
		t.Error("an unknown backend was taken")
	}
}

func clean(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if mounts, err := mount.List(dir); err != nil || len(mounts) != 0 {
		t.Errorf("still mounted: %v, %v", mounts, err)
	}
}

// TestProbeCrowd probes one directory many times at once: loop devices are
// fought for, and each must get its own.
func TestProbeCrowd(t *testing.T) {
	dir := t.TempDir()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, f, err := mount.Probe(context.Background(), mount.Config{Dir: dir, Force: mount.Loop}); err != nil {
				t.Error(f, err)
			}
		})
	}
	wg.Wait()
	clean(t, dir)
}

// TestProbeSweeps removes what a killed probe left, and nothing younger.
func TestProbeSweeps(t *testing.T) {
	dir := t.TempDir()
	old, young := filepath.Join(dir, ".probe-old"), filepath.Join(dir, ".probe-young")
	if err := errors.Join(os.Mkdir(old, 0o700), os.Mkdir(young, 0o700)); err != nil {
		t.Fatal(err)
	}
	hour := time.Now().Add(-time.Hour)
	if err := os.Chtimes(old, hour, hour); err != nil {
		t.Fatal(err)
	}
	if _, _, err := mount.Probe(context.Background(), mount.Config{Dir: dir, Force: mount.Tree}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("old sample: %v", err)
	}
	if _, err := os.Stat(young); err != nil {
		t.Errorf("young sample: %v", err)
	}
}

// TestProbeOnTmpfs has a directory from which the kernel does not mount EROFS
// files: the next backend is chosen, and the finding says why and what helps.
func TestProbeOnTmpfs(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	b, findings, err := mount.Probe(context.Background(), mount.Config{Dir: dir})
	t.Log(findings)
	if err != nil {
		t.Fatal(err)
	}
	if f := findings[0]; !f.Works && (b.Name() == mount.EROFS || f.Reason == "" || f.Remedy == "") {
		t.Errorf("chosen %s, finding %+v", b.Name(), f)
	}
	_, _, err = mount.Probe(context.Background(), mount.Config{Dir: dir, Force: mount.EROFS})
	if findings[0].Works != (err == nil) || err != nil && !errors.Is(err, mount.ErrUnusable) {
		t.Errorf("forced: %v", err)
	}
}

// TestProbeTimeout cuts every trial short.
func TestProbeTimeout(t *testing.T) {
	dir := t.TempDir()
	_, findings, err := mount.Probe(context.Background(), mount.Config{Dir: dir, Timeout: time.Nanosecond})
	if !errors.Is(err, mount.ErrUnusable) || len(findings) != 3 {
		t.Fatalf("%v, %v", findings, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, _, err := mount.Probe(ctx, mount.Config{Dir: dir}); !errors.Is(err, context.Canceled) {
		t.Fatalf("canceled: %v", err)
	}
}

// TestProbeNowhere is asked for a directory that is not there.
func TestProbeNowhere(t *testing.T) {
	_, _, err := mount.Probe(context.Background(), mount.Config{Dir: filepath.Join(t.TempDir(), "no")})
	if !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
}
