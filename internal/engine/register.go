package engine

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"

	contentapi "github.com/containerd/containerd/api/services/content/v1"
	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	leasesapi "github.com/containerd/containerd/api/services/leases/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/metadata"

	"dewpoint/internal/engine/containerd"
	"dewpoint/internal/engine/state"
	"dewpoint/internal/image"
	"dewpoint/internal/trace"
)

// Labels that containerd's garbage collector and remote snapshotters read.
const (
	labelGCRoot     = "containerd.io/gc.root"
	labelGCContent  = "containerd.io/gc.ref.content."
	labelGCSnapshot = "containerd.io/gc.ref.snapshot."
	labelSource     = "containerd.io/distribution.source."
	labelRef        = "containerd.io/snapshot.ref"
	labelImageRef   = "containerd.io/snapshot/cri.image-ref"
	labelManifest   = "containerd.io/snapshot/cri.manifest-digest"
	labelLayer      = "containerd.io/snapshot/cri.layer-digest"
	labelRegistered = "dewpoint.registered" // on an image: the snapshotter that has its chain
	labelOwner      = "dewpoint.owner"      // on a lease: the state directory of the daemon that made it
)

// NotRemoteError says that the snapshotter has not got a layer that it was
// asked to show: the layers must be complete or mounted before Register.
type NotRemoteError struct{ Snapshotter, ChainID string }

func (e *NotRemoteError) Error() string {
	return fmt.Sprintf("snapshotter %s does not have the chain %s", e.Snapshotter, e.ChainID)
}

// ChainID names the snapshot of the whole image.
func ChainID(img *image.Image) string {
	return identity.ChainID(img.Spec.RootFS.DiffIDs).String()
}

// Register makes the image known to containerd under its reference, as if it
// were pulled and unpacked: its documents are content, its layers are
// snapshots that the snapshotter provides, and no layer blob is there. It is
// idempotent; when nothing is to be done it costs two calls at once.
//
// ready, unless nil, blocks until the layer number i, from the bottom, can be
// shown: what containerd has to store for the layers before it, each with its
// fsyncs, is then done while the others still arrive.
func (e *images) Register(ctx context.Context, img *image.Image,
	ready func(ctx context.Context, i int) error) error {
	if e.registered(ctx, img) {
		return nil
	}
	if err := e.register(ctx, img, ready); err != nil {
		return fmt.Errorf("register %s: %w", img.Ref, err)
	}
	return nil
}

func (e *images) registered(ctx context.Context, img *image.Image) bool {
	var named, unpacked bool
	var g errgroup.Group
	g.Go(func() error {
		r, err := e.c.Images.Get(ctx, &imagesapi.GetImageRequest{Name: img.Ref.String()})
		named = err == nil && r.Image.Target.Digest == img.Target.Digest.String() &&
			r.Image.Labels[labelRegistered] == e.cfg.Snapshotter
		return nil
	})
	g.Go(func() error {
		unpacked = e.hasSnapshot(ctx, ChainID(img))
		return nil
	})
	_ = g.Wait()
	return named && unpacked
}

func (e *roots) hasSnapshot(ctx context.Context, key string) bool {
	_, err := e.c.Snapshots.Stat(ctx,
		&snapshotsapi.StatSnapshotRequest{Snapshotter: e.cfg.Snapshotter, Key: key})
	return err == nil
}

func (e *images) register(ctx context.Context, img *image.Image,
	ready func(context.Context, int) error) error {
	_, ctx, release, err := e.lease(ctx)
	if err != nil {
		return err
	}
	defer release()
	g, gctx := errgroup.WithContext(ctx)
	for _, b := range e.documents(img) {
		g.Go(func() error { return e.writeContent(gctx, b) })
	}
	g.Go(func() error { return e.keepChain(gctx, img, ready) })
	if err := g.Wait(); err != nil {
		return err
	}
	if err := e.putImage(ctx, img); err != nil {
		return err
	}
	// From here on the image keeps the chain.
	if e.hasSnapshot(ctx, ChainID(img)) {
		return nil
	}
	return e.keepChain(ctx, img, ready)
}

// Unpack gives an image, whose layers are here, to another namespace that has it: its containers start from
// the chain. The image keeps the chain there as well.
func (e *images) Unpack(ctx context.Context, namespace string, img *image.Image) error {
	ctx = containerd.InNamespace(ctx, namespace)
	err := e.writeContent(ctx, e.documents(img)[0]) // its label keeps the chain
	if err == nil {
		err = e.keepChain(ctx, img, nil)
	}
	return wrap(err, "unpack %s in namespace %s", img.Ref, namespace)
}

// collections is how often the garbage collector may get in the way of one
// registration.
const collections = 5

