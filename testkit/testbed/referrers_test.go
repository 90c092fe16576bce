package testbed

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

func TestReferrersAreListed(t *testing.T) {
	dir := t.TempDir()
	config, _ := putBlob(t, dir, 16)
	h, err := newRegistry(dir, dir)
	if err != nil {
		t.Fatal(err)
	}
	subject := "sha256:" + strings.Repeat("a", 64)
	artifact := fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,"artifactType":"x/pack","config":{"mediaType":"x/empty","digest":"sha256:%s","size":16},
		"layers":[],"subject":{"mediaType":%[1]q,"digest":%[3]q,"size":7},"annotations":{"a":"b"}}`, ocispec.MediaTypeImageManifest, config, subject)
	for range 2 { // the second changes nothing
		req := httptest.NewRequest(http.MethodPut, "/v2/some/image/manifests/art", strings.NewReader(artifact))
		req.Header.Set("Content-Type", ocispec.MediaTypeImageManifest)
		resp := httptest.NewRecorder()
		h.ServeHTTP(resp, req)
		if resp.Code != http.StatusCreated || resp.Header().Get("OCI-Subject") != subject {
			t.Fatalf("push: status %d, %s, headers %v", resp.Code, resp.Body, resp.Header())
		}
	}
	for query, want := range map[string]int{"some/image/referrers/" + subject: 1,
		"some/image/referrers/" + subject + "?artifactType=x/pack": 1,
		"some/image/referrers/" + subject + "?artifactType=other":  0, "other/referrers/" + subject: 0} {
		resp := httptest.NewRecorder()
		h.ServeHTTP(resp, httptest.NewRequest(http.MethodGet, "/v2/"+query, nil))
		var index ocispec.Index
		if err := json.Unmarshal(resp.Body.Bytes(), &index); err != nil || len(index.Manifests) != want {
			t.Errorf("%s: %v, %s", query, err, resp.Body)
		} else if want == 1 &&
			(index.Manifests[0].ArtifactType != "x/pack" || index.Manifests[0].Annotations["a"] != "b") {
			t.Errorf("%s: %+v", query, index.Manifests[0])
		}
	}
}
