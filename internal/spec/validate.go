package spec

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// Validate says what is wrong with the instruction by itself, in one line.
// Names and references are checked by those who know their grammar.
func (r Request) Validate() error {
	switch {
	case r.Image == "":
		return fmt.Errorf("no image is named")
	case r.Memory < 0:
		return fmt.Errorf("memory limit %d is below zero", r.Memory)
	case r.CPUs < 0 || math.IsNaN(r.CPUs) || math.IsInf(r.CPUs, 0):
		return fmt.Errorf("%v is not a number of CPUs", r.CPUs)
	case r.ReadyTimeout < 0:
		return fmt.Errorf("the time to become ready, %v, is below zero", r.ReadyTimeout)
	case len(r.Ports) > 0 && r.Net != "" && r.Net != "bridge":
		return fmt.Errorf("ports are published on the bridge only: leave out --net %s, or -p", r.Net)
	}
	for _, e := range r.Env {
		if strings.IndexByte(e, 0) >= 0 || strings.HasPrefix(e, "=") || e == "" {
			return fmt.Errorf("%q is not an environment variable KEY=VALUE", e)
		}
	}
	for _, v := range r.Volumes {
		if err := v.validate(); err != nil {
			return err
		}
	}
	if len(r.Ports) > maxPorts {
		return fmt.Errorf("%d ports are published, and at most %d can be: use --net host", len(r.Ports), maxPorts)
	}
	if o := r.Options.unsaved(); o != "" && (r.Checkpoint || r.Restore == "always") {
		wish := "--checkpoint"
		if !r.Checkpoint {
			wish = "--restore always"
		}
		return fmt.Errorf("no checkpoint keeps --%s; leave out %s or that", o, wish)
	}
	for _, p := range r.Ports {
		if err := p.validate(); err != nil {
			return err
		}
	}
	if err := r.Options.validate(r.Net == "host" || r.Net == "" && len(r.Ports) == 0); err != nil {
		return err
	}
	for k, v := range r.Labels {
		if err := label(k, v); err != nil {
			return err
		}
	}
	if len(r.Terms.Key) > MaxKey {
		return fmt.Errorf("a key has at most %d bytes", MaxKey)
	}
	if r.Terms.Deadline < 0 {
		return fmt.Errorf("the deadline %v is below zero", r.Terms.Deadline)
	}
	if r.Checkpoint && r.Record {
		return fmt.Errorf("a start that is recorded makes no checkpoint")
	}
	if _, err := ParseReadyCheck(r.Ready, nil); err != nil {
		return err
	}
	if err := r.restarts(); err != nil {
		return err
	}
	if err := r.Health.validate(); err != nil {
		return err
	}
	return choices(
		choice{"net", r.Net, []string{"host", "bridge", "none"}},
		choice{"lazy", r.Lazy, []string{"auto", "never"}},
		choice{"restore", r.Restore, []string{"auto", "never", "always"}},
		choice{"layer-mount", r.Mount, Mounts},
		choice{"order", r.Order, []string{"layers", "parallel"}},
		count(r.Inflaters),
	)
}

// Validate says what is wrong with the instruction by itself, in one line.
func (r PullRequest) Validate() error {
	if r.Image == "" {
		return fmt.Errorf("no image is named")
	}
	return choices(
		choice{"lazy", r.Lazy, []string{"auto", "never"}},
		choice{"order", r.Order, []string{"layers", "parallel"}},
		count(r.Inflaters),
	)
}

// ours are the labels of containers and images that Dewpoint reads. What else begins
// like them, or with containerd's prefix, is set by these alone.
var ours = []string{"dewpoint.checkpoint", "dewpoint.checkpoint.before", "dewpoint.restore.after",
	"dewpoint.restore.env", "dewpoint.restore.volumes", "dewpoint.hooks"}

// Mounts are the backends of package layer/mount, best first.
var Mounts = []string{"erofs", "loop", "tree"}

const maxLabel = 4096 // bytes of name and value, containerd's own limit

func label(name, value string) error {
	switch {
	case name == "" || strings.ContainsFunc(name, func(r rune) bool {
		return r <= ' ' || r == '=' || r == 0x7f
	}):
		return fmt.Errorf("%q is not the name of a label: want KEY=VALUE, without blanks in KEY", name)
	case strings.IndexByte(value, 0) >= 0:
		return fmt.Errorf("label %s: its value has a zero byte", name)
	case len(name)+len(value) > maxLabel:
		return fmt.Errorf("label %s: name and value have more than %d bytes", name[:min(len(name), 64)], maxLabel)
	case strings.HasPrefix(name, "containerd.io/"):
		return fmt.Errorf("label %s: those of containerd are not for containers", name)
	case strings.HasPrefix(name, "dewpoint.") && !slices.Contains(ours, name):
		return fmt.Errorf("there is no label %s; of those that begin so there are %s", name,
			strings.Join(ours, ", "))
	case name == "dewpoint.checkpoint" && !slices.Contains([]string{"", "auto", "never", "stateful"}, value):
		return fmt.Errorf("label %s=%s: want auto, never or stateful", name, value)
	}
	return nil
}

// choice is a field whose value is one of a few, or empty.
type choice struct {
	name, value string
	of          []string
}

// count is the choice of a number that is not below zero.
func count(n int) choice {
	if n < 0 || n > 1024 {
		return choice{"inflaters", fmt.Sprint(n), []string{"0 (the node's choice)", "1 to 1024"}}
	}
	return choice{}
}

func choices(list ...choice) error {
	for _, c := range list {
		if c.value != "" && !slices.Contains(c.of, c.value) {
			return fmt.Errorf("--%s %s: want %s", c.name, c.value, strings.Join(c.of, " or "))
		}
	}
	return nil
}

// Validate says what is wrong with the instruction by itself, in one line.
func (r CheckpointRequest) Validate() error {
	if r.Name == "" {
		return fmt.Errorf("no container is named")
	}
	return choices(choice{"tcp", r.TCP, []string{"close", "refuse"}})
}
