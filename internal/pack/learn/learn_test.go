package learn

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/bdi"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/pack"
	"dewpoint/internal/registry"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/opencontainers/go-digest"
)

// The first start of an image becomes a pack of the pages that it read, and no
// other start is recorded.
func TestFirstStart(t *testing.T) {
	for _, backend := range []string{mount.EROFS, mount.Loop} {
		t.Run(backend, func(t *testing.T) {
			b := newBed(t, backend, nil)
			img := b.image("app:1")
			r := b.Begin(img)
			if r == nil {
				t.Fatal("the first start is not recorded")
			}
			check(t, r.Watch(t.Context()))
			b.start(b.overlay(img))
			r.Ready(stays)
			b.wait()
			b.holds(img, startReads)
			if r := b.Begin(img); r != nil {
				t.Error("a start is recorded though there is a pack")
			}
			b.empty()
		})
	}
}

// empty fails the test if recordings have left something.
func (b *bed) empty() {
	b.t.Helper()
	b.eventually("the end of all recordings", func() bool {
		b.Learner.mu.Lock()
		defer b.Learner.mu.Unlock()
		return len(b.running) == 0
	})
	if left, _ := filepath.Glob(filepath.Join(b.packs, "*.tmp")); len(left) > 0 {
		b.t.Errorf("left: %v", left)
	}
	if left, _ := os.ReadDir(b.cfg.Dir); len(left) > 0 {
		b.t.Errorf("left: %v", left)
	}
	if used := b.snaps.InUse(); len(used) > 0 {
		b.t.Errorf("layers stay mounted: %v", used)
	}
}

func (b *bed) eventually(what string, ok func() bool) {
	b.t.Helper()
	testkit.Eventually(b.t, what, ok)
}

