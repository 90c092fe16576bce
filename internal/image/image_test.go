package image

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// parts are the documents of an image, to be spoiled.
type parts struct {
	manifest ocispec.Manifest
	config   ocispec.Image
}

func someParts(layers int) parts {
	var p parts
	p.manifest.SchemaVersion = 2
	p.manifest.MediaType = ocispec.MediaTypeImageManifest
	p.manifest.Layers = []ocispec.Descriptor{}
	p.manifest.Config.MediaType = ocispec.MediaTypeImageConfig
	p.config.OS, p.config.Architecture = "linux", "amd64"
	p.config.RootFS = ocispec.RootFS{Type: "layers"}
	for n := range layers {
		p.manifest.Layers = append(p.manifest.Layers, ocispec.Descriptor{
			MediaType: ocispec.MediaTypeImageLayerGzip, Digest: digest.FromString(fmt.Sprint("blob", n)),
			Size: int64(n + 100),
		})
		p.config.RootFS.DiffIDs = append(p.config.RootFS.DiffIDs, digest.FromString(fmt.Sprint("tar", n)))
	}
	return p
}

func marshal(t testing.TB, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func describe(mediaType string, b []byte) ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(b), Size: int64(len(b))}
}

func (p parts) image(t testing.TB) (*Image, error) {
	t.Helper()
	config := marshal(t, p.config)
	d := describe(p.manifest.Config.MediaType, config)
	p.manifest.Config.Digest, p.manifest.Config.Size = d.Digest, d.Size
	manifest := marshal(t, p.manifest)
	desc := describe(p.manifest.MediaType, manifest)
	ref, err := ParseReference("example.com/a/b:1")
	if err != nil {
		t.Fatal(err)
	}
	return New(ref, desc, nil, desc, manifest, config)
}

func TestNew(t *testing.T) {
	img, err := someParts(3).image(t)
	if err != nil {
		t.Fatal(err)
	}
	if len(img.Layers) != 3 || img.Layers[2].Compression() != Gzip || img.Size() != 303 ||
		img.Platform().Architecture != "amd64" {
		t.Fatalf("%+v", img)
	}
	if empty, err := someParts(0).image(t); err != nil || len(empty.Layers) != 0 || len(empty.ChainIDs()) != 0 {
		t.Fatal(empty, err)
	}
}

func TestRepeatedLayer(t *testing.T) {
	p := someParts(3)
	p.manifest.Layers[2] = p.manifest.Layers[0]
	p.config.RootFS.DiffIDs[2] = p.config.RootFS.DiffIDs[0]
	img, err := p.image(t)
	if err != nil {
		t.Fatal(err)
	}
	if len(img.Layers) != 3 || len(img.Unique()) != 2 || img.Size() != 201 {
		t.Fatal(len(img.Unique()), img.Size())
	}
}

func TestChainIDs(t *testing.T) {
	img, err := someParts(2).image(t)
	if err != nil {
		t.Fatal(err)
	}
	a, b := img.Layers[0].DiffID, img.Layers[1].DiffID
	want := []digest.Digest{a, digest.FromString(a.String() + " " + b.String())}
	if got := img.ChainIDs(); !reflect.DeepEqual(got, want) {
		t.Fatalf("got %v, want %v", got, want)
	}
	if img.Layers[0].DiffID != a {
		t.Fatal("ChainIDs changed the image")
	}
}

func TestNewRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		spoil func(*parts)
		want  error
		says  string
	}{
		"too few diff_ids": {func(p *parts) {
			p.config.RootFS.DiffIDs = p.config.RootFS.DiffIDs[1:]
		}, ErrInvalid, "diff_ids"},
		"no diff_ids": {func(p *parts) { p.config.RootFS = ocispec.RootFS{} }, ErrInvalid, "diff_ids"},
		"rootfs type": {func(p *parts) { p.config.RootFS.Type = "clay" }, ErrInvalid, "clay"},
		"bad diff_id": {func(p *parts) { p.config.RootFS.DiffIDs[0] = "sha256:xyz" }, ErrInvalid, "diff_id"},
		"sha512 diff_id": {func(p *parts) {
			p.config.RootFS.DiffIDs[0] = digest.SHA512.FromString("")
		}, ErrUnsupported, "sha512"},
		"sha512 layer": {func(p *parts) {
			p.manifest.Layers[0].Digest = digest.SHA512.FromString("")
		}, ErrUnsupported, "sha512"},
		"no layer digest": {func(p *parts) { p.manifest.Layers[1].Digest = "" }, ErrInvalid, "layer 2"},
		"negative size":   {func(p *parts) { p.manifest.Layers[0].Size = -1 }, ErrInvalid, "size"},
		"absurd size":     {func(p *parts) { p.manifest.Layers[0].Size = MaxLayer + 1 }, ErrInvalid, "size"},
		"encrypted": {func(p *parts) {
			p.manifest.Layers[0].MediaType += "+encrypted"
		}, ErrUnsupported, "encrypted"},
		"unknown layer": {func(p *parts) {
			p.manifest.Layers[0].MediaType = "application/x"
		}, ErrUnsupported, "application/x"},
		"Windows base": {func(p *parts) {
			p.manifest.Layers[0].MediaType = DockerForeignLayer + ".gzip"
		}, ErrUnsupported, "non-distributable"},
		"not distributable, with URLs": {undistributedOCI, ErrUnsupported, "non-distributable"},
		"two sizes": {func(p *parts) {
			p.manifest.Layers[1].Digest = p.manifest.Layers[0].Digest
		}, ErrInvalid, "occurs"},
		"artifact": {func(p *parts) {
			p.manifest.Config.MediaType = "application/vnd.cncf.helm.config.v1+json"
		}, ErrUnsupported, "helm"},
	} {
		t.Run(name, func(t *testing.T) {
			p := someParts(2)
			tc.spoil(&p)
			_, err := p.image(t)
			if !errors.Is(err, tc.want) || !strings.Contains(fmt.Sprint(err), tc.says) {
				t.Fatalf("got %v", err)
			}
		})
	}
	if _, err := someParts(MaxLayers + 1).image(t); !errors.Is(err, ErrUnsupported) {
		t.Fatal(err)
	}
	if _, err := someParts(MaxLayers).image(t); err != nil {
		t.Fatal(err)
	}
}

func undistributedOCI(p *parts) {
	p.manifest.Layers[0].MediaType = layerNonDistributable + "+gzip"
	p.manifest.Layers[0].URLs = []string{"https://elsewhere.example/"}
}

func TestNewVerifiesBytes(t *testing.T) {
	img, err := someParts(1).image(t)
	if err != nil {
		t.Fatal(err)
	}
	for _, spoil := range []func(*Image){
		func(i *Image) { i.Manifest = append([]byte(" "), i.Manifest...) },
		func(i *Image) { i.Config = append(i.Config[:len(i.Config):len(i.Config)], ' ') },
		func(i *Image) { i.Desc.Size++; i.Target.Size++ },
	} {
		bad := *img
		spoil(&bad)
		if _, err := New(bad.Ref, bad.Target, bad.Index, bad.Desc, bad.Manifest, bad.Config); !errors.Is(err,
			ErrMismatch) {
			t.Fatal(err)
		}
	}
}

func TestSHA512Manifest(t *testing.T) {
	img, err := someParts(1).image(t)
	if err != nil {
		t.Fatal(err)
	}
	d := img.Desc
	d.Digest = digest.SHA512.FromBytes(img.Manifest)
	if _, err := New(img.Ref, d, nil, d, img.Manifest, img.Config); err != nil {
		t.Fatal(err)
	}
}

