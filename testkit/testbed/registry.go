package testbed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"

	"dewpoint/testkit/demo"

	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Bare begins the names of repositories that have the same images as those
// without it, and nothing that others push beside them.
const Bare = "bare/"

// Serve is a registry over an OCI image layout: what the layout names can be
// pulled, and more can be pushed; blobs that are pushed go to the directory
// pushed, which may be the layout, manifests last as long as the process. It
// returns when ctx ends.
func Serve(ctx context.Context, dir, pushed string, l net.Listener) error {
	if err := os.MkdirAll(filepath.Join(pushed, "blobs", "sha256"), 0o755); err != nil {
		return err
	}
	handler, err := newRegistry(dir, pushed)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: handler}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// newRegistry answers reads of blobs itself, with sendfile and ranges, and
// lists referrers; it leaves the rest of the protocol to go-containerregistry.
func newRegistry(dir, pushed string) (http.Handler, error) {
	quiet := log.New(io.Discard, "", 0)
	rest := &referrers{list: map[string][]ocispec.Descriptor{},
		rest: registry.New(registry.Logger(quiet), registry.WithBlobHandler(blobs{dir, pushed}))}
	if err := loadManifests(rest, dir); err != nil {
		return nil, err
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, digest, ok := strings.Cut(r.URL.Path, "/blobs/sha256:")
		if !ok || (r.Method != http.MethodGet && r.Method != http.MethodHead) {
			rest.ServeHTTP(w, r)
			return
		}
		f, err := os.Open(blobs{dir, pushed}.path(v1.Hash{Algorithm: "sha256", Hex: filepath.Base(digest)}))
		if err != nil {
			http.Error(w, `{"errors":[{"code":"BLOB_UNKNOWN"}]}`, http.StatusNotFound)
			return
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Docker-Content-Digest", "sha256:"+filepath.Base(digest))
		http.ServeContent(w, r, "", info.ModTime(), f)
	}), nil
}

func loadManifests(h http.Handler, dir string) error {
	index, err := demo.Index(dir)
	if err != nil {
		return err
	}
	for _, d := range index.Manifests {
		name, tag, ok := strings.Cut(d.Annotations[ocispec.AnnotationRefName], ":")
		if !ok {
			continue
		}
		raw, err := os.ReadFile(demo.Blob(dir, d.Digest))
		if err != nil {
			return err
		}
		for _, repository := range []string{name, Bare + name} {
			req := httptest.NewRequest(http.MethodPut, "/v2/"+repository+"/manifests/"+tag, bytes.NewReader(raw))
			req.Header.Set("Content-Type", d.MediaType)
			resp := httptest.NewRecorder()
			h.ServeHTTP(resp, req)
			if resp.Code != http.StatusCreated {
				return fmt.Errorf("manifest of %s:%s: %s", repository, tag, resp.Body)
			}
		}
	}
	return nil
}

// blobs are those of the layout, and those that were pushed. What is there
// was verified when it came, so a Stat reads nothing.
type blobs struct{ dir, pushed string }

// path is where a blob is, or would be put.
func (b blobs) path(h v1.Hash) string {
	path := filepath.Join(b.dir, "blobs", h.Algorithm, h.Hex)
	if _, err := os.Stat(path); err == nil {
		return path
	}
	return filepath.Join(b.pushed, "blobs", h.Algorithm, h.Hex)
}

func (b blobs) Stat(_ context.Context, _ string, h v1.Hash) (int64, error) {
	info, err := os.Stat(b.path(h))
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

func (b blobs) Get(_ context.Context, _ string, h v1.Hash) (io.ReadCloser, error) {
	return os.Open(b.path(h))
}

func (b blobs) Put(_ context.Context, _ string, h v1.Hash, r io.ReadCloser) error {
	f, err := os.CreateTemp(filepath.Join(b.pushed, "blobs"), ".push")
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	if err = errors.Join(err, f.Close()); err != nil {
		os.Remove(f.Name())
		return err
	}
	return os.Rename(f.Name(), b.path(h))
}
