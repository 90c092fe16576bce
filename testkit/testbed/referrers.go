package testbed

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"sync"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// referrers is the referrers API as the distribution specification has it,
// around a registry without it: lists carry artifact types and annotations.
type referrers struct {
	rest http.Handler

	mu   sync.Mutex
	list map[string][]ocispec.Descriptor // by repository and the subject's digest; guarded by mu
}

const maxManifest = 4 << 20

func (r *referrers) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if repository, subject, ok := strings.Cut(req.URL.Path, "/referrers/"); ok && req.Method == http.MethodGet {
		r.answer(w, repository+"@"+subject, req.URL.Query().Get("artifactType"))
		return
	}
	if repository, _, ok := strings.Cut(req.URL.Path, "/manifests/"); ok && req.Method == http.MethodPut {
		r.put(w, req, repository)
		return
	}
	r.rest.ServeHTTP(w, req)
}

func (r *referrers) answer(w http.ResponseWriter, of, artifactType string) {
	index := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex,
		Manifests: []ocispec.Descriptor{}}
	r.mu.Lock()
	for _, d := range r.list[of] {
		if artifactType == "" || d.ArtifactType == artifactType {
			index.Manifests = append(index.Manifests, d)
		}
	}
	r.mu.Unlock()
	w.Header().Set("Content-Type", ocispec.MediaTypeImageIndex)
	if artifactType != "" {
		w.Header().Set("OCI-Filters-Applied", "artifactType")
	}
	json.NewEncoder(w).Encode(index)
}

// put passes a manifest on, and remembers it if it has a subject.
func (r *referrers) put(w http.ResponseWriter, req *http.Request, repository string) {
	raw, err := io.ReadAll(http.MaxBytesReader(w, req.Body, maxManifest))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	req.Body = io.NopCloser(bytes.NewReader(raw))
	var m ocispec.Manifest
	if json.Unmarshal(raw, &m) != nil || m.Subject == nil {
		r.rest.ServeHTTP(w, req)
		return
	}
	answer := httptest.NewRecorder()
	r.rest.ServeHTTP(answer, req)
	for k, v := range answer.Header() {
		w.Header()[k] = v
	}
	if answer.Code == http.StatusCreated {
		r.add(path.Clean(repository)+"@"+m.Subject.Digest.String(),
			ocispec.Descriptor{MediaType: req.Header.Get("Content-Type"),
				Digest: digest.FromBytes(raw), Size: int64(len(raw)), ArtifactType: m.ArtifactType,
				Annotations: m.Annotations})
		w.Header().Set("OCI-Subject", m.Subject.Digest.String())
	}
	w.WriteHeader(answer.Code)
	io.Copy(w, answer.Body)
}

func (r *referrers) add(to string, d ocispec.Descriptor) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, have := range r.list[to] {
		if have.Digest == d.Digest {
			return
		}
	}
	r.list[to] = append(r.list[to], d)
}
