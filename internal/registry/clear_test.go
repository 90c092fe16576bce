package registry

import (
	"context"
	"net"
	"net/http"
	"strings"
	"testing"

	"dewpoint/testkit/registrytest"
)

// What is sent in clear, and to whom a login goes.

// elsewhere has the client find reg at registry.example too, which is no loopback address.
func elsewhere(c *Client, reg *registrytest.Server) (host string) {
	c.transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if strings.HasPrefix(addr, "registry.example:") {
			addr = reg.Host()
		}
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
	return "registry.example:5000"
}

func TestNoPlainHTTPUnlessConfigured(t *testing.T) {
	reg := registrytest.New(t)
	reg.PushImage("a:1", someLayers, registrytest.Options{})
	c := client(t, Config{})
	host := elsewhere(c, reg)
	_, err := c.Resolve(t.Context(), parse(t, host+"/a:1"), ResolveOptions{})
	wantKind(t, err, PlainHTTP, `[registry."`+host+`"] plain_http = true`)
	if n := len(reg.Requests()); n != 0 {
		t.Fatalf("%d requests in clear", n)
	}
	c = client(t, Config{Hosts: map[string]Host{host: {PlainHTTP: true}}})
	elsewhere(c, reg)
	if _, err := c.Resolve(t.Context(), parse(t, host+"/a:1"), ResolveOptions{}); err != nil {
		t.Fatal(err)
	}
}

