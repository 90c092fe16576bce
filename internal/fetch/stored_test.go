package fetch

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/registry"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"github.com/opencontainers/go-digest"
)

// storedDir is a directory of blobs by their digests.
type storedDir string

func (d storedDir) Open(dgst digest.Digest) (*os.File, error) {
	return os.Open(filepath.Join(string(d), dgst.Encoded()))
}

// keep puts the blobs of an image there, each of which change may spoil.
func (d storedDir) keep(t *testing.T, b *bed, p registrytest.Pushed, change func(n int, blob []byte) []byte) {
	t.Helper()
	for n, l := range p.Layers {
		want := registry.Blob{Digest: l.Digest, Size: l.Size}
		r, err := b.cfg.Registry.Open(t.Context(), b.ref(p.Ref), want, 0, -1, registry.OpenOptions{})
		b.must(err)
		blob, err := io.ReadAll(r)
		b.must(errors.Join(err, r.Close()))
		file := filepath.Join(string(d), l.Digest.Encoded())
		b.must(os.WriteFile(file, change(n, blob), 0o600))
	}
}

func asIs(_ int, blob []byte) []byte { return blob }

// What lies in a content store on this node is not fetched; what is wrong there, is.
func TestStoredBlobs(t *testing.T) {
	spoilt := func(_ int, blob []byte) []byte {
		blob[len(blob)/2] ^= 1
		return blob
	}
	for name, c := range map[string]struct {
		change func(int, []byte) []byte
		fetch  func(p registrytest.Pushed) int64 // what crosses the link
	}{
		"whole":  {asIs, func(registrytest.Pushed) int64 { return 0 }},
		"spoilt": {spoilt, func(p registrytest.Pushed) int64 { return p.Layers[0].Size + p.Layers[1].Size }},
		"cut": {func(n int, blob []byte) []byte { return blob[:len(blob)-n] },
			func(p registrytest.Pushed) int64 { return p.Layers[1].Size }},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t)
			dir := storedDir(t.TempDir())
			b.cfg.Stored = dir
			p := b.push("a", 1, 2)
			dir.keep(t, b, p, c.change)
			pull, err := b.Pull(t.Context(), b.ref(p.Ref), Options{})
			b.must(err)
			b.must(pull.WaitComplete(t.Context()))
			var from Origins
			for _, l := range pull.Progress() {
				from.Local += l.From.Local
				from.Registry += l.From.Registry
			}
			all, want := p.Layers[0].Size+p.Layers[1].Size, c.fetch(p)
			if n := pull.Fetched(); n != want || from != (Origins{Local: all - want, Registry: want}) {
				t.Errorf("%d of %d bytes were fetched, want %d; %+v", n, all, want, from)
			}
		})
	}
}

// An image that is adopted comes without a request, and is known by its name from then on.
func TestAdopt(t *testing.T) {
	b := newBed(t)
	dir := storedDir(t.TempDir())
	p := pushTo(b.reg, "a", image.Zstd, 1, 2)
	ref := b.ref(p.Ref)
	img, err := b.resolve(t.Context(), ref, Options{}, b.newLookup(t.Context(), ref, Options{}))
	b.must(err)
	b.must(b.cfg.Catalog.Forget(ref))
	b.cfg.Stored = dir
	dir.keep(t, b, p, asIs)
	b.reg.Forget()
	// Others' adoptions take what there is of it: this one waits, until somebody waits for the image.
	slots := int64(runtime.GOMAXPROCS(0))
	b.must(b.storing.Acquire(t.Context(), slots))
	defer b.storing.Release(slots)
	pull, err := b.Adopt(t.Context(), img)
	b.must(err)
	testkit.Eventually(t, "the adoption has its turn", func() bool {
		pull.blobs[0].mu.Lock()
		defer pull.blobs[0].mu.Unlock()
		return pull.blobs[0].hurry != nil
	})
	if n := pull.blobs[0].had.Load(); n != 0 {
		t.Errorf("%d bytes were read while others adopt", n)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Limit)
	defer cancel()
	for _, l := range pull.blobs {
		l.raise(link.Startup, true)
	}
	b.must(pull.WaitComplete(ctx))
	if here, _ := b.PullIsLocal(img.Ref, Options{Local: true}); !here || len(b.reg.Requests()) > 0 {
		t.Errorf("here %t, after %d requests", here, len(b.reg.Requests()))
	}
}
