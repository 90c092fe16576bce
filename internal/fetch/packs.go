package fetch

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pack"
	"dewpoint/internal/registry"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// PackConfig says where packs come from and which of them are believed.
type PackConfig struct {
	Dir string // packs that were made here; "" is none
	// Trust is the policy for packs of registries: "pop" uses none, "signed"
	// those with a valid signature by Key, "repository" any that the image's
	// repository has. "" is "repository" for images named by tag and "signed"
	// for those named by digest.
	Trust string
	Key   ed25519.PublicKey // nil: no signature is valid
	// MaxBytes bounds the packs in Dir; 0 is 1 GiB. Those that were not used for
	// the longest go first.
	MaxBytes int64
}

// The values of PackConfig.Trust, and of what a record says of a pack.
const (
	TrustPoP        = "pop"
	TrustSigned     = "signed"
	TrustRepository = "repository"
)

// packs are the startup packs of this node and of registries: where one is, and whether it is believed.
type packs struct {
	*common

	mu  sync.Mutex
	bad map[digest.Digest]string // why packs with wrong bytes are not used, by manifest
}

// errNoPack says that an image has no pack, as most have not.
var errNoPack = errors.New("the image has no startup pack")

// packFile is a pack that can be read.
type packFile struct {
	size  int64
	local bool
	// passed says that what is read of it is passed on to other nodes, so all is to be.
	passed bool
	about  map[string]string // annotations
	open   OpenPack
}

// packLookup bounds the search for a pack in a registry: a start does not wait
// longer for what it can do without.
const packLookup = 5 * time.Second

// lookup is a search for a pack that begins while the image is still being
// resolved: what crosses the link at the same time costs one round trip.
type lookup struct {
	p    *packs
	ctx  context.Context
	ref  image.Reference
	o    Options
	done chan struct{} // closed when the search has ended; nil before begin

	manifest digest.Digest
	found    *packFile
	err      error

	recorded func() error // returns when the image is recorded durably; nil if it is
	begun    any          // what Source.Resolve has begun
}

// settle waits until the image is recorded, if that is under way.
func (l *lookup) settle() {
	if l.recorded == nil {
		return
	}
	if err := l.recorded(); err != nil {
		l.p.cfg.Log.Warn("an image is known only until this process ends", "image", l.ref, "err", err)
	}
}

// newLookup returns a lookup that does nothing yet, and never will if the pull
// is not to be lazy. One goroutine uses it.
func (p *packs) newLookup(ctx context.Context, ref image.Reference, o Options) *lookup {
	return &lookup{p: p, ctx: ctx, ref: ref, o: o}
}

func (l *lookup) wanted() bool { return l.o.Lazy && !l.p.cfg.Lazy.Never }

// warm opens a second connection to the registry beside the one that fetches
// the manifest, so that the search need not wait for a handshake.
func (l *lookup) warm() {
	if l.wanted() && l.p.cfg.Packs.Trust != TrustPoP {
		l.p.work.Go(func() {
			ctx, cancel := context.WithTimeout(l.ctx, packLookup)
			defer cancel()
			_ = l.p.cfg.Registry.Ping(ctx, l.ref.Host) // the manifest's request tells what is wrong
		})
	}
}

// begin starts the search for the pack of a manifest.
func (l *lookup) begin(d ocispec.Descriptor) {
	if !l.wanted() || l.done != nil {
		return
	}
	l.done, l.manifest = make(chan struct{}), d.Digest
	l.p.work.Go(func() {
		defer close(l.done)
		l.found, l.err = l.p.findPack(l.ctx, &image.Image{Ref: l.ref, Desc: d})
	})
}

