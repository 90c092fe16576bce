package engine

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/engine/cgroup"
	"dewpoint/internal/engine/process"
)

// CRIU dumps a container at runc's word, also one that crun has made. What runc
// has to know of it is a file that differs from version to version of runc. So
// the one that is installed writes it, for a container that is made by the same
// specification, in a directory and a cgroup of its own, and never started: the
// stand-in. Then what tells the two apart is put right.

// crunStatus is what crun keeps about a container.
type crunStatus struct {
	Pid         int
	Bundle      string
	Rootfs      string
	Descriptors string `json:"external_descriptors"` // JSON: what its streams were
}

func (e *dumps) standInDir(name string) string { return filepath.Join(e.cfg.standInsDir(), name) }

func (c *Config) standInsDir() string { return filepath.Join(c.State, "standin") }

// runcState is what runc keeps about a container.
func (e *dumps) runcState(name string) string {
	return filepath.Join(e.cfg.runcDir(name), "state.json")
}

// preparedFile keeps what runc will be told about a container that crun has made.
func (e *dumps) preparedFile(name string) string {
	return filepath.Join(e.cfg.dir(name), "runc-state.json")
}

// PrepareDump does of a Dump what can be done while the container runs, and takes
// a while: Dump does the rest.
func (e *dumps) PrepareDump(ctx context.Context, name string) error {
	defer e.names.lock(name)()
	return wrap(e.prepareDump(ctx, name), "prepare a dump of container %s", name)
}

func (e *dumps) prepareDump(ctx context.Context, name string) error {
	s, start, err := e.crunMade(name)
	if s == nil || err != nil {
		return err
	}
	if b, err := os.ReadFile(e.preparedFile(name)); err == nil && e.isOf(b, s.Pid, start) {
		return nil
	}
	state, err := e.standIn(ctx, name, s)
	if err != nil {
		return fmt.Errorf("make a container by runc in its likeness: %w", err)
	}
	if err := e.liken(state, name, s, start); err != nil {
		return err
	}
	b, err := json.Marshal(state)
	if err != nil {
		return err
	}
	return os.WriteFile(e.preparedFile(name), b, 0o600)
}

// crunMade returns crun's word of a container, and since when its first process
// runs; nil if crun did not make it.
func (e *dumps) crunMade(name string) (*crunStatus, uint64, error) {
	b, err := os.ReadFile(filepath.Join(e.cfg.runcDir(name), "status"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	var s crunStatus
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, 0, fmt.Errorf("crun's status: %w", err)
	}
	start, err := process.Started(s.Pid)
	if err != nil {
		return nil, 0, fmt.Errorf("%w (%w)", ErrNotRunning, err)
	}
	return &s, start, nil
}

// isOf says whether a state is that of a process.
func (e *dumps) isOf(state []byte, pid int, start uint64) bool {
	var s struct {
		Pid   int    `json:"init_process_pid"`
		Start uint64 `json:"init_process_start"`
	}
	return json.Unmarshal(state, &s) == nil && s.Pid == pid && s.Start == start
}

// introduce tells runc about a container that crun has made, until what it
// returns is called. Of others runc knows.
func (e *dumps) introduce(ctx context.Context, name string) (forget func(), err error) {
	s, _, err := e.crunMade(name)
	if s == nil || err != nil {
		return func() {}, err
	}
	if err := e.prepareDump(ctx, name); err != nil {
		return nil, err
	}
	b, err := os.ReadFile(e.preparedFile(name))
	if err != nil {
		return nil, err
	}
	forget = func() { _ = os.Remove(e.runcState(name)) } // crun removes the directory with all that is in it
	if err := os.WriteFile(e.runcState(name), b, 0o600); err != nil {
		forget()
		return nil, err
	}
	return forget, nil
}

// standIn has runc make a container in the likeness of one, on an empty root, and
// returns its state. Nothing else of it is left.
func (e *dumps) standIn(ctx context.Context, name string, s *crunStatus) (state map[string]any, err error) {
	dir := e.standInDir(name)
	if err := e.removeStandIn(ctx, name); err != nil { // of a daemon that was killed
		return nil, err
	}
	if err := os.MkdirAll(filepath.Join(dir, "rootfs"), 0o700); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.removeStandIn(context.WithoutCancel(ctx), name)) }()
	if err := e.writeStandIn(name, s); err != nil {
		return nil, err
	}
	if err := e.runcStandIn(ctx, name, "create", "--bundle", dir, name); err != nil {
		return nil, err
	}
	b, err := os.ReadFile(filepath.Join(dir, "state", name, "state.json"))
	if err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	return state, d.Decode(&state)
}

