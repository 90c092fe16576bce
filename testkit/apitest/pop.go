package apitest

import (
	"context"
	"fmt"
	"strings"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

// layerOf is the diffID of a layer of the fake's PoP.
func layerOf(digit string) string { return "sha256:" + strings.Repeat(digit, 64) }

// PoPStatus implements api.PoPs: a PoP of two nodes and two layers, of which n2
// uses one and fetches a third.
func (n *Node) PoPStatus(context.Context) (spec.PoP, error) {
	now, after := n.fault("PoPStatus")
	if now != nil {
		return spec.PoP{}, now
	}
	p := spec.PoP{Name: "harbour", Node: "fake",
		Store: spec.PoPStore{Path: "/mnt/pop", ID: "STORE1", State: spec.PoPOK, Total: 10_000_000_000,
			Free: 9_000_000_000, Bytes: 9_000_000, Trash: 500_000, Capacity: 8_000_000_000,
			Quotas: []spec.PoPQuota{{Prefix: "team/", Bytes: 1_000_000, Most: 2_000_000_000}}},
		Coordinator: spec.PoPCoordinator{Kind: "redis", State: spec.PoPSettled},
		Nodes: []spec.PoPNode{
			{Name: "fake", Address: "10.0.0.1:7070", Cache: 9_000_000, Capacity: 4_000_000_000,
				Local: spec.PoPHits{Layers: 1, Bytes: 250_000}, Registry: spec.PoPHits{Layers: 1, Bytes: 750_000}},
			{Name: "n2", Store: spec.PoPHits{Layers: 3, Bytes: 3_000_000},
				Peer:     spec.PoPHits{Layers: 1, Bytes: 1_000_000},
				Fetching: []spec.PoPFetch{{Layer: layerOf("6"), Done: 500_000, Size: 2_000_000}}},
		},
		Layers: []spec.PoPLayer{
			{DiffID: layerOf("2"), Size: 1_000_000, BlobSize: 100_000, Image: "nginx:1", Node: "fake",
				Users: []string{"fake", "n2"}},
			{DiffID: layerOf("4"), Size: 8_000_000, BlobSize: 3_000_000, Image: "nginx:1", Node: "fake"},
		},
	}
	if after != nil {
		p.Store = spec.PoPStore{Path: "/mnt/pop", State: spec.PoPAway, Why: after.Error()}
		p.Coordinator = spec.PoPCoordinator{Kind: "redis", State: spec.PoPAway, Why: after.Error()}
		p.Nodes, p.Layers = []spec.PoPNode{}, []spec.PoPLayer{}
	}
	return p, nil
}

// PoPVerify implements api.PoPs. After FailAfter the second layer is damaged.
func (n *Node) PoPVerify(_ context.Context, layers []string, emit func(spec.PoPVerified) error) error {
	now, after := n.fault("PoPVerify")
	if now != nil {
		return now
	}
	all := []spec.PoPVerified{
		{DiffID: layerOf("2"), Image: "nginx:1", Size: 1_000_000, State: spec.PoPWhole},
		{DiffID: layerOf("4"), Image: "nginx:1", Size: 8_000_000, State: spec.PoPWhole},
	}
	if after != nil {
		all[1].State, all[1].Error = spec.PoPReplaced, after.Error()
	}
	found := map[string]spec.PoPVerified{}
	if len(layers) == 0 {
		layers = []string{layerOf("2"), layerOf("4")}
	}
	for _, v := range all {
		found[v.DiffID] = v
	}
	for _, id := range layers {
		v, ok := found[id]
		if !ok {
			return api.New(api.NotFound, fmt.Sprintf("%s: not in the PoP's store", id))
		}
		if err := emit(v); err != nil {
			return err
		}
	}
	return nil
}

// PoPForget implements api.PoPs: only n3 is gone.
func (n *Node) PoPForget(_ context.Context, name string) error {
	now, after := n.fault("PoPForget")
	switch {
	case now != nil:
		return now
	case name != "n3":
		return api.New(api.InUse, fmt.Sprintf("node %s: the node may live", name))
	}
	return after
}