// result waits for the search, which it begins if need be.
func (l *lookup) result(ctx context.Context, img *image.Image) (*packFile, error) {
	if l.done == nil || l.manifest != img.Desc.Digest {
		return l.p.findPack(ctx, img)
	}
	select {
	case <-l.done:
		return l.found, l.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// findPack looks for an image's pack: here, then in its repository.
func (p *packs) findPack(ctx context.Context, img *image.Image) (*packFile, error) {
	if why := p.Quarantined(img.Desc.Digest); why != "" {
		return nil, fmt.Errorf("its startup pack is quarantined: %s", why)
	}
	if err := p.pop.BringPack(ctx, img.Desc.Digest); err != nil {
		p.cfg.Log.Warn("a startup pack of the PoP's store cannot be used", "image", img.Ref, "err", err)
	}
	if f := p.localPack(img.Desc.Digest); f != nil {
		return f, nil
	}
	if p.policy(img) == TrustPoP {
		return nil, errNoPack
	}
	return p.published(ctx, img)
}

// published looks for an image's pack in its repository.
func (p *packs) published(ctx context.Context, img *image.Image) (*packFile, error) {
	ctx, cancel := context.WithTimeout(ctx, packLookup)
	defer cancel()
	list, err := p.cfg.Registry.Referrers(ctx, img.Ref, img.Desc.Digest, pack.MediaType)
	if err != nil {
		return nil, fmt.Errorf("look for a startup pack: %w", err)
	}
	if best := p.choose(img, list); best != nil {
		if f := p.remotePack(img, *best); f != nil {
			f.open, f.passed = p.pop.Pass(img.Desc.Digest, f.size, f.open)
			return f, nil
		}
	}
	return nil, errNoPack
}

// choose is the pack to use of those that a repository has: one whose signature
// is valid before others, and the newest of them.
func (p *packs) choose(img *image.Image, list []ocispec.Descriptor) *ocispec.Descriptor {
	var best *ocispec.Descriptor
	var signed bool
	for i, d := range list {
		ok := p.signed(img, d.Annotations, digest.Digest(d.Annotations[pack.AnnotationHeader])) == nil
		newer := best == nil ||
			d.Annotations[ocispec.AnnotationCreated] > best.Annotations[ocispec.AnnotationCreated]
		if best == nil || ok && !signed || ok == signed && newer {
			best, signed = &list[i], ok
		}
	}
	return best
}

// remotePack is the pack that a descriptor is about, or nil if it says too little.
func (p *packs) remotePack(img *image.Image, d ocispec.Descriptor) *packFile {
	blob, err := digest.Parse(d.Annotations[pack.AnnotationBlob])
	size, serr := strconv.ParseInt(d.Annotations[pack.AnnotationSize], 10, 64)
	if err != nil || serr != nil || size <= 0 {
		return nil
	}
	return &packFile{size: size, about: d.Annotations,
		open: func(ctx context.Context, at pack.Span) (io.ReadCloser, error) {
			return p.cfg.Registry.Open(ctx, img.Ref, registry.Blob{Digest: blob, Size: size}, at.Offset, at.Length,
				registry.OpenOptions{})
		}}
}

func (p *packs) localPack(id digest.Digest) *packFile {
	if p.cfg.Packs.Dir == "" {
		return nil
	}
	path := p.PackPath(id)
	fi, err := os.Stat(path)
	if err != nil {
		return nil
	}
	now := time.Now()
	_ = os.Chtimes(path, now, now) // only the order of collection depends on it
	return &packFile{size: fi.Size(), local: true,
		open: func(_ context.Context, at pack.Span) (io.ReadCloser, error) {
			f, err := os.Open(path)
			if err != nil {
				return nil, err
			}
			return struct {
				io.Reader
				io.Closer
			}{io.NewSectionReader(f, at.Offset, at.Length), f}, nil
		}}
}

// LacksPack reports whether a pack of a manifest would be used here, and there is none yet.
func (p *packs) LacksPack(id digest.Digest) bool {
	return p.cfg.Packs.Dir != "" && p.localPack(id) == nil && p.Quarantined(id) == ""
}

// PackPath is where the pack of a manifest lies if it was made here.
func (p *packs) PackPath(id digest.Digest) string {
	return filepath.Join(p.cfg.Packs.Dir, id.Encoded()+".pack")
}

// policy is what packs of the image's repository must be.
func (p *packs) policy(img *image.Image) string {
	switch {
	case p.cfg.Packs.Trust != "":
		return p.cfg.Packs.Trust
	case img.Ref.Dgst != "":
		return TrustSigned
	}
	return TrustRepository
}

// accepts reports whether a partial layer, which another image's pack may have
// begun, will do for img.
func (p *packs) accepts(img *image.Image, part *layer.Partial) bool {
	switch p.policy(img) {
	case TrustRepository:
		return true
	case TrustSigned:
		return part.Origin.Trust == TrustSigned || part.Origin.Trust == TrustPoP
	}
	return part.Origin.Trust == TrustPoP
}

// trust says why a pack is believed, or an error if it is not.
func (p *packs) trust(img *image.Image, f *packFile, header digest.Digest) (string, error) {
	if f.local {
		return TrustPoP, nil
	}
	if want := f.about[pack.AnnotationHeader]; want != "" && want != header.String() {
		return "", fmt.Errorf("its header hashes to %s, its annotation says %s: %w", header, want, pack.ErrInvalid)
	}
	signed := p.signed(img, f.about, header)
	switch policy := p.policy(img); {
	case signed == nil:
		return TrustSigned, nil
	case policy == TrustRepository:
		return TrustRepository, nil
	default:
		return "", fmt.Errorf("the image's startup pack is not used, for packs have to be signed: %w", signed)
	}
}

func (p *packs) signed(img *image.Image, about map[string]string, header digest.Digest) error {
	if p.cfg.Packs.Key == nil {
		return errors.New("no key is configured (pack.key)")
	}
	sig, err := base64.StdEncoding.DecodeString(about[pack.AnnotationSignature])
	if err != nil || len(sig) == 0 {
		return errors.New("it has no signature")
	}
	return pack.Verify(p.cfg.Packs.Key, img.Desc.Digest, header, sig)
}

// Quarantine keeps the pack of a manifest from being used again. It is kept on
// disk; a pack that is built anew lifts it.
func (p *packs) Quarantine(id digest.Digest, why error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bad[id] = why.Error()
	if p.cfg.Packs.Dir == "" {
		return nil
	}
	return errors.Join(durable.WriteFile(p.PackPath(id)+".bad", []byte(why.Error()), 0o600),
		remove(p.PackPath(id)))
}

func remove(path string) error {
	if err := os.Remove(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// Absolve lifts a quarantine.
func (p *packs) Absolve(id digest.Digest) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.bad, id)
	return remove(p.PackPath(id) + ".bad")
}

// Quarantined says why a pack must not be used, or nothing.
func (p *packs) Quarantined(id digest.Digest) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if why := p.bad[id]; why != "" || p.cfg.Packs.Dir == "" {
		return why
	}
	b, err := os.ReadFile(p.PackPath(id) + ".bad")
	if err != nil {
		return ""
	}
	return string(b)
}

const maxPacks = 1 << 30 // bytes, where PackConfig says none

// collectPacks removes packs beyond the bound, and then while want bytes have
// not been freed yet. It returns how many bytes of disk that gave.
func (p *packs) collectPacks(want int64) (int64, error) {
	if p.cfg.Packs.Dir == "" {
		return 0, nil
	}
	paths, err := filepath.Glob(filepath.Join(p.cfg.Packs.Dir, "*.pack"))
	if err != nil {
		return 0, err
	}
	type entry struct {
		path string
		size int64
		used time.Time
	}
	var all []entry
	var sum, freed int64
	for _, path := range paths {
		if fi, err := os.Stat(path); err == nil {
			all = append(all, entry{path, fi.Size(), fi.ModTime()})
			sum += fi.Size()
		}
	}
	slices.SortFunc(all, func(a, b entry) int { return a.used.Compare(b.used) })
	most := p.cfg.Packs.MaxBytes
	if most == 0 {
		most = maxPacks
	}
	var errs error
	for _, e := range all {
		if sum <= most && freed >= want {
			break
		}
		errs = errors.Join(errs, remove(e.path))
		sum, freed = sum-e.size, freed+e.size
	}
	return freed, errs
}