// keepChain is prepareChain over again when a snapshot went that was there
// already: those that another registration gave up are not kept by our lease,
// and containerd may be about to collect them. What is made anew is kept. So it is when the
// snapshotter had let go of a layer that was ready, since it could not be opened for a moment:
// ready is asked again.
func (e *images) keepChain(ctx context.Context, img *image.Image,
	ready func(context.Context, int) error) error {
	for n := 1; ; n++ {
		err := e.prepareChain(ctx, img, ready)
		var absent *NotRemoteError
		again := errdefs.IsNotFound(err) || ready != nil && errors.As(err, &absent)
		if !again || n == collections || ctx.Err() != nil {
			return err
		}
		e.log.Info("a snapshot of the image was collected, or its layer had gone: making it again", "image",
			img.Ref, "err", err)
	}
}

// lease keeps what is made under the returned context from being collected
// until release. It has an ID.
func (e *images) lease(ctx context.Context) (string, context.Context, func(), error) {
	id := "dewpoint-" + rand.Text()
	_, err := e.c.Leases.Create(ctx, &leasesapi.CreateRequest{ID: id, Labels: e.leaseLabels()})
	if err != nil {
		return "", nil, nil, fmt.Errorf("lease: %w", err)
	}
	release := func() {
		end := func() error {
			_, err := e.c.Leases.Delete(context.WithoutCancel(ctx), &leasesapi.DeleteRequest{ID: id})
			return err
		}
		err := end()
		// containerd has ended in the middle of it, and does not know of it when it is back
		if errdefs.IsUnavailable(err) {
			err = end()
		}
		if err != nil && !errdefs.IsNotFound(err) {
			e.log.Warn("delete lease", "id", id, "err", err)
		}
	}
	return id, metadata.AppendToOutgoingContext(ctx, "containerd-lease", id), release, nil
}

// leaseLabels say whose the lease is, and not when it ends: the clock of a board without a battery
// may be set years ahead while a registration goes on. What a crash leaves, endLeases ends.
func (e *images) leaseLabels() map[string]string { return map[string]string{labelOwner: e.cfg.State} }

// endLeases ends those of an earlier process: what it was making is made anew or not at all.
func (e *images) endLeases(ctx context.Context) error {
	r, err := e.c.Leases.List(ctx,
		&leasesapi.ListRequest{Filters: []string{`labels."` + labelOwner + `"==` + strconv.Quote(e.cfg.State)}})
	if err != nil {
		return err
	}
	for _, l := range r.Leases {
		_, derr := e.c.Leases.Delete(ctx, &leasesapi.DeleteRequest{ID: l.ID})
		err = errors.Join(err, derr)
	}
	return err
}

// Collect has containerd's garbage collector run, and the snapshotter asked what it has
// that containerd does not know: what was removed while either was being killed. The collector
// asks only snapshotters of which it removed something, so one snapshot is made for that.
func (e *images) Collect(ctx context.Context) error {
	id := "dewpoint-" + rand.Text()
	_, err := e.c.Leases.Create(ctx, &leasesapi.CreateRequest{ID: id, Labels: e.leaseLabels()})
	if err != nil {
		return fmt.Errorf("collect: lease: %w", err)
	}
	_, err = e.c.Snapshots.Prepare(metadata.AppendToOutgoingContext(ctx, "containerd-lease", id),
		&snapshotsapi.PrepareSnapshotRequest{Snapshotter: e.cfg.Snapshotter, Key: "collect-" + rand.Text()})
	_, derr := e.c.Leases.Delete(context.WithoutCancel(ctx), &leasesapi.DeleteRequest{ID: id, Sync: true})
	return wrap(errors.Join(err, derr), "collect")
}

// document is one blob with the labels that say what it keeps alive.
type document struct {
	dgst   digest.Digest
	data   []byte
	labels map[string]string
}

func (e *images) documents(img *image.Image) []document {
	source := func(m map[string]string) map[string]string {
		if img.Ref.Host != "" && img.Ref.Path != "" {
			m[labelSource+img.Ref.Host] = img.Ref.Path
		}
		return m
	}
	manifest := source(map[string]string{labelGCContent + "config": img.ConfigD.Digest.String()})
	for i, l := range img.Layers {
		manifest[labelGCContent+"l."+strconv.Itoa(i)] = l.Digest.String()
	}
	config := source(map[string]string{labelGCSnapshot + e.cfg.Snapshotter: ChainID(img)})
	docs := []document{
		{img.ConfigD.Digest, img.Config, config},
		{img.Desc.Digest, img.Manifest, manifest},
	}
	if img.Index != nil {
		docs = append(docs, document{img.Target.Digest, img.Index,
			source(map[string]string{labelGCContent + "m.0": img.Desc.Digest.String()})})
	}
	return docs
}

