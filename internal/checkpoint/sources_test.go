package checkpoint

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"golang.org/x/sys/unix"
)

// bindOf is a specification with one read-only volume.
func bindOf(source string) *specs.Spec {
	o := someSpec("one")
	o.Mounts[2] = specs.Mount{Destination: "/etc/app", Type: "bind", Source: source,
		Options: []string{"rbind", "rprivate", "ro"}}
	return o
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
		os.WriteFile(path, []byte(text), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// tree makes what TestContents changes.
func tree(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	write(t, dir+"/app.conf", "color=red\n")
	write(t, dir+"/d/more.conf", "x")
	write(t, dir+"/large", strings.Repeat("x", maxFileRead+1))
	err := errors.Join(os.Symlink("app.conf", dir+"/link"), unix.Mkfifo(dir+"/fifo", 0o600),
		os.Chtimes(dir+"/large", time.Unix(1, 0), time.Unix(1, 0)))
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestContents changes what is mounted read-only: what another node has alike does not count, whatever else
// containers read does.
func TestContents(t *testing.T) {
	same := contentsOf(bindOf(tree(t)), nil)["/etc/app"]
	if again := contentsOf(bindOf(tree(t)), nil)["/etc/app"]; same == uncounted || again != same {
		t.Fatalf("two that are alike are %q and %q", same, again)
	}
	for what, change := range map[string]func(dir string) error{
		"a file of the same size": func(dir string) error {
			fi, err := os.Stat(dir + "/app.conf")
			write(t, dir+"/app.conf", "color=tan\n")
			return errors.Join(err, os.Chtimes(dir+"/app.conf", fi.ModTime(), fi.ModTime()))
		},
		"a file below": func(dir string) error { return os.WriteFile(dir+"/d/more.conf", []byte("y"), 0o644) },
		"a new one":    func(dir string) error { return os.WriteFile(dir+"/d/new", nil, 0o644) },
		"one is gone":  func(dir string) error { return os.Remove(dir + "/d/more.conf") },
		"a name":       func(dir string) error { return os.Rename(dir+"/d/more.conf", dir+"/d/less.conf") },
		"where a link is": func(dir string) error {
			return errors.Join(os.Remove(dir+"/link"), os.Symlink("large", dir+"/link"))
		},
		"what a file is": func(dir string) error {
			return errors.Join(os.Remove(dir+"/fifo"), os.Mkdir(dir+"/fifo", 0o755))
		},
		"a large one": func(dir string) error {
			return os.Chtimes(dir+"/large", time.Unix(2, 0), time.Unix(2, 0))
		},
		"a large one's":    func(dir string) error { return os.Truncate(dir+"/large", maxFileRead+2) },
		"all of them gone": func(dir string) error { return os.RemoveAll(dir) },
	} {
		dir := tree(t)
		if err := change(dir); err != nil {
			t.Fatal(err)
		}
		if got := contentsOf(bindOf(dir), nil)["/etc/app"]; got == same || got == uncounted {
			t.Errorf("%s has changed: %q", what, got)
		}
	}
	if all := contentsOf(bindOf(tree(t)), []string{"/etc/app"}); len(all) > 0 {
		t.Errorf("of what the label leaves to each container: %q", all)
	}
	if all := contentsOf(someSpec("one"), nil); len(all) > 0 {
		t.Errorf("of what containers write to, and of their own files: %q", all)
	}
	many := t.TempDir()
	for i := range maxCensus {
		write(t, filepath.Join(many, fmt.Sprint(i)), "")
	}
	if got := contentsOf(bindOf(many), nil)["/etc/app"]; got != uncounted {
		t.Errorf("of too many: %q", got)
	}
	if err := os.Remove(filepath.Join(many, "7")); err != nil {
		t.Fatal(err)
	}
	if got := contentsOf(bindOf(many), nil)["/etc/app"]; got == uncounted {
		t.Error("of as many as are looked at: not looked at")
	}
}

// TestChangedFile starts nothing from memory that was made of other files.
func TestChangedFile(t *testing.T) {
	m, f, s := newManager(t, nil)
	file := filepath.Join(t.TempDir(), "app.conf")
	write(t, file, "color=red\n")
	f.spec = bindOf(file)
	ctx := t.Context()
	r, _, err := m.Checkpoint(ctx, "one", Options{Boot: 5})
	if err != nil {
		t.Fatal(err)
	}
	if p, err := m.Plan(ctx, s, Auto, false); err != nil || p.Record == nil {
		t.Errorf("unchanged: %+v, %v", p, err)
	}
	write(t, file, "color=tan\n")
	const says = "what is mounted read-only has changed: /etc/app"
	if p, err := m.Plan(ctx, s, Auto, false); err != nil || p.Record != nil || p.Why != says {
		t.Errorf("changed: %+v, %v", p, err)
	}
	if _, err := m.Plan(ctx, s, Always, false); !errors.Is(err, ErrRestore) ||
		!strings.Contains(err.Error(), says) {
		t.Errorf("changed, always: %v", err)
	}
	if two, _, err := m.Checkpoint(ctx, "one", Options{Boot: 5}); err != nil || two.ID == r.ID {
		t.Errorf("saved again: %v", err)
	}
	if p, err := m.Plan(ctx, s, Auto, false); err != nil || p.Record == nil || p.Record.ID == r.ID {
		t.Errorf("with the newer checkpoint: %+v, %v", p, err)
	}
}

// TestChangedMeanwhile saves nothing whose memory may be of other files than there are now.
func TestChangedMeanwhile(t *testing.T) {
	ctx := t.Context()
	for what, c := range map[string]struct {
		change func(dir string) error
		says   string
	}{
		"nothing": {func(string) error { return nil }, ""},
		"a file": {func(dir string) error {
			return os.WriteFile(dir+"/app.conf", []byte("color=tan\n"), 0o644)
		}, "/etc/app/app.conf"},
		"one replaced": {func(dir string) error {
			return os.Rename(dir+"/app.conf", dir+"/d/more.conf")
		}, "/etc/app/d/more.conf"},
		"one gone": {func(dir string) error { return os.Remove(dir + "/d/more.conf") }, "/etc/app/d"},
		"its old time": {func(dir string) error {
			write(t, dir+"/app.conf", "color=tan\n")
			return os.Chtimes(dir+"/app.conf", time.Unix(1, 0), time.Unix(1, 0))
		}, "/etc/app/app.conf"},
	} {
		m, f, _ := newManager(t, nil)
		dir := tree(t)
		f.spec = bindOf(dir)
		// The file system's own time, which may lag behind the clock.
		mark := filepath.Join(t.TempDir(), "mark")
		write(t, mark, "")
		fi, err := os.Stat(mark)
		if err != nil {
			t.Fatal(err)
		}
		f.made = fi.ModTime()
		time.Sleep(20 * time.Millisecond)
		if err := c.change(dir); err != nil {
			t.Fatal(err)
		}
		_, _, err = m.Checkpoint(ctx, "one", Options{Boot: 5})
		var unfit *UnfitError
		if c.says == "" && err != nil ||
			c.says != "" && (!errors.As(err, &unfit) || !strings.HasSuffix(unfit.What, ": "+c.says)) {
			t.Errorf("%s has changed: %v", what, err)
		}
	}
}

// TestUncounted starts from what may have changed only for who insists.
func TestUncounted(t *testing.T) {
	m, f, s := newManager(t, nil)
	f.spec = bindOf("/proc")
	ctx := t.Context()
	if _, _, err := m.Checkpoint(ctx, "one", Options{Boot: 5}); err != nil {
		t.Fatal(err)
	}
	if p, err := m.Plan(ctx, s, Auto, false); err != nil || p.Record != nil ||
		!strings.Contains(p.Why, "what is mounted at /etc/app has too many files") {
		t.Errorf("auto: %+v, %v", p, err)
	}
	if p, err := m.Plan(ctx, s, Always, false); err != nil || p.Record == nil {
		t.Errorf("always: %+v, %v", p, err)
	}
}

// TestFreeVolumes leaves to each container what the label names.
func TestFreeVolumes(t *testing.T) {
	for _, mode := range []string{"ro", "rw"} {
		m, f, s := newManager(t, map[string]string{LabelVolumes: "/var/x /etc/app"})
		ctx := t.Context()
		for i := range 2 {
			f.spec = bindOf(t.TempDir())
			f.spec.Mounts[2].Options = []string{"rbind", mode}
			if i == 0 {
				if _, _, err := m.Checkpoint(ctx, "one", Options{Boot: 5}); err != nil {
					t.Fatal(err)
				}
			}
		}
		if p, err := m.Plan(ctx, s, Auto, false); err != nil || p.Record == nil {
			t.Errorf("%s: %+v, %v", mode, p, err)
		}
		s.Labels = map[string]string{LabelVolumes: ""}
		if p, err := m.Plan(ctx, s, Always, false); !errors.Is(err, ErrRestore) ||
			!strings.Contains(p.Why, "mounts differ") {
			t.Errorf("%s, and the container does not say so: %+v, %v", mode, p, err)
		}
	}
}

// TestImageVolumes takes an image that declares volumes for one that keeps state, unless told otherwise.
func TestImageVolumes(t *testing.T) {
	ctx := t.Context()
	for name, c := range map[string]struct {
		labels   map[string]string
		stateful bool
		saved    bool
		auto     bool // starts from it unasked
	}{
		"plain":    {},
		"insisted": {stateful: true, saved: true},
		"auto":     {labels: map[string]string{LabelCheckpoint: "auto"}, saved: true, auto: true},
		"named":    {labels: map[string]string{LabelVolumes: "/data"}, saved: true, auto: true},
		"others":   {labels: map[string]string{LabelVolumes: "/dat"}},
		"stateful": {labels: map[string]string{LabelCheckpoint: "stateful", LabelVolumes: "/data"}, stateful: true,
			saved: true},
	} {
		m, _, s := newManager(t, c.labels)
		m.cfg.Auto = "measured"
		s.Image.Spec.Config.Volumes = map[string]struct{}{"/data": {}}
		p, err := m.Plan(ctx, s, Auto, false)
		if err != nil || p.Booted(ctx, 5) != c.auto {
			t.Errorf("%s: saved unasked %v, %v", name, !c.auto, err)
		}
		_, _, err = m.Checkpoint(ctx, "one", Options{Boot: 5, Stateful: c.stateful})
		var unfit *UnfitError
		if c.saved != (err == nil) ||
			err != nil && (!errors.As(err, &unfit) || !strings.Contains(unfit.What, "declares the volume /data")) {
			t.Errorf("%s: %v", name, err)
		}
		if !c.saved {
			continue
		}
		if p, err := m.Plan(ctx, s, Auto, false); err != nil || (p.Record != nil) != c.auto ||
			c.auto != (p.Why == "") || !c.auto && !strings.Contains(p.Why, "only --restore always") {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
		if p, err := m.Plan(ctx, s, Always, false); err != nil || p.Record == nil {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
	m, f, s := newManager(t, nil)
	s.Image.Spec.Config.Volumes = map[string]struct{}{"/etc/app": {}}
	f.spec = bindOf(t.TempDir())
	if _, _, err := m.Checkpoint(ctx, "one", Options{}); err != nil {
		t.Errorf("another volume is mounted there: %v", err)
	}
}
