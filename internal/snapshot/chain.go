package snapshot

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/containerd/v2/pkg/snapshotters"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
)

// extraction is a snapshot that containerd asks for in order to put one layer
// of an image into it.
type extraction struct {
	chain  digest.Digest // that it wants to commit
	below  digest.Digest // the parent's chain, "" for the bottom layer
	labels map[string]string
}

// fits says whether a layer on top of the parent's chain makes the chain that
// is wanted. Nothing becomes an image layer without it.
func (e extraction) fits(diffID digest.Digest) bool {
	if e.below == "" {
		return e.chain == diffID
	}
	return e.chain == identity.ChainID([]digest.Digest{e.below, diffID})
}

// extractionOf recognises an extraction by its label or, where the client
// gives none (image.Unpack), by its key: "extract-UNIQUE CHAIN", which
// containerd's metadata store prefixes with "NAMESPACE/NUMBER/".
func extractionOf(ctx context.Context, key, parent string, labels map[string]string) (extraction, bool) {
	chain, ok := chainOf(key, labels)
	if !ok || !isExtraction(key, labels) {
		return extraction{}, false
	}
	e := extraction{chain: chain, labels: labels}
	if parent == "" {
		return e, true
	}
	_, info, _, err := storage.GetInfo(ctx, parent)
	if err != nil {
		return extraction{}, false
	}
	e.below, ok = chainOf(parent, info.Labels)
	return e, ok
}

func isExtraction(key string, labels map[string]string) bool {
	if labels[snapshots.LabelSnapshotRef] != "" {
		return true
	}
	_, rest, _ := strings.Cut(key, "/")
	_, rest, _ = strings.Cut(rest, "/")
	return strings.HasPrefix(key, snapshots.UnpackKeyPrefix+"-") ||
		strings.HasPrefix(rest, snapshots.UnpackKeyPrefix+"-")
}

// chainOf returns the chain that a snapshot stands for, or is to stand for:
// its label, else the digest that its name ends with.
func chainOf(name string, labels map[string]string) (digest.Digest, bool) {
	if ref := labels[snapshots.LabelSnapshotRef]; ref != "" {
		return parseDigest(ref)
	}
	return parseDigest(name[strings.LastIndexAny(name, " /")+1:])
}

func parseDigest(s string) (digest.Digest, bool) {
	d, err := digest.Parse(s)
	return d, err == nil
}

// find returns the diffID of the layer that an extraction is for, if it is
// here or, when containerd says which image it belongs to and fetch is set,
// can be fetched. Without an error the layer fits.
func (s *Snapshotter) find(ctx context.Context, e extraction, fetch bool) (digest.Digest, error) {
	ids, err := s.layers.Chain(ctx, e.chain)
	if err == nil && len(ids) > 0 {
		return e.check(ids[len(ids)-1])
	}
	if err != nil && !errors.Is(err, ErrNotHere) {
		return "", err
	}
	if id, ok := parseDigest(e.labels[snapshots.LabelSnapshotDiffID]); ok && e.fits(id) {
		if s.layers.HasLayer(id) {
			return id, nil
		}
	}
	w, ok := wantOf(e)
	if !ok || !fetch {
		return "", ErrNotHere
	}
	id, err := s.layers.Fetch(ctx, w)
	if err != nil {
		return "", err
	}
	return e.check(id)
}

func (e extraction) check(id digest.Digest) (digest.Digest, error) {
	if !e.fits(id) {
		return "", fmt.Errorf("layer %s on %q is not chain %s", id, e.below, e.chain)
	}
	return id, nil
}

// wantOf reads the labels that name the image; without an image's reference
// and the layer's digest there is nothing to fetch.
func wantOf(e extraction) (Want, bool) {
	w := Want{Ref: e.labels[snapshotters.TargetRefLabel], Chain: e.chain}
	var ok bool
	if w.Layer, ok = parseDigest(e.labels[snapshotters.TargetLayerDigestLabel]); !ok || w.Ref == "" {
		return Want{}, false
	}
	w.Manifest, _ = parseDigest(e.labels[snapshotters.TargetManifestDigestLabel])
	w.DiffID, _ = parseDigest(e.labels[snapshots.LabelSnapshotDiffID])
	for _, l := range strings.Split(e.labels[snapshotters.TargetImageLayersLabel], ",") {
		if d, ok := parseDigest(strings.TrimSpace(l)); ok {
			w.Layers = append(w.Layers, d)
		}
	}
	if !slices.Contains(w.Layers, w.Layer) {
		w.Layers = slices.Insert(w.Layers, 0, w.Layer)
	}
	return w, true
}

// gather applies opts to an empty Info, without the labels that are ours.
func gather(opts []snapshots.Opt) (snapshots.Info, error) {
	var info snapshots.Info
	for _, opt := range opts {
		if err := opt(&info); err != nil {
			return info, err
		}
	}
	if info.Labels != nil {
		info.Labels = maps.Clone(info.Labels)
		delete(info.Labels, LabelLayer)
		delete(info.Labels, LabelMount)
	}
	return info, nil
}
