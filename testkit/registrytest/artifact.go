package registrytest

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Quirks are ways in which registries differ. The zero value is one that
// keeps to version 1.1 of the OCI distribution specification.
type Quirks struct {
	NoReferrers bool          // no referrers API: 404, and no OCI-Subject for what is pushed
	NoSubject   bool          // no OCI-Subject, though there is the API
	NoFilter    bool          // the API ignores artifactType
	Page        int           // entries on a page of the API's answer; 0 is all
	Uploads     string        // scheme and host of the addresses for uploads; "" is a path
	ReadOnly    bool          // no pushes: 405
	Far         time.Duration // each answer takes so long, as over a distance
}

// Be sets the registry's quirks from now on.
func (s *Server) Be(q Quirks) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.quirks = q
}

func (a *answer) quirks() Quirks {
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	return a.s.quirks
}

// Artifacts gives what refers to a manifest in a repository, whichever way
// it is listed.
func (s *Server) Artifacts(repo string, subject digest.Digest) []ocispec.Descriptor {
	return s.Store.referrers(repo, subject)
}

// referrers answers the API of that name.
func (a *answer) referrers(repo, subject string) {
	q := a.quirks()
	if q.NoReferrers {
		a.fail(http.StatusNotFound, "NOT_FOUND", "no such path")
		return
	}
	all := a.s.Store.referrers(repo, digest.Digest(subject))
	query := a.r.URL.Query()
	if want := query.Get("artifactType"); want != "" && !q.NoFilter {
		all = slices.DeleteFunc(all, func(d ocispec.Descriptor) bool { return d.ArtifactType != want })
		a.Header().Set("OCI-Filters-Applied", "artifactType")
	}
	all = slices.DeleteFunc(all, func(d ocispec.Descriptor) bool {
		return d.Digest.String() <= query.Get("last")
	})
	if q.Page > 0 && len(all) > q.Page {
		all = all[:q.Page]
		query.Set("last", all[q.Page-1].Digest.String())
		a.Header().Set("Link", fmt.Sprintf(`<%s?%s>; rel="next"`, a.r.URL.Path, query.Encode()))
	}
	a.document(ocispec.MediaTypeImageIndex, a.s.json(ocispec.Index{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex, Manifests: all,
	}))
}

// referrers lists the manifests of a repository with the subject, by digest.
func (s *Store) referrers(repo string, subject digest.Digest) []ocispec.Descriptor {
	s.mu.RLock()
	defer s.mu.RUnlock()
	out := []ocispec.Descriptor{}
	for key, m := range s.manifests {
		var doc ocispec.Manifest
		if key != repo+"/"+m.digest.String() || json.Unmarshal(m.body, &doc) != nil || doc.Subject == nil ||
			doc.Subject.Digest != subject {
			continue
		}
		d := ocispec.Descriptor{
			MediaType: m.mediaType, Digest: m.digest, Size: int64(len(m.body)), ArtifactType: doc.ArtifactType,
			Annotations: doc.Annotations,
		}
		if d.ArtifactType == "" {
			d.ArtifactType = doc.Config.MediaType
		}
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b ocispec.Descriptor) int {
		return strings.Compare(a.Digest.String(), b.Digest.String())
	})
	return out
}

// writes reports whether the request changes what is stored.
func writes(r *http.Request) bool { return r.Method != http.MethodGet && r.Method != http.MethodHead }

// writable lets a request pass, or refuses it as a registry that is only read.
func (a *answer) writable() bool {
	if !writes(a.r) || !a.quirks().ReadOnly {
		return true
	}
	a.fail(http.StatusMethodNotAllowed, "UNSUPPORTED", "the registry is read-only")
	return false
}

