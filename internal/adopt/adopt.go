// Package adopt makes images of containerd's other clients images of this node, so that they need not be
// pulled again: those that were there before Dewpoint was.
//
// An image is known by containerd's records in all namespaces, and by its documents in containerd's content
// store. Its layers come from there where their blobs still are, else by the link, last of all. Nothing
// that was there is removed or changed, but that the image keeps the snapshots it gets.
package adopt

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"time"

	contentapi "github.com/containerd/containerd/api/services/content/v1"
	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	namespacesapi "github.com/containerd/containerd/api/services/namespaces/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"dewpoint/internal/engine/containerd"
	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/spec"
)

// Config names what an Adopter works with. All of it is required.
type Config struct {
	Containerd *containerd.Client
	Stored     fetch.Stored // containerd's content store
	Puller     *fetch.Puller
	Catalog    *fetch.Catalog
	Layers     *layer.Store
	Engine     Engine
}

// Engine gives containerd images whose layers are here, *engine.Engine.
type Engine interface {
	Register(ctx context.Context, img *image.Image, ready func(context.Context, int) error) error
	Unpack(ctx context.Context, namespace string, img *image.Image) error
}

// Adopter adopts images. It is safe for concurrent use.
type Adopter struct{ cfg Config }

// New returns an Adopter.
func New(cfg Config) *Adopter { return &Adopter{cfg} }

// found is an image as containerd has it.
type found struct {
	ref        image.Reference
	target     ocispec.Descriptor
	namespaces []string
}

// ErrUnknown says that containerd has no image of a name.
var ErrUnknown = errors.New("containerd has no such image")

// Adopt adopts the images of some names, or all, one after the other, and calls emit with what each will
// cost, how it goes on and what it has cost. It goes on behind an image that cannot be adopted, of which emit
// is told. With dry only what it will cost is told. An error of emit ends it and is returned.
func (a *Adopter) Adopt(ctx context.Context, names []string, dry bool, emit func(spec.Adoption) error) error {
	all, err := a.find(ctx)
	if err != nil {
		return err
	}
	if all, err = chosen(all, names); err != nil {
		return err
	}
	for _, f := range all {
		told := spec.Adoption{Image: f.ref.String(), Digest: f.target.Digest.String(), Namespaces: f.namespaces}
		img, err := a.load(f)
		if err == nil {
			a.price(ctx, f, img, &told)
		}
		if err == nil && !dry && told.State != spec.Adopted {
			err = a.adopt(ctx, f, img, &told, emit)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			told.State, told.Error = spec.AdoptFailed, err.Error()
		}
		if err := emit(told); err != nil {
			return err
		}
	}
	return nil
}

// chosen are the images of some names; no names are all.
func chosen(all []found, names []string) (some []found, err error) {
	if len(names) == 0 {
		return all, nil
	}
	for _, n := range names {
		ref, err := image.ParseReference(n)
		if err != nil {
			return nil, err
		}
		i := slices.IndexFunc(all, func(f found) bool { return f.ref == ref })
		if i < 0 {
			return nil, fmt.Errorf("%s: %w", ref, ErrUnknown)
		}
		some = append(some, all[i])
	}
	return some, nil
}

// find lists the images of all namespaces, by their names.
func (a *Adopter) find(ctx context.Context) ([]found, error) {
	r, err := a.cfg.Containerd.Namespaces.List(ctx, &namespacesapi.ListNamespacesRequest{})
	if err != nil {
		return nil, fmt.Errorf("list containerd's namespaces: %w", err)
	}
	var all []found
	for _, ns := range r.Namespaces {
		l, err := a.cfg.Containerd.Images.List(containerd.InNamespace(ctx, ns.Name), &imagesapi.ListImagesRequest{})
		if err != nil {
			return nil, fmt.Errorf("list the images of namespace %s: %w", ns.Name, err)
		}
		for _, i := range l.Images {
			ref, err := image.ParseReference(i.Name)
			if err != nil || strings.HasPrefix(i.Name, "sha256:") { // CRI's second name of an image
				continue
			}
			t := i.Target
			all = add(all, found{ref, ocispec.Descriptor{MediaType: t.MediaType, Digest: digest.Digest(t.Digest),
				Size: t.Size}, []string{ns.Name}})
		}
	}
	all = joinUntagged(all)
	slices.SortFunc(all, func(a, b found) int { return cmp.Compare(a.ref.String(), b.ref.String()) })
	return all, nil
}

