package registry

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"dewpoint/internal/image"
)

// FuzzHeaders takes what a registry says when it refuses. Challenges that are written again, quoted, are read
// as they were.
func FuzzHeaders(f *testing.F) {
	f.Add(`Bearer realm="https://a/t",service="a\"b",scope=x`, `{"errors":[{"code":"DENIED","message":"no"}]}`, "7")
	f.Add(`basic realm=a`, "no\nno", "Wed, 21 Oct 2065 07:28:00 GMT")
	f.Add(``, `{"errors":[{}]}`, "-9223372036854775808")
	f.Fuzz(func(t *testing.T, challenge, body, after string) {
		lines := []string{"Other", challenge, "Basic", "Bearer a=b"}
		all := challenges(http.Header{"Www-Authenticate": lines})
		if len(all) != len(lines) || all[0].scheme != schemeBearer {
			t.Fatalf("%+v", all)
		}
		for _, c := range challenges(http.Header{"Www-Authenticate": {challenge}}) {
			line := c.scheme + " "
			for k, v := range c.params {
				line += fmt.Sprintf(`%s="%s",`, k, strings.NewReplacer(`"`, `\"`, `\`, `\\`).Replace(v))
			}
			again := challenges(http.Header{"Www-Authenticate": {line}})
			if !reflect.DeepEqual(again[0].params, c.params) {
				t.Fatalf("%q gives %q, which as %q gives %q", challenge, c.params, line, again[0].params)
			}
		}
		if code, err := diagnosis(http.Header{}, []byte(body)); code != "" && err == nil {
			t.Fatalf("%q has a code and says nothing", code)
		}
		if d := retryAfter(http.Header{"Retry-After": {after}}); d < 0 {
			t.Fatalf("%q is %s", after, d)
		}
	})
}

// FuzzArtifact takes the manifest of what a registry lists beside an image.
func FuzzArtifact(f *testing.F) {
	f.Add([]byte(`{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{},"layers":[` +
		`{"digest":"` + digest.FromString("").String() + `","size":5}]}`))
	f.Add([]byte(`{"schemaVersion":2,"manifests":[]}`))
	f.Add([]byte(`{"schemaVersion":2,"config":{},"layers":[{"digest":"sha256:../../x","size":-1}]}`))
	of := func(doc []byte) ocispec.Descriptor {
		return ocispec.Descriptor{Digest: digest.FromBytes(doc), Size: int64(len(doc))}
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		m, err := parseArtifact(of(doc), doc)
		if err != nil {
			return
		}
		for _, l := range m.Layers {
			if l.Digest.Validate() != nil || l.Size < 0 || l.Size > image.MaxLayer {
				t.Fatalf("%+v", l)
			}
		}
		if _, err := parseArtifact(of(append(doc, ' ')), doc); err == nil {
			t.Fatal("another one is taken for it")
		}
		if out, err := json.Marshal(m); err != nil || !json.Valid(out) {
			t.Fatal(err)
		}
	})
}

// FuzzLogins takes Docker's file, whose credential helpers are not there, and what a helper says.
func FuzzLogins(f *testing.F) {
	f.Add([]byte(`{"auths":{"a.b":{"auth":"dTpw"}}}`), []byte(`{"ServerURL":"a.b","Username":"u","Secret":"p"}`))
	f.Add([]byte(`{"auths":{"a.b":{"auth":"dQ=="}}}`), []byte(`credentials not found in native keychain`))
	f.Add([]byte(`{"auths":{"a.b":{"identitytoken":"x"}},"credHelpers":{"c":"none"}}`), []byte(`{"Username":"<token>"}`))
	dir := f.TempDir()
	chmod(f, write(f, filepath.Join(dir, "docker-credential-said"), "#!/bin/sh\nexec /bin/cat "+dir+"/said\n"))
	f.Setenv("PATH", dir)
	helped := write(f, filepath.Join(dir, "helped.json"), `{"credHelpers":{"a.b":"said"}}`)
	f.Fuzz(func(t *testing.T, logins, said []byte) {
		file := write(t, filepath.Join(dir, "config.json"), string(logins))
		a, err := readLogin(t.Context(), file, "a.b")
		if err == nil && len(logins) == 0 && a.Username != "" {
			t.Fatalf("%+v", a)
		}
		write(t, filepath.Join(dir, "said"), string(said))
		a, err = readLogin(t.Context(), helped, "a.b")
		if err != nil {
			return
		}
		if a.Username == identity || a.Password != "" && a.IdentityToken != "" {
			t.Fatalf("%+v", a)
		}
	})
}
