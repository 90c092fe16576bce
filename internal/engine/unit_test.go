package engine

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"dewpoint/internal/image"
)

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
	e, from := compose(Config{Root: t.TempDir()}), t.TempDir()
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
		at := slices.IndexFunc(e.cfg.mounts(s), func(m specs.Mount) bool {
			return m.Destination == "/own" && m.Source == dir
		})
		if own == nil {
			if at >= 0 {
				t.Error("what has none of its own has a mount")
			}
			continue
		}
		if want := []string{"rw", "ro"}[i]; at < 0 || !slices.Contains(e.cfg.mounts(s)[at].Options, want) {
			t.Fatalf("mounts %+v, want one with %s", e.cfg.mounts(s), want)
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
