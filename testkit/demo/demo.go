// Package demo builds the container images of the demonstration, the tests
// and the benchmarks: real ones, from Debian packages of the machine's own
// mirror, and the structures that the papers measured.
//
// An image is a stack of layers over one base, as a Dockerfile would make it.
// mmdebstrap makes the base tree; an application's layer is what installing
// its packages in a chroot over an overlayfs changes. Layers are compressed by
// Go's gzip at level 6, the encoder and level with which docker pushes.
//
// All images live in one OCI image layout, named by the standard annotation
// (org.opencontainers.image.ref.name, "nginx:1"). What is in the layout is not
// built again; an image appears in its index only once it is whole.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// Dir is where images are kept when nothing else is said.
const Dir = "/var/cache/dewpoint/images"

// Config says what to build and where.
type Config struct {
	Dir   string    // the OCI layout, made if absent; "" is the constant Dir
	Names []string  // NAME:TAG as listed by Names; none is Default
	Log   io.Writer // one line for each step; nil discards
}

// Default are the images of the demonstration.
var Default = []string{"nginx:1", "redis:1", "python:1"}

// recipe makes one image: its layers in order, then its configuration.
type recipe struct {
	layers func(ctx context.Context, b *builder) ([]layer, error)
	config ocispec.ImageConfig
}

// Names lists every image that Build knows, sorted.
func Names() []string {
	var names []string
	for name := range recipes() {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func recipes() map[string]recipe {
	all := map[string]recipe{"goweb:1": website}
	for _, some := range []map[string]app{apps, services} {
		for name, a := range some {
			all[name+":1"] = recipe{layers: a.layers, config: a.config}
			all[name+":zstd"] = recipe{layers: recompressed(name + ":1"), config: a.config}
		}
	}
	for name, a := range boots {
		all[name+":boot"] = recipe{layers: a.layers, config: a.config}
	}
	for name, size := range manyImages {
		all[name] = manyRecipe(size)
	}
	for name, s := range structures {
		all[name] = recipe{layers: s.layers, config: sleeper}
	}
	return all
}

// Build makes the named images that are absent from the layout. It needs root.
// Two builds of one layout exclude each other.
func Build(ctx context.Context, cfg Config) error {
	b, err := newBuilder(cfg)
	if err != nil {
		return err
	}
	defer b.close()
	known := recipes()
	for _, name := range cfg.Names {
		if _, ok := known[name]; !ok {
			return fmt.Errorf("image %s: unknown; there are %v", name, Names())
		}
	}
	for _, name := range b.names {
		if err := b.build(ctx, name, known); err != nil {
			return fmt.Errorf("image %s: %w", name, err)
		}
	}
	return nil
}

// builder holds what the images of one Build share.
type builder struct {
	names []string
	store store
	lock  *os.File
	work  string // scratch trees, removed by close
	log   io.Writer
	base  *tree // made on first use
}

func newBuilder(cfg Config) (*builder, error) {
	b := &builder{names: cfg.Names, store: store{dir: cfg.Dir}, log: cfg.Log}
	if len(b.names) == 0 {
		b.names = Default
	}
	if b.store.dir == "" {
		b.store.dir = Dir
	}
	if b.log == nil {
		b.log = io.Discard
	}
	if err := os.MkdirAll(b.store.dir, 0o755); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(b.store.dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	b.lock = lock
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		lock.Close()
		return nil, fmt.Errorf("lock %s: %w", b.store.dir, err)
	}
	b.work = filepath.Join(b.store.dir, ".work")
	if err := errors.Join(b.store.init(), os.RemoveAll(b.work)); err != nil { // of a build that was killed
		lock.Close()
		return nil, err
	}
	return b, os.MkdirAll(b.work, 0o755)
}

func (b *builder) close() {
	os.RemoveAll(b.work)
	b.lock.Close()
}

func (b *builder) build(ctx context.Context, name string, known map[string]recipe) error {
	if has, err := b.store.hasImage(name); has || err != nil {
		return err
	}
	start := time.Now()
	r := known[name]
	layers, err := r.layers(ctx, b)
	if err != nil {
		return err
	}
	img := ocispec.Image{Config: r.config}
	img.OS, img.Architecture = "linux", runtime.GOARCH
	if err := b.store.add(name, img, layers); err != nil {
		return err
	}
	var packed, unpacked int64
	for _, l := range layers {
		packed, unpacked = packed+l.Desc.Size, unpacked+l.Size
	}
	fmt.Fprintf(b.log, "image %s: %d layers, %.1f MB compressed, %.1f MB unpacked, built in %.0f s\n",
		name, len(layers), float64(packed)/1e6, float64(unpacked)/1e6, time.Since(start).Seconds())
	return nil
}

// recompressed gives the layers of another image as zstd.
func recompressed(name string) func(context.Context, *builder) ([]layer, error) {
	return func(ctx context.Context, b *builder) ([]layer, error) {
		if err := b.build(ctx, name, recipes()); err != nil {
			return nil, err
		}
		return b.store.recompress(name)
	}
}
