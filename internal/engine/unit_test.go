package engine

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"dewpoint/internal/image"
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
	cfg := Config{Root: "/r", State: "/s", DiffSocket: "/s/diff.sock"}
	if err := cfg.defaults(); err != nil {
		t.Fatal(err)
	}
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

func TestArgs(t *testing.T) {
	img := ocispec.ImageConfig{Entrypoint: []string{"/entry"}, Cmd: []string{"cmd"}}
	for want, s := range map[string]Spec{
		"/entry cmd":    {},
		"/entry other":  {Cmd: []string{"other"}},
		"/mine":         {Entrypoint: []string{"/mine"}},
		"/mine other":   {Entrypoint: []string{"/mine"}, Cmd: []string{"other"}},
		"/direct":       {Entrypoint: []string{""}, Cmd: []string{"/direct"}},
		"/entry a b c":  {Cmd: []string{"a", "b", "c"}},
		"/mine x other": {Entrypoint: []string{"/mine", "x"}, Cmd: []string{"other"}},
	} {
		s.Image = &image.Image{Spec: ocispec.Image{Config: img}}
		if got, err := s.Args(); err != nil || strings.Join(got, " ") != want {
			t.Errorf("got %q, %v; want %q", got, err, want)
		}
	}
	s := Spec{Entrypoint: []string{""}, Image: &image.Image{Spec: ocispec.Image{Config: img}}}
	if got, err := s.Args(); err == nil {
		t.Errorf("nothing to run gives %q", got)
	}
}

// A container's own directory begins with another's files, which it may only read then.
func TestOwnDirectory(t *testing.T) {
	e, from := &Engine{cfg: Config{Root: t.TempDir()}}, t.TempDir()
	if err := os.CopyFS(from,
		fstest.MapFS{"a": {Data: []byte("1"), Mode: 0o600}, "d/b": {Data: []byte("2"), Mode: 0o600}}); err != nil {
		t.Fatal(err)
	}
	for i, own := range []*Own{{Target: "/own"}, {Target: "/own", From: from}, nil} {
		s := &Spec{Name: "c", Own: own}
		dir := e.OwnDir("c")
		if err := os.MkdirAll(filepath.Join(dir, "left by another"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := e.makeOwn(s); err != nil {
			t.Fatal(err)
		}
		at := slices.IndexFunc(e.mounts(s), func(m specs.Mount) bool {
			return m.Destination == "/own" && m.Source == dir
		})
		if own == nil {
			if at >= 0 {
				t.Error("what has none of its own has a mount")
			}
			continue
		}
		if want := []string{"rw", "ro"}[i]; at < 0 || !slices.Contains(e.mounts(s)[at].Options, want) {
			t.Fatalf("mounts %+v, want one with %s", e.mounts(s), want)
		}
		names, _ := filepath.Glob(dir + "/*")
		deep, err := os.ReadFile(dir + "/d/b")
		if own.From == "" && len(names) > 0 ||
			own.From != "" && (len(names) != 2 || string(deep) != "2" || err != nil) {
			t.Errorf("%+v: %q, %q, %v", own, names, deep, err)
		}
	}
	if err := os.Symlink("a", from+"/link"); err != nil {
		t.Fatal(err)
	}
	if err := e.makeOwn(&Spec{Name: "c", Own: &Own{From: from}}); err == nil {
		t.Error("a symbolic link was taken")
	}
}

func TestEnv(t *testing.T) {
	s := Spec{Env: []string{"A=2", "PATH", "C=1=2"},
		Image: &image.Image{Spec: ocispec.Image{Config: ocispec.ImageConfig{Env: []string{"A=1", "B=1",
			"EMPTY="}}}}}
	if got, want := s.env("h"),
		[]string{"HOSTNAME=h", "A=2", "B=1", "EMPTY=", "C=1=2"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestParseSignal(t *testing.T) {
	for s, want := range map[string]unix.Signal{"SIGQUIT": unix.SIGQUIT, "term": unix.SIGTERM, "9": unix.SIGKILL,
		"SIGRTMIN+3": 37, "RTMIN": 34} {
		if got, err := ParseSignal(s); err != nil || got != want {
			t.Errorf("%s is %v, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "0", "65", "SIGNOTHING", "RTMIN+99", "RTMIN-1"} {
		if got, err := ParseSignal(s); err == nil {
			t.Errorf("%q is %v", s, got)
		}
	}
}

func TestValidName(t *testing.T) {
	for _, s := range []string{"a", "web-1", "A.b_c", strings.Repeat("x", 63)} {
		if err := ValidName(s); err != nil {
			t.Error(err)
		}
	}
	for _, s := range []string{"", "-a", ".", "..", "a/b", "a b", "ä", "a\n", strings.Repeat("x", 64)} {
		if ValidName(s) == nil {
			t.Errorf("%q is valid", s)
		}
	}
}

func TestWaiters(t *testing.T) {
	locks := `1: POSIX  ADVISORY  WRITE 31 fe:00:1835 0 EOF
2: FLOCK  ADVISORY  WRITE 32 fe:00:1836 0 EOF
2: -> FLOCK  ADVISORY  WRITE 41 fe:00:1836 0 EOF
2: -> FLOCK  ADVISORY  WRITE 42 fe:00:1836 0 EOF
3: OFDLCK ADVISORY  READ -1 00:06:5 0 0
`
	if got := waiters(locks, []string{"32", "42", "43"}); len(got) != 1 || got["42"] != "32" {
		t.Errorf("%v", got)
	}
	if got := waiters("", []string{"1"}); len(got) != 0 {
		t.Errorf("of nothing: %v", got)
	}
}

// A full disk is known in what containerd's API says only by its words; too many cgroups have the kernel's
// same number.
func TestFullDiskIsKnown(t *testing.T) {
	full := toNative(status.Error(codes.Unknown,
		"create snapshot a: commit failed: write /r/metadata.db: no space left on device"))
	if !errors.Is(full, unix.ENOSPC) || !errdefs.IsUnknown(full) {
		t.Errorf("a full disk: %v", full)
	}
	if err := toNative(status.Error(codes.Unknown,
		"mkdir /sys/fs/cgroup/a: no space left on device")); errors.Is(err, unix.ENOSPC) {
		t.Errorf("too many cgroups: %v", err)
	}
	if err := toNative(status.Error(codes.NotFound, "a: not found")); errors.Is(err, unix.ENOSPC) ||
		!errdefs.IsNotFound(err) {
		t.Errorf("something else: %v", err)
	}
}
