package member

import (
	"path/filepath"
	"testing"
	"time"

	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/registry"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"github.com/opencontainers/go-digest"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bed is a puller with a real store, before a real registry.
type bed struct {
	*fetch.Puller
	t       testing.TB
	reg     *registrytest.Server
	layers  *layer.Store
	catalog *fetch.Catalog
	dir     string // of the store
}

// newClient is a client of a registry.
func newClient(t testing.TB, reg *registrytest.Server) *registry.Client {
	t.Helper()
	client, err := registry.New(registry.Config{Hosts: map[string]registry.Host{reg.Host(): {PlainHTTP: true}},
		DockerConfig: filepath.Join(t.TempDir(), "none"), Backoff: time.Millisecond,
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

func (b *bed) has(id digest.Digest) bool {
	_, err := b.layers.Peek(id)
	return err == nil
}

// eventually waits for what happens in the background.
func (b *bed) eventually(what string, ok func() bool) {
	b.t.Helper()
	testkit.Eventually(b.t, what, ok)
}

func nobody(digest.Digest) bool { return false }
