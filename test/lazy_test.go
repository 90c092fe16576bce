package test

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"dewpoint/internal/image"
	"dewpoint/internal/pack"
	"dewpoint/internal/registry"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"github.com/opencontainers/go-digest"
)

// lazyImage is the test program with a layer of files that its start does not
// read, and a pack that holds what it does read.
type lazyImage struct {
	registrytest.Pushed
	files map[string]string // path in the image, and the sha256 of its contents
	pack  []byte
}

// pushLazy pushes such an image. The files take size bytes.
func pushLazy(t *testing.T, reg *registrytest.Server, name string, size int, c image.Compression) *lazyImage {
	t.Helper()
	li := &lazyImage{}
	layers := append(appLayers(t, 0), registrytest.Layer{Tar: li.mixed(size), Compression: c})
	li.Pushed = reg.PushImage(name, layers, appOptions())
	client := registryClient(t, reg)
	made := packs.of(t, li, client, layers)
	li.pack = made.bytes
	li.publish(t, client, made.bytes, made.header)
	return li
}

// packs are those that were made: all tests push the same few images.
var packs = madePacks{byImage: map[digest.Digest]madePack{}}

type madePacks struct {
	mu      sync.Mutex // held while one is made
	byImage map[digest.Digest]madePack
}

type madePack struct {
	bytes  []byte // nobody writes into them
	header digest.Digest
}

// of is the pack of an image that is in a registry: the program is read, nothing else.
func (p *madePacks) of(t *testing.T, li *lazyImage, client *registry.Client,
	layers []registrytest.Layer) madePack {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if have, ok := p.byImage[li.Digest]; ok {
		return have
	}
	profile := &pack.Profile{Version: 1, Image: li.Digest}
	in := pack.Input{Image: li.Digest, Dir: t.TempDir(), Profile: profile}
	for i, l := range li.Layers {
		profile.Layers = append(profile.Layers, l.DiffID)
		if i == 1 { // the program
			profile.Reads = append(profile.Reads, pack.Range{Layer: i, Length: int64(len(layers[i].Tar))})
		}
		in.Layers = append(in.Layers,
			pack.InputLayer{DiffID: l.DiffID, Blob: l.Digest, BlobSize: l.Size, Size: int64(len(layers[i].Tar)),
				Compression: l.Compression(), Data: bytes.NewReader(layers[i].Tar), Open: func() (io.ReadCloser, error) {
					return client.Open(t.Context(), reference(t, li.Ref), registry.Blob{Digest: l.Digest, Size: l.Size}, 0,
						-1, registry.OpenOptions{})
				}})
	}
	var b bytes.Buffer
	stats, err := pack.Build(t.Context(), &b, in)
	if err != nil {
		t.Fatal(err)
	}
	made := madePack{b.Bytes(), stats.Header}
	p.byImage[li.Digest] = made
	return made
}

// publish pushes a pack beside the image.
func (li *lazyImage) publish(t *testing.T, client *registry.Client, b []byte, header digest.Digest) {
	t.Helper()
	_, err := client.PushArtifact(t.Context(), reference(t, li.Ref),
		registry.Artifact{Type: pack.MediaType, Subject: li.Desc,
			Annotations: map[string]string{pack.AnnotationBlob: digest.FromBytes(b).String(),
				pack.AnnotationSize:   strconv.Itoa(len(b)),
				pack.AnnotationHeader: header.String()},
			Layers: []registry.ArtifactLayer{{MediaType: pack.MediaType, Digest: digest.FromBytes(b),
				Size: int64(len(b)),
				Open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil }}}})
	if err != nil {
		t.Fatal(err)
	}
}

// mixedTars are the tars that mixed has made, by size, and their files.
var mixedTars sync.Map

type mixedTar struct {
	tar   []byte
	files map[string]string
}

// mixed is a tar of files of changing nature, of a quarter MiB each, which are the image's from now on.
func (li *lazyImage) mixed(size int) []byte {
	if have, ok := mixedTars.Load(size); ok {
		m := have.(mixedTar)
		li.files = maps.Clone(m.files)
		return m.tar
	}
	li.files = map[string]string{}
	r := rand.New(rand.NewPCG(7, 1))
	files := []registrytest.File{{Name: "data/", Mode: 0o755}}
	for i := range size >> 18 {
		b := make([]byte, 1<<18)
		for j := range b {
			b[j] = byte(r.IntN(2+i*11%250)) + byte(i)
		}
		name := fmt.Sprintf("data/f%d", i)
		files = append(files, registrytest.File{Name: name, Body: string(b)})
		li.files["/"+name] = fmt.Sprintf("%x", sha256.Sum256(b))
	}
	m := mixedTar{registrytest.Tar(files...), maps.Clone(li.files)}
	mixedTars.Store(size, m)
	return m.tar
}