func TestRecord(t *testing.T) {
	img, err := someParts(2).image(t)
	if err != nil {
		t.Fatal(err)
	}
	d := img.Desc
	d.Platform = &ocispec.Platform{OS: "linux", Architecture: "amd64"}
	var idx ocispec.Index
	idx.SchemaVersion, idx.Manifests = 2, []ocispec.Descriptor{d}
	index := marshal(t, idx)
	indexed, err := New(img.Ref, describe(ocispec.MediaTypeImageIndex, index), index, d, img.Manifest,
		img.Config)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []*Image{img, indexed} {
		b := marshal(t, want)
		var got *Image
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("got %+v, want %+v", got, want)
		}
		damaged := strings.Replace(string(b), `"size":`, `"size":1`, 1)
		if err := json.Unmarshal([]byte(damaged), &got); err == nil {
			t.Fatal("a damaged record was read")
		}
	}
}

func TestKindOf(t *testing.T) {
	for doc, want := range map[string]Kind{
		`{"schemaVersion":2,"manifests":[]}`:                                                            Index,
		`{"schemaVersion":2,"mediaType":"` + DockerManifestList + `","manifests":[]}`:                   Index,
		`{"schemaVersion":2,"config":{},"layers":[]}`:                                                   Manifest,
		`{"schemaVersion":2,"mediaType":"` + DockerManifest + `","config":{},"layers":[]}`:              Manifest,
		`{"schemaVersion":2,"manifests":[],"layers":[]}`:                                                Unknown,
		`{"schemaVersion":2,"mediaType":"` + DockerManifest + `","manifests":[]}`:                       Unknown,
		`{"schemaVersion":2,"mediaType":"` + ocispec.MediaTypeImageIndex + `","config":{},"layers":[]}`: Unknown,
		`{"schemaVersion":1,"fsLayers":[]}`:                                                             Unknown,
		`{"schemaVersion":3,"manifests":[]}`:                                                            Unknown,
		`{"schemaVersion":2}`:                                                                           Unknown,
		`{"schemaVersion":2,"manifests":null,"layers":null}`:                                            Unknown,
		`[]`: Unknown, ``: Unknown, `{`: Unknown, `null`: Unknown, `<html>`: Unknown,
		`{"schemaVersion":2,"manifests":[]}{}`: Unknown,
	} {
		got, err := KindOf([]byte(doc))
		if got != want || (err == nil) != (want != Unknown) {
			t.Errorf("%s: %d %v", doc, got, err)
		}
	}
	if _, err := KindOf([]byte(`{"schemaVersion":1}`)); !errors.Is(err, ErrUnsupported) {
		t.Error(err)
	}
	if _, err := KindOf(make([]byte, MaxManifest+1)); !errors.Is(err, ErrTooLarge) {
		t.Error(err)
	}
}

func TestMediaType(t *testing.T) {
	for _, tc := range [][3]string{
		{`{"schemaVersion":2,"layers":[]}`, DockerManifest, DockerManifest},
		{`{"schemaVersion":2,"layers":[]}`, "text/plain", ocispec.MediaTypeImageManifest},
		{`{"schemaVersion":2,"layers":[]}`, DockerManifestList, ocispec.MediaTypeImageManifest},
		{`{"schemaVersion":2,"manifests":[]}`, "", ocispec.MediaTypeImageIndex},
		{`{"schemaVersion":2,"mediaType":"` + DockerManifestList + `","manifests":[]}`, ocispec.MediaTypeImageIndex,
			DockerManifestList},
	} {
		if got, err := MediaType([]byte(tc[0]), tc[1]); got != tc[2] || err != nil {
			t.Errorf("%s served as %q: %s %v", tc[0], tc[1], got, err)
		}
	}
}

