package registry

import (
	"bytes"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"

	"dewpoint/testkit/registrytest"
)

// copyTo pushes everything that a test registry has of an image to another
// registry, over the distribution protocol.
func copyTo(t *testing.T, from *registrytest.Server, p registrytest.Pushed, url, repo, tag string) {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	fetch := func(path string) ([]byte, http.Header) {
		res, err := c.Get(from.URL() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil || res.StatusCode != http.StatusOK {
			t.Fatal(res.Status, err)
		}
		return b, res.Header
	}
	put := func(method, path, contentType string, b []byte) {
		req, err := http.NewRequest(method, url+path, bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", contentType)
		res, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != http.StatusCreated {
			t.Fatal(path, res.Status)
		}
	}
	digests := []string{p.Config.String()}
	for _, l := range p.Layers {
		digests = append(digests, l.Digest.String())
	}
	for _, d := range digests {
		b, _ := fetch("/v2/" + repo + "/blobs/" + d)
		put(http.MethodPost, "/v2/"+repo+"/blobs/uploads/?digest="+d, "application/octet-stream", b)
	}
	b, h := fetch("/v2/" + repo + "/manifests/" + tag)
	put(http.MethodPut, "/v2/"+repo+"/manifests/"+tag, h.Get("Content-Type"), b)
}

// The client gets from somebody else's registry what it gets from ours.
func TestRealRegistry(t *testing.T) {
	ours := registrytest.New(t)
	p := ours.PushImage("a/b:1", someLayers, registrytest.Options{})
	srv := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer srv.Close()
	copyTo(t, ours, p, srv.URL, "a/b", "1")
	host := strings.TrimPrefix(srv.URL, "http://")
	c := client(t, Config{Hosts: map[string]Host{host: {PlainHTTP: true}}})
	defer c.Close()
	for _, ref := range []string{host + "/a/b:1", host + "/a/b@" + p.Digest.String()} {
		img, err := c.Resolve(t.Context(), parse(t, ref), ResolveOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for n, l := range img.Layers {
			if l != p.Layers[n] {
				t.Errorf("layer %d: %+v", n, l)
			}
			var all bytes.Buffer
			for at := int64(0); at < l.Size; at += 1000 {
				s, err := c.Open(t.Context(), img.Ref, Blob{l.Digest, l.Size}, at, min(1000, l.Size-at), OpenOptions{})
				if err != nil {
					t.Fatal(err)
				}
				if _, err := io.Copy(&all, s); err != nil {
					t.Fatal(err)
				}
				s.Close()
			}
			if _, err := readHash(&all, l.Digest); err != nil {
				t.Error(err)
			}
		}
	}
	_, err := c.Resolve(t.Context(), parse(t, host+"/none:1"), ResolveOptions{})
	wantKind(t, err, NotFound)
}

// Somebody else's registry takes our artifacts and lists them: by the tag where
// it has no referrers API, and by its API, which knows neither types nor
// annotations, where it has.
func TestOthersArtifacts(t *testing.T) {
	for _, api := range []bool{false, true} {
		ours := registrytest.New(t)
		p := ours.PushImage("a/b:1", someLayers, registrytest.Options{})
		srv := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0)),
			registry.WithReferrersSupport(api)))
		defer srv.Close()
		copyTo(t, ours, p, srv.URL, "a/b", "1")
		host := strings.TrimPrefix(srv.URL, "http://")
		c := client(t, Config{Hosts: map[string]Host{host: {PlainHTTP: true}}})
		defer c.Close()
		p.Ref = host + "/a/b:1"
		for _, body := range []string{"old", "new"} {
			d := push(t, c, p.Ref, artifact(p.Desc, packType, body))
			checkArtifact(t, c, p, d, body)
		}
		list, err := c.Referrers(t.Context(), parse(t, p.Ref), p.Digest, "")
		if want := map[bool]int{false: 1, true: 2}[api]; err != nil || len(list) != want {
			t.Errorf("%d artifacts listed, want %d; %v", len(list), want, err)
		}
		if !api && bodies(t, c, p.Ref, p.Digest, packType) != "new" {
			t.Error("the new artifact did not take the old one's place")
		}
	}
}
