// Package setup joins dewd to what runs containers on a machine: it writes into their configuration files,
// and takes that back.
//
// # The model
//
// A target (containerd, k3s, docker, nerdctl) is a list of files, and a function for each that gives its
// new text from the old one. Plan gives the changes without making them. A change is durable and made at
// once, and the old text stays beside it as FILE.before-dewpoint. Lines that were
// added and replaced are marked, so that Undo gives the text that there was before, byte by byte, also
// where somebody else has changed other lines since; of a JSON file, which has no comments, it takes back
// its own keys.
package setup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"

	"dewpoint/internal/durable"
)

// Config says what is joined, and where it lies.
type Config struct {
	Target     string // containerd, k3s, docker, nerdctl
	Root       string // before all paths; "" is the machine's own
	Containerd string // program, asked for its version; "" is found in PATH
	File       string // containerd's configuration; "" is /etc/containerd/config.toml
	Socket     string // of the snapshotter; "" is /run/dewpoint/snapshotter.sock
}

// Targets are what dewd can be joined to.
var Targets = []string{"containerd", "k3s", "docker", "nerdctl"}

// Change is what becomes of a file.
type Change struct {
	Path        string
	Before, New []byte
	Remove      bool // the file goes
	mode        fs.FileMode
	uid, gid    int
}

// Plan is what a target needs.
type Plan struct {
	Changes []Change
	Restart []string // services that read the files when they start, in their order
	Hints   []string // what is left to people
}

// file is one that a target has, and its new text.
type file struct {
	path string
	text func(old []byte) ([]byte, error)
}

const backup = ".before-dewpoint"

func (c *Config) defaults() {
	if c.Socket == "" {
		c.Socket = "/run/dewpoint/snapshotter.sock"
	}
	if c.Containerd == "" {
		c.Containerd = "containerd"
	}
	if c.File == "" {
		c.File = "/etc/containerd/config.toml"
	}
}

// files are the target's. Their functions may ask the target's programs.
func (c Config) files(ctx context.Context) ([]file, Plan, error) {
	containerd := file{c.File, func(old []byte) ([]byte, error) {
		v, err := versionOf(ctx, c.Containerd)
		if err != nil {
			return nil, err
		}
		return containerdConfig(old, v, c.Socket)
	}}
	switch c.Target {
	case "containerd":
		return []file{containerd}, Plan{Restart: []string{"containerd"}}, nil
	case "nerdctl":
		return []file{containerd, {"/etc/nerdctl/nerdctl.toml", nerdctlConfig}},
			Plan{Restart: []string{"containerd"}}, nil
	case "docker":
		return []file{containerd, {"/etc/docker/daemon.json", dockerConfig}},
			Plan{Restart: []string{"containerd", "docker"}, Hints: []string{
				"Docker before 29 needs \"containerd\": its socket, in daemon.json; images that Docker has are to be pulled again"}}, nil
	case "k3s":
		template := file{c.k3sTemplate(), func(old []byte) ([]byte, error) { return k3sTemplate(old, c.Socket) }}
		return []file{template, {"/etc/rancher/k3s/config.yaml.d/dewpoint.yaml", k3sConfig}},
			Plan{Restart: []string{"k3s"}}, nil
	}
	return nil, Plan{}, fmt.Errorf("%q is none of %q", c.Target, Targets)
}

// Join plans the target's files with dewd in them. A file that has it already is not changed.
func Join(ctx context.Context, c Config) (Plan, error) {
	c.defaults()
	files, plan, err := c.files(ctx)
	if err != nil {
		return plan, err
	}
	return c.plan(files, plan, func(f file, old []byte) (Change, error) {
		if joined(old) {
			return Change{}, nil
		}
		text, err := f.text(old)
		return Change{Before: old, New: text}, err
	})
}

// Leave plans the target's files without dewd.
func Leave(ctx context.Context, c Config) (Plan, error) {
	c.defaults()
	files, plan, err := c.files(ctx)
	if err != nil {
		return plan, err
	}
	plan.Hints = nil
	return c.plan(files, plan, func(f file, old []byte) (Change, error) {
		if !joined(old) {
			return Change{}, nil
		}
		if filepath.Ext(f.path) == ".json" {
			text, gone, err := undoJSON(old, c.real(f)+backup)
			return Change{Before: old, New: text, Remove: gone}, err
		}
		text, gone := undo(old)
		return Change{Before: old, New: text, Remove: gone}, nil
	})
}