func registryClient(t *testing.T, reg *registrytest.Server) *registry.Client {
	t.Helper()
	c, err := registry.New(registry.Config{Hosts: map[string]registry.Host{reg.Host(): {PlainHTTP: true}},
		DockerConfig: filepath.Join(t.TempDir(), "none")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func reference(t *testing.T, s string) image.Reference {
	t.Helper()
	ref, err := image.ParseReference(s)
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

// read reads a file in the container that listens on port, and checks it.
func (li *lazyImage) read(t *testing.T, port, path string) {
	t.Helper()
	if got := fmt.Sprintf("%x",
		sha256.Sum256([]byte(get(t, "http://127.0.0.1:"+port+"/cat?"+path)))); got != li.files[path] {
		t.Errorf("%s in the container hashes to %s, not to %s", path, got, li.files[path])
	}
}

// served is the bytes of the big layer that the registry has given.
func (li *lazyImage) served(reg *registrytest.Server) int64 {
	return reg.Served(li.Layers[len(li.Layers)-1].Digest)
}

// An image with a pack starts with the pack alone, reads what is absent on
// demand, becomes whole behind that, and is then mounted from its own files.
func TestLazyRun(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"erofs", "loop", "tree"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			reg := registrytest.New(t)
			li := pushLazy(t, reg, "app:1", 32<<20, image.Gzip)
			before := li.served(reg)
			m := newMachine(t, reg)
			m.config = strings.Replace(m.config, "[node]\n", "[node]\nmount = \""+backend+"\"\n", 1) +
				"[lazy]\ndelay = \"2s\"\n"
			m.start()
			port := freePort(t)
			rec := m.record("run", "-d", "--name", "web", "--ready", "http:"+port+"/", li.Ref, "serve", port)
			if rec.Way.Pull != "lazy" {
				t.Fatalf("way: %+v", rec.Way)
			}
			if n := rec.Bytes.Registry; n > int64(len(li.pack))+100<<10 {
				t.Errorf("%d bytes came before it was ready, the pack has %d", n, len(li.pack))
			}
			li.read(t, port, "/data/f40")
			if n := li.served(reg) - before; n > 8<<20 { // two segments of a compressor that seldom begins a block
				t.Errorf("one file cost %d bytes of the layer", n)
			}
			m.awaitComplete()
			for path := range li.files {
				li.read(t, port, path)
			}
			m.must("rm", "-f", "web")
			rec = m.record("run", "-d", "--name", "web2", "--ready", "http:"+port+"/", li.Ref, "serve", port)
			if rec.Way.Pull != "local" {
				t.Errorf("the second way: %+v", rec.Way)
			}
			li.read(t, port, "/data/f3")
			m.must("rm", "-f", "web2")
		})
	}
}

// json is must for commands that print a document.
func (m *machine) json(v any, args ...string) {
	m.t.Helper()
	out := m.must(append([]string{"--json"}, args...)...)
	if err := json.Unmarshal([]byte(out), v); err != nil {
		m.t.Fatalf("dew %s: %v in %q", strings.Join(args, " "), err, out)
	}
}

// awaitComplete waits until all layers of the node are complete.
func (m *machine) awaitComplete() {
	m.t.Helper()
	testkit.Eventually(m.t, "images are complete", func() bool {
		var images []spec.Image
		m.json(&images, "images")
		complete := len(images) > 0
		for _, img := range images {
			for _, l := range img.Layers {
				complete = complete && l.State == spec.StateComplete
			}
		}
		return complete
	})
}

// What a start has waited for, since it was not here, is among the spans of its record.
func TestWaitsAreSpans(t *testing.T) {
	t.Parallel()
	b := newLazyBed(t, "erofs", off+noLearn)
	rec := b.record("run", "-d", "--name", "web", "--ready", "http:"+b.port+"/sum?"+file(40), b.li.Ref, "serve",
		b.port)
	if rec.Way.Pull != "lazy" {
		t.Fatalf("way: %+v", rec.Way)
	}
	waits, root := 0, spec.Span{}
	for _, s := range rec.Spans {
		switch s.Name {
		case "wait":
			waits++
			if s.To < s.From || s.From < 0 || !strings.HasPrefix(s.Attributes["layer"], "sha256:") ||
				s.Attributes["at"] == "" {
				t.Errorf("%+v", s)
			}
		case "deploy":
			root = s
		}
	}
	if waits == 0 || root.Attributes["waits"] == "" || root.Attributes["waited"] == "" {
		t.Errorf("%d waits; the root is %+v", waits, root)
	}
	b.must("rm", "-f", "web")
}
