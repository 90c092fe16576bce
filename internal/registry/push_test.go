package registry

import (
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"dewpoint/testkit/registrytest"
)

const packType = "application/vnd.example.pack.v1"

// artifact is one whose only layer is body.
func artifact(subject ocispec.Descriptor, typ, body string) Artifact {
	return Artifact{
		Type: typ, Subject: subject, Annotations: map[string]string{"example.body": body},
		Layers: []ArtifactLayer{{
			MediaType: typ, Digest: digest.FromString(body), Size: int64(len(body)),
			Open: func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(body)), nil },
		}},
	}
}

func push(t *testing.T, c *Client, ref string, a Artifact) ocispec.Descriptor {
	t.Helper()
	d, err := c.PushArtifact(t.Context(), parse(t, ref), a)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// bodies lists what refers to a subject, by the annotation of artifact, sorted.
func bodies(t *testing.T, c *Client, ref string, subject digest.Digest, typ string) string {
	t.Helper()
	list, err := c.Referrers(t.Context(), parse(t, ref), subject, typ)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, d := range list {
		out = append(out, d.Annotations["example.body"])
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func TestArtifactRoundTrip(t *testing.T) {
	for name, tc := range map[string]struct {
		quirks registrytest.Quirks
		packs  string         // on the list when two were pushed
		all    string         // of any type
		asked  map[string]int // for the first look and the second, by type
	}{
		"as specified": {registrytest.Quirks{}, "new old", "new old other", map[string]int{"GET referrers": 2}},
		"no filter": {registrytest.Quirks{NoFilter: true}, "new old", "new old other",
			map[string]int{"GET referrers": 2}},
		"no subject": {registrytest.Quirks{NoSubject: true}, "new old", "new old other",
			map[string]int{"GET referrers": 2}},
		"pages": {registrytest.Quirks{NoFilter: true, Page: 1}, "new old", "new old other",
			map[string]int{"GET referrers": 6}},
		"tag": {registrytest.Quirks{NoReferrers: true}, "new", "new other",
			map[string]int{"GET referrers": 1, "GET manifests": 2}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			reg := registrytest.New(t)
			reg.Be(tc.quirks)
			p := reg.PushImage("a/b:1", someLayers, registrytest.Options{})
			c := client(t, Config{}, reg)
			if got := bodies(t, client(t, Config{}, reg), p.Ref, p.Digest, packType); got != "" {
				t.Fatalf("%q refers to a new image", got)
			}
			push(t, c, p.Ref, artifact(p.Desc, packType, "old"))
			push(t, c, p.Ref, artifact(p.Desc, "application/vnd.example.other", "other"))
			d := push(t, c, p.Ref, artifact(p.Desc, packType, "new"))
			reg.Forget()
			for range 2 {
				if got := bodies(t, c, p.Ref, p.Digest, packType); got != tc.packs {
					t.Errorf("packs %q, want %q", got, tc.packs)
				}
			}
			if got := reg.Kinds(); !maps.Equal(got, tc.asked) {
				t.Errorf("asked %v, want %v", got, tc.asked)
			}
			if got := bodies(t, c, p.Ref, p.Digest, ""); got != tc.all {
				t.Errorf("artifacts %q, want %q", got, tc.all)
			}
			checkArtifact(t, c, p, d, "new")
		})
	}
}

// checkArtifact fetches an artifact that was made by artifact.
func checkArtifact(t *testing.T, c *Client, p registrytest.Pushed, d ocispec.Descriptor, body string) {
	t.Helper()
	ref := parse(t, p.Ref)
	m, err := c.Artifact(t.Context(), ref, d)
	if err != nil {
		t.Fatal(err)
	}
	if m.Subject == nil || m.Subject.Digest != p.Digest || m.Subject.Size != p.Desc.Size ||
		m.ArtifactType != packType || len(m.Layers) != 1 {
		t.Fatalf("artifact %+v", m)
	}
	l := m.Layers[0]
	s, err := c.Open(t.Context(), ref, Blob{l.Digest, l.Size}, 0, -1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if got, err := io.ReadAll(s); err != nil || string(got) != body {
		t.Fatalf("layer %q, %v", got, err)
	}
}

// What the registry has is not sent again, and what is listed is listed once.
func TestPushAgain(t *testing.T) {
	reg := registrytest.New(t)
	reg.Be(registrytest.Quirks{NoReferrers: true})
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	c := client(t, Config{}, reg)
	first := push(t, c, p.Ref, artifact(p.Desc, packType, "x"))
	if got, want := reg.Kinds(),
		map[string]int{"HEAD blobs": 2, "POST uploads": 2, "PUT uploads": 2, "PUT manifests": 2,
			"GET manifests": 1}; !maps.Equal(got, want) {
		t.Errorf("asked %v, want %v", got, want)
	}
	reg.Forget()
	if again := push(t, c, p.Ref, artifact(p.Desc, packType, "x")); again.Digest != first.Digest {
		t.Errorf("equal artifacts are %s and %s", first.Digest, again.Digest)
	}
	if got, want := reg.Kinds(),
		map[string]int{"HEAD blobs": 2, "PUT manifests": 2, "GET manifests": 1}; !maps.Equal(got, want) {
		t.Errorf("again asked %v, want %v", got, want)
	}
	if got := bodies(t, c, p.Ref, p.Digest, ""); got != "x" {
		t.Errorf("listed %q", got)
	}
}

func TestPushLogin(t *testing.T) {
	for name, tc := range map[string]struct {
		auth  registrytest.Auth
		login string
		kind  Kind // -1 is success
	}{
		"bearer":            {registrytest.Auth{Mode: registrytest.Bearer}, "p", -1},
		"bearer, may pull":  {registrytest.Auth{Mode: registrytest.Bearer, Anonymous: true}, "p", -1},
		"bearer, none":      {registrytest.Auth{Mode: registrytest.Bearer}, "", Unauthorized},
		"bearer, wrong":     {registrytest.Auth{Mode: registrytest.Bearer}, "wrong", Unauthorized},
		"bearer, anonymous": {registrytest.Auth{Mode: registrytest.Bearer, Anonymous: true}, "", Unauthorized},
		"basic":             {registrytest.Auth{Mode: registrytest.Basic}, "p", -1},
		"basic, none":       {registrytest.Auth{Mode: registrytest.Basic}, "", Unauthorized},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			reg := registrytest.New(t)
			p := reg.PushImage("a/b:1", someLayers, registrytest.Options{})
			tc.auth.User, tc.auth.Password = "u", "p"
			reg.Require(tc.auth)
			cfg := Config{}
			if tc.login != "" {
				cfg.DockerConfig = logins(t, reg.Host(), "u", tc.login)
			}
			c := client(t, cfg, reg)
			_, err := c.PushArtifact(t.Context(), parse(t, p.Ref), artifact(p.Desc, packType, "x"))
			if tc.kind != -1 {
				wantKind(t, err, tc.kind, "push", "dew login "+reg.Host(), "write")
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := bodies(t, c, p.Ref, p.Digest, packType); got != "x" {
				t.Errorf("listed %q", got)
			}
		})
	}
}

func TestPushFaults(t *testing.T) {
	for name, tc := range map[string]struct {
		fault  registrytest.Fault
		quirks registrytest.Quirks
		kind   Kind // -1 is success
		words  string
	}{
		"503 for the address": {registrytest.Fault{Do: registrytest.Status, Status: 503, Method: "POST", Times: 2},
			registrytest.Quirks{}, -1, ""},
		"503 for the blob": {registrytest.Fault{Do: registrytest.Status, Status: 503, Method: "PUT", Times: 2},
			registrytest.Quirks{}, -1, ""},
		"503 for the manifest": {registrytest.Fault{Do: registrytest.Status, Status: 503, Method: "PUT",
			Path: "/manifests/", Times: 2}, registrytest.Quirks{}, -1, ""},
		"503 for the tag": {registrytest.Fault{Do: registrytest.Status, Status: 503,
			Path: "/manifests/sha256-", Times: 2}, registrytest.Quirks{NoReferrers: true}, -1, ""},
		"HEAD refused": {registrytest.Fault{Do: registrytest.Status, Status: 403, Method: "HEAD"},
			registrytest.Quirks{}, -1, ""},
		"hangs once": {registrytest.Fault{Do: registrytest.Hang, Method: "PUT", Times: 1},
			registrytest.Quirks{}, -1, ""},
		"hangs": {registrytest.Fault{Do: registrytest.Hang, Method: "PUT"}, registrytest.Quirks{},
			Stalled, "push again"},
		"503": {registrytest.Fault{Do: registrytest.Status, Status: 503, Method: "POST"},
			registrytest.Quirks{}, ServerFault, "later"},
		"403": {registrytest.Fault{Do: registrytest.Status, Status: 403, Method: "POST"},
			registrytest.Quirks{}, Forbidden, "dew login"},
		"413": {registrytest.Fault{Do: registrytest.Status, Status: 413, Method: "PUT"},
			registrytest.Quirks{}, Protocol, "413"},
		"read-only": {registrytest.Fault{Path: "none"}, registrytest.Quirks{ReadOnly: true}, Protocol,
			"read-only"},
		"not over HTTP": {registrytest.Fault{Path: "none"}, registrytest.Quirks{Uploads: "ftp://elsewhere"},
			Protocol, "where to upload to"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			reg := registrytest.New(t)
			p := reg.PushImage("a:1", someLayers, registrytest.Options{})
			c := client(t, Config{StallTimeout: 200 * time.Millisecond}, reg)
			reg.Be(tc.quirks)
			reg.Fail(tc.fault)
			d, err := c.PushArtifact(t.Context(), parse(t, p.Ref), artifact(p.Desc, packType, "x"))
			if tc.kind != -1 {
				wantKind(t, err, tc.kind, "push artifact for a@"+p.Digest.String()+" to "+reg.Host(), tc.words)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			checkArtifact(t, c, p, d, "x")
		})
	}
}

// An upload may lie at another host, which is not told our credentials.
func TestUploadElsewhere(t *testing.T) {
	reg := registrytest.New(t)
	elsewhere := registrytest.NewConfig(t, registrytest.Config{Store: reg.Store})
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	reg.Require(registrytest.Auth{Mode: registrytest.Basic, User: "u", Password: "p"})
	c := client(t, Config{DockerConfig: logins(t, reg.Host(), "u", "p")}, reg, elsewhere)
	reg.Be(registrytest.Quirks{Uploads: reg.URL()})
	push(t, c, p.Ref, artifact(p.Desc, packType, "x"))

	reg.Be(registrytest.Quirks{Uploads: elsewhere.URL()})
	elsewhere.Require(registrytest.Auth{Mode: registrytest.Bearer, Anonymous: true})
	_, err := c.PushArtifact(t.Context(), parse(t, p.Ref), artifact(p.Desc, packType, "y"))
	wantKind(t, err, Unauthorized, elsewhere.Host())
	for _, r := range elsewhere.Requests() {
		if r.Auth != "" || r.Method != http.MethodPut {
			t.Errorf("%s %s with %q", r.Method, r.Path, r.Auth)
		}
	}
	if n := len(elsewhere.Requests()); n != 1 {
		t.Errorf("%d requests elsewhere", n)
	}
}

// slow gives a byte, then waits.
type slow struct {
	io.Reader
	wait time.Duration
}

func (s slow) Read(p []byte) (int, error) {
	time.Sleep(s.wait)
	return s.Reader.Read(p[:1])
}

func (slow) Close() error { return nil }

// An upload that moves is not cut, however long it takes.
func TestSlowUpload(t *testing.T) {
	reg := registrytest.New(t)
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	c := client(t, Config{StallTimeout: 400 * time.Millisecond, ResolveRetries: -1}, reg)
	a := artifact(p.Desc, packType, "ten bytes.")
	a.Layers[0].Open = func() (io.ReadCloser, error) {
		return slow{strings.NewReader("ten bytes."), 80 * time.Millisecond}, nil
	}
	push(t, c, p.Ref, a)
}

// A source that fails is the caller's error, and not tried again.
func TestPushFromBrokenSource(t *testing.T) {
	reg := registrytest.New(t)
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	c := client(t, Config{}, reg)
	broken := errors.New("disk on fire")
	for name, tc := range map[string]struct {
		open func() (io.ReadCloser, error)
		want error
	}{
		"open": {func() (io.ReadCloser, error) { return nil, broken }, broken},
		"read": {func() (io.ReadCloser, error) {
			return io.NopCloser(io.MultiReader(strings.NewReader("ab"), errReader{broken})), nil
		}, broken},
		"short": {func() (io.ReadCloser, error) {
			return io.NopCloser(strings.NewReader("ab")), nil
		}, io.ErrUnexpectedEOF},
	} {
		reg.Forget()
		a := artifact(p.Desc, packType, "abcdef")
		a.Layers[0].Open = tc.open
		_, err := c.PushArtifact(t.Context(), parse(t, p.Ref), a)
		if !errors.Is(err, tc.want) {
			t.Errorf("%s: %v", name, err)
		}
		if n := reg.Kinds()["POST uploads"]; n != 1 {
			t.Errorf("%s: %d uploads", name, n)
		}
	}
	a := artifact(p.Desc, packType, "abcdef")
	a.Layers[0].Open = func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("ABCDEF")), nil }
	_, err := c.PushArtifact(t.Context(), parse(t, p.Ref), a)
	wantKind(t, err, Protocol, "digest did not match")
}

