package checkpoint

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/checkpoint/hooks"
	"dewpoint/internal/engine"
	"dewpoint/internal/image"
)

// labelsOf are an image's labels with a container's own over them. One with an empty
// value is as none.
func labelsOf(img *image.Image, own map[string]string) map[string]string {
	all := maps.Clone(img.Spec.Config.Labels)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, own)
	return all
}

// Dress gives a container to come what makes a checkpoint of it possible and its
// clones differ: no system calls that cannot be dumped, and the agents that its
// labels or its image's ask for. Those that want no checkpoints stay as they are.
func (m *Manager) Dress(s *engine.Spec) error {
	labels := labelsOf(s.Image, s.Labels)
	if labels[LabelCheckpoint] == "never" {
		return nil
	}
	s.Dumpable = true
	if err := hooks.Check(labels); err != nil {
		return err
	}
	agents, err := hooks.ParseAgents(labels[hooks.LabelAgents])
	if err != nil || len(agents) == 0 {
		return err
	}
	dir, err := m.agents.install()
	if err != nil {
		return fmt.Errorf("agents: %w", err)
	}
	for _, mt := range hooks.Mounts(dir) {
		s.Mounts = append(s.Mounts,
			specs.Mount{Destination: mt.Destination, Type: mt.Type, Source: mt.Source, Options: mt.Options})
	}
	s.Env = overlay(s, agents)
	return nil
}

// overlay is the order's environment with what the agents add to the image's.
func overlay(s *engine.Spec, agents []hooks.Agent) []string {
	merged := map[string]string{}
	var names []string
	for _, kv := range slices.Concat(s.Image.Spec.Config.Env, s.Env) {
		k, v, set := strings.Cut(kv, "=")
		if !set {
			delete(merged, k)
			continue
		}
		if _, ok := merged[k]; !ok {
			names = append(names, k)
		}
		merged[k] = v
	}
	var all []string
	for _, k := range names {
		if v, ok := merged[k]; ok {
			all = append(all, k+"="+v)
		}
	}
	out := s.Env[:len(s.Env):len(s.Env)]
	for _, kv := range hooks.Activate(all, agents) {
		if k, v, _ := strings.Cut(kv, "="); merged[k] != v {
			out = append(out, kv)
		}
	}
	return out
}

// agents are the files by which applications take part in being saved. They are installed when they are
// needed first.
type agents struct {
	root string

	mu  sync.Mutex
	dir string // where they are, once they are; guarded by mu
}

// install returns the directory of the agents.
func (a *agents) install() (string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.dir != "" {
		return a.dir, nil
	}
	if err := os.MkdirAll(a.root, 0o711); err != nil {
		return "", err
	}
	var err error
	a.dir, err = hooks.Install(a.root)
	return a.dir, err
}

// Created prepares a container that is made and will boot.
func (m *Manager) Created(img *image.Image, info *engine.Info) error {
	labels := labelsOf(img, info.Labels)
	if labels[hooks.LabelAgents] == "" || labels[LabelCheckpoint] == "never" {
		return nil
	}
	return hooks.Prepare(rootOf(info))
}

// Anew is what changes of the labels of a container that was restored, and is to be started by its command.
func Anew(info *engine.Info) map[string]string {
	id := info.Labels[LabelRestored]
	if id == "" {
		return nil
	}
	return map[string]string{LabelRestored: "", LabelAnew: id}
}

// Remade prepares a container that is made again, and will boot: what its agents need was
// its processes'.
func (m *Manager) Remade(ctx context.Context, info *engine.Info) error {
	spec, err := m.cfg.Containers.SpecOf(ctx, info.Name)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(spec.Mounts, func(mt specs.Mount) bool { return mt.Destination == hooks.StateDir }) {
		return nil
	}
	return hooks.Prepare(rootOf(info))
}

func rootOf(info *engine.Info) string { return fmt.Sprintf("/proc/%d/root", info.Pid) }

// hooked is a container as package hooks sees it.
func (m *Manager) hooked(info *engine.Info, img *image.Image, id string) hooks.Container {
	c := hooks.Container{Name: info.Name, Image: info.Image, Checkpoint: id, Labels: labelsOf(img, info.Labels),
		Root: rootOf(info)}
	if info.Addr.IsValid() {
		c.Address = info.Addr.String()
	}
	c.Exec = func(ctx context.Context, args, env []string, output io.Writer) (int, error) {
		return m.cfg.Containers.Exec(ctx, info.ID(),
			engine.ExecSpec{Args: args, Env: env, Stdout: output, Stderr: output})
	}
	return c
}
