package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"
)

func TestFallbackTag(t *testing.T) {
	for d, want := range map[digest.Digest]string{
		digest.FromString(""):        "sha256-e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
		digest.SHA512.FromString(""): "sha512-cf83e1357eefb8bdf1542850d66d8007d620e4050b5715dc83f4a921d36ce9ce",
	} {
		if got := fallbackTag(d); got != want {
			t.Errorf("%s: %s", d, got)
		}
	}
}

// That one repository or image is unknown says nothing of the others.
func TestAPIIsNotForgottenForOneRepository(t *testing.T) {
	reg := registrytest.New(t)
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	c := client(t, Config{}, reg)
	push(t, c, p.Ref, artifact(p.Desc, packType, "x"))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/v2/gone/") {
			w.WriteHeader(http.StatusNotFound)
			io.WriteString(w, `{"errors":[{"code":"NAME_UNKNOWN","message":"no such repository"}]}`)
			return
		}
		http.Redirect(w, r, reg.URL()+r.URL.RequestURI(), http.StatusTemporaryRedirect)
	}))
	defer srv.Close()
	host := strings.TrimPrefix(srv.URL, "http://")
	c = client(t, Config{Hosts: map[string]Host{host: {PlainHTTP: true}}}, reg)
	defer c.Close()
	if got := bodies(t, c, host+"/gone", p.Digest, packType); got != "" {
		t.Error(got)
	}
	if got := bodies(t, c, host+"/a", p.Digest, packType); got != "x" {
		t.Errorf("%q", got)
	}
}

func TestReferrersFromHostileRegistry(t *testing.T) {
	subject := digest.FromString("image")
	entry := func(n int) string {
		return fmt.Sprintf(`{"mediaType":"m","digest":%q,"size":1,"artifactType":%q}`,
			digest.FromString(fmt.Sprint(n)), packType)
	}
	index := func(w http.ResponseWriter, manifests string) {
		w.Header().Set("Content-Type", ocispec.MediaTypeImageIndex)
		fmt.Fprintf(w, `{"schemaVersion":2,"manifests":%s}`, manifests)
	}
	for name, tc := range map[string]struct {
		api  http.HandlerFunc // the tag is not there
		want int              // entries; -1 is an error
		most int32            // requests
	}{
		"null": {func(w http.ResponseWriter, r *http.Request) { index(w, "null") }, 0, 1},
		"HTML": {func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "<html>") }, 0, 2},
		"JSON": {func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "{}") }, 0, 2},
		"405":  {func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(405) }, 0, 2},
		"501":  {func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(501) }, 0, 2},
		"403":  {func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(403) }, -1, 1},
		"bad entries": {func(w http.ResponseWriter, r *http.Request) {
			index(w, `[{"digest":"x"},{"size":-1},{},`+entry(1)+`]`)
		}, 1, 1},
		"large": {func(w http.ResponseWriter, r *http.Request) {
			index(w, "["+strings.Repeat(" ", 5<<20)+"]")
		}, -1, 1},
		"link off": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Link", `<http://127.0.0.1:1/x>; rel="next"`)
			index(w, "["+entry(1)+"]")
		}, 1, 1},
		"link to self": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Link", `<>; rel=next`)
			index(w, "["+entry(1)+"]")
		}, 1, 1},
		"endless": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Link", fmt.Sprintf(`<?n=0>; rel="prev", <?n=%s0,>; rel="next"`, r.URL.Query().Get("n")))
			index(w, "["+entry(1)+"]")
		}, maxPages, maxPages},
		"breaks off": {func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Query().Has("last") {
				w.WriteHeader(404)
				return
			}
			w.Header().Set("Link", `<?last=1>; rel="next"`)
			index(w, "["+entry(1)+"]")
		}, -1, 2},
	} {
		t.Run(name, func(t *testing.T) {
			var requests atomic.Int32
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				requests.Add(1)
				if !strings.Contains(r.URL.Path, "/referrers/") {
					w.WriteHeader(404)
					return
				}
				tc.api(w, r)
			}))
			defer srv.Close()
			host := strings.TrimPrefix(srv.URL, "http://")
			c := client(t, Config{Hosts: map[string]Host{host: {PlainHTTP: true}}})
			defer c.Close()
			got, err := c.Referrers(t.Context(), parse(t, host+"/a"), subject, packType)
			if (err != nil) != (tc.want == -1) || err == nil && len(got) != tc.want {
				t.Errorf("%d entries, %v", len(got), err)
			}
			if n := requests.Load(); n > tc.most {
				t.Errorf("%d requests", n)
			}
		})
	}
}