func TestSelect(t *testing.T) {
	entry := func(platform string) ocispec.Descriptor {
		d := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromString(platform)}
		if platform != "" {
			p, err := ParsePlatform(platform)
			if err != nil {
				t.Fatal(err)
			}
			d.Platform = &p
		}
		return d
	}
	attest := entry("linux/amd64")
	attest.Digest = "attestation"
	attest.Annotations = map[string]string{"vnd.docker.reference.type": "attestation-manifest"}
	unknown := entry("")
	unknown.Platform = &ocispec.Platform{OS: "unknown", Architecture: "unknown"}
	for _, tc := range []struct {
		has  string
		want string
		got  string // "" is none
	}{
		{"linux/amd64 linux/arm64", "linux/arm64", "linux/arm64"},
		{"linux/arm/v5 linux/arm/v6 linux/arm/v7", "linux/arm/v7", "linux/arm/v7"},
		{"linux/arm/v5 linux/arm/v6", "linux/arm/v7", "linux/arm/v6"},
		{"linux/arm/v7", "linux/arm/v6", ""},
		{"linux/arm64/v8", "linux/arm64", "linux/arm64/v8"},
		{"linux/arm64", "linux/arm64/v8", "linux/arm64"},
		{"windows/amd64", "linux/amd64", ""},
		{"linux/amd64", "linux/amd64/v3", "linux/amd64"},
		{"linux/amd64 linux/amd64/v3", "linux/amd64/v3", "linux/amd64/v3"},
		{"linux/amd64 linux/amd64/v3", "linux/amd64", "linux/amd64"},
		{"", "linux/amd64", ""},
	} {
		idx := ocispec.Index{Manifests: []ocispec.Descriptor{attest, unknown}}
		for _, p := range strings.Fields(tc.has) {
			idx.Manifests = append(idx.Manifests, entry(p))
		}
		want, err := ParsePlatform(tc.want)
		if err != nil {
			t.Fatal(err)
		}
		got, err := Select(idx, want)
		if tc.got == "" {
			if !errors.Is(err, ErrPlatform) {
				t.Errorf("%s of %s: %v", tc.want, tc.has, err)
			}
		} else if err != nil || got.Digest != digest.FromString(tc.got) {
			t.Errorf("%s of %s: %+v %v", tc.want, tc.has, got.Platform, err)
		}
	}
	bare := entry("")
	if got, err := Select(ocispec.Index{Manifests: []ocispec.Descriptor{attest, bare}},
		DefaultPlatform()); err != nil || got.Digest != bare.Digest {
		t.Error(got, err)
	}
}

func TestSniff(t *testing.T) {
	for s, want := range map[string]Compression{
		"\x1f\x8b\x08\x00": Gzip, "\x28\xb5\x2f\xfd": Zstd, "\x50\x2a\x4d\x18": Zstd, "\x5f\x2a\x4d\x18": Zstd,
		"\x60\x2a\x4d\x18": Plain, "etc/": Plain, "": Plain, "\x1f": Plain, "\x50\x2a\x4d": Plain,
		"\x28\xb5\x2f": Plain,
	} {
		if got := Sniff([]byte(s)); got != want {
			t.Errorf("%q: %s, want %s", s, got, want)
		}
	}
}

func TestLayerTypes(t *testing.T) {
	for mediaType, want := range map[string]Compression{
		"application/vnd.docker.image.rootfs.diff.tar.gzip": Gzip,
		"application/vnd.docker.image.rootfs.diff.tar.zstd": Zstd,
		"application/vnd.docker.image.rootfs.diff.tar":      Plain,
		"application/vnd.oci.image.layer.v1.tar+gzip":       Gzip,
		"application/vnd.oci.image.layer.v1.tar+zstd":       Zstd,
		"application/vnd.oci.image.layer.v1.tar":            Plain,
		"application/vnd.oci.image.layer.v1.tar+bzip2":      "",
	} {
		if got := (Layer{MediaType: mediaType}).Compression(); got != want {
			t.Errorf("%s: %q", mediaType, got)
		}
	}
}

