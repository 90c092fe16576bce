package demo

import (
	"archive/tar"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// manyImages are images of the sizes that the Foglets evaluation has: 4, 118, 125
// and 193 MB unpacked. All have ls, ping and watch. The smallest is busybox, as
// Alpine is; the others are Debian, filled up with files of the machine's own /usr.
var manyImages = map[string]int64{"many:4": 4e6, "many:118": 118e6, "many:125": 125e6, "many:193": 193e6}

// ManyNames lists the images of the experiments with many deployments, the smallest first.
func ManyNames() []string { return []string{"many:4", "many:118", "many:125", "many:193"} }

var manyConfig = ocispec.ImageConfig{Env: []string{pathEnv, "TERM=linux"}, Cmd: []string{"ls"}}

func manyRecipe(size int64) recipe {
	if size < 20e6 {
		return recipe{layers: busyboxLayers(size), config: manyConfig}
	}
	return recipe{config: manyConfig, layers: func(ctx context.Context, b *builder) ([]layer, error) {
		tools := app{packages: []string{"iputils-ping", "procps"},
			setup: `printf '127.0.0.1 localhost\n' > /etc/hosts`}
		layers, err := tools.layers(ctx, b)
		if err != nil {
			return nil, err
		}
		for _, l := range layers {
			size -= l.Size
		}
		fill, err := b.store.pack(ocispec.MediaTypeImageLayerGzip, gzip6, func(l *layerWriter) error {
			tw := tar.NewWriter(l)
			err := new(hostFiles).fill(ctx, tw, "opt/fill", func() bool { return l.unpacked.n >= size })
			return errors.Join(err, tw.Close())
		})
		return append(layers, fill), err
	}}
}

// busyboxLayers is one layer of a static busybox and noise up to size.
func busyboxLayers(size int64) func(context.Context, *builder) ([]layer, error) {
	return func(ctx context.Context, b *builder) ([]layer, error) {
		program, err := b.busybox(ctx)
		if err != nil {
			return nil, err
		}
		l, err := b.store.pack(ocispec.MediaTypeImageLayerGzip, gzip6, func(l *layerWriter) error {
			tw := tar.NewWriter(l)
			noise := make([]byte, max(0, size-int64(len(program))))
			rand.NewChaCha8([32]byte{1}).Read(noise)
			err := errors.Join(
				add(tw, &tar.Header{Name: "bin/busybox", Mode: 0o755}, program),
				add(tw, &tar.Header{Name: "etc/hosts", Mode: 0o644}, []byte("127.0.0.1 localhost\n")),
				add(tw, &tar.Header{Name: "etc/passwd", Mode: 0o644}, []byte("root:x:0:0:root:/:/bin/sh\n")),
				add(tw, &tar.Header{Name: "opt/fill", Mode: 0o644}, noise))
			for _, name := range []string{"ls", "ping", "sh", "sleep", "watch"} {
				err = errors.Join(err,
					add(tw, &tar.Header{Name: "bin/" + name, Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777},
						nil))
			}
			for _, dir := range []string{"dev/", "proc/", "sys/", "tmp/"} {
				err = errors.Join(err, add(tw, &tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755}, nil))
			}
			return errors.Join(err, tw.Close())
		})
		return []layer{l}, err
	}
}

func add(tw *tar.Writer, hdr *tar.Header, body []byte) error {
	hdr.Size = int64(len(body))
	if err := tw.WriteHeader(hdr); err != nil {
		return err
	}
	_, err := tw.Write(body)
	return err
}

// busybox is the program of Debian's package busybox-static.
func (b *builder) busybox(ctx context.Context) ([]byte, error) {
	sources, codename, err := aptSources(ctx)
	if err != nil {
		return nil, err
	}
	top, err := os.MkdirTemp(b.work, "busybox")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(top)
	tree := filepath.Join(top, "tree")
	args := []string{"--quiet", "--mode=root", "--variant=extract", "--format=directory",
		"--include=busybox-static"}
	for _, option := range aptOptions(ctx) {
		args = append(args, "--aptopt="+option)
	}
	if err := run(exec.CommandContext(ctx, "mmdebstrap",
		append(append(args, codename, tree), sources...)...)); err != nil {
		return nil, err
	}
	for _, path := range []string{"bin/busybox", "usr/bin/busybox"} {
		if program, err := os.ReadFile(filepath.Join(tree, path)); err == nil {
			return program, nil
		}
	}
	return nil, errors.New("no busybox in the package busybox-static")
}
