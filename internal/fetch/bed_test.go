package fetch

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/registry"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"github.com/opencontainers/go-digest"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bed is a puller with a real store, before one or more real registries.
type bed struct {
	*Puller
	t      testing.TB
	reg    *registrytest.Server
	layers *layer.Store
	dir    string // of the store
}

func newBed(t testing.TB, more ...*registrytest.Server) *bed {
	t.Helper()
	b := &bed{t: t, reg: registrytest.New(t), dir: filepath.Join(t.TempDir(), "layers")}
	client := newClient(t, filepath.Join(t.TempDir(), "none"), append(more, b.reg)...)
	var err error
	b.layers, err = layer.Open(layer.Config{Dir: b.dir})
	b.must(err)
	t.Cleanup(func() { b.must(b.layers.Close()) })
	catalog, err := OpenCatalog(t.TempDir(), nil)
	b.must(err)
	b.Puller = NewPuller(Config{Registry: client, Layers: b.layers, Catalog: catalog,
		Link: link.New(link.Config{Inflaters: 1})})
	b.fresh = 0
	t.Cleanup(func() { b.must(b.Close()) })
	return b
}

// newClient is a client of the registries, with the logins of a file.
func newClient(t testing.TB, logins string, regs ...*registrytest.Server) *registry.Client {
	t.Helper()
	hosts := map[string]registry.Host{}
	for _, r := range regs {
		hosts[r.Host()] = registry.Host{PlainHTTP: true}
	}
	client, err := registry.New(registry.Config{Hosts: hosts, DockerConfig: logins, Backoff: time.Millisecond,
		StallTimeout: 1500 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	return client
}

func (b *bed) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// push makes an image of one layer for each seed.
func (b *bed) push(name string, seeds ...uint64) registrytest.Pushed {
	return pushTo(b.reg, name, image.Gzip, seeds...)
}

func pushTo(reg *registrytest.Server, name string, c image.Compression, seeds ...uint64) registrytest.Pushed {
	var ls []registrytest.Layer
	for _, s := range seeds {
		ls = append(ls, registrytest.Layer{Tar: registrytest.RandomTar(s, 4, 200<<10), Compression: c})
	}
	return reg.PushImage(name, ls, registrytest.Options{})
}

func (b *bed) ref(s string) image.Reference {
	b.t.Helper()
	r, err := image.ParseReference(s)
	b.must(err)
	return r
}

// pull brings a whole image and lets go of it.
func (b *bed) pull(p registrytest.Pushed) *image.Image {
	b.t.Helper()
	ctx, cancel := context.WithCancel(b.t.Context())
	defer cancel()
	pull, err := b.Pull(ctx, b.ref(p.Ref), Options{})
	b.must(err)
	b.must(pull.WaitComplete(ctx))
	cancel()
	b.eventually("the end of the pull's hold", func() bool {
		b.holds.mu.Lock()
		defer b.holds.mu.Unlock()
		return !b.holds.pulls[pull]
	})
	return pull.Image
}

func (b *bed) has(id digest.Digest) bool {
	_, err := b.layers.Peek(id)
	return err == nil
}

// leave makes what a pull that was cut so long ago would have left.
func (b *bed) leave(id digest.Digest, size int, age time.Duration) string {
	b.t.Helper()
	dir := filepath.Join(b.dir, id.Encoded())
	b.must(os.Mkdir(dir, 0o755))
	b.must(os.WriteFile(filepath.Join(dir, "data"), make([]byte, size), 0o600))
	then := time.Now().Add(-age)
	b.must(os.Chtimes(dir, then, then))
	return dir
}

func there(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func (b *bed) want(p registrytest.Pushed, layer int) Want {
	return Want{Ref: b.ref(p.Ref), Manifest: p.Digest, Layer: p.Layers[layer].Digest}
}

func (b *bed) eventually(what string, ok func() bool) {
	b.t.Helper()
	testkit.Eventually(b.t, what, ok)
}
