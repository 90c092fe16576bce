package server

import (
	"context"
	"runtime"
	"time"

	"dewpoint/internal/engine"
	"dewpoint/internal/engine/shimgroup"
	"dewpoint/internal/layer/inflate"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/server/doctor"
	"dewpoint/internal/spec"

	"golang.org/x/sys/unix"
)

// observer implements api.Observer.
type observer struct {
	*events
	version string
	node    string
	doctor  doctor.Config
	engine  containerd
	mounts  mounts
	parts   []finder // in the order in which a doctor's visit shows them
}

// finder knows what is well and what is not with one part of the node.
type finder interface {
	findings(ctx context.Context) []spec.Finding
}

// Doctor implements api.Observer.
func (o *observer) Doctor(ctx context.Context) ([]spec.Finding, error) {
	out := doctor.Examine(ctx, o.doctor)
	for _, p := range o.parts {
		out = append(out, p.findings(ctx)...)
	}
	return out, nil
}

// Version implements api.Observer.
func (o *observer) Version(context.Context) (spec.Version, error) {
	var u unix.Utsname
	unix.Uname(&u)
	return spec.Version{Version: o.version, Node: o.node, Engine: "containerd " + o.engine.Version(),
		Mount:    o.mounts.backend.Name(),
		Inflater: inflate.Engine(), Kernel: unix.ByteSliceToString(u.Release[:]), Go: runtime.Version()}, nil
}

// containerd is the engine, as a doctor sees it.
type containerd struct {
	*engine.Engine
	state string
}

func (c containerd) findings(ctx context.Context) []spec.Finding {
	return []spec.Finding{c.answers(ctx), c.runtime(), c.shims()}
}

// answers asks containerd for the snapshotter: only then is it certain
// that a container could start.
func (c containerd) answers(ctx context.Context) spec.Finding {
	f := spec.Finding{What: "containerd", Level: spec.LevelOK,
		Detail: c.Version() + " at " + c.Socket()}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := c.Check(ctx); err != nil {
		f.Level, f.Detail, f.Remedy = spec.LevelBad, err.Error(),
			"see its log ("+c.state+"/containerd/containerd.log of a private one); restart it, or dewd"
	}
	return f
}

// runtime says what makes containers.
func (c containerd) runtime() spec.Finding {
	f := spec.Finding{What: "runtime", Level: spec.LevelOK}
	var lacking bool
	if f.Detail, lacking = c.Runtime(); lacking {
		f.Level, f.Remedy = spec.LevelNote,
			"containers start faster by crun: scripts/install demo brings one; then restart dewd"
	}
	return f
}

// shims says whether containers share shims.
func (c containerd) shims() spec.Finding {
	f := spec.Finding{What: "shims", Level: spec.LevelOK}
	var missing bool
	if f.Detail, missing = c.Shims(); missing {
		f.Level, f.Remedy = spec.LevelNote,
			"install "+shimgroup.Program+
				" beside dewd or in PATH, and restart dewd: containers start faster and share memory"
	}
	return f
}

// mounts are the ways to mount layers that there are here.
type mounts struct {
	backend mount.Backend // the one in use
	tried   []mount.Finding
	forced  bool // the configuration names it
}

func (m mounts) findings(context.Context) []spec.Finding {
	var out []spec.Finding
	for _, f := range m.tried {
		n := spec.Finding{What: "mount by " + f.Backend, Level: spec.LevelOK, Detail: "works", Remedy: f.Remedy}
		if f.Backend == m.backend.Name() {
			n.Detail = "in use: the best that works here"
			if m.forced {
				n.Detail = "in use: node.mount says so"
			}
		}
		if !f.Works {
			n.Level, n.Detail = spec.LevelNote, f.Reason
		}
		out = append(out, n)
	}
	return out
}

// pluginDirs are the directories to look for CNI plugins in.
var pluginDirs = []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"}
