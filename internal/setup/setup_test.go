package setup

import (
	"bytes"
	"cmp"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pelletier/go-toml/v2"
)

const socket = "/run/dewpoint/snapshotter.sock"

// Every kind of file that is found gets dewd, keeps all else, and is what it was when that is undone.
func TestContainerdFiles(t *testing.T) {
	texts := map[string]string{
		"version 2": "# mine\nversion = 2\nroot = \"/data\" # a disk\n\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n" +
			"  snapshotter = \"overlayfs\" # as ever\n  [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n" +
			"    runtime_type = \"io.containerd.runc.v2\"\n",
		"version 3":  "version = 3\n[plugins.'io.containerd.service.v1.diff-service']\n  default = ['walking']\n  x = 1\n",
		"no newline": "version = 2\ndisabled_plugins = [\n  \"cri\",\n]",
		"empty list": "version = 3\n[plugins.'io.containerd.transfer.v1.local']\n  unpack_config = []\n  y = [\n 1,\n 2]\n",
		"a list": "version = 3\n[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]\n" +
			"  platform = 'linux'\n  snapshotter = 'native'\n",
		"none": "",
	}
	for _, program := range []string{"/usr/bin/containerd", "/var/cache/dewpoint/tools/containerd-2.4.2/containerd"} {
		if out, err := exec.Command(program, "config", "default").Output(); err == nil {
			texts["default of "+program] = string(out)
		} else {
			t.Logf("%s is not tried: %v", program, err)
		}
	}
	for name, text := range texts {
		for _, v := range []version{{1, 6, 20}, {1, 7, 4}, {2, 4, 2}} {
			if v.major < 2 && strings.Contains(text, "version = 3") {
				continue
			}
			out, err := containerdConfig([]byte(text), v, socket)
			if err != nil {
				t.Errorf("%s, %v: %v", name, v, err)
				continue
			}
			checkJoined(t, out, v)
			back, gone := undo(out)
			if string(back) != text || gone != (text == "") {
				t.Errorf("%s, %v: after undo it is\n%s", name, v, back)
			}
			changed := append([]byte("# another's line\n"), out...)
			if back, _ := undo(changed); string(back) != "# another's line\n"+text {
				t.Errorf("%s, %v: after another's change and undo it is\n%s", name, v, back)
			}
		}
	}
}

func checkJoined(t *testing.T, text []byte, v version) {
	t.Helper()
	var doc map[string]any
	if err := toml.Unmarshal(text, &doc); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	if lookup(doc, []string{"proxy_plugins", "dewpoint", "address"}) != socket {
		t.Errorf("no proxy plugin in\n%s", text)
	}
	differs, _ := lookup(doc, []string{"plugins", diffs, "default"}).([]any)
	if v.atLeast(1, 7, 4) != (len(differs) == 2 && differs[0] == "dewpoint-diff" && differs[1] == "walking") {
		t.Errorf("differs are %q in\n%s", differs, text)
	}
	unpack, _ := lookup(doc, []string{"plugins", transfers, "unpack_config"}).([]any)
	if v.atLeast(1, 7, 4) && len(unpack) != 2 {
		t.Errorf("%d entries of unpack_config in\n%s", len(unpack), text)
	}
	if !joined(text) {
		t.Error("what was written is not known again")
	}
}

func TestFilesForHands(t *testing.T) {
	for text, want := range map[string]string{
		"disabled_plugins = [\"cri\"]\n":                               "config migrate",
		"version = 3\n[plugins]\n'" + diffs + "' = {x = 1}\n":          errByHand.Error(),
		"version = 2\n[proxy_plugins.dewpoint]\ntype = \"snapshot\"\n": "remove that first",
		"version = ": "toml",
	} {
		out, err := containerdConfig([]byte(text), version{2, 4, 2}, socket)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q\n%s", text, err, want, out)
		}
	}
}

