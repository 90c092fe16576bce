package testbed

import (
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

	"dewpoint/internal/demo"

	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Serve is a registry over an OCI image layout: what the layout names can be
// pulled, and more can be pushed; blobs that are pushed stay in the layout,
// manifests last as long as the process. It returns when ctx ends.
func Serve(ctx context.Context, dir string, l net.Listener) error {
	handler, err := newRegistry(dir)
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
// leaves the rest of the protocol to go-containerregistry.
func newRegistry(dir string) (http.Handler, error) {
	quiet := log.New(io.Discard, "", 0)
	rest := registry.New(registry.Logger(quiet), registry.WithReferrersSupport(true),
		registry.WithBlobHandler(blobs{dir}))
	if err := loadManifests(rest, dir); err != nil {
		return nil, err
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, digest, ok := strings.Cut(r.URL.Path, "/blobs/sha256:")
		if !ok || (r.Method != http.MethodGet && r.Method != http.MethodHead) {
			rest.ServeHTTP(w, r)
			return
		}
		f, err := os.Open(filepath.Join(dir, "blobs", "sha256", filepath.Base(digest)))
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
		f, err := os.Open(demo.Blob(dir, d.Digest))
		if err != nil {
			return err
		}
		req := httptest.NewRequest(http.MethodPut, "/v2/"+name+"/manifests/"+tag, f)
		req.Header.Set("Content-Type", d.MediaType)
		resp := httptest.NewRecorder()
		h.ServeHTTP(resp, req)
		f.Close()
		if resp.Code != http.StatusCreated {
			return fmt.Errorf("manifest of %s:%s: %s", name, tag, resp.Body)
		}
	}
	return nil
}

// blobs keeps pushed blobs beside those of the layout. What is there was
// verified when it came, so a Stat reads nothing.
type blobs struct{ dir string }

func (b blobs) path(h v1.Hash) string { return filepath.Join(b.dir, "blobs", h.Algorithm, h.Hex) }

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
	f, err := os.CreateTemp(filepath.Join(b.dir, "blobs"), ".push")
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
