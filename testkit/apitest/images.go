package apitest

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

// Images implements api.Images.
func (n *Node) Images(context.Context) ([]spec.Image, error) {
	if now, _ := n.fault("Images"); now != nil {
		return nil, now
	}
	defer n.lock()()
	var list []spec.Image
	for _, name := range slices.Sorted(maps.Keys(n.pulled)) {
		list = append(list, n.images[name])
	}
	return list, nil
}

// users is called with mu held.
func (n *Node) users(image string) int {
	users := 0
	for _, c := range n.containers {
		if c.Image == image {
			users++
		}
	}
	return users
}

// RemoveImage implements api.Images.
func (n *Node) RemoveImage(_ context.Context, name string) error {
	now, after := n.fault("RemoveImage")
	if now != nil {
		return now
	}
	defer n.lock()()
	switch {
	case !n.pulled[name]:
		return api.New(api.NotFound, fmt.Sprintf("there is no image %s", name))
	case n.users(name) > 0:
		return api.New(api.InUse, fmt.Sprintf("%s is in use", name))
	}
	delete(n.pulled, name)
	n.happened(spec.Event{Kind: spec.EventDeleted, Image: name})
	return after
}

// Prune implements api.Images.
func (n *Node) Prune(_ context.Context, opt spec.PruneOptions) (spec.PruneReport, error) {
	now, after := n.fault("Prune")
	if now != nil {
		return spec.PruneReport{}, now
	}
	defer n.lock()()
	var r spec.PruneReport
	for _, name := range slices.Sorted(maps.Keys(n.pulled)) {
		if !opt.Images || n.users(name) > 0 {
			continue
		}
		delete(n.pulled, name)
		r.Images = append(r.Images, name)
		for _, l := range n.images[name].Layers {
			r.Layers = append(r.Layers, l.Digest)
			r.Bytes += l.Disk
		}
	}
	if opt.PoP {
		r.PoPLayers, r.PoPBytes = []string{layerOf("4")}, 8_000_000
	}
	return r, after
}

// Adopt implements api.Images. containerd has two images, one of which has lost its blobs. After FailAfter
// the second cannot be adopted.
func (n *Node) Adopt(_ context.Context, images []string, dry bool, emit func(spec.Adoption) error) error {
	now, after := n.fault("Adopt")
	if now != nil {
		return now
	}
	all := []spec.Adoption{
		{Image: "docker.io/library/nginx:1", Digest: layerOf("a"), Namespaces: []string{"default", "k8s.io"},
			State: spec.AdoptNew, Store: 3_100_000, Disk: 9_000_000},
		{Image: "docker.io/library/redis:7", Digest: layerOf("b"), Namespaces: []string{"k8s.io"},
			State: spec.AdoptNew, Here: 1_000_000, Link: 2_000_000},
	}
	for _, name := range images {
		if !slices.ContainsFunc(all, func(a spec.Adoption) bool { return a.Image == name }) {
			return api.New(api.NotFound, fmt.Sprintf("%s: containerd has no such image", name))
		}
	}
	for i, a := range all {
		if len(images) > 0 && !slices.Contains(images, a.Image) {
			continue
		}
		if !dry {
			a.State = spec.Adopting
			if err := emit(a); err != nil {
				return err
			}
			a.State, a.Done, a.Disk = spec.Adopted, a.Store+a.Link, 9_000_000
			if after != nil && i == 1 {
				a.State, a.Done, a.Error = spec.AdoptFailed, 0, after.Error()
			}
		}
		if err := emit(a); err != nil {
			return err
		}
	}
	return nil
}

// Doctor implements api.Observer. It finds fault with whatever a call of Fail
// said.
func (n *Node) Doctor(context.Context) ([]spec.Finding, error) {
	found := []spec.Finding{
		{What: "kernel", Level: spec.LevelOK, Detail: "6.12.0 x86_64"},
		{What: "mount", Level: spec.LevelNote, Detail: "tree", Remedy: "a kernel with EROFS"},
	}
	if now, after := n.fault("Doctor"); now != nil {
		return nil, now
	} else if after != nil {
		found = append(found,
			spec.Finding{What: "runc", Level: spec.LevelBad, Detail: after.Error(), Remedy: "apt-get install runc"})
	}
	return found, nil
}

// Version implements api.Observer.
func (n *Node) Version(context.Context) (spec.Version, error) {
	now, _ := n.fault("Version")
	return spec.Version{Version: "v0.0-test", Node: "fake", Engine: "none", Mount: "erofs", Inflater: "go",
		Kernel: "6.12.0", Go: "go0"}, now
}

// Events implements api.Observer.
func (n *Node) Events(ctx context.Context, after *spec.Mark, begun func() error,
	emit func(spec.Event) error) error {
	if now, _ := n.fault("Events"); now != nil {
		return now
	}
	unlock := n.lock()
	seen := len(n.events)
	if after != nil {
		seen = min(seen, int(after.Seq))
	}
	unlock()
	if begun != nil {
		if err := begun(); err != nil {
			return err
		}
	}
	for {
		var news []spec.Event
		err := n.await(ctx, func() bool {
			news = slices.Clone(n.events[seen:])
			return len(news) > 0
		})
		if err != nil {
			return err
		}
		for _, e := range news {
			if err := emit(e); err != nil {
				return err
			}
		}
		seen += len(news)
	}
}