// fake is a root directory with a containerd that says its version.
func fake(t *testing.T, target string) Config {
	t.Helper()
	root := t.TempDir()
	program := filepath.Join(root, "containerd")
	if err := os.WriteFile(program, []byte("#!/bin/sh\necho containerd x v2.4.2 y\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return Config{Target: target, Root: root, Containerd: program}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err = errors.Join(err, os.WriteFile(path, []byte(text), 0o640)); err != nil {
		t.Fatal(err)
	}
}

func TestTargets(t *testing.T) {
	for _, target := range Targets {
		for _, there := range []bool{false, true} {
			c := fake(t, target)
			daemon := filepath.Join(c.Root, "etc/docker/daemon.json")
			if there {
				write(t, c.Root+"/etc/containerd/config.toml", "version = 2 # two\n")
				write(t, c.Root+"/etc/nerdctl/nerdctl.toml", "snapshotter = \"stargz\"\ndebug = true\n")
				write(t, daemon, "{\"log-level\":\"warn\",  \"features\": {\"buildkit\": true}}")
			}
			before := tree(t, c.Root)
			p, err := Join(t.Context(), c)
			if err != nil || len(p.Changes) == 0 {
				t.Fatalf("%s: %v, %d changes", target, err, len(p.Changes))
			}
			if got := tree(t, c.Root); got != before {
				t.Errorf("%s: a plan changes\n%s\nto\n%s", target, before, got)
			}
			if err := p.Make(true); err != nil {
				t.Fatal(err)
			}
			if got := Joined(c.Root); len(got) == 0 {
				t.Errorf("%s: nothing is joined", target)
			}
			if p, err = Join(t.Context(), c); err != nil || len(p.Changes) > 0 || len(p.Restart) > 0 {
				t.Errorf("%s: joined again: %v, %v", target, err, p)
			}
			if p, err = Leave(t.Context(), c); err == nil {
				err = p.Make(false)
			}
			if got := tree(t, c.Root); err != nil || got != before {
				t.Errorf("%s: %v, after undo\n%s\nnot\n%s", target, err, got, before)
			}
		}
	}
}

// What others write below dewd's lines, or in their place, stays in its table.
func TestUndoAmongOthersLines(t *testing.T) {
	const cri = "[plugins.'io.containerd.grpc.v1.cri'.containerd]"
	for name, c := range map[string]struct {
		before, old, change, want string
		of                        version
	}{
		"below dewd's plugin": {"version = 2\n", "  enable_remote_snapshot_annotations = \"true\"" + mark + "\n",
			"  enable_remote_snapshot_annotations = \"true\"" + mark + "\n    other = \"1\"\n", "version = 2\n",
			version{2, 0, 0}},
		"in dewd's plugin": {"version = 2\n", "  type = \"snapshot\"" + mark + "\n",
			"  platform = \"linux\"\n  # what it is\n", "version = 2\n  # what it is\n", version{}},
		"below a table of dewd's": {"version = 2\n", "disable_snapshot_annotations = false" + mark + "\n",
			"disable_snapshot_annotations = false" + mark + "\n  other = 1\n",
			"version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n  other = 1\n", version{}},
		"a value of his own": {"version = 2\n" + cri + "\n  snapshotter = \"native\"\n", "  snapshotter = \"dewpoint\"" + mark,
			"  snapshotter = \"stargz\"", "version = 2\n" + cri + "\n  snapshotter = \"stargz\"\n", version{}},
	} {
		text, err := containerdConfig([]byte(c.before), cmp.Or(c.of, version{1, 6, 20}), socket)
		if err != nil || !strings.Contains(string(text), c.old) {
			t.Fatalf("%s: %v\n%s", name, err, text)
		}
		out, _ := undo(bytes.Replace(text, []byte(c.old), []byte(c.change), 1))
		if string(out) != c.want {
			t.Errorf("%s:\n%s\nwant\n%s", name, out, c.want)
		}
	}
}

// Docker's file has no comments: dewd's keys go, and another's change since stays.
func TestDockerChangedSince(t *testing.T) {
	c := fake(t, "docker")
	daemon := filepath.Join(c.Root, "etc/docker/daemon.json")
	write(t, daemon, "{\"storage-driver\": \"btrfs\"}")
	p, err := Join(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Make(true); err != nil {
		t.Fatal(err)
	}
	text, _ := os.ReadFile(daemon)
	write(t, daemon, string(bytes.Replace(text, []byte("{"), []byte("{\"debug\": true,"), 1)))
	if p, err = Leave(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if err := p.Make(false); err != nil {
		t.Fatal(err)
	}
	text, _ = os.ReadFile(daemon)
	if doc, err := parseJSON(text); err != nil || len(doc) != 2 || doc["debug"] != true || doc["storage-driver"] != "btrfs" {
		t.Errorf("%v\n%s", err, text)
	}
}

// A daemon.json that is a link stays one, and the file that it leads to is what it was after the undo.
func TestDockerByLink(t *testing.T) {
	c := fake(t, "docker")
	link, to := filepath.Join(c.Root, "etc/docker/daemon.json"), filepath.Join(c.Root, "srv/docker.json")
	const before = "{ \"storage-driver\":   \"btrfs\" }"
	write(t, to, before)
	if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(to, link); err != nil {
		t.Fatal(err)
	}
	p, err := Join(t.Context(), c)
	if err == nil {
		err = p.Make(true)
	}
	if err != nil {
		t.Fatal(err)
	}
	if text, _ := os.ReadFile(link); !joined(text) {
		t.Errorf("after the setup it is\n%s", text)
	}
	if p, err = Leave(t.Context(), c); err == nil {
		err = p.Make(false)
	}
	if err != nil {
		t.Fatal(err)
	}
	if at, err := os.Readlink(link); err != nil || at != to {
		t.Errorf("the link leads to %q, %v", at, err)
	}
	if text, err := os.ReadFile(to); err != nil || string(text) != before {
		t.Errorf("%v, after the undo it is\n%s", err, text)
	}
	if _, err := os.Lstat(to + backup); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old text: %v", err)
	}
}

// tree is all files of a directory with their contents.
func tree(t *testing.T, root string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			var text []byte
			text, err = os.ReadFile(path)
			b.WriteString(path + "\n" + string(text))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}
