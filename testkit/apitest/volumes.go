package apitest

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

// Volumes implements api.Volumes: those that were made, and those that a container has.
func (n *Node) Volumes(context.Context) ([]spec.VolumeInfo, error) {
	if now, _ := n.fault("Volumes"); now != nil {
		return nil, now
	}
	defer n.lock()()
	return n.allVolumes(), nil
}

// allVolumes is called with mu held.
func (n *Node) allVolumes() (list []spec.VolumeInfo) {
	all := map[string][]string{}
	for _, name := range n.volumes {
		all[name] = nil
	}
	for _, name := range slices.Sorted(maps.Keys(n.containers)) {
		for _, v := range n.containers[name].req.Volumes {
			if v.Named() {
				all[v.Source] = append(all[v.Source], name)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		list = append(list, spec.VolumeInfo{Name: name, Path: "/volumes/" + name, Containers: all[name]})
	}
	return list
}

// MakeVolume implements api.Volumes.
func (n *Node) MakeVolume(_ context.Context, name string) error {
	now, after := n.fault("MakeVolume")
	if now != nil {
		return now
	}
	defer n.lock()()
	if !slices.Contains(n.volumes, name) {
		n.volumes = append(n.volumes, name)
	}
	return after
}

// RemoveVolume implements api.Volumes.
func (n *Node) RemoveVolume(_ context.Context, name string) error {
	now, after := n.fault("RemoveVolume")
	if now != nil {
		return now
	}
	defer n.lock()()
	for _, v := range n.allVolumes() {
		switch {
		case v.Name != name:
		case len(v.Containers) > 0:
			return api.New(api.InUse, fmt.Sprintf("the volume is in use: %s, by %s", name, v.Containers[0]))
		default:
			n.volumes = slices.DeleteFunc(n.volumes, func(had string) bool { return had == name })
			return after
		}
	}
	return api.New(api.NotFound, fmt.Sprintf("there is no such volume: %s", name))
}