// add joins the namespaces that have the same image by the same name.
func add(all []found, f found) []found {
	for i := range all {
		if all[i].ref == f.ref && all[i].target.Digest == f.target.Digest {
			all[i].namespaces = append(all[i].namespaces, f.namespaces...)
			return all
		}
	}
	return append(all, f)
}

// joinUntagged leaves out the images by their digests alone that have a tag as well, in whichever namespace.
// Their namespaces count as the tag's: they have the image.
func joinUntagged(all []found) []found {
	tagged := func(f found) int {
		return slices.IndexFunc(all, func(t found) bool {
			return t.ref.Tag != "" && t.target.Digest == f.target.Digest
		})
	}
	untagged := func(f found) bool { return f.ref.Tag == "" && tagged(f) >= 0 }
	for _, f := range all {
		if !untagged(f) {
			continue
		}
		to := &all[tagged(f)].namespaces
		for _, ns := range f.namespaces {
			if !slices.Contains(*to, ns) {
				*to = append(*to, ns)
			}
		}
	}
	return slices.DeleteFunc(all, untagged)
}

// load reads the image's documents, and verifies them.
func (a *Adopter) load(f found) (*image.Image, error) {
	doc, err := a.document(f.target)
	if err != nil {
		return nil, err
	}
	kind, err := image.KindOf(doc)
	if err != nil {
		return nil, err
	}
	var index []byte
	desc, manifest := f.target, doc
	if kind == image.Index {
		index = doc
		idx, err := image.ParseIndex(index)
		if err != nil {
			return nil, err
		}
		if desc, err = image.Select(idx, image.DefaultPlatform()); err != nil {
			return nil, err
		}
		if manifest, err = a.document(desc); err != nil {
			return nil, err
		}
	}
	m, err := image.ParseManifest(manifest)
	if err != nil {
		return nil, err
	}
	config, err := a.document(m.Config)
	if err != nil {
		return nil, err
	}
	return image.New(f.ref, f.target, index, desc, manifest, config)
}

func (a *Adopter) document(d ocispec.Descriptor) ([]byte, error) {
	r, err := a.cfg.Stored.Open(d.Digest)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("a document of the image is not in containerd's content store: pull it (%w)", err)
	}
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(io.LimitReader(r, image.MaxConfig+1))
}

// price says what the image will cost.
func (a *Adopter) price(ctx context.Context, f found, img *image.Image, told *spec.Adoption) {
	told.State = spec.AdoptNew
	for _, l := range img.Unique() {
		have, err := a.cfg.Layers.Peek(l.DiffID)
		switch {
		case err == nil:
			told.Here += l.Size
			told.Disk += have.DiskUse()
		case a.cfg.Puller.Stored(l):
			told.Store += l.Size
		default:
			told.Link += l.Size
		}
	}
	if told.Here < img.Size() {
		told.Disk += a.unpacked(ctx, f, img)
	} else if known := a.cfg.Catalog.Get(f.ref); known != nil && known.Target.Digest == f.target.Digest &&
		a.unpackedHere(ctx, f, img) {
		told.State = spec.Adopted
	}
}

// unpackedHere reports whether every namespace that has the image has it from dewd's layers.
func (a *Adopter) unpackedHere(ctx context.Context, f found, img *image.Image) bool {
	chains := img.ChainIDs()
	if len(chains) == 0 {
		return true
	}
	for _, ns := range f.namespaces {
		_, err := a.cfg.Containerd.Snapshots.Stat(containerd.InNamespace(ctx, ns),
			&snapshotsapi.StatSnapshotRequest{Snapshotter: snapshotter, Key: chains[len(chains)-1].String()})
		if err != nil {
			return false
		}
	}
	return true
}

