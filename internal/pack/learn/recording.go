package learn

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/image"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/pack"
	"dewpoint/internal/pack/profile"

	"github.com/opencontainers/go-digest"
)

// longest is when a recording that nobody ends is dropped.
const longest = time.Hour

// Recording is one start that is being recorded. Its methods are safe for
// concurrent use, and do nothing on a nil Recording, which is what a start has
// that is not recorded.
type Recording struct {
	l     *Learner
	img   *image.Image
	name  string // of the container, if it was asked for
	asked bool
	limit *time.Timer

	over    context.Context // ends with the recording
	end     context.CancelFunc
	started chan struct{} // closed when kernel and err are set
	kernel  *profile.Recording
	err     error

	mu     sync.Mutex
	mounts []func() // releases; guarded by mu
	ending bool     // guarded by mu
}

// Begin begins the recording of a start of the image if there is something to
// learn, and returns nil if not. It does not wait for the kernel: Watch does.
func (l *Learner) Begin(img *image.Image) *Recording {
	if l == nil || l.cfg.Never || !l.wanted(img) {
		return nil
	}
	r, err := l.begin(img, "", false)
	if err != nil {
		l.cfg.Log.Debug("a start is not recorded", "image", img.Ref, "why", err)
		return nil
	}
	return r
}

// BeginAsked begins the recording of a container's start because someone asked
// for it. It goes on until End, which finds it by the container's name.
// Recordings that nobody asked for give way.
func (l *Learner) BeginAsked(img *image.Image, name string) (*Recording, error) {
	if err := profile.Available(l.cfg.Dir); err != nil {
		return nil, cannot(err)
	}
	l.mu.Lock()
	var weak []*Recording
	for r := range l.running {
		if !r.asked && overlap(r.img, img) {
			weak = append(weak, r)
		}
	}
	l.mu.Unlock()
	for _, r := range weak {
		r.Drop()
	}
	return l.begin(img, name, true)
}

func cannot(err error) error {
	return &Error{kind: unsupported, text: "starts cannot be recorded on this node", err: err,
		remedy: "\"dew doctor\" says what the node lacks"}
}

// wanted reports whether the image's start would teach anything. An image that
// has a profile and no pack is built.
func (l *Learner) wanted(img *image.Image) bool {
	id := img.Desc.Digest
	if exists(l.cfg.Packs.PackPath(id)) {
		return false
	}
	if exists(l.profilePath(id)) {
		l.buildLater(img)
		return false
	}
	return true
}

func overlap(a, b *image.Image) bool {
	return slices.ContainsFunc(a.Layers, func(l image.Layer) bool { return b.HasLayer(l.DiffID) })
}

func (l *Learner) begin(img *image.Image, name string, asked bool) (*Recording, error) {
	r := &Recording{l: l, img: img, name: name, asked: asked, started: make(chan struct{})}
	r.over, r.end = context.WithCancel(l.life)
	r.limit = time.AfterFunc(longest, func() {
		l.cfg.Log.Warn("a recording went on for too long: nothing of it is kept", "image", img.Ref, "limit",
			longest)
		r.Drop()
	})
	if err := l.enlist(r); err != nil {
		r.limit.Stop()
		r.end()
		return nil, err
	}
	ok := l.spawn(func() {
		defer close(r.started)
		r.kernel, r.err = profile.Start(l.life, profile.Config{Dir: l.cfg.Dir, Log: l.cfg.Log}, nil)
	})
	if !ok {
		r.err = problem(inUse, "dewd is stopping", "")
		close(r.started)
		r.Drop()
		return nil, r.err
	}
	return r, nil
}

func (l *Learner) enlist(r *Recording) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for other := range l.running {
		if overlap(other.img, r.img) {
			return problem(inUse,
				fmt.Sprintf("a start of %s, which has layers in common, is being recorded", other.img.Ref),
				"try again when that has ended")
		}
	}
	l.running[r] = true
	return nil
}

func (l *Learner) strike(r *Recording) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.running, r)
}

