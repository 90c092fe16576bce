package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"dewpoint/internal/image"
	"dewpoint/internal/limit"
)

// Artifact is something to push that refers to an image.
type Artifact struct {
	Type        string             // artifactType, a media type
	Subject     ocispec.Descriptor // the manifest that it refers to
	Layers      []ArtifactLayer
	Annotations map[string]string
}

// ArtifactLayer is a blob of an Artifact. Open gives its bytes from the
// beginning; it is called once for each attempt to upload them, and the
// reader is closed, which may be after PushArtifact returned if that failed.
type ArtifactLayer struct {
	MediaType string
	Digest    digest.Digest
	Size      int64
	Open      func() (io.ReadCloser, error)
}

// PushArtifact puts an artifact into ref's repository, where Referrers finds
// it, and gives its descriptor. What the registry has already is not sent
// again. Pushes go to the registry itself, never to a mirror.
//
// Where the registry keeps no list of what refers to an image, the tag that
// stands in for it is updated: other artifacts of the same type leave it. The
// protocol has no way to do that atomically, so of two pushes at the same time
// one may be lost from the list. Where the registry keeps the list, older
// artifacts of the type stay in it.
//
// Errors are *Error, or the layer's own when its bytes cannot be read, or the
// end of ctx. Temporary failures are retried.
func (c *Client) PushArtifact(ctx context.Context, ref image.Reference,
	a Artifact) (ocispec.Descriptor, error) {
	p := pusher{c: c, ctx: ctx, ref: ref,
		op: opPush + "artifact for " + ref.Path + "@" + a.Subject.Digest.String()}
	doc, err := a.manifest()
	if err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("%s: %w", p.op, err)
	}
	if p.ep, err = c.origin(ref.Host); err != nil {
		return ocispec.Descriptor{}, err
	}
	d := ocispec.Descriptor{
		MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromBytes(doc), Size: int64(len(doc)),
		ArtifactType: a.Type, Annotations: a.Annotations,
	}
	for _, l := range append(slices.Clone(a.Layers), emptyLayer) {
		if err := p.retried(func() error { return p.blob(l) }); err != nil {
			return ocispec.Descriptor{}, err
		}
	}
	var listed bool
	err = p.retried(func() (err error) {
		listed, err = p.manifest(d, doc, a.Subject.Digest)
		return err
	})
	if err == nil && !listed {
		err = p.retried(func() error { return p.list(d, a.Subject.Digest) })
	}
	return d, err
}

// emptyLayer is the blob that stands for a configuration.
var emptyLayer = ArtifactLayer{
	Digest: ocispec.DescriptorEmptyJSON.Digest, Size: ocispec.DescriptorEmptyJSON.Size,
	Open: opener(ocispec.DescriptorEmptyJSON.Data),
}

func opener(b []byte) func() (io.ReadCloser, error) {
	return func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil }
}

// manifest makes the document; equal artifacts make equal ones.
func (a Artifact) manifest() ([]byte, error) {
	if err := a.Subject.Digest.Validate(); err != nil {
		return nil, fmt.Errorf("subject: digest %q: %w", a.Subject.Digest, err)
	}
	if a.Type == "" {
		return nil, errors.New("the artifact has no type")
	}
	m := ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		ArtifactType: a.Type,
		Config:       ocispec.DescriptorEmptyJSON, Annotations: a.Annotations,
		Subject: &ocispec.Descriptor{MediaType: a.Subject.MediaType, Digest: a.Subject.Digest,
			Size: a.Subject.Size},
	}
	for n, l := range a.Layers {
		if err := l.Digest.Validate(); err != nil || l.Size < 0 || l.Open == nil {
			return nil, fmt.Errorf("layer %d: digest %q, %d bytes: not a blob", n+1, l.Digest, l.Size)
		}
		m.Layers = append(m.Layers, ocispec.Descriptor{MediaType: l.MediaType, Digest: l.Digest, Size: l.Size})
	}
	if len(m.Layers) == 0 {
		m.Layers = []ocispec.Descriptor{ocispec.DescriptorEmptyJSON} // as the specification has it
	}
	doc, err := json.Marshal(m)
	if err == nil && len(doc) > image.MaxManifest {
		err = image.ErrTooLarge
	}
	return doc, err
}

// origin is the endpoint of the registry itself: as its hosts directory
// describes it, if that does.
func (c *Client) origin(host string) (*endpoint, error) {
	eps, err := c.endpoints(host)
	if err != nil {
		return nil, err
	}
	for _, ep := range eps {
		if ep.namespace == "" {
			return ep, nil
		}
	}
	return c.makeEndpoint(host, hostConfig{caps: canAll})
}

// pusher is one PushArtifact under way.
type pusher struct {
	c   *Client
	ctx context.Context
	ref image.Reference
	op  string
	ep  *endpoint
}

func (p *pusher) retried(try func() error) error { return p.c.retried(p.ctx, p.op, try) }

// ask is a request that needs the right to write.
func (p *pusher) ask(method, path string) ask {
	return ask{op: p.op, method: method, path: path, scope: "repository:" + p.ref.Path + ":pull,push"}
}

// do makes one request of the push. The answer's body has been read away.
func (p *pusher) do(q ask, l *ArtifactLayer) (*http.Response, error) {
	w := newWatch(p.ctx, p.c.cfg.StallTimeout)
	defer w.End()
	if l != nil {
		q.body = &upload{ArtifactLayer: l, w: w, op: p.op}
	}
	res, err := p.ep.do(w.Ctx, p.c.cfg.UserAgent, q)
	if err != nil {
		return nil, p.asPush(err)
	}
	drain(res)
	return res, nil
}