func TestEmptyLayers(t *testing.T) {
	for _, size := range []int{0, 1024, 10240} {
		if !(Layer{DiffID: digest.FromBytes(make([]byte, size))}).Empty() {
			t.Errorf("%d zero bytes are an empty tar", size)
		}
	}
	if (Layer{DiffID: digest.FromString("x")}).Empty() {
		t.Error("not empty")
	}
}

func TestReference(t *testing.T) {
	d := digest.FromString("x").String()
	for in, want := range map[string]string{
		"nginx":                       "docker.io/library/nginx:latest",
		"a/b:1":                       "docker.io/a/b:1",
		"10.77.255.1:5000/nginx:1":    "10.77.255.1:5000/nginx:1",
		"localhost/x":                 "localhost/x:latest",
		"ghcr.io/a/b@" + d:            "ghcr.io/a/b@" + d,
		"ghcr.io/a/b:tag@" + d:        "ghcr.io/a/b@" + d,
		"[::1]:5000/x":                "[::1]:5000/x:latest",
		"index.docker.io/library/x:1": "docker.io/library/x:1",
	} {
		r, err := ParseReference(in)
		if err != nil || r.String() != want {
			t.Errorf("%s: %s %v", in, r, err)
		}
		var back Reference
		if err := back.UnmarshalText([]byte(want)); err != nil || back != r {
			t.Errorf("%s does not survive: %+v %v", in, back, err)
		}
	}
	for _, in := range []string{"example.c_m/a/b:1", "", "x/UPPER", "a b", "x@sha256:1", "../x"} {
		if r, err := ParseReference(in); err == nil {
			t.Errorf("%q is %s", in, r)
		}
	}
	var zero Reference
	if b := marshal(t, zero); string(b) != `""` {
		t.Errorf("zero is %s", b)
	}
}

func FuzzManifest(f *testing.F) {
	p := someParts(2)
	f.Add(marshal(f, p.manifest), marshal(f, p.config))
	f.Add([]byte(`{"schemaVersion":2,"manifests":[{"platform":{}}]}`), []byte(`{}`))
	f.Add([]byte(`{"schemaVersion":1,"fsLayers":[]}`), []byte(`null`))
	f.Fuzz(func(t *testing.T, manifest, config []byte) {
		if idx, err := ParseIndex(manifest); err == nil {
			if d, err := Select(idx, DefaultPlatform()); err == nil && d.Digest.Validate() != nil {
				t.Fatal(d.Digest)
			}
		}
		if _, err := ParseManifest(manifest); err != nil {
			return
		}
		// Let the documents fit each other, so that what lies behind the
		// digests is reached too.
		var m map[string]any
		if json.Unmarshal(manifest, &m) != nil {
			return
		}
		m["config"] = describe("", config)
		manifest = marshal(t, m)
		d := describe("", manifest)
		img, err := New(Reference{}, d, nil, d, manifest, config)
		if err != nil {
			return
		}
		if len(img.Layers) != len(img.Spec.RootFS.DiffIDs) || len(img.ChainIDs()) != len(img.Layers) {
			t.Fatal("layers and diffIDs differ")
		}
		for _, l := range img.Layers {
			if l.Size < 0 || l.Compression() == "" || l.DiffID.Validate() != nil || l.Digest.Validate() != nil {
				t.Fatalf("%+v", l)
			}
		}
		var back Image
		if err := json.Unmarshal(marshal(t, img), &back); err != nil ||
			!reflect.DeepEqual(back.Layers, img.Layers) {
			t.Fatal(err)
		}
	})
}

func FuzzReference(f *testing.F) {
	for _, s := range []string{"nginx", "a.b:5000/c/d:e", "x@sha256:" + strings.Repeat("a", 64), "[::1]:1/x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseReference(s)
		if err != nil {
			return
		}
		back, err := ParseReference(r.String())
		if err != nil || back != r || r.Object() == "" || strings.Contains(r.Path, "..") {
			t.Fatal(r, back, err)
		}
	})
}
