package apitest

import (
	"context"
	"fmt"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

// learned is what the node knows of an image's starts. Each run reads a page
// of /bin/app and one of a file of its own.
type learned struct {
	runs      int
	exercised bool
	pack      bool
	pushed    bool
}

// ProfileEnd implements api.Packs. Containers are recorded if they were to be.
func (n *Node) ProfileEnd(_ context.Context, e spec.ProfileEnd) (spec.Profile, error) {
	now, after := n.fault("ProfileEnd")
	if now != nil {
		return spec.Profile{}, now
	}
	defer n.lock()()
	c, err := n.find(e.Name)
	if err == nil && !c.req.Record {
		err = api.New(api.NotFound, fmt.Sprintf("no recording of a container %q goes on", e.Name))
	}
	if err != nil {
		return spec.Profile{}, err
	}
	c.req.Record = false
	if !e.Discard {
		if n.learned[c.Image] == nil || !e.Merge {
			n.learned[c.Image] = &learned{}
		}
		l := n.learned[c.Image]
		l.runs, l.exercised = l.runs+1, l.exercised || e.Exercised
	}
	return spec.Profile{Name: c.Name, Image: c.Image, Digest: c.Digest, Read: 8192, Files: 2, Total: 10_000_000,
		Largest: reads(1)}, after
}

func reads(runs int) []spec.FileRead {
	out := []spec.FileRead{{Path: "bin/app", Layer: "sha256:1", Read: 4096, Size: 1_000_000}}
	for i := range runs {
		out = append(out, spec.FileRead{Path: fmt.Sprintf("lib/run-%d", i+1), Layer: "sha256:1", Read: 4096,
			Size: 5000})
	}
	return out
}

// known is called with mu held.
func (n *Node) known(image string) (*learned, error) {
	if !n.pulled[image] {
		return nil, api.New(api.NotFound, fmt.Sprintf("there is no image %s", image))
	}
	if l := n.learned[image]; l != nil {
		return l, nil
	}
	e := api.New(api.NotFound, "no start of the image has been recorded here")
	e.Remedy = "record one with \"dew profile IMAGE\""
	return nil, e
}

// PackBuild implements api.Packs.
func (n *Node) PackBuild(_ context.Context, image string) (spec.Pack, error) {
	now, after := n.fault("PackBuild")
	if now != nil {
		return spec.Pack{}, now
	}
	defer n.lock()()
	l, err := n.known(image)
	if err != nil {
		return spec.Pack{}, err
	}
	l.pack = true
	return n.pack(image, l), after
}

func (n *Node) pack(image string, l *learned) spec.Pack {
	img := n.images[image]
	p := spec.Pack{Image: image, Digest: img.Digest, Pack: img.Digest, Size: 60_000, Chunks: 1, Total: img.Disk,
		ImageSize: img.Size,
		Parts: spec.PackParts{Header: 500, Tables: 1500, Chunks: 29_000, Points: 1000, Windows: 20_000,
			Files: 8000},
		Start: 31_000, Share: 31_000 / float64(img.Size), Runs: l.runs, Exercised: l.exercised,
		Created: time.Unix(1e9, 0).UTC(),
		Node:    "fake", From: spec.FromNode, Trust: "pop", Files: 1 + l.runs, Largest: reads(l.runs)}
	for _, r := range p.Largest {
		p.Needed += r.Read
	}
	return p
}

// PackPush implements api.Packs.
func (n *Node) PackPush(_ context.Context, p spec.PackPush) (spec.PackPushed, error) {
	now, after := n.fault("PackPush")
	if now != nil {
		return spec.PackPushed{}, now
	}
	defer n.lock()()
	l, err := n.known(p.Image)
	if err == nil && !l.pack {
		err = api.New(api.NotFound, "it has no pack")
	}
	if err != nil {
		return spec.PackPushed{}, err
	}
	l.pushed = true
	d := n.images[p.Image].Digest
	return spec.PackPushed{Image: p.Image, Manifest: d, Pack: d, Size: 60_000, Signed: len(p.Key) > 0}, after
}

// PackInspect implements api.Packs.
func (n *Node) PackInspect(_ context.Context, image string) (spec.Pack, error) {
	now, after := n.fault("PackInspect")
	if now != nil {
		return spec.Pack{}, now
	}
	defer n.lock()()
	l, err := n.known(image)
	if err == nil && !l.pack {
		err = api.New(api.NotFound, "it has no pack")
	}
	if err != nil {
		return spec.Pack{}, err
	}
	return n.pack(image, l), after
}

// Recorded reports whether a container is being recorded.
func (n *Node) Recorded(name string) bool {
	defer n.lock()()
	c, err := n.find(name)
	return err == nil && c.req.Record
}