// writeStandIn writes the specification of a stand-in: the container's, without
// what costs time and is of no account for a dump. Its program is runc itself,
// since there must be one.
func (e *dumps) writeStandIn(name string, s *crunStatus) error {
	b, err := os.ReadFile(filepath.Join(s.Bundle, "config.json"))
	if err != nil {
		return err
	}
	var o specs.Spec
	if err := json.Unmarshal(b, &o); err != nil {
		return err
	}
	o.Root = &specs.Root{Path: filepath.Join(e.standInDir(name), "rootfs")}
	o.Process.Args, o.Process.Cwd, o.Process.User, o.Process.Env = []string{"/proc/self/exe"}, "/", specs.User{},
		[]string{defaultPath}
	o.Process.Terminal = false
	o.Linux.CgroupsPath, o.Linux.Resources, o.Linux.Seccomp = e.standInCgroup(name), nil, nil
	if b, err = json.Marshal(&o); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(e.standInDir(name), "config.json"), b, 0o600)
}

// standInCgroup is that of no container.
func (e *dumps) standInCgroup(name string) string { return e.cfg.places().Cgroup(".standin-" + name) }

func (e *dumps) runcStandIn(ctx context.Context, name string, args ...string) error {
	log := filepath.Join(e.standInDir(name), "log")
	args = append([]string{"--root", filepath.Join(e.standInDir(name), "state"), "--log", log}, args...)
	// the container has what would be its output
	if err := exec.CommandContext(ctx, cmp.Or(e.runc, "runc"), args...).Run(); err != nil {
		said, _ := os.ReadFile(log)
		return fmt.Errorf("runc %s: %w: %s", args[4], err, strings.TrimSpace(string(said)))
	}
	return nil
}

func (e *dumps) removeStandIn(ctx context.Context, name string) error {
	dir := e.standInDir(name)
	if _, err := os.Lstat(dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	err := e.runcStandIn(ctx, name, "delete", "--force", name)
	cgroup.Remove(e.standInCgroup(name))
	return errors.Join(err, unmountBelow(dir), os.RemoveAll(dir))
}

// removeStandIns removes those of a daemon that was killed.
func (e *dumps) removeStandIns(ctx context.Context) error {
	entries, err := os.ReadDir(e.cfg.standInsDir())
	for _, d := range entries {
		err = errors.Join(err, e.removeStandIn(ctx, d.Name()))
	}
	return err
}

// liken makes a stand-in's state that of the container.
func (e *dumps) liken(state map[string]any, name string, s *crunStatus, start uint64) error {
	config, ok1 := state["config"].(map[string]any)
	cgroups, ok2 := config["cgroups"].(map[string]any)
	paths, ok3 := state["cgroup_paths"].(map[string]any)
	namespaces, ok4 := state["namespace_paths"].(map[string]any)
	pid, ok5 := state["init_process_pid"].(json.Number)
	if !ok1 || !ok2 || !ok3 || !ok4 || !ok5 {
		return errors.New("runc's state is not understood: set engine.runtime = \"runc\" to make checkpoints on this node")
	}
	state["init_process_pid"], state["init_process_start"] = s.Pid, start
	state["external_descriptors"] = s.descriptors()
	config["rootfs"] = s.Rootfs
	cgroups["path"] = e.cfg.places().Cgroup(name)
	for k, v := range paths {
		if p, ok := v.(string); ok {
			paths[k] = strings.Replace(p, e.standInCgroup(name), e.cfg.places().Cgroup(name), 1)
		}
	}
	own := "/proc/" + strconv.Itoa(s.Pid) + "/"
	for k, v := range namespaces {
		if p, ok := v.(string); ok {
			namespaces[k] = strings.Replace(p, "/proc/"+pid.String()+"/", own, 1)
		}
	}
	return nil
}

// descriptors are what the standard streams of the container were when it was
// made; what they are now if crun does not say.
func (s *crunStatus) descriptors() []string {
	var d []string
	if json.Unmarshal([]byte(s.Descriptors), &d) == nil && len(d) == 3 {
		return d
	}
	d = make([]string, 3)
	for i := range d {
		d[i], _ = os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", s.Pid, i))
	}
	return d
}
