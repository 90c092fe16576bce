package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"dewpoint/internal/image"
)

const (
	maxPages = 16        // of one list; with image.MaxManifest bytes in all
	muteFor  = time.Hour // an endpoint without the referrers API is not asked for it again
)

var acceptIndex = []string{ocispec.MediaTypeImageIndex}

// errNoAPI says that an endpoint has no referrers API.
var errNoAPI = errors.New("no referrers API")

// Referrers lists the manifests in ref's repository that refer to subject and
// are of the artifact type, or of any if that is "". None is no error. They
// are in the registry's order; their number and size are bounded, and what
// lies beyond the bounds is not looked at.
//
// An endpoint is asked by the referrers API, and where it has none, for the
// tag that stands in for it. The two are asked one after the other: the second
// goes over the connection of the first, where beside it a connection would
// have to be made, which takes as many round trips or more; and registries
// count requests for tags against their limits. That there is no API is
// remembered, so that the price is paid once an hour.
//
// Its errors are as Resolve's. It tries as long as ctx lets it.
func (c *Client) Referrers(ctx context.Context, ref image.Reference, subject digest.Digest,
	artifactType string) ([]ocispec.Descriptor, error) {
	op := opList + ref.Path + "@" + subject.String()
	if err := subject.Validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	eps, err := c.endpoints(ref.Host)
	if err != nil {
		return nil, err
	}
	l := lister{c: c, ctx: ctx, ref: ref, op: op, subject: subject, artifactType: artifactType}
	var found []ocispec.Descriptor
	err = c.retried(ctx, op, func() error {
		return c.mirrors(ctx, eps, canPull|canResolve, op, func(ep *endpoint) (err error) {
			found, err = l.ask(ep)
			return err
		})
	})
	if absent(err) {
		return nil, nil
	}
	return found, err
}

// lister is one Referrers under way.
type lister struct {
	c            *Client
	ctx          context.Context
	ref          image.Reference
	op           string
	subject      digest.Digest
	artifactType string
}

// ask lists what one endpoint has. The error is NotFound if that is nothing
// for want of a tag, so that the next endpoint is asked.
func (l *lister) ask(ep *endpoint) ([]ocispec.Descriptor, error) {
	if ep.caps&canReferrers != 0 && time.Now().UnixNano() >= ep.mute.Load() {
		found, err := l.byAPI(ep)
		if !errors.Is(err, errNoAPI) {
			return found, err
		}
	}
	doc, h, err := l.c.document(l.ctx, ep, l.manifest(), "")
	if err != nil {
		return nil, err
	}
	list, err := parseList(doc, h)
	if err != nil {
		return nil, &Error{Kind: BadImage, Host: ep.base.Host, Op: l.op,
			Err: fmt.Errorf("tag %s: %w", fallbackTag(l.subject), err)}
	}
	return l.filter(list, h), nil
}

// manifest asks for the tag that stands in for the API, whatever it names:
// there are registries that hide what is not accepted.
func (l *lister) manifest() ask {
	return ask{op: l.op, path: manifestPath(l.ref, fallbackTag(l.subject)), scope: pullScope(l.ref),
		accept: acceptManifests}
}

// fallbackTag is where clients of registries without the API keep the list.
func fallbackTag(d digest.Digest) string {
	return fmt.Sprintf("%.32s-%.64s", d.Algorithm(), d.Encoded())
}

// byAPI reads the API's pages. The error is errNoAPI if there is none.
func (l *lister) byAPI(ep *endpoint) ([]ocispec.Descriptor, error) {
	q := ask{op: l.op, path: "/" + l.ref.Path + "/referrers/" + l.subject.String(), scope: pullScope(l.ref),
		accept: acceptIndex}
	if l.artifactType != "" {
		q.query = url.Values{"artifactType": {l.artifactType}}.Encode()
	}
	found, h, size, err := l.page(ep, q)
	if err != nil {
		return nil, l.judge(ep, err)
	}
	for n := 1; n < maxPages && size < image.MaxManifest; n++ {
		if q.at = nextPage(ep, q, h); q.at == nil {
			break
		}
		var more []ocispec.Descriptor
		var length int
		if more, h, length, err = l.page(ep, q); err != nil {
			return nil, l.broken(ep, err)
		}
		found, size = append(found, more...), size+length
	}
	return found, nil
}

// page reads one page; size is its bytes.
func (l *lister) page(ep *endpoint, q ask) (found []ocispec.Descriptor, h http.Header, size int, err error) {
	doc, h, err := l.c.document(l.ctx, ep, q, "")
	if err != nil {
		return nil, nil, 0, err
	}
	list, err := parseList(doc, h)
	return l.filter(list, h), h, len(doc), err
}

// judge tells from the failure of the first page whether there is an API. An
// answer that speaks of the repository or the image says nothing of others.
func (l *lister) judge(ep *endpoint, err error) error {
	var e *Error
	switch {
	case errors.Is(err, errNoList):
	case !errors.As(err, &e) || !unknownRequest(e.Status):
		return err
	case ofContent(e.code):
		return errNoAPI
	}
	ep.mute.Store(time.Now().Add(muteFor).UnixNano())
	l.c.cfg.Log.Debug("registry has no referrers API", "endpoint", ep.base.Host)
	return errNoAPI
}