// A loopback address needs no configuration, with TLS or without, and is sent no login in clear:
// who deploys containers may have his own listen there.
func TestLoopback(t *testing.T) {
	reg := registrytest.New(t)
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	c := client(t, Config{DockerConfig: logins(t, reg.Host(), "u", "p")})
	img, err := c.Resolve(t.Context(), parse(t, p.Ref), ResolveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l := img.Layers[0]
	s, err := c.Open(t.Context(), img.Ref, Blob{l.Digest, l.Size}, 0, -1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	for _, mode := range []registrytest.AuthMode{registrytest.Basic, registrytest.Bearer} {
		reg.Require(registrytest.Auth{Mode: mode, User: "u", Password: "p"})
		reg.Forget()
		_, err = c.Resolve(t.Context(), parse(t, p.Ref), ResolveOptions{})
		wantKind(t, err, Unauthorized, `[registry."`+reg.Host()+`"] plain_http = true`)
		for _, r := range reg.Requests() {
			if r.Auth != "" || strings.Contains(r.Path, "token") {
				t.Errorf("%s had %q", r.Path, r.Auth)
			}
		}
	}

	secure := registrytest.NewConfig(t, registrytest.Config{TLS: true})
	p = secure.PushImage("a:1", someLayers, registrytest.Options{})
	_, err = client(t, Config{}).Resolve(t.Context(), parse(t, p.Ref), ResolveOptions{})
	wantKind(t, err, Certificate)
}

// Where HTTP is configured, a login goes over it, and to that host and port alone.
func TestLoginGoesToItsHostAlone(t *testing.T) {
	thief := registrytest.New(t)
	for _, mode := range []registrytest.AuthMode{registrytest.Basic, registrytest.Bearer} {
		reg := registrytest.New(t)
		p := reg.PushImage("a:1", someLayers, registrytest.Options{})
		reg.Require(registrytest.Auth{Mode: mode, User: "u", Password: "p"})
		c := client(t, Config{DockerConfig: logins(t, reg.Host(), "u", "p")}, reg, thief)
		if _, err := c.Resolve(t.Context(), parse(t, p.Ref), ResolveOptions{}); err != nil {
			t.Fatal(err)
		}
		reg.Fail(registrytest.Fault{Do: registrytest.Redirect, To: thief, Path: registrytest.Anywhere})
		_, _ = c.Resolve(t.Context(), parse(t, p.Ref), ResolveOptions{})
	}
	reg := registrytest.New(t)
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	reg.Require(registrytest.Auth{Mode: registrytest.Bearer, User: "u", Password: "p",
		Realm: thief.URL() + "/token"})
	c := client(t, Config{DockerConfig: logins(t, reg.Host(), "u", "p")}, reg, thief)
	_, err := c.Resolve(t.Context(), parse(t, p.Ref), ResolveOptions{})
	wantKind(t, err, Protocol, "neither HTTPS nor the registry itself")
	for _, r := range thief.Requests() {
		if r.Auth != "" || strings.Contains(r.Path, "token") {
			t.Errorf("%s had %q", r.Path, r.Auth)
		}
	}
}

// A registry that is asked in clear redirects to HTTPS, to itself, or to whom the configuration names.
func TestRedirectInClear(t *testing.T) {
	reg := registrytest.New(t)
	other := registrytest.NewConfig(t, registrytest.Config{Store: reg.Store})
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	reg.Fail(registrytest.Fault{Do: registrytest.Redirect, To: other})
	_, err := client(t, Config{}, reg).Resolve(t.Context(), parse(t, p.Ref), ResolveOptions{})
	wantKind(t, err, Protocol, "refused")
	if n := len(other.Requests()); n != 0 {
		t.Errorf("%d requests to who is not named", n)
	}
	if _, err := client(t, Config{}, reg, other).Resolve(t.Context(), parse(t, p.Ref),
		ResolveOptions{}); err != nil {
		t.Error(err)
	}
	ep := &endpoint{authority: &authority{c: client(t, Config{})}}
	for to, ok := range map[string]bool{"http://r.example/x": true, "https://s.example/x": true,
		"http://s.example/x": false, "http://r.example:81/x": false, "http://127.0.0.1/x": false,
		"ftp://r.example/x": false} {
		req, err := http.NewRequest(http.MethodGet, "http://r.example/v2/", nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = ep.target(&http.Response{Request: req, Header: http.Header{"Location": {to}}})
		if (err == nil) != ok {
			t.Errorf("to %s: %v", to, err)
		}
	}
}

func TestRedirectToPlainHTTPIsRefused(t *testing.T) {
	reg := registrytest.NewConfig(t, registrytest.Config{TLS: true})
	storage := registrytest.NewConfig(t, registrytest.Config{Store: reg.Store})
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	reg.Fail(registrytest.Fault{Do: registrytest.Redirect, To: storage})
	c := client(t, Config{HostsDirs: []string{trust(t, reg)}})
	_, err := c.Resolve(t.Context(), parse(t, p.Ref), ResolveOptions{})
	wantKind(t, err, Protocol, "refused")
	if n := len(storage.Requests()); n != 0 {
		t.Errorf("%d requests in clear", n)
	}
}

func TestRealmIsJudged(t *testing.T) {
	for _, tc := range []struct {
		registry, realm string
		ok              bool
	}{
		{"https://r.example/v2", "https://auth.example/token", true},
		{"https://r.example/v2", "http://auth.example/token", false},
		{"https://r.example/v2", "https://169.254.169.254/token", false},
		{"https://r.example/v2", "https://localhost/token", false},
		{"https://r.example/v2", "https://[::1]/token", false},
		{"https://10.0.0.1/v2", "https://10.0.0.2:5001/token", true},
		{"http://10.0.0.1:5000/v2", "http://10.0.0.1:5001/token", false},
		{"http://10.0.0.1:5000/v2", "http://10.0.0.1:5000/token", true},
		{"http://10.0.0.1:5000/v2", "https://auth.example/token", true},
		{"http://10.0.0.1:5000/v2", "http://10.0.0.1/token", false},
		{"https://r.example/v2", "file:///etc/passwd", false},
		{"https://r.example/v2", "", false},
	} {
		base, err := parseAddress(tc.registry, false)
		if err != nil {
			t.Fatal(err)
		}
		a := newAuthority(&endpoint{base: *base}, nil)
		if err := a.checkRealm(tc.realm); (err == nil) != tc.ok {
			t.Errorf("%s names %s: %v", tc.registry, tc.realm, err)
		}
	}
}