// joined says whether a text was written by Join.
func joined(text []byte) bool {
	return bytes.Contains(text, []byte(mark+"\n")) || bytes.Contains(text, []byte(`"dewpoint"`)) && jsonJoined(text)
}

// real is where a file lies: a link to it stays one.
func (c Config) real(f file) string {
	path := c.Root + f.path
	if to, err := filepath.EvalSymlinks(path); err == nil {
		return to
	}
	return path
}

func (c Config) plan(files []file, plan Plan, change func(file, []byte) (Change, error)) (Plan, error) {
	for _, f := range files {
		path := c.real(f)
		old, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return plan, err
		}
		ch, err := change(f, old)
		if err != nil {
			return plan, fmt.Errorf("%s: %w", path, err)
		}
		ch.Path, ch.mode, ch.uid, ch.gid = path, 0o644, -1, -1
		if st, err := os.Stat(path); err == nil {
			ch.mode = st.Mode().Perm()
			if sys, ok := st.Sys().(*syscall.Stat_t); ok {
				ch.uid, ch.gid = int(sys.Uid), int(sys.Gid)
			}
		}
		if ch.Remove || !bytes.Equal(ch.New, ch.Before) {
			plan.Changes = append(plan.Changes, ch)
		}
	}
	if len(plan.Changes) == 0 {
		plan.Restart = nil
	}
	return plan, nil
}

// Make makes the changes. Of each file either all is changed or nothing; join says that the old text is to
// stay beside it, else that file goes.
func (p Plan) Make(join bool) error {
	for _, c := range p.Changes {
		if err := c.make(join); err != nil {
			return err
		}
	}
	return nil
}

func (c Change) make(join bool) error {
	if c.Remove {
		return errors.Join(os.Remove(c.Path), remove(c.Path+backup))
	}
	if err := os.MkdirAll(filepath.Dir(c.Path), 0o755); err != nil {
		return err
	}
	if join && c.Before != nil {
		if err := c.write(c.Path+backup, c.Before); err != nil {
			return err
		}
	}
	if err := c.write(c.Path, c.New); err != nil || join {
		return err
	}
	return remove(c.Path + backup)
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// write puts a text at path at once, as the owner of the file that is there.
func (c Change) write(path string, text []byte) error {
	return durable.Commit(path, c.mode, func(f *os.File) error {
		_, err := f.Write(text)
		return errors.Join(err, f.Chmod(c.mode), f.Chown(c.uid, c.gid))
	})
}

// Diff is a change as "diff -u" shows it.
func (c Change) Diff(ctx context.Context) (string, error) {
	dir, err := os.MkdirTemp("", "dew-setup-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	if err := errors.Join(os.WriteFile(a, c.Before, 0o600), os.WriteFile(b, c.New, 0o600)); err != nil {
		return "", err
	}
	out, err := exec.CommandContext(ctx, "diff", "-u", "--label", c.Path, "--label", c.Path, a, b).Output()
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || exit.ExitCode() > 1) {
		return "", fmt.Errorf("diff: %w", err)
	}
	return string(out), nil
}

// RestartServices restarts the plan's services.
func (p Plan) RestartServices(ctx context.Context) error {
	for _, s := range p.Restart {
		if out, err := exec.CommandContext(ctx, "systemctl", "restart", s).CombinedOutput(); err != nil {
			return fmt.Errorf("systemctl restart %s: %w: %s", s, err, bytes.TrimSpace(out))
		}
	}
	return nil
}

// Joined are the targets whose files name dewd.
func Joined(root string) []string {
	var found []string
	for target, path := range map[string]string{"containerd": "/etc/containerd/config.toml",
		"docker": "/etc/docker/daemon.json", "nerdctl": "/etc/nerdctl/nerdctl.toml",
		"k3s": "/etc/rancher/k3s/config.yaml.d/dewpoint.yaml"} {
		if text, err := os.ReadFile(root + path); err == nil && joined(text) {
			found = append(found, target)
		}
	}
	slices.Sort(found)
	return found
}