// snapshotter is dewd's name in containerd.
const snapshotter = "dewpoint"

// keeps begins the labels by which an image's configuration keeps its snapshots.
const keeps = "containerd.io/gc.ref.snapshot."

// unpacked is what the layers that are not here take as another snapshotter has unpacked them, which is about
// what they take as files; 0 if none has.
func (a *Adopter) unpacked(ctx context.Context, f found, img *image.Image) int64 {
	for _, ns := range f.namespaces {
		ctx := containerd.InNamespace(ctx, ns)
		r, err := a.cfg.Containerd.Content.Info(ctx, &contentapi.InfoRequest{Digest: img.ConfigD.Digest.String()})
		if err != nil {
			continue
		}
		for label := range r.Info.Labels {
			by, ok := strings.CutPrefix(label, keeps)
			if !ok || by == snapshotter {
				continue
			}
			var sum int64
			for i, chain := range img.ChainIDs() {
				if _, err := a.cfg.Layers.Peek(img.Layers[i].DiffID); err == nil {
					continue
				}
				u, err := a.cfg.Containerd.Snapshots.Usage(ctx,
					&snapshotsapi.UsageRequest{Snapshotter: by, Key: chain.String()})
				if err == nil {
					sum += u.Size
				}
			}
			if sum > 0 {
				return sum
			}
		}
	}
	return 0
}

// tellEvery is the time between two reports of an image that comes.
const tellEvery = time.Second

// adopt brings the image's layers and gives them to those that have the image. told becomes what it has cost.
func (a *Adopter) adopt(ctx context.Context, f found, img *image.Image, told *spec.Adoption,
	emit func(spec.Adoption) error) error {
	known := a.cfg.Catalog.Get(f.ref)
	if known != nil && known.Target.Digest != f.target.Digest && a.has(known) {
		return fmt.Errorf("dewd has another image by this name, %s: remove that one first (dew rmi)",
			known.Target.Digest)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pull, err := a.cfg.Puller.Adopt(ctx, img)
	if err != nil {
		return err
	}
	came := make(chan error, 1)
	go func() { came <- pull.WaitComplete(ctx) }()
	told.State = spec.Adopting
	tick := time.NewTicker(tellEvery)
	defer tick.Stop()
	for waiting := true; waiting; {
		if err := emit(*told); err != nil {
			return err
		}
		select {
		case err := <-came:
			if err != nil {
				return err
			}
			waiting = false
		case <-tick.C:
		}
		told.Done = 0
		for _, l := range pull.Progress() {
			told.Done += l.From.Local + l.From.PoP + l.From.Registry
		}
		told.Done -= told.Here
	}
	if err := a.cfg.Engine.Register(ctx, img, nil); err != nil {
		return err
	}
	for _, ns := range f.namespaces {
		if err := a.cfg.Engine.Unpack(ctx, ns, img); err != nil {
			return err
		}
	}
	a.settle(img, pull, told)
	return nil
}

// has reports whether all layers of an image are here, complete or partial; an adoption that failed may
// have left less.
func (a *Adopter) has(img *image.Image) bool {
	return !slices.ContainsFunc(img.Unique(), func(l image.Layer) bool {
		_, err := a.cfg.Layers.Peek(l.DiffID)
		return err != nil && a.cfg.Layers.Partial(l.DiffID) == nil
	})
}

// settle says what it has cost.
func (a *Adopter) settle(img *image.Image, pull *fetch.Pull, told *spec.Adoption) {
	told.State, told.Disk = spec.Adopted, 0
	came := told.Store + told.Link
	told.Link = pull.Fetched()
	told.Store = max(0, came-told.Link)
	for _, l := range img.Unique() {
		if have, err := a.cfg.Layers.Peek(l.DiffID); err == nil {
			told.Disk += have.DiskUse()
		}
	}
}
