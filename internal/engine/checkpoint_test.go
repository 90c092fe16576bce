package engine

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"

	"dewpoint/internal/engine/cgroup"
	"dewpoint/internal/engine/process"
)

// criuLines are what both dump and restore need here.
var criuLines = []string{"tcp-close", "manage-cgroups ignore"}

// dump writes a container's processes and its writable layer, which becomes a
// snapshot, and returns what restores them.
func (b *bed) dump(name string) *Restore {
	b.t.Helper()
	ctx := b.t.Context()
	dir, work := b.t.TempDir(), b.t.TempDir()
	if err := b.Pause(ctx, name); err != nil {
		b.t.Fatal(err)
	}
	if err := b.Dump(ctx, name, DumpSpec{Dir: dir, Work: work, Config: criuLines}); err != nil {
		log, _ := os.ReadFile(filepath.Join(work, "dump.log"))
		b.t.Fatalf("%v\n%s", err, log)
	}
	upper := b.commitUpper(name)
	if err := b.Resume(name); err != nil {
		b.t.Fatal(err)
	}
	return &Restore{Images: ImagesIn(dir), Upper: upper, Config: criuLines}
}

// commitUpper makes a snapshot of what the container has written.
func (b *bed) commitUpper(name string) digest.Digest {
	b.t.Helper()
	ctx := b.t.Context()
	upper, err := b.Upper(ctx, name)
	if err != nil {
		b.t.Fatal(err)
	}
	id := digest.FromString("upper of " + name)
	parent := b.img.Spec.RootFS.DiffIDs[0]
	_, err = b.c.Snapshots.Prepare(ctx, &snapshotsapi.PrepareSnapshotRequest{
		Snapshotter: b.cfg.Snapshotter, Key: "upper", Parent: parent.String(),
		Labels: map[string]string{labelGCRoot: "now"},
	})
	if err != nil {
		b.t.Fatal(err)
	}
	to, err := b.Upper(ctx, "upper")
	if err != nil {
		b.t.Fatal(err)
	}
	if err := exec.Command("cp", "-a", upper+"/.", to).Run(); err != nil {
		b.t.Fatal(err)
	}
	_, err = b.c.Snapshots.Commit(ctx, &snapshotsapi.CommitSnapshotRequest{
		Snapshotter: b.cfg.Snapshotter, Name: identity.ChainID([]digest.Digest{parent, id}).String(), Key: "upper",
		Labels: map[string]string{labelGCRoot: "now"},
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return id
}

func TestDumpAndRestore(t *testing.T) {
	eachContainerd(t, func(t *testing.T, b *bed) {
		b.run(Spec{Name: "one", Net: NetBridge, Cmd: []string{"count"}})
		b.awaitLog("one", "\n20\n")
		r := b.dump("one")
		two := b.run(Spec{Name: "two", Net: NetBridge, Cmd: []string{"count"}, Restore: r, Memory: 64 << 20})
		b.awaitLog("one", "\n40\n") // runs on
		b.awaitLog("two", "\n40\n")
		stdout, _ := b.cfg.places().Output("two")
		if log, _ := os.ReadFile(stdout); strings.HasPrefix(string(log), "0\n") {
			t.Errorf("restored container began anew")
		}
		b.likeABooted(two)

		// What it is restored from is waited for last; without it nothing is made.
		lost := errors.New("memory is lost")
		three := Spec{Name: "three", Net: NetBridge, Image: b.img, Cmd: []string{"count"},
			Restore: &Restore{Upper: r.Upper, Config: r.Config}}
		three.Restore.Images = func(context.Context) (string, error) {
			for _, there := range []string{b.cfg.places().Address("three"), b.cfg.bundle("three")} {
				if _, err := os.Stat(there); err != nil {
					t.Errorf("not made before its images are there: %v", err)
				}
			}
			return "", lost
		}
		if _, err := b.Create(t.Context(), three); !errors.Is(err, lost) {
			t.Errorf("without images: %v", err)
		}
		b.run(Spec{Name: "three", Net: NetBridge, Cmd: []string{"count"}, Restore: r})
	})
}

// likeABooted asserts that a restored container is one as any other.
func (b *bed) likeABooted(i *Info) {
	b.t.Helper()
	ctx := context.Background()
	if got, err := b.Inspect(ctx, i.Name); err != nil || got.Status != Running || got.Pid == 0 {
		b.t.Errorf("inspect: %+v, %v", got, err)
	}
	var out strings.Builder
	st, err := b.Exec(ctx, i.Name,
		ExecSpec{Args: []string{"/probe", "cat", "/etc/hostname", "/etc/hosts", "/proc/sys/kernel/hostname"},
			Stdout: &out})
	if err != nil || st != 0 || strings.Count(out.String(), i.Name) != 3 ||
		!strings.Contains(out.String(), i.Addr.String()) {
		b.t.Errorf("exec: %d, %v, %q", st, err, out.String())
	}
	file := "memory.limit_in_bytes"
	if cgroup.Unified() {
		file = "memory.max"
	}
	limit, err := os.ReadFile(filepath.Join(i.CgroupDir("memory"), file))
	if err != nil || strings.TrimSpace(string(limit)) != "67108864" {
		b.t.Errorf("memory limit: %s, %v", limit, err)
	}
	if err := b.Stop(ctx, i.Name, process.StopTimeout); err != nil {
		b.t.Error(err)
	}
	if x, err := b.Wait(ctx, i.Name); err != nil || x.Status != 128+15 && x.Status != 2 {
		b.t.Errorf("exit: %+v, %v", x, err)
	}
	if err := b.Engine.Start(ctx, i.Name); err != nil { // boots
		b.t.Error(err)
	}
	b.awaitLog(i.Name, "\n0\n1\n")
}