// Watch mounts the image's layers anew and records what is read of them from
// now on. It is called when they can be mounted and before the container is
// made. After an error, which only a recording that was asked for returns, the
// recording has ended.
func (r *Recording) Watch(ctx context.Context) error {
	if r == nil {
		return nil
	}
	err := r.watch(ctx)
	if err == nil {
		return nil
	}
	r.Drop()
	if r.asked {
		return err
	}
	level := slog.LevelWarn
	if known := (*Error)(nil); errors.As(err, &known) {
		level = slog.LevelDebug // this node, or an image that is not whole
	}
	r.l.cfg.Log.Log(ctx, level, "a start is not recorded", "image", r.img.Ref, "why", err)
	return nil
}

func (r *Recording) watch(ctx context.Context) error {
	select {
	case <-r.started:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if r.err != nil {
		return r.explain(r.err)
	}
	layers, err := r.mount(ctx)
	if err != nil {
		return err
	}
	return r.explain(r.kernel.Add(layers...))
}

func (r *Recording) explain(err error) error {
	if errors.Is(err, profile.ErrUnsupported) {
		return cannot(err)
	}
	return err
}

// mount gives every layer a fresh mount.
func (r *Recording) mount(ctx context.Context) ([]profile.Layer, error) {
	files := map[digest.Digest]mount.Files{}
	for _, l := range r.img.Layers {
		have, err := r.l.cfg.Layers.Peek(l.DiffID)
		if err != nil {
			return nil, problem(inUse, "the image is not whole yet", "wait until it is, or use --lazy never")
		}
		files[l.DiffID] = have.Files()
	}
	var out []profile.Layer
	for id, f := range files {
		if f.Tree != "" {
			return nil, cannot(fmt.Errorf("layers are unpacked directories here (mount backend tree): %w",
				profile.ErrUnsupported))
		}
		path, release, err := r.l.cfg.Mounts.Fresh(ctx, id)
		if err != nil {
			return nil, err
		}
		if !r.hold(release) {
			return nil, problem(inUse, "the recording has ended", "")
		}
		out = append(out, profile.Layer{DiffID: id, Index: f.Index, Mount: path})
	}
	return out, nil
}

// hold keeps a release for the end, unless that has come.
func (r *Recording) hold(release func()) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ending {
		release()
		return false
	}
	r.mounts = append(r.mounts, release)
	return true
}

// Gone waits for a container's end. It returns an error if ctx ended before, or
// if it will not be known.
type Gone func(ctx context.Context) error

// Ready says that the container serves. A recording that nobody asked for ends
// when it has settled, or when the container has ended, becomes a profile, and
// then a pack. From here on the recording does not keep the layers in the store:
// the container does. The kernel's mounts are let go when the container has ended.
func (r *Recording) Ready(gone Gone) {
	if r == nil {
		return
	}
	r.release()
	if !r.asked {
		r.endAfter(r.l.cfg.After, gone)
		return
	}
	r.l.spawn(func() {
		if gone(r.over) == nil {
			r.rest()
		}
	})
}

// rest ends what the kernel records, and lets go of the mounts. The recording
// waits for End.
func (r *Recording) rest() {
	if <-r.started; r.kernel == nil {
		return
	}
	if _, err := r.kernel.Stop(); err != nil { // finish is told again
		r.l.cfg.Log.Debug("end what the kernel records", "image", r.img.Ref, "err", err)
	}
}

// release lets go of the mounts. The kernel keeps what is recorded.
func (r *Recording) release() {
	r.mu.Lock()
	mounts := r.mounts
	r.mounts = nil
	r.mu.Unlock()
	for _, release := range mounts {
		release()
	}
}

func (r *Recording) endAfter(d time.Duration, gone Gone) {
	r.l.spawn(func() {
		ctx, cancel := context.WithTimeout(r.over, d)
		defer cancel()
		if gone(ctx) != nil {
			<-ctx.Done()
		}
		if r.over.Err() != nil {
			return
		}
		if err := r.keep(); err != nil {
			r.l.cfg.Log.Warn("a recorded start is lost", "image", r.img.Ref, "err", err)
		}
	})
}