// asPush lets a refused login say what it was for.
func (p *pusher) asPush(err error) error {
	var e *Error
	if errors.As(err, &e) && e.Kind == Unauthorized {
		e.Op = p.op
	}
	return err
}

// blob sees that the registry has a blob.
func (p *pusher) blob(l ArtifactLayer) error {
	there, err := p.has(l)
	if there || err != nil {
		return err
	}
	res, err := p.do(p.ask(http.MethodPost, "/"+p.ref.Path+"/blobs/uploads/"), nil)
	if err != nil {
		return err
	}
	q := p.ask(http.MethodPut, "")
	if q.at, err = p.ep.target(res); err != nil {
		return &Error{Kind: Protocol, Host: p.ep.base.Host, Op: p.op,
			Err: fmt.Errorf("where to upload to: %w", err)}
	}
	q.at.RawQuery = strings.TrimPrefix(q.at.RawQuery+"&digest="+l.Digest.String(), "&")
	_, err = p.do(q, &l)
	return err
}

// has asks whether the blob is there. It needs no more than the right to
// read; a registry that refuses to say is sent the blob.
func (p *pusher) has(l ArtifactLayer) (bool, error) {
	q := p.ask(http.MethodHead, "/"+p.ref.Path+"/blobs/"+l.Digest.String())
	q.scope, q.accept = pullScope(p.ref), acceptAny
	res, err := p.do(q, nil)
	var e *Error
	if errors.As(err, &e) && e.Status >= 400 && !e.Temporary() {
		return false, nil
	}
	return err == nil && (res.ContentLength < 0 || res.ContentLength == l.Size), err
}

// manifest stores the document under its digest. listed reports that the
// registry has put it on the list of what refers to the subject.
func (p *pusher) manifest(d ocispec.Descriptor, doc []byte, subject digest.Digest) (listed bool, err error) {
	res, err := p.do(p.ask(http.MethodPut, manifestPath(p.ref, d.Digest.String())), sending(d.MediaType, doc))
	if err != nil {
		return false, err
	}
	return res.Header.Get("OCI-Subject") == subject.String(), nil
}

func sending(mediaType string, doc []byte) *ArtifactLayer {
	return &ArtifactLayer{MediaType: mediaType, Size: int64(len(doc)), Open: opener(doc)}
}

// list puts the artifact on the list that the tag names.
func (p *pusher) list(d ocispec.Descriptor, subject digest.Digest) error {
	old, err := p.listed(subject)
	if err != nil {
		return err
	}
	idx := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex}
	idx.Manifests = append(slices.DeleteFunc(old, func(o ocispec.Descriptor) bool {
		return o.ArtifactType == d.ArtifactType || o.Digest == d.Digest
	}), d)
	doc, err := json.Marshal(idx)
	if err != nil {
		return fmt.Errorf("%s: %w", p.op, err)
	}
	_, err = p.do(p.ask(http.MethodPut, manifestPath(p.ref, fallbackTag(subject))), sending(idx.MediaType, doc))
	return err
}

// listed reads the list that the tag names; it may be absent. Something else
// under the tag is not overwritten.
func (p *pusher) listed(subject digest.Digest) ([]ocispec.Descriptor, error) {
	l := lister{c: p.c, ctx: p.ctx, ref: p.ref, op: p.op, subject: subject}
	doc, h, err := p.c.document(p.ctx, p.ep, l.manifest(), "")
	if absent(err) {
		return nil, nil
	}
	if err != nil {
		return nil, p.asPush(err)
	}
	old, err := parseList(doc, h)
	if err != nil {
		return nil, &Error{Kind: BadImage, Host: p.ep.base.Host, Op: p.op,
			Err: fmt.Errorf("tag %s: %w; delete it and push again", fallbackTag(subject), err)}
	}
	return old, nil
}

// upload is the body of a request.
type upload struct {
	*ArtifactLayer
	w  *limit.Watch
	op string
}

// attach opens the bytes and makes them the request's body; nil has none.
func (u *upload) attach(req *http.Request) error {
	if u == nil {
		return nil
	}
	r, err := u.Open()
	if err != nil {
		return fmt.Errorf("%s: %w", u.op, err)
	}
	req.Body, req.ContentLength = &outgoing{body: r, u: u, left: u.Size}, u.Size
	req.Header.Set("Content-Type", "application/octet-stream")
	if u.Digest == "" {
		req.Header.Set("Content-Type", u.MediaType)
	}
	return nil
}

// outgoing is an upload's bytes on their way. The request lives as long as
// they move, and ends with the error of a source that fails.
type outgoing struct {
	body io.ReadCloser
	u    *upload
	left int64
}

func (o *outgoing) Read(p []byte) (int, error) {
	o.u.w.Arm()
	if o.left == 0 {
		return 0, io.EOF
	}
	n, err := o.body.Read(p[:min(int64(len(p)), o.left)])
	o.left -= int64(n)
	if err == io.EOF && o.left > 0 {
		err = fmt.Errorf("%d bytes are missing of %s: %w", o.left, o.u.Digest, io.ErrUnexpectedEOF)
	}
	if err != nil && err != io.EOF {
		err = fmt.Errorf("%s: %w", o.u.op, err)
		o.u.w.Cancel(err)
	}
	return n, err
}

func (o *outgoing) Close() error { return o.body.Close() }
