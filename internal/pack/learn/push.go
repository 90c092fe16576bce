package learn

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"fmt"
	"io"
	"os"
	"strconv"

	"dewpoint/internal/image"
	"dewpoint/internal/pack"
	"dewpoint/internal/registry"
	"dewpoint/internal/spec"

	"github.com/opencontainers/go-digest"
)

// Push publishes the pack of an image in the image's repository, signed if
// there is a key (PEM).
func (l *Learner) Push(ctx context.Context, img *image.Image, o spec.PackPush) (spec.PackPushed, error) {
	key, err := privateKey(o.Key)
	if err != nil {
		return spec.PackPushed{}, err
	}
	f, err := l.open(img)
	if err != nil {
		return spec.PackPushed{}, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return spec.PackPushed{}, err
	}
	_, header, err := pack.ReadHeader(f)
	if err != nil {
		return spec.PackPushed{}, fmt.Errorf("%s: %w", f.Name(), err)
	}
	id, err := hashOf(f)
	if err != nil {
		return spec.PackPushed{}, err
	}
	a := artifact(img, f, digest.Digest(id), fi.Size(), header)
	if key != nil {
		a.Annotations[pack.AnnotationSignature] = base64.StdEncoding.EncodeToString(pack.Sign(key, img.Desc.Digest,
			header))
	}
	d, err := l.cfg.Registry.PushArtifact(ctx, img.Ref, a)
	if err != nil {
		return spec.PackPushed{}, err
	}
	return spec.PackPushed{Image: img.Ref.String(), Manifest: d.Digest.String(), Pack: id, Size: fi.Size(),
		Signed: key != nil}, nil
}

func privateKey(text []byte) (ed25519.PrivateKey, error) {
	if len(text) == 0 {
		return nil, nil
	}
	key, err := pack.ParsePrivateKey(text)
	if err != nil {
		return nil, &Error{kind: badRequest, text: "the key cannot be used", err: err,
			remedy: "make one with openssl genpkey -algorithm ed25519"}
	}
	return key, nil
}

// artifact is what docs/design/formats.md says of a published pack.
func artifact(img *image.Image, f *os.File, id digest.Digest, size int64,
	header digest.Digest) registry.Artifact {
	return registry.Artifact{Type: pack.MediaType, Subject: img.Desc,
		Annotations: map[string]string{
			pack.AnnotationBlob:   id.String(),
			pack.AnnotationSize:   strconv.FormatInt(size, 10),
			pack.AnnotationHeader: header.String(),
		},
		Layers: []registry.ArtifactLayer{{MediaType: pack.MediaType, Digest: id, Size: size,
			Open: func() (io.ReadCloser, error) {
				return io.NopCloser(io.NewSectionReader(f, 0, size)), nil
			}}},
	}
}