type errReader struct{ err error }

func (e errReader) Read([]byte) (int, error) { return 0, e.err }

func TestPushRefusesNonsense(t *testing.T) {
	c := client(t, Config{})
	good := artifact(ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest,
		Digest: digest.FromString("x"), Size: 1}, packType, "x")
	for name, spoil := range map[string]func(*Artifact){
		"subject": func(a *Artifact) { a.Subject.Digest = "sha256:short" },
		"type":    func(a *Artifact) { a.Type = "" },
		"layer":   func(a *Artifact) { a.Layers = []ArtifactLayer{{}} },
		"size":    func(a *Artifact) { a.Annotations = map[string]string{"x": strings.Repeat("x", 5<<20)} },
	} {
		a := good
		spoil(&a)
		_, err := c.PushArtifact(t.Context(), parse(t, "127.0.0.1:1/a"), a)
		var e *Error
		if err == nil || errors.As(err, &e) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A tag that is no list is not overwritten, and said to be none.
func TestFallbackTagIsTaken(t *testing.T) {
	reg := registrytest.New(t)
	reg.Be(registrytest.Quirks{NoReferrers: true})
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	taken := reg.PushImage("a:"+fallbackTag(p.Digest), someLayers[:1], registrytest.Options{})
	c := client(t, Config{}, reg)
	_, err := c.PushArtifact(t.Context(), parse(t, p.Ref), artifact(p.Desc, packType, "x"))
	wantKind(t, err, BadImage, fallbackTag(p.Digest), "delete it")
	_, err = c.Referrers(t.Context(), parse(t, p.Ref), p.Digest, packType)
	wantKind(t, err, BadImage, fallbackTag(p.Digest))
	if img, err := c.Resolve(t.Context(), parse(t, taken.Ref), ResolveOptions{}); err != nil ||
		img.Desc.Digest != taken.Digest {
		t.Error("the image was overwritten", err)
	}
}