// writeContent is putContent over again when a blob that was there already, and that our lease did not
// keep, is collected before it has its labels.
func (e *images) writeContent(ctx context.Context, d document) error {
	for n := 1; ; n++ {
		if err := e.putContent(ctx, d); !errdefs.IsNotFound(err) || n == collections || ctx.Err() != nil {
			return err
		}
	}
}

// putContent puts a blob into the content store in one message, and makes
// sure of its labels where the blob is there already.
func (e *images) putContent(ctx context.Context, d document) error {
	ctx, cancel := context.WithTimeout(ctx, containerd.CallTimeout)
	defer cancel()
	s, err := e.c.Content.Write(ctx)
	if err == nil {
		err = s.Send(&contentapi.WriteContentRequest{
			Action: contentapi.WriteAction_COMMIT, Ref: "dewpoint-" + rand.Text(),
			Total: int64(len(d.data)), Expected: d.dgst.String(), Data: d.data, Labels: d.labels,
		})
	}
	if err == nil {
		_ = s.CloseSend()
		_, err = s.Recv()
	}
	if err = containerd.Native(err); !errdefs.IsAlreadyExists(err) {
		return wrap(err, "write %s", d.dgst)
	}
	paths := make([]string, 0, len(d.labels))
	for k := range d.labels {
		paths = append(paths, "labels."+k)
	}
	_, err = e.c.Content.Update(ctx, &contentapi.UpdateRequest{
		Info:       &contentapi.Info{Digest: d.dgst.String(), Labels: d.labels},
		UpdateMask: fieldMask(paths),
	})
	return wrap(err, "label %s", d.dgst)
}

// prepareChain asks for one snapshot per layer, bottom first, naming the
// chain ID it wants: the snapshotter answers that it exists already.
func (e *images) prepareChain(ctx context.Context, img *image.Image,
	ready func(context.Context, int) error) error {
	chains := identity.ChainIDs(append([]digest.Digest(nil), img.Spec.RootFS.DiffIDs...))
	parent := ""
	for i, c := range chains {
		labels := map[string]string{
			labelRef: c.String(), labelImageRef: img.Ref.String(), labelManifest: img.Desc.Digest.String(),
		}
		if ready != nil {
			if err := ready(ctx, i); err != nil {
				return err
			}
		}
		if i < len(img.Layers) {
			labels[labelLayer] = img.Layers[i].Digest.String()
		}
		if err := e.prepareLayer(ctx, c.String(), parent, labels); err != nil {
			return err
		}
		parent = c.String()
	}
	return nil
}

func (e *images) prepareLayer(ctx context.Context, chain, parent string, labels map[string]string) error {
	ctx, step := trace.Start(ctx, "layer")
	defer step.End()
	key := "extract-" + rand.Text() + " " + chain
	_, err := e.c.Snapshots.Prepare(ctx, &snapshotsapi.PrepareSnapshotRequest{
		Snapshotter: e.cfg.Snapshotter, Key: key, Parent: parent, Labels: labels,
	})
	if errdefs.IsAlreadyExists(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("prepare %s: %w", chain, err)
	}
	undo := e.removeSnapshot(context.WithoutCancel(ctx), key)
	if e.hasSnapshot(ctx, chain) {
		return undo // an ordinary snapshotter whose chain is there
	}
	return errors.Join(&NotRemoteError{e.cfg.Snapshotter, chain}, undo)
}

func (e *images) putImage(ctx context.Context, img *image.Image) error {
	rec := &imagesapi.Image{
		Name:   img.Ref.String(),
		Target: descriptor(img.Target),
		Labels: map[string]string{labelRegistered: e.cfg.Snapshotter, state.LabelOwn: "true"},
	}
	made, err := e.c.Images.Create(ctx, &imagesapi.CreateImageRequest{Image: rec})
	put := made.GetImage()
	if errdefs.IsAlreadyExists(err) {
		var changed *imagesapi.UpdateImageResponse
		changed, err = e.c.Images.Update(ctx, &imagesapi.UpdateImageRequest{
			Image: rec, UpdateMask: fieldMask([]string{"target", "labels." + labelRegistered}),
		})
		put = changed.GetImage()
	}
	if err == nil {
		e.state.ImagePut(*state.ImageInfoOf(put))
	}
	return err
}

func descriptor(d ocispec.Descriptor) *types.Descriptor {
	return &types.Descriptor{MediaType: d.MediaType, Digest: d.Digest.String(), Size: d.Size,
		Annotations: d.Annotations}
}
