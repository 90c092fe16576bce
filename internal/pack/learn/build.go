package learn

import (
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"dewpoint/internal/durable"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/inflate"
	"dewpoint/internal/pack"
	"dewpoint/internal/sched"

	"github.com/opencontainers/go-digest"
)

// buildLater builds an image's pack in the background. What fails is logged,
// and not tried again on its own accord while this process lives.
func (l *Learner) buildLater(img *image.Image) {
	id := img.Desc.Digest
	l.mu.Lock()
	waits := l.queued[id] || l.closed
	l.queued[id] = true
	l.mu.Unlock()
	if waits {
		return
	}
	l.spawn(func() {
		s, err := l.Build(l.life, img)
		switch {
		case l.life.Err() != nil:
			return
		case err != nil:
			level := slog.LevelError
			if known := (*Error)(nil); errors.As(err, &known) {
				level = slog.LevelInfo // the image has gone meanwhile
			}
			l.cfg.Log.Log(l.life, level, "no startup pack is built", "image", img.Ref, "err", err)
		default:
			l.done(id)
			l.cfg.Log.Info("startup pack built", "image", img.Ref, "bytes", s.Size, "needed", s.Needed)
			if l.cfg.Shared != nil {
				l.cfg.Shared.SharePack(id)
			}
		}
	})
}

func (l *Learner) done(id digest.Digest) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.queued, id)
}

// Build makes the pack of an image from its profile and its layers, which must
// be here, and lifts a quarantine of it. Builds wait for each other. When
// Build returns nil the pack survives a power cut.
func (l *Learner) Build(ctx context.Context, img *image.Image) (pack.Stats, error) {
	select {
	case l.turn <- struct{}{}:
	case <-ctx.Done():
		return pack.Stats{}, context.Cause(ctx)
	}
	defer func() { <-l.turn }()
	id := img.Desc.Digest
	p, err := l.Profile(id)
	if err != nil {
		return pack.Stats{}, err
	}
	j, points, err := l.job(img, p)
	if err != nil {
		return pack.Stats{}, err
	}
	path := l.cfg.Packs.PackPath(id)
	var stats pack.Stats
	err = durable.Commit(path, 0o600, func(f *os.File) (err error) {
		j.Dir = filepath.Dir(path)
		stats, err = l.child(ctx, j, points, f)
		return err
	})
	if err != nil {
		return pack.Stats{}, fmt.Errorf("build the pack of %s: %w", img.Ref, err)
	}
	return stats, l.cfg.Packs.Absolve(id)
}

// job is what a child is told. The points of its layers follow it.
type job struct {
	Image   digest.Digest
	Profile *pack.Profile
	Layers  []jobLayer
	Dir     string
}

type jobLayer struct {
	DiffID, Blob   digest.Digest
	BlobSize, Size int64
	Compression    image.Compression
	Data           string // path
	Points         bool   // points follow
}

type points = func(yield func(inflate.Point) error) error

// job describes a build, and gives the points of those layers that have them,
// in order.
func (l *Learner) job(img *image.Image, p *pack.Profile) (job, []points, error) {
	j := job{Image: img.Desc.Digest, Profile: p}
	var all []points
	seen := map[digest.Digest]bool{}
	for _, want := range img.Layers {
		if seen[want.DiffID] {
			continue
		}
		seen[want.DiffID] = true
		have, err := l.cfg.Layers.Peek(want.DiffID)
		if err != nil {
			return j, nil, problem(inUse,
				fmt.Sprintf("layer %s of the image is not here, or not whole yet", want.Digest), "\"dew pull\" it first")
		}
		if have.Tree {
			return j, nil, problem(unsupported,
				"layers are unpacked directories here (mount backend tree), of which no pack can be made",
				"build it on a node whose kernel has EROFS")
		}
		to := jobLayer{DiffID: want.DiffID, Blob: want.Digest, BlobSize: want.Size, Size: have.Size,
			Compression: want.Compression(), Data: have.Files().Data}
		var found points
		if to.Compression, found = pointsOf(have, want); found != nil {
			to.Points = true
			all = append(all, found)
		}
		j.Layers = append(j.Layers, to)
	}
	return j, all, nil
}

// pointEvery is how far apart points of plain layers are made.
const pointEvery = 2 << 20

// pointsOf gives the points of the blob that the image has, and how it is
// compressed. A layer that came from another blob has points that are of no
// use for this one.
func pointsOf(have *layer.Layer, want image.Layer) (image.Compression, points) {
	switch {
	case want.Digest == want.DiffID: // whatever its media type says
		return image.Plain, func(yield func(inflate.Point) error) error {
			for at := int64(pointEvery); at < have.Size; at += pointEvery {
				if err := yield(inflate.Point{In: at, Out: at}); err != nil {
					return err
				}
			}
			return nil
		}
	case have.Blob != want.Digest:
		return want.Compression(), nil
	}
	return want.Compression(), have.Points
}

// outcome is what a child says on its standard output.
type outcome struct {
	Stats pack.Stats
	Error string
	Full  bool // the error is that of a full disk
}

func (o *outcome) err() error {
	if o.Full {
		return fmt.Errorf("%w (%s)", syscall.ENOSPC, o.Error)
	}
	return errors.New(o.Error)
}

// child runs a build in a process of its own, which writes to out.
func (l *Learner) child(ctx context.Context, j job, pts []points, out *os.File) (pack.Stats, error) {
	cmd := exec.CommandContext(ctx, l.cfg.Exec[0], l.cfg.Exec[1:]...)
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.ExtraFiles = []*os.File{out}
	var said, complaint bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &limited{w: &complaint, left: 4 << 10}
	r, w := io.Pipe()
	cmd.Stdin = r
	fed := make(chan error, 1)
	go func() { fed <- w.CloseWithError(feed(w, j, pts)) }()
	err := sched.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	r.Close()
	<-fed
	var o outcome
	if jerr := json.Unmarshal(said.Bytes(), &o); jerr == nil && o.Error != "" {
		return o.Stats, o.err()
	}
	if ctx.Err() != nil {
		return o.Stats, context.Cause(ctx)
	}
	if err != nil {
		return o.Stats, fmt.Errorf("%w %s", err, strings.TrimSpace(complaint.String()))
	}
	return o.Stats, nil
}

// mark is a point of a layer, or the end of its points.
type mark struct {
	Layer int
	End   bool
	Point inflate.Point
}

// feed writes the job, and behind it the points of each layer that has them.
func feed(w io.Writer, j job, pts []points) error {
	e := gob.NewEncoder(w)
	if err := e.Encode(j); err != nil {
		return err
	}
	for i := range j.Layers {
		if !j.Layers[i].Points {
			continue
		}
		err := pts[0](func(p inflate.Point) error { return e.Encode(mark{Layer: i, Point: p}) })
		if err != nil {
			return fmt.Errorf("read restart points: %w", err)
		}
		if err := e.Encode(mark{Layer: i, End: true}); err != nil {
			return err
		}
		pts = pts[1:]
	}
	return nil
}

// limited keeps the beginning of what is written to it.
type limited struct {
	w    io.Writer
	left int
}

func (l *limited) Write(b []byte) (int, error) {
	n := min(len(b), l.left)
	l.left -= n
	_, err := l.w.Write(b[:n])
	return len(b), err
}
