package adopt

import (
	"fmt"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
)

// Who has an image by its digest alone, as the kubelet does, gets it with those who have it by a tag.
func TestJoinUntagged(t *testing.T) {
	one, other := digest.FromString("1"), digest.FromString("2")
	f := func(ref string, d digest.Digest, namespaces ...string) found {
		r, err := image.ParseReference(ref)
		if err != nil {
			t.Fatal(err)
		}
		return found{r, ocispec.Descriptor{Digest: d}, namespaces}
	}
	name := "example.com/app@"
	got := joinUntagged([]found{
		f(name+one.String(), one, "k8s.io", "moby"), f("example.com/app:1", one, "default", "moby"),
		f(name+other.String(), other, "k8s.io"),
	})
	var all []string
	for _, f := range got {
		all = append(all, fmt.Sprint(f.ref.Tag, f.namespaces))
	}
	if want := "[1[default moby k8s.io] [k8s.io]]"; fmt.Sprint(all) != want {
		t.Errorf("%v, want %s", all, want)
	}
}

// An image without layers has no snapshot that a namespace could lack.
func TestWithoutLayers(t *testing.T) {
	store, err := layer.Open(layer.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	a := New(Config{Layers: store})
	none := new(image.Image)
	if !a.unpackedHere(t.Context(), found{namespaces: []string{"default"}}, none) || !a.has(none) {
		t.Error("an image without layers lacks something")
	}
	if a.has(&image.Image{Layers: []image.Layer{{DiffID: digest.FromString("1")}}}) {
		t.Error("a layer that never came is here")
	}
}
