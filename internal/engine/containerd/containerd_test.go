package containerd

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestParseVersion(t *testing.T) {
	for line, want := range map[string]containerdVersion{
		"containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3": {1, 6, 20},
		"containerd github.com/containerd/containerd/v2 2.4.2+unknown \n":             {2, 4, 2},
		"containerd containerd.io v1.7.27 05044ec0a9a75232cad458027ca83437aae3f4da":   {1, 7, 27},
		"containerd x 2.5.0-rc.1 abc":                                                 {2, 5, 0},
		"containerd x 2.5 abc":                                                        {2, 5, 0},
	} {
		if got, err := parseVersion(line); err != nil || got != want {
			t.Errorf("%q is %v, %v", line, got, err)
		}
	}
	for _, line := range []string{"", "containerd x", "containerd x vfoo", "containerd x 1.4.3 abc"} {
		if v, err := parseVersion(line); err == nil {
			t.Errorf("%q is %v", line, v)
		}
	}
}

func TestPrivateConfig(t *testing.T) {
	cfg := Config{Root: "/r", State: "/s", Snapshotter: "dewpoint", SnapshotterSocket: "/s/snapshotter.sock",
		DiffSocket: "/s/diff.sock"}
	written := func(major, minor, patch int) string {
		return privateConfig(cfg, containerdVersion{major, minor, patch}, "/r/c", "/s/c", "/s/c.sock")
	}
	const diff, remap = `default = ["dewpoint-diff", "walking"]`, `capabilities = ["remap-ids"]`
	one, two := written(1, 6, 20), written(2, 4, 2)
	for _, want := range []string{"version = 2", "[proxy_plugins.dewpoint]", `address = "/s/snapshotter.sock"`} {
		if !strings.Contains(one, want) {
			t.Errorf("1.6 lacks %q", want)
		}
	}
	for _, c := range []struct {
		text, what string
		want       bool
	}{
		{one, "diff", false}, {written(1, 7, 3), "diff", false}, {written(1, 7, 4), diff, true}, {two, diff, true},
		{one, remap, false}, {written(1, 7, 29), remap, false}, {written(2, 0, 0), remap, true}, {two, remap, true},
	} {
		if strings.Contains(c.text, c.what) != c.want {
			t.Errorf("%q is to be there: %v, in\n%s", c.what, c.want, c.text)
		}
	}
	for _, want := range []string{"version = 3", "enable_remote_snapshot_annotations",
		`snapshotter = "dewpoint"`, `snapshotter = "overlayfs"`} {
		if !strings.Contains(two, want) {
			t.Errorf("2.4 lacks %q", want)
		}
	}
}

// A full disk is known in what containerd's API says only by its words; too many cgroups have the kernel's
// same number.
func TestFullDiskIsKnown(t *testing.T) {
	full := Native(status.Error(codes.Unknown,
		"create snapshot a: commit failed: write /r/metadata.db: no space left on device"))
	if !errors.Is(full, unix.ENOSPC) || !errdefs.IsUnknown(full) {
		t.Errorf("a full disk: %v", full)
	}
	if err := Native(status.Error(codes.Unknown,
		"mkdir /sys/fs/cgroup/a: no space left on device")); errors.Is(err, unix.ENOSPC) {
		t.Errorf("too many cgroups: %v", err)
	}
	if err := Native(status.Error(codes.NotFound, "a: not found")); errors.Is(err, unix.ENOSPC) ||
		!errdefs.IsNotFound(err) {
		t.Errorf("something else: %v", err)
	}
}
