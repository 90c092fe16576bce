package registry

import (
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"
)

// logins writes a docker config.json.
func logins(t *testing.T, host, user, password string) string {
	t.Helper()
	auth := base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
	return write(t, filepath.Join(t.TempDir(), "config.json"),
		fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, host, auth))
}

func TestAuth(t *testing.T) {
	const user, password = "dew", "point:s3cret"
	for name, tc := range map[string]struct {
		auth     registrytest.Auth
		login    string // password in config.json, "" for no login
		requests int    // for an image by tag, first time
		kind     Kind   // -1 is success
	}{
		"basic":             {registrytest.Auth{Mode: registrytest.Basic}, password, 3, -1},
		"basic, wrong":      {registrytest.Auth{Mode: registrytest.Basic}, "wrong", 2, Unauthorized},
		"basic, none":       {registrytest.Auth{Mode: registrytest.Basic}, "", 1, Unauthorized},
		"bearer":            {registrytest.Auth{Mode: registrytest.Bearer}, password, 4, -1},
		"bearer, wrong":     {registrytest.Auth{Mode: registrytest.Bearer}, "wrong", 2, Unauthorized},
		"bearer, none":      {registrytest.Auth{Mode: registrytest.Bearer}, "", 2, Unauthorized},
		"bearer, anonymous": {registrytest.Auth{Mode: registrytest.Bearer, Anonymous: true}, "", 4, -1},
		"bearer, short life": {registrytest.Auth{Mode: registrytest.Bearer, Life: time.Nanosecond,
			Tell: time.Hour}, password, 3, Unauthorized},
		"bearer, wrong and there": {registrytest.Auth{Mode: registrytest.Bearer, Anonymous: true}, "wrong", 2,
			Unauthorized},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			reg := registrytest.New(t)
			p := reg.PushImage("a/b:1", someLayers, registrytest.Options{})
			tc.auth.User, tc.auth.Password = user, password
			reg.Require(tc.auth)
			cfg := Config{}
			if tc.login != "" {
				cfg.DockerConfig = logins(t, reg.Host(), user, tc.login)
			}
			c := client(t, cfg, reg)
			_, err := c.Resolve(t.Context(), parse(t, p.Ref), ResolveOptions{})
			if n := len(reg.Requests()); n != tc.requests {
				t.Errorf("%d requests, want %d", n, tc.requests)
			}
			if tc.kind != -1 {
				wantKind(t, err, tc.kind, "dew login "+reg.Host())
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			reg.Forget()
			if _, err := c.Resolve(t.Context(), parse(t, p.Ref), ResolveOptions{}); err != nil {
				t.Fatal(err)
			}
			if n := len(reg.Requests()); n != 2 {
				t.Errorf("the second time %d requests, want 2", n)
			}
		})
	}
}

func TestTokenPerRepository(t *testing.T) {
	reg := registrytest.New(t)
	a := reg.PushImage("a:1", someLayers, registrytest.Options{})
	b := reg.PushImage("b:1", someLayers, registrytest.Options{})
	reg.Require(registrytest.Auth{Mode: registrytest.Bearer, Anonymous: true})
	c := client(t, Config{}, reg)
	for _, r := range []string{a.Ref, b.Ref, a.Ref} {
		if _, err := c.Resolve(t.Context(), parse(t, r), ResolveOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if n := reg.Count("/token"); n != 2 {
		t.Errorf("%d tokens, want one for each repository", n)
	}
	if n := reg.Count("/manifests/"); n != 4 {
		t.Errorf("%d manifest requests: only the first may be challenged", n)
	}
}

func TestTokenExpires(t *testing.T) {
	for name, tell := range map[string]time.Duration{"as told": time.Second, "sooner than told": time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, 1000)
			b.reg.Require(registrytest.Auth{Mode: registrytest.Bearer, Anonymous: true, Life: time.Second, Tell: tell})
			c := client(t, Config{}, b.reg)
			for range 3 {
				if _, _, err := b.read(t, c, 1, -1); err != nil {
					t.Fatal(err)
				}
				time.Sleep(600 * time.Millisecond)
			}
			if n := b.reg.Count("/token"); n != 2 {
				t.Errorf("%d tokens, want 2", n)
			}
		})
	}
}

// However many streams find their token refused, one fetches the next.
func TestTokenIsFetchedOnce(t *testing.T) {
	b := newBed(t, 1000)
	b.reg.Require(registrytest.Auth{Mode: registrytest.Bearer, Anonymous: true})
	c := client(t, Config{}, b.reg)
	for range 2 {
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				if _, _, err := b.read(t, c, 1, -1); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		b.reg.Revoke()
	}
	if n := b.reg.Count("/token"); n != 2 {
		t.Errorf("%d tokens, want 2", n)
	}
}

