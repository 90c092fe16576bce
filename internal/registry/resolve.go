package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	"dewpoint/internal/image"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// ResolveOptions are what one Resolve may differ in.
type ResolveOptions struct {
	Platform ocispec.Platform // zero is the node's own
	// Manifest, if set, is called by Resolve as soon as the platform's manifest
	// is known, before the config is fetched. It must not block.
	Manifest func(ocispec.Descriptor)
}

var acceptManifests = []string{
	ocispec.MediaTypeImageIndex + ", " + image.DockerManifestList + ", " +
		ocispec.MediaTypeImageManifest + ", " + image.DockerManifest,
}

// Resolve fetches an image's documents and verifies them: the index, if the
// reference names one, the manifest for the platform, and the config; one
// request each. Layers are not touched.
//
// Its errors are *Error, with Kind BadImage and one of package image's
// sentinels where the documents came but cannot be used, or the end of ctx.
func (c *Client) Resolve(ctx context.Context, ref image.Reference, o ResolveOptions) (*image.Image, error) {
	eps, err := c.endpoints(ref.Host)
	if err != nil {
		return nil, err
	}
	r := resolver{c: c, ctx: ctx, ref: ref, eps: eps, op: "resolve " + ref.String(), platform: o.Platform}
	if r.platform.OS == "" && r.platform.Architecture == "" {
		r.platform = image.DefaultPlatform()
	}
	img, err := r.resolve(o)
	if err != nil {
		return nil, r.explain(err)
	}
	return img, nil
}

// resolver is one Resolve under way.
type resolver struct {
	c        *Client
	ctx      context.Context
	ref      image.Reference
	eps      []*endpoint
	op       string
	platform ocispec.Platform
}

func (r *resolver) resolve(o ResolveOptions) (*image.Image, error) {
	target, doc, err := r.target()
	if err != nil {
		return nil, err
	}
	kind, err := image.KindOf(doc)
	if err != nil {
		return nil, err
	}
	var index []byte
	desc, manifest := target, doc
	if kind == image.Index {
		index = doc
		if desc, manifest, err = r.chosen(index); err != nil {
			return nil, err
		}
	}
	m, err := image.ParseManifest(manifest)
	if err != nil {
		return nil, err
	}
	if o.Manifest != nil {
		o.Manifest(desc)
	}
	config, err := r.config(m.Config)
	if err != nil {
		return nil, err
	}
	img, err := image.New(r.ref, target, index, desc, manifest, config)
	if err != nil {
		return nil, err
	}
	if index == nil {
		err = image.CheckPlatform(img.Platform(), r.platform)
	}
	return img, err
}

// target fetches what the reference names.
func (r *resolver) target() (ocispec.Descriptor, []byte, error) {
	want := canPull
	if r.ref.Dgst == "" {
		want |= canResolve
	}
	doc, served, err := r.manifest(r.ref.Object(), r.ref.Dgst, want)
	if err != nil {
		return ocispec.Descriptor{}, nil, err
	}
	d := r.ref.Dgst
	if d == "" {
		d = digest.FromBytes(doc)
	}
	mediaType, err := image.MediaType(doc, served)
	return ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(doc))}, doc, err
}

// chosen fetches the manifest for the platform.
func (r *resolver) chosen(index []byte) (d ocispec.Descriptor, doc []byte, err error) {
	idx, err := image.ParseIndex(index)
	if err != nil {
		return d, nil, err
	}
	if d, err = image.Select(idx, r.platform); err != nil {
		return d, nil, err
	}
	doc, _, err = r.manifest(d.Digest.String(), d.Digest, canPull)
	return d, doc, err
}

func (r *resolver) config(d ocispec.Descriptor) ([]byte, error) {
	s, err := r.c.Open(r.ctx, r.ref, Blob{d.Digest, d.Size}, 0, -1, OpenOptions{})
	if err != nil {
		return nil, err
	}
	defer s.Close()
	b := make([]byte, d.Size)
	if _, err := io.ReadFull(s, b); err != nil {
		return nil, err
	}
	return b, image.CheckBytes("config", d, b)
}

