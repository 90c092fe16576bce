package member

import (
	"context"
	"path/filepath"
	"testing"

	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"
)

// A layer that is one zstd frame goes on from the compressed bytes that a dead node has left in the
// store; wrong ones are found out, and nothing of them stays.
func TestTakeOverOfOneFrame(t *testing.T) {
	testkit.Long(t)
	for name, flip := range map[string]bool{"as they were": false, "flipped": true} {
		t.Run(name, func(t *testing.T) {
			s := newPoPBed(t)
			s.every = 128 << 10
			a := s.node("a", nil)
			p := s.reg.PushImage("app",
				[]registrytest.Layer{{Tar: registrytest.RandomTar(1, 8, 6<<20), Compression: image.Zstd}},
				registrytest.Options{})
			l := p.Layers[0]
			s.reg.Fail(registrytest.Fault{Do: registrytest.Stall, At: l.Size * 3 / 4, Digest: l.Digest, Times: 1})
			s.reg.Fail(registrytest.Fault{Do: registrytest.Hang, Digest: l.Digest, Skip: 1})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			_, err := a.Pull(ctx, a.ref(p.Ref), fetch.Options{})
			a.must(err)
			a.eventually("most of it is kept", func() bool {
				c, err := a.member.usable().Checkpoint(ctx, l.DiffID)
				if err != nil {
					return false
				}
				defer c.Close()
				return c.Size == 0 && c.Kept.From == 0 && c.Kept.To > l.Size*5/8
			})
			s.hub.Cut("a", true)
			cancel()
			s.reg.Heal()
			b := s.node("b", nil)
			if flip {
				kept, err := filepath.Glob(filepath.Join(s.store, "layers", "*.blob"))
				a.must(err)
				for _, path := range kept {
					s.flip(path)
				}
			}
			from := b.bring(p)[0].From
			if n := s.served(p); !flip &&
				(n > l.Size*9/8 || from.PoP < l.Size*5/8 || from.PoP+from.Registry != l.Size) {
				t.Errorf("of %d bytes the registry sent %d: %+v", l.Size, n, from)
			}
			if n := s.served(p); flip && n < l.Size*7/4 {
				t.Errorf("of %d bytes the registry sent %d", l.Size, n)
			}
			rec := b.published(l.DiffID)
			b.must(b.member.usable().Verify(t.Context(), rec, 0))
			s.hub.Cut("a", false)
			b.eventually("nothing else is there", func() bool {
				_, err := b.member.usable().Sweep(t.Context())
				b.must(err)
				left, err := filepath.Glob(filepath.Join(s.store, "layers", "*"))
				b.must(err)
				fills, err := filepath.Glob(filepath.Join(s.store, "fill", "*"))
				b.must(err)
				return len(left) == 3 && len(fills) == 0 // record, tar and table
			})
		})
	}
}
