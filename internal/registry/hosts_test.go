package registry

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"dewpoint/testkit/registrytest"
)

func chmod(t testing.TB, file string) {
	t.Helper()
	if err := os.Chmod(file, 0o755); err != nil {
		t.Fatal(err)
	}
}

// trust writes a hosts directory that trusts the registry's authority.
func trust(t *testing.T, regs ...*registrytest.Server) string {
	t.Helper()
	root := t.TempDir()
	for _, r := range regs {
		dir := filepath.Join(root, r.Host())
		write(t, filepath.Join(dir, "ca.pem"), string(r.CA()))
		write(t, filepath.Join(dir, "hosts.toml"), `ca = "ca.pem"`)
	}
	return root
}

func resolve(t *testing.T, c *Client, ref string) error {
	t.Helper()
	_, err := c.Resolve(t.Context(), parse(t, ref), ResolveOptions{})
	return err
}

func TestTLS(t *testing.T) {
	reg := registrytest.NewConfig(t, registrytest.Config{TLS: true})
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	wantKind(t, resolve(t, client(t, Config{}), p.Ref), Certificate, "hosts.toml")
	root := trust(t, reg)
	if err := resolve(t, client(t, Config{HostsDirs: []string{root}}), p.Ref); err != nil {
		t.Fatal(err)
	}
	// in Docker's layout
	dir := filepath.Join(t.TempDir(), reg.Host())
	write(t, filepath.Join(dir, "ca.crt"), string(reg.CA()))
	if err := resolve(t, client(t, Config{HostsDirs: []string{filepath.Dir(dir)}}), p.Ref); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(root, reg.Host(), "hosts.toml"), "skip_verify = true")
	if err := resolve(t, client(t, Config{HostsDirs: []string{root}}), p.Ref); err != nil {
		t.Fatal(err)
	}
}

func TestClientCertificate(t *testing.T) {
	reg := registrytest.NewConfig(t, registrytest.Config{TLS: true, ClientCerts: true})
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	root := trust(t, reg)
	dir := filepath.Join(root, reg.Host())
	c := client(t, Config{HostsDirs: []string{root}})
	wantKind(t, resolve(t, c, p.Ref), Certificate, "client")
	write(t, filepath.Join(dir, "me.pem"), string(reg.ClientPair()))
	for _, form := range []string{`"me.pem"`, `["me.pem"]`, `[["me.pem", "me.pem"]]`} {
		time.Sleep(10 * time.Millisecond) // another time of modification
		write(t, filepath.Join(dir, "hosts.toml"), "ca = [\"ca.pem\"]\nclient = "+form)
		if err := resolve(t, c, p.Ref); err != nil { // the same Client sees the change
			t.Fatal(form, err)
		}
	}
}

// mirrored writes a hosts.toml for host with the mirrors, and without a server.
func mirrored(t *testing.T, host, more string, mirrors ...*registrytest.Server) string {
	t.Helper()
	root := t.TempDir()
	var b strings.Builder
	for _, m := range mirrors {
		fmt.Fprintf(&b, "[host.%q]\n%s\n", m.URL(), more)
	}
	write(t, filepath.Join(root, host, "hosts.toml"), b.String())
	return root
}

