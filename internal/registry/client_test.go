package registry

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"dewpoint/internal/image"
	"dewpoint/testkit/registrytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// client makes a Client that has no logins, speaks plain HTTP to regs, and
// does not wait long.
func client(t *testing.T, cfg Config, regs ...*registrytest.Server) *Client {
	t.Helper()
	if cfg.DockerConfig == "" {
		cfg.DockerConfig = filepath.Join(t.TempDir(), "none.json")
	}
	def(&cfg.Backoff, time.Millisecond)
	def(&cfg.MaxBackoff, 5*time.Millisecond)
	def(&cfg.StallTimeout, 5*time.Second)
	if cfg.Hosts == nil {
		cfg.Hosts = map[string]Host{}
	}
	for _, r := range regs {
		cfg.Hosts[r.Host()] = Host{PlainHTTP: true}
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func parse(t *testing.T, ref string) image.Reference {
	t.Helper()
	r, err := image.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// wantKind insists on an *Error of the kind whose one line contains the words.
func wantKind(t *testing.T, err error, k Kind, words ...string) *Error {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("got %T %v, want an *Error", err, err)
	}
	if e.Kind != k {
		t.Fatalf("kind %d, want %d: %v", e.Kind, k, err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %q", err, w)
		}
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("%q is not one line", err)
	}
	return e
}

var someLayers = []registrytest.Layer{
	{Tar: registrytest.RandomTar(1, 4, 10_000)},
	{Tar: registrytest.RandomTar(2, 4, 10_000), Compression: image.Zstd},
}

func write(t testing.TB, path, content string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestResolveRoundTrips(t *testing.T) {
	reg := registrytest.New(t)
	c := client(t, Config{}, reg)
	for _, docker := range []bool{false, true} {
		p := reg.PushImage("a/b:1", someLayers, registrytest.Options{Docker: docker})
		idx := reg.PushIndex("a/b:2", []registrytest.PlatformImage{
			{Platform: "linux/s390x"}, {Platform: "linux/amd64", Layers: someLayers},
			{Platform: "linux/arm64", Layers: someLayers[:1]},
		}, registrytest.Options{Docker: docker})
		for _, tc := range []struct {
			ref      string
			platform string
			requests int
			layers   int
		}{
			{p.Ref, "", 2, 2}, {p.ByDigest, "", 2, 2}, {idx.Ref, "linux/amd64", 3, 2},
			{idx.ByDigest, "linux/arm64", 3, 1},
		} {
			reg.Forget()
			pl, err := image.ParsePlatform(tc.platform)
			if err != nil {
				t.Fatal(err)
			}
			img, err := c.Resolve(t.Context(), parse(t, tc.ref), ResolveOptions{Platform: pl})
			if err != nil {
				t.Fatal(err)
			}
			if n := len(reg.Requests()); n != tc.requests {
				t.Errorf("%s: %d requests, want %d", tc.ref, n, tc.requests)
			}
			if len(img.Layers) != tc.layers || img.Ref.String() != tc.ref {
				t.Errorf("%s: got %d layers of %s", tc.ref, len(img.Layers), img.Ref)
			}
		}
	}
}

func TestResolveRefuses(t *testing.T) {
	reg := registrytest.New(t)
	c := client(t, Config{}, reg)
	old := reg.PushSchema1("old:1")
	_, err := c.Resolve(t.Context(), parse(t, old.Ref), ResolveOptions{})
	wantKind(t, err, BadImage, "schema 1", old.Ref)

	idx := reg.PushIndex("multi:1", []registrytest.PlatformImage{{Platform: "linux/s390x"}},
		registrytest.Options{})
	_, err = c.Resolve(t.Context(), parse(t, idx.Ref), ResolveOptions{})
	wantKind(t, err, BadImage, "linux/s390x")
	if !errors.Is(err, image.ErrPlatform) {
		t.Error(err)
	}

	art := reg.PushManifest("art:1", "",
		[]byte(`{"schemaVersion":2,"artifactType":"application/x","config":{"mediaType":"application/vnd.oci.empty.v1+json","size":2,"digest":"sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"},"layers":[]}`))
	_, err = c.Resolve(t.Context(), parse(t, art.Ref), ResolveOptions{})
	wantKind(t, err, BadImage, "application/x")

	big := reg.PushManifest("big:1", "", make([]byte, image.MaxManifest+1))
	_, err = c.Resolve(t.Context(), parse(t, big.Ref), ResolveOptions{})
	wantKind(t, err, BadImage, "too large")

	_, err = c.Resolve(t.Context(), parse(t, reg.Host()+"/no/such:1"), ResolveOptions{})
	wantKind(t, err, NotFound, "check the image's name")
}

func TestResolveFaults(t *testing.T) {
	for name, tc := range map[string]struct {
		fault registrytest.Fault
		kind  Kind // -1 is success
		asked int  // manifest requests
	}{
		"no digest header": {registrytest.Fault{Do: registrytest.NoDigest}, -1, 1},
		"wrong digest":     {registrytest.Fault{Do: registrytest.WrongDigest}, Mismatch, 1},
		"flipped bit":      {registrytest.Fault{Do: registrytest.Flip, At: 9, Path: "/manifests/"}, Mismatch, 1},
		"503 twice": {registrytest.Fault{Do: registrytest.Status, Status: 503, Path: "/manifests/",
			Times: 2}, -1, 3},
		"503": {registrytest.Fault{Do: registrytest.Status, Status: 503, Path: "/manifests/"},
			ServerFault, 4},
		"429 with a wait": {registrytest.Fault{Do: registrytest.Status, Status: 429, RetryAfter: "1",
			Path: "/manifests/", Times: 1}, -1, 2},
		"401": {registrytest.Fault{Do: registrytest.Status, Status: 401, Path: "/manifests/"},
			Unauthorized, 1},
		"403": {registrytest.Fault{Do: registrytest.Status, Status: 403, Path: "/manifests/"},
			Forbidden, 1},
		"404": {registrytest.Fault{Do: registrytest.Status, Status: 404, Path: "/manifests/"},
			NotFound, 1},
		"hangs once":         {registrytest.Fault{Do: registrytest.Hang, Path: "/manifests/", Times: 1}, -1, 2},
		"hangs":              {registrytest.Fault{Do: registrytest.Hang, Path: "/manifests/"}, Stalled, 4},
		"config cut":         {registrytest.Fault{Do: registrytest.Cut, At: 20, Times: 1}, -1, 1},
		"config flipped":     {registrytest.Fault{Do: registrytest.Flip, At: 20}, Mismatch, 1},
		"config is an error": {registrytest.Fault{Do: registrytest.Status, Status: 404}, NotFound, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			reg := registrytest.New(t)
			c := client(t, Config{StallTimeout: 200 * time.Millisecond}, reg)
			p := reg.PushImage("a:1", someLayers, registrytest.Options{})
			reg.Fail(tc.fault)
			start := time.Now()
			_, err := c.Resolve(t.Context(), parse(t, p.Ref), ResolveOptions{})
			if tc.kind == -1 {
				if err != nil {
					t.Fatal(err)
				}
			} else {
				wantKind(t, err, tc.kind)
			}
			c.Close()
			reg.Close() // so that hanging requests are in the log
			if n := reg.Count("/manifests/"); n != tc.asked {
				t.Errorf("%d manifest requests, want %d", n, tc.asked)
			}
			if tc.fault.RetryAfter != "" && time.Since(start) < time.Second {
				t.Error("Retry-After was not kept")
			}
		})
	}
}

func TestPlainHTTPToHTTPS(t *testing.T) {
	reg := registrytest.NewConfig(t, registrytest.Config{TLS: true})
	_, err := client(t, Config{}, reg).Resolve(t.Context(), parse(t, reg.Host()+"/a:1"), ResolveOptions{})
	wantKind(t, err, PlainHTTP, "leave out plain_http")
}

func TestUnreachable(t *testing.T) {
	reg := registrytest.New(t)
	reg.Close()
	_, err := client(t, Config{}, reg).Resolve(t.Context(), parse(t, reg.Host()+"/a:1"), ResolveOptions{})
	wantKind(t, err, Unreachable, "connection refused", reg.Host())
	_, err = client(t, Config{}).Resolve(t.Context(), parse(t, "no-such-host.invalid/a:1"), ResolveOptions{})
	wantKind(t, err, Unreachable)
}

func TestRegistryComesBack(t *testing.T) {
	reg := registrytest.New(t)
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	reg.Close()
	c := client(t, Config{ResolveRetries: 50, MaxBackoff: 50 * time.Millisecond}, reg)
	time.AfterFunc(200*time.Millisecond, func() {
		if err := reg.Up(); err != nil {
			t.Error(err)
		}
	})
	if _, err := c.Resolve(t.Context(), parse(t, p.Ref), ResolveOptions{}); err != nil {
		t.Fatal(err)
	}
}

func TestResolveEndsWithContext(t *testing.T) {
	reg := registrytest.New(t)
	reg.Fail(registrytest.Fault{Do: registrytest.Hang, Path: registrytest.Anywhere})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := client(t, Config{}, reg).Resolve(ctx, parse(t, reg.Host()+"/a:1"), ResolveOptions{})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}

func TestPing(t *testing.T) {
	reg := registrytest.New(t)
	c := client(t, Config{}, reg)
	reg.Require(registrytest.Auth{Mode: registrytest.Basic, User: "u", Password: "p"})
	if err := c.Ping(t.Context(), reg.Host()); err != nil {
		t.Fatal(err)
	}
	reg.Close()
	wantKind(t, c.Ping(t.Context(), reg.Host()), Unreachable)
}