func unknownRequest(status int) bool {
	switch status {
	case http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotAcceptable,
		http.StatusNotImplemented:
		return true
	}
	return false
}

func ofContent(c transport.ErrorCode) bool {
	switch c {
	case transport.NameUnknownErrorCode, transport.NameInvalidErrorCode, transport.ManifestUnknownErrorCode,
		transport.DigestInvalidErrorCode:
		return true
	}
	return false
}

// broken keeps a later page that is not there from being taken for a list
// that is not there.
func (l *lister) broken(ep *endpoint, err error) error {
	if absent(err) || errors.Is(err, errNoList) {
		return &Error{Kind: Protocol, Host: ep.base.Host, Op: l.op, Err: errors.New("the list breaks off")}
	}
	return err
}

// linkHeader matches one link: its target and its parameters.
var linkHeader = regexp.MustCompile(`<([^>]*)>([^<]*)`)

// nextPage is where the Link header leads: to the endpoint itself, and on. It
// is nil at the end.
func nextPage(ep *endpoint, q ask, h http.Header) *url.URL {
	for _, link := range linkHeader.FindAllStringSubmatch(strings.Join(h.Values("Link"), ","), -1) {
		if !relNext.MatchString(link[2]) {
			continue
		}
		here := ep.address(q)
		u, err := here.Parse(link[1])
		if err != nil || !ep.same(u) || u.String() == here.String() {
			return nil
		}
		if ep.namespace != "" && !u.Query().Has("ns") {
			u.RawQuery += "&" + url.Values{"ns": {ep.namespace}}.Encode()
		}
		return u
	}
	return nil
}

var relNext = regexp.MustCompile(`(?i);\s*rel\s*=\s*("[^"]*\bnext\b[^"]*"|next\b)`)

var errNoList = errors.New("not an image index")

// parseList reads an index. It is one if it or the server says so; an empty
// one may lack the list.
func parseList(doc []byte, h http.Header) ([]ocispec.Descriptor, error) {
	var idx ocispec.Index
	if err := json.Unmarshal(doc, &idx); err != nil {
		return nil, fmt.Errorf("%w: %w", errNoList, err)
	}
	served, _, _ := strings.Cut(h.Get("Content-Type"), ";")
	if idx.MediaType != ocispec.MediaTypeImageIndex && served != ocispec.MediaTypeImageIndex &&
		idx.Manifests == nil {
		return nil, errNoList
	}
	return idx.Manifests, nil
}

// filter keeps what is of the type, and what Artifact could fetch. Where the
// registry has filtered, an entry need not say its type.
func (l *lister) filter(list []ocispec.Descriptor, h http.Header) []ocispec.Descriptor {
	filtered := false
	for _, f := range strings.Split(h.Get("OCI-Filters-Applied"), ",") {
		filtered = filtered || strings.TrimSpace(f) == "artifactType"
	}
	return slices.DeleteFunc(list, func(d ocispec.Descriptor) bool {
		if d.Digest.Validate() != nil || d.Size < 0 || d.Size > image.MaxManifest {
			return true
		}
		return l.artifactType != "" && d.ArtifactType != l.artifactType && (d.ArtifactType != "" || !filtered)
	})
}

// absent reports that what was asked for is not there.
func absent(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Kind == NotFound
}

// Artifact fetches the manifest that a descriptor of Referrers names, and
// verifies it: it is d's bytes, and each of its layers has a digest and a size.
// Its layers are blobs for Open. Errors are as Resolve's.
func (c *Client) Artifact(ctx context.Context, ref image.Reference,
	d ocispec.Descriptor) (ocispec.Manifest, error) {
	op := opFetch + d.Digest.String()
	if err := d.Digest.Validate(); err != nil {
		return ocispec.Manifest{}, fmt.Errorf("%s: %w", op, err)
	}
	eps, err := c.endpoints(ref.Host)
	if err != nil {
		return ocispec.Manifest{}, err
	}
	r := resolver{c: c, ctx: ctx, ref: ref, eps: eps, op: op}
	doc, _, err := r.manifest(d.Digest.String(), d.Digest, canPull)
	if err != nil {
		return ocispec.Manifest{}, err
	}
	m, err := parseArtifact(d, doc)
	if err != nil {
		return ocispec.Manifest{}, r.explain(err)
	}
	return m, nil
}

func parseArtifact(d ocispec.Descriptor, doc []byte) (m ocispec.Manifest, err error) {
	if err := image.CheckBytes("artifact", d, doc); err != nil {
		return m, err
	}
	switch kind, err := image.KindOf(doc); {
	case err != nil:
		return m, err
	case kind != image.Manifest:
		return m, fmt.Errorf("%w: an index where an artifact's manifest is due", image.ErrInvalid)
	}
	if err := json.Unmarshal(doc, &m); err != nil {
		return m, fmt.Errorf("%w: manifest: %w", image.ErrInvalid, err)
	}
	for n, l := range m.Layers {
		if err := l.Digest.Validate(); err != nil || l.Size < 0 || l.Size > image.MaxLayer {
			return ocispec.Manifest{},
				fmt.Errorf("%w: artifact: layer %d: digest %q, %d bytes", image.ErrInvalid, n+1, l.Digest, l.Size)
		}
	}
	return m, nil
}