func TestIdentityToken(t *testing.T) {
	b := newBed(t, 1000)
	b.reg.Require(registrytest.Auth{Mode: registrytest.Bearer, Identity: "refresh-me"})
	file := write(t, filepath.Join(t.TempDir(), "config.json"),
		fmt.Sprintf(`{"auths":{%q:{"identitytoken":"refresh-me"}}}`, b.reg.Host()))
	if _, _, err := b.read(t, client(t, Config{DockerConfig: file}, b.reg), 0, -1); err != nil {
		t.Fatal(err)
	}
}

func TestBadDockerConfig(t *testing.T) {
	b := newBed(t, 1000)
	b.reg.Require(registrytest.Auth{Mode: registrytest.Basic, User: "u", Password: "p"})
	file := write(t, filepath.Join(t.TempDir(), "config.json"), `{"auths":`)
	_, _, err := b.read(t, client(t, Config{DockerConfig: file}, b.reg), 0, -1)
	wantKind(t, err, BadConfig, file)
}

// A redirect takes the request, and none of the credentials, elsewhere; and
// it is remembered.
func TestRedirect(t *testing.T) {
	b := newBed(t, 100_000)
	storage := registrytest.NewConfig(t, registrytest.Config{Store: b.reg.Store})
	b.reg.Require(registrytest.Auth{Mode: registrytest.Basic, User: "u", Password: "p"})
	b.reg.Fail(registrytest.Fault{Do: registrytest.Redirect, To: storage})
	c := client(t, Config{DockerConfig: logins(t, b.reg.Host(), "u", "p")}, b.reg, storage)
	for range 3 {
		got, _, err := b.read(t, c, 50_000, -1)
		if err != nil || len(got) != 50_000 {
			t.Fatal(err)
		}
	}
	for _, r := range storage.Requests() {
		if r.Auth != "" || r.Range != "bytes=50000-99999" {
			t.Errorf("storage saw %q, range %q", r.Auth, r.Range)
		}
	}
	if n := len(storage.Requests()); n != 3 {
		t.Errorf("storage saw %d requests", n)
	}
	if n := b.reg.Count("/blobs/"); n != 2 { // challenged once, then redirected once
		t.Errorf("the registry saw %d requests", n)
	}
	storage.Fail(registrytest.Fault{Do: registrytest.Status, Status: http.StatusForbidden, Path: "/storage/",
		Times: 1})
	if _, _, err := b.read(t, c, 0, -1); err != nil {
		t.Fatalf("an address that expired: %v", err)
	}
	if n := b.reg.Count("/blobs/"); n != 3 {
		t.Errorf("the registry saw %d requests", n)
	}
}

func FuzzReadToken(f *testing.F) {
	f.Add(`{"token":"a","expires_in":60}`)
	f.Add(`{"access_token":"a","expires_in":-1}`)
	f.Add(`{"token":"a\nb"}`)
	f.Fuzz(func(t *testing.T, s string) {
		v, _, life, err := readToken(io.LimitReader(strings.NewReader(s), 1<<20))
		if err == nil && (v == "" || life <= 0 || strings.ContainsAny(v, "\r\n")) {
			t.Fatal(v, life)
		}
	})
}

// A registry behind a path prefix has scopes that only it knows.
func TestScopeOfTheChallenge(t *testing.T) {
	reg := registrytest.New(t)
	p := reg.PushImage("proxy/a:1", someLayers, registrytest.Options{})
	reg.Require(registrytest.Auth{Mode: registrytest.Bearer, Anonymous: true})
	root := t.TempDir()
	write(t, filepath.Join(root, "example.com", "hosts.toml"),
		fmt.Sprintf("[host.%q]\noverride_path = true\n", reg.URL()+"/v2/proxy"))
	c := client(t, Config{HostsDirs: []string{root}})
	img, err := c.Resolve(t.Context(), parse(t, "example.com/a:1"), ResolveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if img.Desc.Digest != p.Digest {
		t.Fatal("another image")
	}
}

func TestLongRetryAfterIsNotWaitedFor(t *testing.T) {
	b := newBed(t, 1000)
	b.reg.Fail(registrytest.Fault{Do: registrytest.Status, Status: 429, RetryAfter: "7200"})
	start := time.Now()
	_, _, err := b.read(t, client(t, Config{}, b.reg), 0, -1)
	wantKind(t, err, RateLimited, "2h0m0s")
	if time.Since(start) > testkit.Limit {
		t.Error("waited")
	}
}
