package hooks

import (
	"crypto/sha256"
	"debug/elf"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"dewpoint/internal/durable"
)

// Where a container that asks for agents finds them and its state.
const (
	AgentsDir = "/run/dewpoint/agents" // read-only, the same for all containers
	StateDir  = "/run/dewpoint/state"  // a small tmpfs of its own
)

// Agent is a ready-made agent's name: "python", "node" or "jvm".
type Agent string

const (
	Python Agent = "python"
	Node   Agent = "node"
	JVM    Agent = "jvm"
)

// ParseAgents reads the value of "dewpoint.hooks": names with commas between.
func ParseAgents(value string) ([]Agent, error) {
	var found []Agent
	for name := range strings.FieldsFuncSeq(value, func(r rune) bool { return r == ',' || r == ' ' }) {
		a := Agent(name)
		if !slices.Contains([]Agent{Python, Node, JVM}, a) {
			return nil, fmt.Errorf("label %s: there is no agent %q (there are python, node, jvm)", LabelAgents, name)
		}
		if !slices.Contains(found, a) {
			found = append(found, a)
		}
	}
	return found, nil
}

// Mount is one that a container with agents needs; fields as in an OCI specification.
type Mount struct {
	Destination, Type, Source string
	Options                   []string
}

// Mounts are what a container that asks for agents needs; dir is Install's.
func Mounts(dir string) []Mount {
	return []Mount{
		{AgentsDir, "bind", dir, []string{"bind", "ro", "nosuid", "nodev"}},
		{StateDir, "tmpfs", "tmpfs",
			[]string{"nosuid", "nodev", "noexec", "mode=0755", "size=1m", "nr_inodes=8192"}},
	}
}

// Activate adds to a container's environment what makes its interpreters load the
// agents. What the variables hold already stays in force.
func Activate(env []string, agents []Agent) []string {
	if len(agents) == 0 {
		return env
	}
	env = join(env, "DEWPOINT_STATE", "", func(string) string { return StateDir })
	for _, a := range agents {
		switch a {
		case Python:
			env = join(env, "PYTHONPATH", ":", func(old string) string { return AgentsDir + "/python:" + old })
		case Node:
			env = join(env, "NODE_OPTIONS", " ", func(old string) string {
				return "--require=" + AgentsDir + "/node.js " + old
			})
		case JVM:
			env = join(env, "JAVA_TOOL_OPTIONS", " ", func(old string) string {
				return "-javaagent:" + AgentsDir + "/jvm.jar " + old
			})
		}
	}
	return env
}

// join replaces a variable's value; separators at the new value's end go.
func join(env []string, name, separator string, value func(old string) string) []string {
	old := ""
	env = slices.DeleteFunc(slices.Clone(env), func(e string) bool {
		v, ok := strings.CutPrefix(e, name+"=")
		if ok {
			old = v
		}
		return ok
	})
	return append(env, name+"="+strings.TrimRight(value(old), separator))
}

//go:embed agents/python/sitecustomize.py
var pythonStart []byte

//go:embed agents/python/dewpoint_restore.py
var pythonAgent []byte

//go:embed agents/node.js
var nodeAgent []byte

// The JVM's agent is kept beside its source: mkjar says how it is made.
//
//go:generate ./mkjar agents/jvm.jar agents/jvm dewpoint/Agent Premain-Class
//go:generate ./mkjar testdata/draw.jar testdata Draw Main-Class
//go:embed agents/jvm.jar
var jvmAgent []byte

// Install writes the agents into a directory under root, which is named by their
// content, and returns its path: to be mounted read-only at AgentsDir. Agents that
// are there are left alone, so containers of an older daemon keep theirs. The
// path's last element belongs to what must be the same where a checkpoint is
// restored. One process at a time may install under a root, which must exist.
func Install(root string) (string, error) {
	files, err := agentFiles()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	for _, f := range files {
		fmt.Fprintf(h, "%s %d\n%s", f.path, len(f.data), f.data)
	}
	dir := filepath.Join(root, hex.EncodeToString(h.Sum(nil)[:8]))
	removeLeftovers(root)
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	tmp, err := os.MkdirTemp(root, ".agents-*")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	if err := writeFiles(tmp, files); err != nil {
		return "", err
	}
	err = os.Rename(tmp, dir)
	if errors.Is(err, os.ErrExist) {
		err = nil // another has been first
	}
	return dir, err
}

// removeLeftovers takes away what a crash has left of an Install.
func removeLeftovers(root string) {
	old, _ := filepath.Glob(filepath.Join(root, ".agents-*"))
	for _, dir := range old {
		os.RemoveAll(dir)
	}
}

type agentFile struct {
	path string
	data []byte
}

func agentFiles() ([]agentFile, error) {
	files := []agentFile{
		{"python/sitecustomize.py", pythonStart},
		{"python/dewpoint_restore.py", pythonAgent},
		{"node.js", nodeAgent},
		{"jvm.jar", jvmAgent},
	}
	for arch, machine := range map[string]elf.Machine{"x64": elf.EM_X86_64, "arm64": elf.EM_AARCH64} {
		object, err := randPoll(machine)
		if err != nil {
			return nil, err
		}
		files = append(files, agentFile{"reseed-" + arch + ".node", object})
	}
	slices.SortFunc(files, func(a, b agentFile) int { return strings.Compare(a.path, b.path) })
	return files, nil
}

func writeFiles(dir string, files []agentFile) error {
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	for _, f := range files {
		path := filepath.Join(dir, f.path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := durable.WriteFile(path, f.data, 0o644); err != nil {
			return err
		}
	}
	return nil
}
