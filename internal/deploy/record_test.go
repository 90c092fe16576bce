package deploy

import (
	"testing"

	"dewpoint/internal/fetch"
	"dewpoint/internal/layer"
)

// The way is "pop" when the registry gave nothing of what came.
func TestWayOf(t *testing.T) {
	come := func(s layer.State, from fetch.Origins) fetch.LayerProgress {
		return fetch.LayerProgress{Progress: layer.Progress{State: s}, From: from}
	}
	here := come(layer.Complete, fetch.Origins{Local: 9})
	store := come(layer.Complete, fetch.Origins{PoP: 9})
	peer := come(layer.Readable, fetch.Origins{PoP: 7, Local: 2})
	fetched := come(layer.Complete, fetch.Origins{Registry: 9})
	both := come(layer.Complete, fetch.Origins{PoP: 4, Registry: 5})
	way := func(layers ...fetch.LayerProgress) []fetch.LayerProgress { return layers }
	for _, c := range []struct {
		local, lazy bool
		layers      []fetch.LayerProgress
		want        string
	}{
		{true, false, way(here, here), "local"},
		{true, false, way(here, store), "pop"},
		{true, false, nil, "local"},
		{false, false, way(here, store, peer), "pop"},
		{false, false, way(peer), "pop"},
		{false, false, way(store, fetched), "whole"},
		{false, false, way(store, both), "whole"},
		{false, false, way(fetched), "whole"},
		{false, false, way(here), "whole"}, // an earlier pull's bytes, which did not make a layer yet
		{false, false, way(store, come(layer.Filling, fetch.Origins{PoP: 3})), "whole"},
		{false, true, way(fetched, store), "lazy"},
		{true, true, way(here), "local"},
	} {
		if got := wayOf(c.local, c.lazy, c.layers); got != c.want {
			t.Errorf("local %t, lazy %t, %+v: %s, want %s", c.local, c.lazy, c.layers, got, c.want)
		}
	}
}

// What came uncompressed counts as the compressed bytes that it saved.
func TestHere(t *testing.T) {
	l := fetch.LayerProgress{Progress: layer.Progress{Fetched: 3}}
	l.Layer.Size = 10
	if n := here(l); n != 3 {
		t.Errorf("%d", n)
	}
	if l.From = (fetch.Origins{Registry: 3, PoP: 7}); here(l) != 10 {
		t.Errorf("%d", here(l))
	}
}