// upload answers POST and PUT below a repository's blobs/uploads/.
func (a *answer) upload(repo, id string) {
	d := digest.Digest(a.r.URL.Query().Get("digest"))
	switch {
	case a.r.Method == http.MethodPost && d == "":
		a.begin(repo)
	case a.r.Method == http.MethodPost, a.r.Method == http.MethodPut && a.s.finish(repo+"/"+id, a.r.URL.Query()):
		a.receive(repo, d)
	case a.r.Method == http.MethodPut:
		a.fail(http.StatusNotFound, "BLOB_UPLOAD_UNKNOWN", "blob upload unknown to registry")
	default:
		a.fail(http.StatusMethodNotAllowed, "UNSUPPORTED", "the operation is unsupported")
	}
}

// begin gives the address of an upload, which has a query of its own.
func (a *answer) begin(repo string) {
	id := rand.Text()
	a.s.mu.Lock()
	a.s.uploads[repo+"/"+id] = true
	a.s.mu.Unlock()
	a.Header().Set("Location", a.quirks().Uploads+"/v2/"+repo+"/blobs/uploads/"+id+"?_state=a%2Fb%3D")
	a.WriteHeader(http.StatusAccepted)
}

// finish ends an upload, and reports whether it was one.
func (s *Server) finish(upload string, q url.Values) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.uploads[upload] && q.Get("_state") == "a/b="
	delete(s.uploads, upload)
	return was
}

// receive stores the body if it hashes to d.
func (a *answer) receive(repo string, d digest.Digest) {
	got := digest.Canonical.Digester()
	b, err := a.s.Store.spool(a.r.ContentLength > 1<<20, got, func(w io.Writer) error {
		_, err := io.Copy(w, a.r.Body)
		return err
	})
	if err != nil {
		panic(http.ErrAbortHandler) // the client has gone
	}
	if got.Digest() != d {
		a.fail(http.StatusBadRequest, "DIGEST_INVALID", "provided digest did not match uploaded content")
		return
	}
	a.s.Store.add(d, b)
	a.created("/v2/"+repo+"/blobs/"+d.String(), d)
}

func (s *Store) add(d digest.Digest, b blob) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.blobs[d] = b
}

func (a *answer) created(location string, d digest.Digest) {
	a.Header().Set("Location", location)
	a.Header().Set("Docker-Content-Digest", d.String())
	a.WriteHeader(http.StatusCreated)
}

// putManifest stores the body as a manifest whose parts are there.
func (a *answer) putManifest(repo, object string) {
	body, err := io.ReadAll(http.MaxBytesReader(a, a.r.Body, 8<<20))
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	d, named := digest.FromBytes(body), digest.Digest(object)
	tag := object
	if named.Validate() == nil {
		tag = ""
	}
	var doc struct {
		ocispec.Manifest
		Manifests []ocispec.Descriptor `json:"manifests"`
	}
	switch err := json.Unmarshal(body, &doc); {
	case err != nil:
		a.fail(http.StatusBadRequest, "MANIFEST_INVALID", "manifest invalid")
	case tag == "" && named != d:
		a.fail(http.StatusBadRequest, "DIGEST_INVALID", "provided digest did not match uploaded content")
	case !a.s.Store.complete(repo, doc.Manifest, doc.Manifests):
		a.fail(http.StatusBadRequest, "MANIFEST_BLOB_UNKNOWN",
			"manifest references a manifest or blob unknown to registry")
	default:
		a.s.Store.putManifest(repo, tag, a.r.Header.Get("Content-Type"), body)
		if q := a.quirks(); doc.Subject != nil && !q.NoReferrers && !q.NoSubject {
			a.Header().Set("OCI-Subject", doc.Subject.Digest.String())
		}
		a.created("/v2/"+repo+"/manifests/"+d.String(), d)
	}
}

// complete reports whether what a manifest or an index names is there.
func (s *Store) complete(repo string, m ocispec.Manifest, index []ocispec.Descriptor) bool {
	parts := m.Layers
	if m.Config.Digest != "" {
		parts = append(parts, m.Config)
	}
	for _, d := range parts {
		if b, ok := s.blob(d.Digest); !ok || b.size != d.Size {
			return false
		}
	}
	for _, d := range index {
		if _, ok := s.manifest(repo, d.Digest.String()); !ok {
			return false
		}
	}
	return true
}
