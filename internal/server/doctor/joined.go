package doctor

import (
	"context"
	"fmt"
	"strings"
	"time"

	introapi "github.com/containerd/containerd/api/services/introspection/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"dewpoint/internal/setup"
	"dewpoint/internal/spec"
)

// sockets are where the containerd of a target listens. Docker and nerdctl use the machine's.
var sockets = map[string]string{
	"containerd": "/run/containerd/containerd.sock", "docker": "/run/containerd/containerd.sock",
	"nerdctl": "/run/containerd/containerd.sock", "k3s": "/run/k3s/containerd/containerd.sock",
}

// asker asks the containerd at a socket whether it has dewd's snapshotter.
type asker func(ctx context.Context, socket string) (bool, error)

// joined says which programs' configuration names dewd below the directory host, and whether their
// containerd has read it since.
func joined(ctx context.Context, host string, knows asker) spec.Finding {
	const what = "joined programs"
	targets := setup.Joined(host)
	if len(targets) == 0 {
		return finding(what, spec.LevelOK, "none: only dew starts containers from dewd's layers", "")
	}
	for _, t := range targets {
		known, err := knows(ctx, sockets[t])
		if err != nil {
			return finding(what, spec.LevelNote,
				fmt.Sprintf("%s: its containerd does not answer: %v", t, err),
				"start it, or take dewd out of its configuration: dew setup --undo "+t)
		}
		if !known {
			return finding(what, spec.LevelNote, t+": its containerd has not read what dew setup wrote",
				"restart it: dew setup "+t+" says how")
		}
	}
	return finding(what, spec.LevelOK, strings.Join(targets, ", "), "")
}

// Knows says whether the containerd at a socket has dewd's snapshotter.
func Knows(ctx context.Context, socket string) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	c, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return false, err
	}
	defer c.Close()
	r, err := introapi.NewIntrospectionClient(c).Plugins(ctx, &introapi.PluginsRequest{
		Filters: []string{"type==io.containerd.snapshotter.v1,id==dewpoint"}})
	return err == nil && len(r.Plugins) > 0, err
}