func TestMirrors(t *testing.T) {
	origin := registrytest.New(t)
	p := origin.PushImage("a:1", someLayers, registrytest.Options{})
	ref := parse(t, p.Ref)
	l := p.Layers[0]

	t.Run("serves", func(t *testing.T) {
		mirror := registrytest.NewConfig(t, registrytest.Config{Store: origin.Store})
		origin.Forget()
		c := client(t, Config{HostsDirs: []string{mirrored(t, origin.Host(), "", mirror)}})
		if err := resolve(t, c, p.Ref); err != nil {
			t.Fatal(err)
		}
		if n := len(origin.Requests()); n != 0 {
			t.Errorf("the registry saw %d requests", n)
		}
		for _, r := range mirror.Requests() {
			if !strings.Contains(r.Path, "?ns="+strings.ReplaceAll(origin.Host(), ":", "%3A")) {
				t.Errorf("no namespace in %s", r.Path)
			}
		}
	})
	t.Run("pull only", func(t *testing.T) {
		mirror := registrytest.NewConfig(t, registrytest.Config{Store: origin.Store})
		origin.Forget()
		root := mirrored(t, origin.Host(), `capabilities = ["pull"]`, mirror)
		if err := resolve(t, client(t, Config{HostsDirs: []string{root}}, origin), p.Ref); err != nil {
			t.Fatal(err)
		}
		if origin.Count("/manifests/") != 1 || mirror.Count("/blobs/") != 1 {
			t.Error("the tag is the registry's, the blob the mirror's")
		}
	})
	t.Run("empty and dead", func(t *testing.T) {
		empty, dead := registrytest.New(t), registrytest.New(t)
		dead.Close()
		root := mirrored(t, origin.Host(), "", dead, empty)
		c := client(t, Config{HostsDirs: []string{root}}, origin)
		if err := resolve(t, c, p.Ref); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("lies", func(t *testing.T) {
		mirror := registrytest.NewConfig(t, registrytest.Config{Store: origin.Store})
		mirror.Fail(registrytest.Fault{Do: registrytest.Flip, At: 5, Path: registrytest.Anywhere})
		root := mirrored(t, origin.Host(), "", mirror)
		c := client(t, Config{HostsDirs: []string{root}}, origin)
		if _, err := c.Resolve(t.Context(), parse(t, p.ByDigest), ResolveOptions{}); err == nil {
			t.Fatal("its config was flipped too")
		}
		mirror.Heal()
		mirror.Fail(registrytest.Fault{Do: registrytest.Flip, At: 5, Path: "/manifests/"})
		if err := resolve(t, c, p.ByDigest); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("dies in the middle", func(t *testing.T) {
		mirror := registrytest.NewConfig(t, registrytest.Config{Store: origin.Store})
		mirror.Fail(registrytest.Fault{Do: registrytest.Cut, At: 100})
		root := mirrored(t, origin.Host(), "", mirror)
		c := client(t, Config{HostsDirs: []string{root}, Retries: 3}, origin)
		s, err := c.Open(t.Context(), ref, Blob{l.Digest, l.Size}, 0, -1, OpenOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if _, err := readHash(s, l.Digest); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("says no", func(t *testing.T) {
		empty := registrytest.New(t)
		root := mirrored(t, origin.Host(), "", empty)
		err := resolve(t, client(t, Config{HostsDirs: []string{root}}, origin), origin.Host()+"/none:1")
		wantKind(t, err, NotFound, origin.Host())
	})
}

func TestHeaderStaysAtHost(t *testing.T) {
	reg := registrytest.New(t)
	storage := registrytest.NewConfig(t, registrytest.Config{Store: reg.Store})
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	reg.Fail(registrytest.Fault{Do: registrytest.Redirect, To: storage})
	root := mirrored(t, "example.com", "[host.\""+reg.URL()+"\".header]\nx-secret = [\"a\", \"b\"]\n", reg)
	if err := resolve(t, client(t, Config{HostsDirs: []string{root}}, storage),
		strings.Replace(p.Ref, reg.Host(), "example.com", 1)); err != nil {
		t.Fatal(err)
	}
	if got := reg.Requests()[0].Header["X-Secret"]; !reflect.DeepEqual(got, []string{"a", "b"}) {
		t.Errorf("the registry saw %q", got)
	}
	if got := storage.Requests()[0].Header["X-Secret"]; got != nil {
		t.Errorf("storage saw %q", got)
	}
}

func TestParseHosts(t *testing.T) {
	got, err := parseHosts("/d", []byte(`
server = "https://registry.example/sub"
ca = "/abs/ca.pem"
dial_timeout = "3s"
[host."http://b.example:5000"]
  capabilities = ["pull", "resolve", "push"]
  client = [["c.cert", "c.key"], ["d.cert", "d.key"]]
[host."a.example"]
  capabilities = ["pull"]
  skip_verify = true
[host."a.example".header]
  x-a = "1"
[host."https://c.example/api/registry"]
  override_path = true
`))
	if err != nil {
		t.Fatal(err)
	}
	var s []string
	for _, h := range got {
		s = append(s, fmt.Sprint(h.base, h.caps, h.ca, h.client, h.skipVerify, h.header, h.dialTimeout))
	}
	want := []string{
		"http://b.example:5000/v2 3 [] [[/d/c.cert /d/c.key] [/d/d.cert /d/d.key]] false map[] 0s",
		"https://a.example/v2 1 [] [] true map[X-A:[1]] 0s",
		"https://c.example/api/registry 7 [] [] false map[] 0s",
		"https://registry.example/sub/v2 7 [/abs/ca.pem] [] false map[] 3s",
	}
	if !reflect.DeepEqual(s, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(s, "\n"), strings.Join(want, "\n"))
	}
}

func TestBadHostsFile(t *testing.T) {
	for _, content := range []string{"server = ", `server = "ftp://x"`, `capabilities = ["fly"]`, "ca = 1",
		`dial_timeout = "soon"`, "ca = \"missing.pem\""} {
		root := t.TempDir()
		write(t, filepath.Join(root, "x.example", "hosts.toml"), content)
		wantKind(t, resolve(t, client(t, Config{HostsDirs: []string{root}}), "x.example/a:1"), BadConfig)
	}
}

func TestHostDir(t *testing.T) {
	root := t.TempDir()
	for _, d := range []string{"a_5000_", "b:5000", "_default"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for host, want := range map[string]string{"a:5000": "a_5000_", "b:5000": "b:5000", "c": "_default"} {
		got, err := hostDir([]string{filepath.Join(root, "none"), root}, host)
		if err != nil || got != filepath.Join(root, want) {
			t.Errorf("%s: %s %v", host, got, err)
		}
	}
}

func FuzzParseHosts(f *testing.F) {
	f.Add([]byte("server = \"https://x\"\n[host.\"http://y\"]\ncapabilities = [\"pull\"]\nclient = [[\"a\",\"b\"]]\n"))
	f.Add([]byte("[host]\n\"x\" = {ca = [\"y\"], header = {a = [\"b\"]}}\n"))
	f.Add([]byte("host.\"x\".skip_verify = true"))
	f.Fuzz(func(t *testing.T, b []byte) {
		hosts, err := parseHosts("/d", b)
		if err != nil {
			return
		}
		for n, h := range hosts {
			if h.base == nil && n != len(hosts)-1 {
				t.Fatal("a mirror without an address")
			}
			if h.base != nil && (h.base.Host == "" || h.base.Scheme != "http" && h.base.Scheme != "https") {
				t.Fatal(h.base)
			}
		}
	})
}
