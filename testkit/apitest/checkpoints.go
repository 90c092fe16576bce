package apitest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

// Checkpoint implements api.Checkpoints.
func (n *Node) Checkpoint(_ context.Context, r spec.CheckpointRequest) (spec.Checkpoint, error) {
	now, after := n.fault("Checkpoint")
	if now != nil {
		return spec.Checkpoint{}, now
	}
	defer n.lock()()
	c, err := n.find(r.Name)
	if err == nil && c.Status != spec.StatusRunning {
		err = api.New(api.NotRunning, fmt.Sprintf("%s does not run", r.Name))
	}
	if err != nil {
		return spec.Checkpoint{}, err
	}
	cp := spec.Checkpoint{ID: layerOf(fmt.Sprintf("%x", 10+len(n.checkpoints))), Image: c.Image,
		Digest: c.Digest, Args: append([]string{}, c.req.Cmd...), Created: time.Now(), Node: "fake",
		Engine: "criu", Size: 2_000_000, Pages: 30_000_000, Upper: 4096, Boot: 1.5, Paused: 0.04,
		Stateful: r.Stateful, Where: "node"}
	if r.Share {
		cp.Owner = "*"
	}
	n.checkpoints = append(n.checkpoints, cp)
	n.happened(spec.Event{Kind: spec.EventCheckpointed, Name: c.Name, Image: c.Image, Checkpoint: cp.ID})
	return cp, after
}

// ListCheckpoints implements api.Checkpoints.
func (n *Node) ListCheckpoints(_ context.Context, image string) ([]spec.Checkpoint, error) {
	if now, _ := n.fault("ListCheckpoints"); now != nil {
		return nil, now
	}
	defer n.lock()()
	var out []spec.Checkpoint
	for _, c := range slices.Backward(n.checkpoints) {
		if image == "" || c.Image == image {
			if len(n.checkpoints) > 1 {
				c.Differs = []string{"arguments " + strings.Join(c.Args, " ")}
			}
			out = append(out, c)
		}
	}
	return out, nil
}

// RemoveCheckpoint implements api.Checkpoints.
func (n *Node) RemoveCheckpoint(_ context.Context, id string) error {
	now, after := n.fault("RemoveCheckpoint")
	if now != nil {
		return now
	}
	defer n.lock()()
	at := slices.IndexFunc(n.checkpoints, func(c spec.Checkpoint) bool {
		return c.ID == id || len(id) >= 6 && strings.HasPrefix(c.ID, "sha256:"+id)
	})
	if at < 0 {
		return api.New(api.NotFound, fmt.Sprintf("there is no checkpoint %s", id))
	}
	n.checkpoints = slices.Delete(n.checkpoints, at, at+1)
	return after
}

// restore starts a container from a checkpoint of its image, unless it is not to.
func (n *Node) restore(c *container, r *spec.Record) bool {
	defer n.lock()()
	i := slices.IndexFunc(n.checkpoints, func(p spec.Checkpoint) bool { return p.Image == c.Image })
	switch {
	case c.req.Restore == "never":
	case i < 0 && c.req.Checkpoint:
		r.Way.Why = append(r.Way.Why, "restore: there is no checkpoint of the image")
	case i >= 0:
		r.Way.Start = "restore"
		return true
	}
	return false
}