func (r *Recording) keep() error {
	res, ok, err := r.finish()
	if err != nil || !ok || len(res.Reads) == 0 {
		return err
	}
	if res.Lost > 0 {
		return fmt.Errorf("%d of the kernel's events are missing", res.Lost)
	}
	if err := r.l.store(r.profile(res, false), false); err != nil {
		return err
	}
	r.l.buildLater(r.img)
	return nil
}

// Drop ends the recording and keeps nothing of it.
func (r *Recording) Drop() {
	if r == nil {
		return
	}
	if _, _, err := r.finish(); err != nil {
		r.l.cfg.Log.Warn("end a recording", "image", r.img.Ref, "err", err)
	}
}

// finish ends the recording; ok is false if it has ended before, or begun never.
func (r *Recording) finish() (res profile.Result, ok bool, err error) {
	r.mu.Lock()
	ended := r.ending
	r.ending = true
	r.mu.Unlock()
	if ended {
		return res, false, nil
	}
	defer r.l.strike(r)
	r.end()
	r.limit.Stop()
	<-r.started
	if r.kernel != nil {
		res, err = r.kernel.Stop()
	}
	r.release()
	return res, r.err == nil, err
}

// profile makes a profile of what was recorded.
func (r *Recording) profile(res profile.Result, exercised bool) *pack.Profile {
	p := &pack.Profile{Version: pack.Version, Image: r.img.Desc.Digest,
		About: pack.About{Runs: 1, Exercised: exercised, Created: time.Now().UTC().Truncate(time.Second),
			Node: r.l.cfg.Node}}
	at := map[digest.Digest]int{}
	for _, l := range r.img.Layers {
		if _, ok := at[l.DiffID]; !ok {
			at[l.DiffID] = len(p.Layers)
			p.Layers = append(p.Layers, l.DiffID)
		}
	}
	for _, read := range res.Reads {
		if i, ok := at[read.Layer]; ok {
			p.Reads = append(p.Reads, pack.Range{Layer: i, Offset: read.Offset, Length: read.Length})
		}
	}
	return p
}

// store writes a profile, together with the one that is there if merge is set.
func (l *Learner) store(p *pack.Profile, merge bool) error {
	if merge {
		old, err := l.Profile(p.Image)
		var none *Error
		switch {
		case err == nil:
			node := p.About.Node
			if p, err = pack.Merge(old, p); err != nil {
				return err
			}
			p.About.Node = node
		case !errors.As(err, &none):
			l.cfg.Log.Warn("an earlier profile cannot be read: it is replaced", "err", err)
		}
	}
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return durable.WriteFile(l.profilePath(p.Image), b, 0o600)
}

// Prepared is to be called when a client of containerd has made a container's
// directory on these layers, bottom first, and before it can mount that; gone is
// closed when the directory is removed. It may take some tens of milliseconds,
// once for each image.
func (l *Learner) Prepared(layers []digest.Digest, gone <-chan struct{}) {
	if l.cfg.Never || l.cfg.Images == nil || len(layers) == 0 {
		return
	}
	img := l.stranger(layers)
	if img == nil {
		return
	}
	r := l.Begin(img)
	if r == nil {
		return
	}
	ctx, cancel := context.WithTimeout(l.life, startLimit)
	defer cancel()
	r.Watch(ctx)
	r.release()
	r.endAfter(l.cfg.Others, func(ctx context.Context) error {
		select {
		case <-gone:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
}

// startLimit is how long a start of another client waits for its recording to begin.
const startLimit = 2 * time.Second

// stranger finds the image of these layers, if they are all here and there is
// something to learn of it. Of images that differ in nothing but their
// configuration none may be known: the start may be of any of them.
func (l *Learner) stranger(layers []digest.Digest) (found *image.Image) {
	for _, id := range layers {
		if _, err := l.cfg.Layers.Peek(id); err != nil {
			return nil
		}
	}
	for _, img := range l.cfg.Images.WithLayer(layers[len(layers)-1]) {
		same := slices.EqualFunc(img.Layers, layers, func(a image.Layer, id digest.Digest) bool {
			return a.DiffID == id
		})
		if same && !l.wanted(img) {
			return nil
		}
		if same && found == nil {
			found = img
		}
	}
	return found
}