func TestReferrersEndWithContext(t *testing.T) {
	reg := registrytest.New(t)
	reg.Fail(registrytest.Fault{Do: registrytest.Hang, Path: "/referrers/"})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	start := time.Now()
	_, err := client(t, Config{}, reg).Referrers(ctx, parse(t, reg.Host()+"/a"), digest.FromString("x"),
		packType)
	if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) > testkit.Limit {
		t.Fatal(err, time.Since(start))
	}
}

// A mirror is asked by what its capabilities say, and one that knows nothing
// does not hide what the registry knows. Pushes pass it by.
func TestArtifactsAndMirrors(t *testing.T) {
	for name, tc := range map[string]struct {
		caps   string
		quirks registrytest.Quirks
		mirror map[string]int
		origin int
	}{
		"has the API": {`["pull", "resolve", "referrers"]`, registrytest.Quirks{},
			map[string]int{"GET referrers": 1}, 0},
		"lacks the API": {`["pull", "resolve", "referrers"]`, registrytest.Quirks{NoReferrers: true},
			map[string]int{"GET referrers": 1, "GET manifests": 1}, 1},
		"not for it": {`["pull", "resolve"]`, registrytest.Quirks{}, map[string]int{"GET manifests": 1}, 1},
		"for blobs":  {`["pull"]`, registrytest.Quirks{}, map[string]int{}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			reg := registrytest.New(t)
			mirror := registrytest.NewConfig(t, registrytest.Config{Store: reg.Store})
			mirror.Be(tc.quirks)
			p := reg.PushImage("a:1", someLayers, registrytest.Options{})
			root := t.TempDir()
			write(t, filepath.Join(root, reg.Host(), "hosts.toml"),
				fmt.Sprintf("[host.%q]\ncapabilities = %s\n", mirror.URL(), tc.caps))
			c := client(t, Config{HostsDirs: []string{root}}, reg)
			push(t, c, p.Ref, artifact(p.Desc, packType, "x"))
			if n := len(mirror.Requests()); n != 0 {
				t.Errorf("%d requests of a push at the mirror", n)
			}
			reg.Forget()
			if got := bodies(t, c, p.Ref, p.Digest, packType); got != "x" {
				t.Errorf("listed %q", got)
			}
			if got := mirror.Kinds(); !maps.Equal(got, tc.mirror) {
				t.Errorf("asked the mirror %v, want %v", got, tc.mirror)
			}
			if got := len(reg.Requests()); got != tc.origin {
				t.Errorf("%d requests at the registry, want %d", got, tc.origin)
			}
		})
	}
}

func TestArtifactIsVerified(t *testing.T) {
	reg := registrytest.New(t)
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	c := client(t, Config{}, reg)
	d := push(t, c, p.Ref, artifact(p.Desc, packType, "x"))
	longer := d
	longer.Size++
	_, err := c.Artifact(t.Context(), parse(t, p.Ref), longer)
	wantKind(t, err, Mismatch)
	idx := reg.PushIndex("i:1", nil, registrytest.Options{})
	_, err = c.Artifact(t.Context(), parse(t, idx.Ref), idx.Desc)
	wantKind(t, err, BadImage, "index")
	reg.Fail(registrytest.Fault{Do: registrytest.Flip, At: 9, Path: "/manifests/"})
	_, err = c.Artifact(t.Context(), parse(t, p.Ref), d)
	wantKind(t, err, Mismatch)
	reg.Heal()
	reg.Fail(registrytest.Fault{Do: registrytest.Garbage, At: 5 << 20, Path: "/manifests/"})
	_, err = c.Artifact(t.Context(), parse(t, p.Ref), d)
	wantKind(t, err, BadImage, "too large")
}

func FuzzParseList(f *testing.F) {
	f.Add([]byte(`{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[{"digest":"sha256:x","size":-1}]}`), "")
	f.Add([]byte(`null`), ocispec.MediaTypeImageIndex)
	f.Fuzz(func(t *testing.T, doc []byte, served string) {
		h := http.Header{"Content-Type": {served}}
		list, err := parseList(doc, h)
		if err != nil && list != nil {
			t.Fatal("both a list and an error")
		}
		for _, d := range (&lister{}).filter(list, h) {
			if d.Digest.Validate() != nil || d.Size < 0 {
				t.Fatalf("%+v", d)
			}
		}
		if bytes.Equal(doc, []byte("{}")) && served == "" && err == nil {
			t.Fatal("anything is a list")
		}
	})
}
