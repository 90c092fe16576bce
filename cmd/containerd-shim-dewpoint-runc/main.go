// containerd-shim-dewpoint-runc is containerd's own shim for runc and crun, made
// of its packages, for a process that carries up to 32 containers in place of
// one (package shimgroup). Its heap may grow to several times what is in use
// before the collector runs: containerd-shim-runc-v2 has it run each time that
// this has grown by 40 %, which took a fifth of the shim's processor time while
// many containers were made (docs/design/creation.md).
package main

import (
	"context"
	"runtime/debug"

	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/manager"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/task"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/containerd/v2/plugins"
	"github.com/containerd/plugin"
	"github.com/containerd/plugin/registry"
)

// heapGrowth is by how many percent of what is in use the heap may grow, and
// heapLimit the bytes at which the collector runs all the same.
const (
	heapGrowth = 400
	heapLimit  = 32 << 20
)

func main() {
	registry.Register(&plugin.Registration{
		Type:     plugins.TTRPCPlugin,
		ID:       "task",
		Requires: []plugin.Type{plugins.EventPlugin, plugins.InternalPlugin},
		InitFn:   serve,
	})
	shim.RunShim(context.Background(), manager.NewShimManager("io.containerd.runc.v2"))
}

// serve makes the service that containerd calls. What RunShim has said of the
// collector is over by then.
func serve(ic *plugin.InitContext) (any, error) {
	debug.SetGCPercent(heapGrowth)
	debug.SetMemoryLimit(heapLimit)
	publisher, err := ic.GetByID(plugins.EventPlugin, "publisher")
	if err != nil {
		return nil, err
	}
	stop, err := ic.GetByID(plugins.InternalPlugin, "shutdown")
	if err != nil {
		return nil, err
	}
	return task.NewTaskService(ic.Context, publisher.(shim.Publisher), stop.(shutdown.Service))
}