// manifest fetches a document by tag or digest and verifies it; it gives the
// media type that it was served under too. Temporary failures are retried.
func (r *resolver) manifest(object string, d digest.Digest, want capability) (doc []byte, served string,
	err error) {
	q := ask{op: r.op, path: manifestPath(r.ref, object), scope: pullScope(r.ref), accept: acceptManifests}
	err = r.c.retried(r.ctx, r.op, func() error {
		return r.c.mirrors(r.ctx, r.eps, want, r.op, func(ep *endpoint) error {
			body, h, err := r.c.document(r.ctx, ep, q, d)
			doc, served = body, h.Get("Content-Type")
			return err
		})
	})
	return doc, served, err
}

func manifestPath(ref image.Reference, object string) string {
	return "/" + ref.Path + "/manifests/" + object
}

// retried calls try until it succeeds or fails for good.
func (c *Client) retried(ctx context.Context, op string, try func() error) error {
	b := backoff{first: c.cfg.Backoff, most: c.cfg.MaxBackoff, retries: c.cfg.ResolveRetries}
	for {
		err := try()
		if err == nil {
			return nil
		}
		if err := b.again(ctx, err); err != nil {
			return err
		}
		c.retries.Add(1)
		c.cfg.Log.Info("retry", "op", op, "failures", b.failures, "error", err)
	}
}

// document fetches a manifest from one endpoint, and the header it came with.
// It must hash to d, if given, and to what the endpoint says it hashes to.
func (c *Client) document(ctx context.Context, ep *endpoint, q ask, d digest.Digest) ([]byte, http.Header,
	error) {
	w := newWatch(ctx, c.cfg.StallTimeout)
	defer w.End()
	res, err := ep.do(w.Ctx, c.cfg.UserAgent, q)
	if err != nil {
		return nil, nil, err
	}
	host := res.Request.URL.Host
	body := &wire{body: res.Body, w: w, c: c, host: host, op: q.op}
	defer body.Close()
	doc, err := io.ReadAll(io.LimitReader(body, image.MaxManifest+1))
	if err != nil {
		return nil, nil, broken(w.Ctx, err, host, q.op)
	}
	if len(doc) > image.MaxManifest {
		return nil, nil, &Error{Kind: BadImage, Host: host, Op: q.op, Err: image.ErrTooLarge}
	}
	if res.ContentLength > int64(len(doc)) {
		return nil, nil, broken(w.Ctx, io.ErrUnexpectedEOF, host, q.op)
	}
	for _, want := range []digest.Digest{d, digest.Digest(res.Header.Get("Docker-Content-Digest"))} {
		if err := hashesTo(doc, want); err != nil {
			return nil, nil, &Error{Kind: Mismatch, Host: host, Op: q.op, Err: err}
		}
	}
	return doc, res.Header, nil
}

// hashesTo verifies a digest; "" is none to verify.
func hashesTo(doc []byte, want digest.Digest) error {
	if want == "" {
		return nil
	}
	if err := want.Validate(); err != nil {
		return fmt.Errorf("digest %q: %w", want, err)
	}
	if got := want.Algorithm().FromBytes(doc); got != want {
		return fmt.Errorf("%w: the manifest hashes to %s, not to %s", image.ErrMismatch, got, want)
	}
	return nil
}

// explain makes an Error of what package image says.
func (r *resolver) explain(err error) error {
	var e *Error
	if errors.As(err, &e) || r.ctx.Err() != nil {
		return err
	}
	k := BadImage
	if errors.Is(err, image.ErrMismatch) {
		k = Mismatch
	}
	return &Error{Kind: k, Host: r.ref.Host, Op: r.op, Err: err}
}

// Ping asks whether one of a host's endpoints answers, logged in or not.
func (c *Client) Ping(ctx context.Context, host string) error {
	eps, err := c.endpoints(host)
	if err != nil {
		return err
	}
	return c.mirrors(ctx, eps, canPull, opPing, func(ep *endpoint) error {
		w := newWatch(ctx, c.cfg.StallTimeout)
		defer w.End()
		res, err := ep.send(w.Ctx, c.cfg.UserAgent, ask{op: opPing, accept: acceptAny}, ep.url("/"), "")
		if err != nil {
			return err
		}
		if res.StatusCode == http.StatusOK || res.StatusCode == http.StatusUnauthorized {
			drain(res)
			return nil
		}
		return refused(res, ep.base.Host, opPing)
	})
}