// stays is Gone of a container that does not end.
func stays(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

// A recording ends with its container, and lets go of the kernel's mounts: one
// that nobody asked for becomes a pack, the other waits for its end.
func TestContainerGoes(t *testing.T) {
	for _, asked := range []bool{false, true} {
		t.Run(fmt.Sprint(asked), func(t *testing.T) {
			b := newBed(t, mount.EROFS, func(c *Config) { c.After = time.Hour })
			img := b.image("app:1")
			r := b.Begin(img)
			if asked {
				r.Drop()
				var err error
				r, err = b.BeginAsked(img, "web")
				check(t, err)
			}
			check(t, r.Watch(t.Context()))
			var devices []string
			for _, path := range b.paths {
				devices = append(devices, device(t, path))
			}
			t.Run("container", func(t *testing.T) { // whose end unmounts it
				b.t = t
				b.start(b.overlay(img))
			})
			b.t = t
			end := make(chan struct{})
			r.Ready(func(ctx context.Context) error {
				select {
				case <-end:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			})
			if _, err := bdi.ReadAhead(devices[0]); err != nil {
				t.Errorf("the mount is gone while the container runs: %v", err)
			}
			close(end)
			if asked {
				b.released(devices)
				rep, err := b.End(spec.ProfileEnd{Name: "web"})
				check(t, err)
				if rep.Files != 3 || rep.Read == 0 {
					t.Errorf("%+v", rep)
				}
			} else {
				b.wait()
				b.holds(img, startReads)
				b.released(devices)
			}
			b.empty()
		})
	}
}

// device is the backing device of the mount at path, which lasts as long as that.
func device(t *testing.T, path string) string {
	t.Helper()
	root, err := os.Open(path)
	check(t, err)
	defer root.Close()
	name, err := bdi.Of(root)
	check(t, err)
	return name
}

func (b *bed) released(devices []string) {
	b.t.Helper()
	for _, name := range devices {
		b.eventually("the end of the mount "+name, func() bool {
			_, err := bdi.ReadAhead(name)
			return errors.Is(err, fs.ErrNotExist)
		})
	}
}

// A start that fails, or is never watched, leaves nothing, and the next one is recorded.
func TestDrop(t *testing.T) {
	b := newBed(t, mount.EROFS, nil)
	img := b.image("app:1")
	b.Begin(img).Drop()
	r := b.Begin(img)
	check(t, r.Watch(t.Context()))
	b.start(b.overlay(img))
	r.Drop()
	r.Ready(stays)
	r.Drop()
	b.empty()
	if _, err := b.Profile(img.Desc.Digest); err == nil {
		t.Error("a failed start has made a profile")
	}
	if r = b.Begin(img); r == nil {
		t.Fatal("the start after a failed one is not recorded")
	}
	r.Drop()
	var none *Recording
	check(t, none.Watch(t.Context()))
	none.Ready(stays)
	none.Drop()
}

// Recordings of images that share a layer exclude each other, and one that was
// asked for goes first.
func TestOneAtATime(t *testing.T) {
	b := newBed(t, mount.EROFS, nil)
	one, two := b.image("app:1"), b.image("app:2")
	r := b.Begin(one)
	if b.Begin(one) != nil || b.Begin(two) != nil {
		t.Error("two recordings share layers")
	}
	asked, err := b.BeginAsked(two, "web")
	check(t, err)
	b.start(b.overlayAfter(asked, two))
	if _, ok, _ := r.finish(); ok {
		t.Error("the recording that nobody asked for goes on")
	}
	var busy *Error
	if _, err := b.BeginAsked(one, "other"); !errors.As(err, &busy) || busy.Kind() != inUse {
		t.Errorf("%v", err)
	}
	if _, err := b.End(spec.ProfileEnd{Name: "other"}); !errors.As(err, &busy) || busy.Kind() != notFound {
		t.Errorf("%v", err)
	}
	rep, err := b.End(spec.ProfileEnd{Name: "web", Discard: true})
	check(t, err)
	if rep.Read != 4*page || rep.Files != 3 || rep.Largest[0].Path != "d/a" || rep.Largest[0].Read != 2*page ||
		rep.Digest != two.Desc.Digest.String() {
		t.Errorf("%+v", rep)
	}
	if exists(b.profilePath(two.Desc.Digest)) {
		t.Error("a discarded recording has made a profile")
	}
	b.empty()
}

func (b *bed) overlayAfter(r *Recording, img *image.Image) string {
	b.t.Helper()
	check(b.t, r.Watch(b.t.Context()))
	return b.overlay(img)
}

// Runs are merged when that is asked for, and the pack has all that they read.
func TestMergeBuildInspect(t *testing.T) {
	b := newBed(t, mount.EROFS, nil)
	img := b.image("app:1")
	var none *Error
	if _, err := b.Build(t.Context(), img); !errors.As(err, &none) || none.Kind() != notFound ||
		!strings.Contains(none.Remedy(), "dew profile") {
		t.Errorf("build without a profile: %v", err)
	}
	read := func(merge bool, file string) {
		r, err := b.BeginAsked(img, "web")
		check(t, err)
		root := b.overlayAfter(r, img)
		_, err = os.ReadFile(filepath.Join(root, file))
		check(t, err)
		_, err = b.End(spec.ProfileEnd{Name: "web", Merge: merge, Exercised: true})
		check(t, err)
	}
	read(false, "d/a")
	read(false, "both")
	read(true, "b")
	check(t, os.WriteFile(b.cfg.Packs.PackPath(img.Desc.Digest)+".bad", []byte("it lied"), 0o600))
	if _, err := b.Inspect(t.Context(), img); !errors.As(err, &none) ||
		!strings.Contains(err.Error(), "it lied") {
		t.Errorf("inspect a quarantined pack: %v", err)
	}
	s, err := b.Build(t.Context(), img)
	check(t, err)
	if exists(b.cfg.Packs.PackPath(img.Desc.Digest) + ".bad") {
		t.Error("the quarantine stands")
	}
	want := []fileRead{{1, "both", 0}}
	for i := range int64(300) {
		want = append(want, fileRead{1, "b", i})
	}
	b.holds(img, want)
	p, err := b.Inspect(t.Context(), img)
	check(t, err)
	parts := p.Parts
	sum := parts.Header + parts.Tables + parts.Chunks + parts.Points + parts.Windows + parts.Files
	if p.Runs != 2 || !p.Exercised || p.Node != "n1" || p.Pack != s.Digest.String() || p.Size != s.Size ||
		sum != p.Size ||
		p.Files != 2 || p.Largest[0].Path != "b" || p.Largest[0].Read != 300*page ||
		p.Largest[0].Size != 300*page || p.Share <= 0 || p.Trust != "pop" {
		t.Errorf("%+v", p)
	}
	b.empty()
}

// A client of containerd that nobody tells of readiness is recorded for a fixed time.
func TestOtherClients(t *testing.T) {
	b := newBed(t, mount.EROFS, func(c *Config) { c.Others = 300 * time.Millisecond })
	img := b.image("app:1")
	parent := ""
	for i, id := range img.ChainIDs() {
		_, err := b.snaps.Prepare(t.Context(), fmt.Sprint("extract-", i, " ", id), parent,
			snapshots.WithLabels(map[string]string{snapshots.LabelSnapshotRef: id.String()}))
		if err == nil {
			t.Fatal("a layer is left to containerd")
		}
		parent = id.String()
	}
	if len(b.paths) > 0 {
		t.Fatal("the pull is recorded")
	}
	_, err := b.snaps.Prepare(t.Context(), "k8s.io/7/container", parent)
	check(t, err)
	b.start(b.overlay(img))
	b.wait()
	b.holds(img, startReads)
	clear(b.paths)
	_, err = b.snaps.Prepare(t.Context(), "k8s.io/8/another", parent)
	check(t, err)
	if len(b.paths) > 0 {
		t.Error("the second start is recorded")
	}
	for _, name := range []string{"k8s.io/7/container", "k8s.io/8/another", parent, img.ChainIDs()[0].String()} {
		check(t, b.snaps.Remove(t.Context(), name))
	}
	check(t, b.snaps.Cleanup(t.Context()))
	b.empty()
}

// Where nothing can be recorded a start goes on, and who asked is told why.
func TestUnsupported(t *testing.T) {
	b := newBed(t, mount.Tree, nil)
	img := b.image("app:1")
	r := b.Begin(img)
	check(t, r.Watch(t.Context()))
	r.Ready(stays)
	asked, err := b.BeginAsked(img, "web")
	check(t, err)
	var e *Error
	if err := asked.Watch(t.Context()); !errors.As(err, &e) || e.Kind() != unsupported ||
		!strings.Contains(err.Error(), "tree") {
		t.Errorf("%v", err)
	}
	check(t, b.store(&pack.Profile{Version: 1, Image: img.Desc.Digest}, false))
	if _, err := b.Build(t.Context(), img); !errors.As(err, &e) || e.Kind() != unsupported {
		t.Errorf("%v", err)
	}
	b.empty()
}

func TestNever(t *testing.T) {
	b := newBed(t, mount.EROFS, func(c *Config) { c.Never = true })
	img := b.image("app:1")
	if b.Begin(img) != nil {
		t.Error("it records of its own accord")
	}
	r, err := b.BeginAsked(img, "web")
	check(t, err)
	r.Drop()
}

// Of an image that is not whole nothing is recorded.
func TestMissingLayer(t *testing.T) {
	b := newBed(t, mount.EROFS, func(c *Config) { c.Layers = without{c.Layers} })
	img := b.image("app:1")
	r := b.Begin(img)
	check(t, r.Watch(t.Context()))
	b.empty()
	asked, err := b.BeginAsked(img, "web")
	check(t, err)
	if err := asked.Watch(t.Context()); err == nil {
		t.Error("an image that is not here is recorded")
	}
	b.empty()
}

type without struct{ Layers }

func (without) Peek(digest.Digest) (*layer.Layer, error) { return nil, layer.ErrUnknown }

// The pack has the points that are known of the layers, each layer its own.
func TestPoints(t *testing.T) {
	b := newBed(t, mount.EROFS, nil)
	tar := func(seed uint64, n int) []byte { return registrytest.RandomTar(seed, n, 3<<20) }
	p := b.reg.PushImage("app:1",
		[]registrytest.Layer{{Tar: tar(1, 1), Compression: image.Plain}, {Tar: tar(2, 2), Compression: image.Gzip},
			{Tar: tar(3, 1), Compression: image.Zstd}, {Tar: tar(4, 1), Compression: image.Zstd, MemberSize: 1 << 20}},
		registrytest.Options{})
	img := b.pull(p.Ref)
	check(t, b.store(&pack.Profile{Version: 1, Image: img.Desc.Digest}, false))
	_, err := b.Build(t.Context(), img)
	check(t, err)
	f, err := b.open(img)
	check(t, err)
	defer f.Close()
	h, _, err := pack.ReadHeader(f)
	check(t, err)
	for i, l := range h.Layers {
		if l.Points == nil {
			t.Fatalf("layer %d has no digests", i)
		}
		at := h.PointsSpan(i)
		stored := make([]byte, at.Length)
		_, err := f.ReadAt(stored, at.Offset)
		check(t, err)
		points, err := h.DecodePoints(i, stored)
		check(t, err)
		if want := int(l.Size >> 22); points.Len() <= want {
			t.Errorf("layer %d of %d bytes has %d points", i, l.Size, points.Len())
		}
		if points.Enterable() != (i != 2) {
			t.Errorf("layer %d can be entered: %v", i, points.Enterable())
		}
		if points.Enterable() {
			b.segments(h, f, points, i, img)
		}
	}
}

// segments inflates each segment of a layer from its blob.
func (b *bed) segments(h *pack.Header, f *os.File, points *pack.Points, i int, img *image.Image) {
	b.t.Helper()
	blob := b.blob(img, i)
	for n := range points.Len() {
		var window []byte
		if w := points.Window(n); w.Length > 0 {
			window = make([]byte, w.Length)
			_, err := f.ReadAt(window, h.WindowsSpan(i).Offset+w.Offset)
			check(b.t, err)
		}
		lo, hi := points.Blob(n)
		from, to := points.Data(n)
		data := make([]byte, to-from)
		check(b.t, points.Inflate(n, bytes.NewReader(blob[lo:hi]), window, data))
		check(b.t, b.compare(h.Layers[i].DiffID, from, data))
	}
}

// blob fetches a layer as the registry has it.
func (b *bed) blob(img *image.Image, i int) []byte {
	b.t.Helper()
	l := img.Layers[i]
	r, err := b.cfg.Registry.(*registry.Client).Open(b.t.Context(), img.Ref,
		registry.Blob{Digest: l.Digest, Size: l.Size}, 0, -1, registry.OpenOptions{})
	check(b.t, err)
	defer r.Close()
	all, err := io.ReadAll(r)
	check(b.t, err)
	return all
}

// A build that fails leaves nothing, says why, and the one before stays.
func TestBuildFails(t *testing.T) {
	b := newBed(t, mount.EROFS, nil)
	img := b.image("app:1")
	check(t, b.store(&pack.Profile{Version: 1, Image: img.Desc.Digest}, false))
	_, err := b.Build(t.Context(), img)
	check(t, err)
	l, err := b.cfg.Layers.Peek(img.Layers[0].DiffID)
	check(t, err)
	f, err := os.OpenFile(l.Files().Data, os.O_WRONLY, 0)
	check(t, err)
	_, err = f.WriteAt([]byte("changed"), 2000)
	check(t, errors.Join(err, f.Close()))
	if _, err := b.Build(t.Context(), img); err == nil ||
		!strings.Contains(err.Error(), "does not match its digest") {
		t.Errorf("%v", err)
	}
	if _, err := b.Inspect(t.Context(), img); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Build(ctx, img); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err := (&outcome{Error: "write x: no space left on device", Full: true}).err(); !errors.Is(err,
		syscall.ENOSPC) {
		t.Error(err)
	}
	b.empty()
}

func TestPush(t *testing.T) {
	for _, q := range []registrytest.Quirks{{}, {NoReferrers: true}} {
		b := newBed(t, mount.EROFS, nil)
		b.reg.Be(q)
		img := b.image("team/app:1")
		if _, err := b.Push(t.Context(), img, spec.PackPush{}); err == nil {
			t.Error("a pack that is not there is pushed")
		}
		check(t, b.store(&pack.Profile{Version: 1, Image: img.Desc.Digest}, false))
		_, err := b.Build(t.Context(), img)
		check(t, err)
		public, private, err := ed25519.GenerateKey(rand.Reader)
		check(t, err)
		der, err := x509.MarshalPKCS8PrivateKey(private)
		check(t, err)
		var e *Error
		if _, err := b.Push(t.Context(), img, spec.PackPush{Key: []byte("none")}); !errors.As(err, &e) ||
			e.Kind() != badRequest {
			t.Errorf("%v", err)
		}
		got, err := b.Push(t.Context(), img,
			spec.PackPush{Key: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})})
		check(t, err)
		client := b.cfg.Registry.(*registry.Client)
		list, err := client.Referrers(t.Context(), img.Ref, img.Desc.Digest, pack.MediaType)
		check(t, err)
		if len(list) != 1 || list[0].Digest.String() != got.Manifest || !got.Signed {
			t.Fatalf("%+v, %+v", list, got)
		}
		about := list[0].Annotations
		sig, err := base64.StdEncoding.DecodeString(about[pack.AnnotationSignature])
		check(t, err)
		check(t, pack.Verify(public, img.Desc.Digest, digest.Digest(about[pack.AnnotationHeader]), sig))
		if about[pack.AnnotationBlob] != got.Pack || about[pack.AnnotationSize] != fmt.Sprint(got.Size) {
			t.Errorf("%v", about)
		}
	}
}

// What an earlier process left unfinished goes; profiles stay.
func TestSweep(t *testing.T) {
	b := newBed(t, mount.EROFS, nil)
	img := b.image("app:1")
	check(t, b.store(&pack.Profile{Version: 1, Image: img.Desc.Digest}, false))
	check(t, os.WriteFile(filepath.Join(b.packs, "x.pack.123.tmp"), nil, 0o600))
	b.Learner.Close()
	if b.Begin(img) != nil {
		t.Error("a closed Learner records")
	}
	b.Learner = New(b.cfg)
	t.Cleanup(b.Learner.Close)
	if left, _ := filepath.Glob(filepath.Join(b.packs, "*")); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
	if b.Begin(img) != nil {
		t.Error("recorded though there is a profile")
	}
	b.wait() // of which the pack is made
}
