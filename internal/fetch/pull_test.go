package fetch

import (
	"context"
	"errors"
	"io"
	"math"
	"testing"
	"time"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/testkit/registrytest"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

func TestLocalAsksNobody(t *testing.T) {
	b := newBed(t)
	p := b.push("a", 1, 2)
	img := b.pull(p)
	asked := len(b.reg.Requests())
	pull, err := b.Pull(t.Context(), img.Ref, Options{Local: true})
	b.must(err)
	b.must(pull.Wait(t.Context()))
	if !pull.Local || len(b.reg.Requests()) != asked {
		t.Errorf("local %t, %d requests", pull.Local, len(b.reg.Requests())-asked)
	}
	moved := b.push("a", 1, 3)
	if pull, err = b.Pull(t.Context(), img.Ref, Options{}); err != nil ||
		pull.Image.Desc.Digest != moved.Digest {
		t.Errorf("without Local the tag's new image was not found: %v", err)
	}
	b.must(pull.WaitComplete(t.Context()))
	asked = b.reg.Count("/manifests/")
	byDigest := b.ref(p.ByDigest)
	for range 2 {
		if _, err := b.Pull(t.Context(), byDigest, Options{}); err != nil {
			t.Fatal(err)
		}
	}
	if n := b.reg.Count("/manifests/") - asked; n > 2 { // HEAD and GET at most, once
		t.Errorf("%d requests for what a digest names", n)
	}
}

func TestLocalFetchesWhatIsMissing(t *testing.T) {
	b := newBed(t)
	img := b.pull(b.push("a", 1))
	if _, err := b.Collect(t.Context(), math.MaxInt64, nobody); err != nil || b.has(img.Layers[0].DiffID) {
		t.Fatal("the layer is still here", err)
	}
	pull, err := b.Pull(t.Context(), img.Ref, Options{Local: true})
	b.must(err)
	b.must(pull.WaitComplete(t.Context()))
	if pull.Local || !b.has(img.Layers[0].DiffID) {
		t.Error("the layer was not fetched")
	}
}

// The registry of one image hangs; another image comes nevertheless.
func TestHangingRegistryDelaysNoOtherPull(t *testing.T) {
	other := registrytest.New(t)
	b := newBed(t, other)
	stuck, fine := b.push("stuck", 1, 2, 3), pushTo(other, "fine", image.Gzip, 4, 5)
	for _, l := range stuck.Layers {
		b.reg.Fail(registrytest.Fault{Do: registrytest.Hang, Digest: l.Digest})
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	hung, err := b.Pull(ctx, b.ref(stuck.Ref), Options{})
	b.must(err)
	begin := time.Now()
	b.pull(fine)
	if d := time.Since(begin); d > link.Silence+time.Second {
		t.Errorf("the other pull took %s", d)
	}
	cancel()
	hung.WaitComplete(t.Context())
}

// The bottom layer hangs, the top one cannot be had: that is told at once.
func TestAnyLayersErrorIsToldAtOnce(t *testing.T) {
	b := newBed(t)
	p := b.push("a", 1, 2)
	b.reg.Fail(registrytest.Fault{Do: registrytest.Stall, At: 1000, Digest: p.Layers[0].Digest})
	b.reg.Fail(registrytest.Fault{Do: registrytest.Status, Status: 404, Digest: p.Layers[1].Digest})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	pull, err := b.Pull(ctx, b.ref(p.Ref), Options{Order: link.Parallel, Inflaters: 2})
	b.must(err)
	begin := time.Now()
	if err := pull.Wait(ctx); err == nil || errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if d := time.Since(begin); d > time.Second {
		t.Errorf("told after %s", d)
	}
	stop := errors.New("stop")
	ctx2, cancel2 := context.WithCancelCause(t.Context())
	cancel2(stop)
	if err := pull.fillsOf(0).Wait(ctx2); !errors.Is(err, stop) {
		t.Errorf("the caller's end is not told: %v", err)
	}
}

// fillsOf is the pull of one layer of p.
func (p *Pull) fillsOf(i int) *Pull {
	return &Pull{Image: p.Image, layers: p.layers[i : i+1], fills: p.fills[i : i+1]}
}

// Two images hold one layer, packed in two ways. The second one joins the
// first one's fill and is still served by its own blob's name.
func TestOneLayerPackedInTwoWays(t *testing.T) {
	b := newBed(t)
	gz, zst := pushTo(b.reg, "gz", image.Gzip, 1), pushTo(b.reg, "zst", image.Zstd, 1)
	b.reg.Fail(registrytest.Fault{Do: registrytest.Stall, At: 1000, Times: 1, Digest: gz.Layers[0].Digest})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err := b.Pull(ctx, b.ref(gz.Ref), Options{})
	b.must(err)
	b.eventually("the first fill", func() bool { return len(b.reg.Ranges(gz.Layers[0].Digest)) > 0 })

	pull, err := b.Pull(ctx, b.ref(zst.Ref), Options{})
	b.must(err)
	if got := pull.Progress()[0].Layer; got != zst.Layers[0] {
		t.Errorf("progress speaks of %s", got.Digest)
	}
	id, err := b.Fetch(ctx, b.want(zst, 0))
	if err != nil || id != gz.Layers[0].DiffID {
		t.Errorf("%s, %v", id, err)
	}
	if n := len(b.reg.Ranges(zst.Layers[0].Digest)); n != 0 {
		t.Errorf("the layer was fetched a second time, by %d requests", n)
	}
}

func TestSessionGoesOnBetweenCalls(t *testing.T) {
	b := newBed(t)
	p := b.push("a", 1, 2, 3)
	if _, err := b.Fetch(t.Context(), b.want(p, 0)); err != nil {
		t.Fatal(err)
	}
	b.eventually("the layers that nobody asked for", func() bool { return b.has(p.Layers[2].DiffID) })
	if !b.holds.Held(p.Layers[0].DiffID) {
		t.Error("the layers of a session may be collected")
	}
	if n := b.reg.Count("/manifests/"); n > 2 {
		t.Errorf("%d requests for a manifest", n)
	}
	b.sessionIdle = 10 * time.Millisecond
	if id, err := b.Fetch(t.Context(), b.want(p, 1)); err != nil || id != p.Layers[1].DiffID {
		t.Error(id, err)
	}
	if _, err := b.Fetch(t.Context(), Want{Ref: b.ref(p.Ref), Manifest: p.Digest, Layer: p.Config}); err == nil {
		t.Error("a layer that the image does not have was given")
	}
	b.eventually("the end of the session", func() bool { return !b.holds.Held(p.Layers[0].DiffID) })
	b.clients.mu.Lock()
	defer b.clients.mu.Unlock()
	if len(b.sessions) != 0 {
		t.Error("the session is still listed")
	}
}

// A session that failed is not joined again.
func TestSessionAfterAFailure(t *testing.T) {
	b := newBed(t)
	p := b.push("a", 1)
	b.reg.Fail(registrytest.Fault{Do: registrytest.Status, Status: 404, Times: 1})
	if _, err := b.Fetch(t.Context(), b.want(p, 0)); err == nil {
		t.Fatal("no error")
	}
	if _, err := b.Fetch(t.Context(), b.want(p, 0)); err != nil {
		t.Error(err)
	}
}

// Who makes a session does not keep others from theirs, and who waits for one
// may leave.
func TestSlowSessionBlocksNobody(t *testing.T) {
	b := newBed(t)
	slow, other := b.push("slow", 1), b.push("other", 2)
	b.pull(slow)
	if _, run, err := b.enlist(slow.Digest); run == nil || err != nil {
		t.Fatal("not the maker", err)
	}
	if _, err := b.Fetch(t.Context(), b.want(other, 0)); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := b.Fetch(ctx, b.want(slow, 0)); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

func TestNoSessionAfterClose(t *testing.T) {
	b := newBed(t)
	p := b.push("a", 1)
	b.pull(p)
	if _, err := b.Fetch(t.Context(), b.want(p, 0)); err != nil {
		t.Fatal(err)
	}
	b.must(b.Close())
	b.eventually("the end of the hold", func() bool { return !b.holds.Held(p.Layers[0].DiffID) })
	if _, err := b.Fetch(t.Context(), b.want(p, 0)); !errors.Is(err, errClosed) {
		t.Error(err)
	}
}

// What a power cut made unknown is fetched again from where it can be had.
func TestFilesFillsAgain(t *testing.T) {
	other := registrytest.New(t)
	b := newBed(t, other)
	here, elsewhere := b.push("a", 1), pushTo(other, "b", image.Gzip, 1)
	id := b.pull(here).Layers[0].DiffID
	b.pull(elsewhere)
	for _, down := range []*registrytest.Server{b.reg, other} {
		b.eventually("the layer's removal", func() bool {
			_, err := b.Collect(t.Context(), math.MaxInt64, nobody)
			return err == nil && !b.has(id)
		})
		down.Fail(registrytest.Fault{Do: registrytest.Status, Status: 404})
		f, err := b.Files(t.Context(), id)
		if err != nil || !there(f.Data) {
			t.Errorf("%v, %v", f, err)
		}
		down.Heal()
	}
	if _, err := b.Files(t.Context(), here.Config); !errors.Is(err, layer.ErrUnknown) {
		t.Error(err)
	}
}

func TestCopyBlobs(t *testing.T) {
	b := newBed(t)
	p := b.push("a", 1, 2, 1)
	img := b.pull(p)
	put := func(_ context.Context, d ocispec.Descriptor, open func() (io.ReadCloser, error)) error {
		r, err := open()
		if err != nil {
			return err
		}
		defer r.Close()
		n, err := io.Copy(d.Digest.Algorithm().Hash(), r)
		if seen := r.(*metered).progress(); n != d.Size || seen.Received != n || seen.Fetched != n ||
			seen.Waiting <= 0 {
			t.Errorf("%d bytes of %d, the link sees %+v", n, d.Size, seen)
		}
		if b.cfg.Link.Idle() {
			t.Error("it takes no turn on the link")
		}
		return err
	}
	if n, err := b.CopyBlobs(t.Context(), img, Options{}, put); err != nil || n != img.Size() {
		t.Errorf("%d bytes of %d, %v", n, img.Size(), err)
	}
	full := errors.New("full")
	n, err := b.CopyBlobs(t.Context(), img, Options{},
		func(_ context.Context, _ ocispec.Descriptor, open func() (io.ReadCloser, error)) error {
			r, err := open()
			if err != nil {
				return err
			}
			defer r.Close()
			_, err = io.ReadFull(r, make([]byte, 1000))
			return errors.Join(err, full)
		})
	if n != 1000 || !errors.Is(err, full) {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// Two pulls of one image at the same time: what comes is counted once, for the
// one that began it.
func TestFetchedOnce(t *testing.T) {
	b := newBed(t)
	b.reg.Fail(registrytest.Fault{Do: registrytest.Slow, At: 4 << 20})
	img := b.push("a", 1, 2)
	first, err := b.Pull(t.Context(), b.ref(img.Ref), Options{})
	b.must(err)
	second, err := b.Pull(t.Context(), b.ref(img.Ref), Options{})
	b.must(err)
	b.must(first.WaitComplete(t.Context()))
	b.must(second.WaitComplete(t.Context()))
	if n, served := first.Fetched(),
		b.reg.Served(img.Layers[0].Digest)+b.reg.Served(img.Layers[1].Digest); n != served || served == 0 {
		t.Errorf("the first pull fetched %d bytes of the %d that came", n, served)
	}
	if n := second.Fetched(); n != 0 {
		t.Errorf("the second pull, which joined, fetched %d bytes", n)
	}
}
