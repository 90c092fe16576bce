package api_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/api"
	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/apitest"
)

// authority signs certificates into files of a directory.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, dir: t.TempDir()}
	a.cert, a.key = a.sign("ca", nil, time.Hour)
	return a
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

// sign makes NAME.crt and NAME.key, valid for so long from an hour ago on.
func (a *authority) sign(name string, addrs []net.IP, valid time.Duration) (*x509.Certificate,
	*ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		IPAddresses: addrs,
		NotBefore:   time.Now().Add(-time.Hour), NotAfter: time.Now().Add(valid), BasicConstraintsValid: true,
		IsCA:        a.cert == nil,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, key.Public(), signer)
	if err != nil {
		a.t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	for end, b := range map[string]*pem.Block{".crt": {Type: "CERTIFICATE", Bytes: der},
		".key": {Type: "PRIVATE KEY", Bytes: pkcs8}} {
		if err := os.WriteFile(a.path(name+end), pem.EncodeToMemory(b), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
	signed, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return signed, key
}

// credentials of a client with a certificate.
func (a *authority) credentials(name string) api.Credentials {
	return api.Credentials{CA: a.path("ca.crt"), Cert: a.path(name + ".crt"), Key: a.path(name + ".key")}
}

// serveTCP serves a node with one image over TLS, and gives its address.
func serveTCP(t *testing.T, ca *authority, who *api.Access) string {
	t.Helper()
	n := &apitest.Node{}
	n.Add(nginx)
	t.Cleanup(n.Close)
	return serveNode(t, ca, who, n)
}

func serveNode(t *testing.T, ca *authority, who *api.Access, n api.Node) string {
	t.Helper()
	ca.sign("node", []net.IP{net.IPv4(127, 0, 0, 1)}, time.Hour)
	b, err := os.ReadFile(ca.path("ca.crt"))
	if err == nil {
		err = os.WriteFile(ca.path("clients.crt"), b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := (api.TLSFiles{Cert: ca.path("node.crt"), Key: ca.path("node.key"),
		ClientCA: ca.path("clients.crt")}).Config()
	if err != nil {
		t.Fatal(err)
	}
	l, err := api.ListenTCP("127.0.0.1:0", cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = api.Serve(ctx, l, who.Handler(api.NewHandler(n, api.Config{})))
	}()
	t.Cleanup(func() { cancel(); <-done })
	return "https://" + l.Addr().String()
}

func dialWith(t *testing.T, host string, cred api.Credentials) *api.Client {
	t.Helper()
	c, err := api.DialWith(host, cred)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// isolated is a request that takes nothing of the host.
var isolated = spec.Request{Image: "nginx:1", Net: "none"}

func TestRolesOfCertificates(t *testing.T) {
	ca := newAuthority(t)
	for _, name := range []string{"reader", "deployer", "root", "stranger"} {
		ca.sign(name, nil, time.Hour)
	}
	host := serveTCP(t, ca,
		&api.Access{Clients: map[string]api.Role{"reader": api.Read, "deployer": api.Deploy, "root": api.Admin}})
	ctx := t.Context()
	for name, may := range map[string]struct{ read, deploy, admin bool }{
		"reader": {read: true}, "deployer": {true, true, false}, "root": {true, true, true}, "stranger": {},
	} {
		c := dialWith(t, host, ca.credentials(name))
		check := func(what string, may bool, err error) {
			var e *api.Error
			refused := errors.As(err, &e) && (e.Code == api.Permission || e.Code == api.Unauthorized)
			if may && err != nil || !may && !refused {
				t.Errorf("%s: %s: %v", name, what, err)
			}
		}
		_, err := c.Images(ctx)
		check("images", may.read, err)
		_, err = c.Deploy(ctx, isolated, spec.Watch{})
		check("deploy", may.deploy, err)
		_, err = c.Deploy(ctx,
			spec.Request{Image: "nginx:1", Net: "none", Volumes: []spec.Volume{{Source: "/", Target: "/host"}}},
			spec.Watch{})
		check("deploy with the host's root", may.admin, err)
		_, err = c.Deploy(ctx, spec.Request{Image: "nginx:1"}, spec.Watch{})
		check("deploy in the host's network", may.admin, err)
		_, err = c.Prune(ctx, spec.PruneOptions{})
		check("prune", may.admin, err)
	}
}

// Every call of the service is asked as by somebody without a role: none may answer.
func TestEveryCallNeedsARole(t *testing.T) {
	ca := newAuthority(t)
	host := serveTCP(t, ca, &api.Access{})
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: clientTLS(t, ca)}}
	defer c.CloseIdleConnections()
	methods := pb.File_dewpoint_v1_node_proto.Services().Get(0).Methods()
	for i := range methods.Len() {
		path := "/dewpoint.v1.Node/" + string(methods.Get(i).Name())
		for _, kind := range []string{"application/json", "application/connect+json", "application/grpc+proto",
			"text/plain", ""} {
			req, _ := http.NewRequestWithContext(t.Context(), "POST", host+path, strings.NewReader("{}"))
			req.Header.Set("Content-Type", kind)
			r, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(r.Body)
			r.Body.Close()
			said := string(body) + r.Header.Get("Grpc-Message") + r.Trailer.Get("Grpc-Message")
			if !strings.Contains(said, "not known here") {
				t.Errorf("%s as %q: status %d, %q", path, kind, r.StatusCode, said)
			}
		}
	}
}

func clientTLS(t *testing.T, ca *authority) *tls.Config {
	t.Helper()
	p := x509.NewCertPool()
	p.AddCert(ca.cert)
	return &tls.Config{RootCAs: p}
}

func TestTokens(t *testing.T) {
	ca := newAuthority(t)
	tokens := ca.path("tokens")
	host := serveTCP(t, ca, &api.Access{Tokens: tokens})
	secret, err := api.AddToken(tokens, "ci", api.Deploy)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := api.AddToken(tokens, "ci", api.Admin); err == nil {
		t.Error("a name has two tokens")
	}
	file := ca.path("secret")
	if err := os.WriteFile(file, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := dialWith(t, host, api.Credentials{CA: ca.path("ca.crt"), Token: file})
	if _, err := c.Deploy(t.Context(), isolated, spec.Watch{}); err != nil {
		t.Error(err)
	}
	_, err = c.Prune(t.Context(), spec.PruneOptions{})
	wantCode(t, err, api.Permission, api.ExitPermission)
	kept, err := os.ReadFile(tokens)
	if err != nil || bytes.Contains(kept, []byte(secret)) {
		t.Errorf("the file keeps the token in clear: %q %v", kept, err)
	}

	// A line that is removed ends the token at once; a file that is wrong lets nobody in.
	if err := os.WriteFile(tokens, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = c.Images(t.Context())
	wantCode(t, err, api.Unauthorized, api.ExitUnauthorized)
	if err := os.WriteFile(tokens, append(kept, "ci admin\n"...), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err = c.Images(t.Context()); err == nil {
		t.Error("a file that cannot be read lets callers in")
	}
}

// Certificates that have ended or that somebody else has signed are refused, by whoever
// sees them, with words that say so; a renewed one is taken without a restart.
func TestCertificatesThatDoNotHold(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	ca.sign("late", nil, -time.Minute)
	ca.sign("root", nil, time.Hour)
	other.sign("root", nil, time.Hour)
	host := serveTCP(t, ca, &api.Access{Clients: map[string]api.Role{"late": api.Admin, "root": api.Admin}})

	_, err := api.DialWith(host, ca.credentials("late"))
	wantCode(t, err, api.Unauthorized, api.ExitUnauthorized)
	stranger := other.credentials("root")
	stranger.CA = ca.path("ca.crt")
	_, err = dialWith(t, host, stranger).Images(t.Context())
	wantCode(t, err, api.Unauthorized, api.ExitUnauthorized)
	_, err = dialWith(t, host, other.credentials("root")).Images(t.Context())
	wantCode(t, err, api.Unauthorized, api.ExitUnauthorized)

	ca.sign("node", []net.IP{net.IPv4(127, 0, 0, 1)}, -time.Minute) // the node's own ends
	_, err = dialWith(t, host, ca.credentials("root")).Images(t.Context())
	wantCode(t, err, api.Unauthorized, api.ExitUnauthorized)
	if !strings.Contains(err.Error(), "expired") {
		t.Errorf("%v", err)
	}
	ca.sign("node", []net.IP{net.IPv4(127, 0, 0, 1)}, time.Hour)
	if _, err = dialWith(t, host, ca.credentials("root")).Images(t.Context()); err != nil {
		t.Error(err)
	}
}

// The node itself looks at the clients' certificates, whatever the clients do: one that has ended, that is
// for tomorrow, or of an authority that it trusts no longer, opens nothing; nor does one that ends
// while its connection lives.
func TestNodeLooksAtCertificates(t *testing.T) {
	testkit.Long(t)
	ca := newAuthority(t)
	host := serveTCP(t, ca,
		&api.Access{Clients: map[string]api.Role{"late": api.Admin, "root": api.Admin, "brief": api.Admin}})
	// ask speaks HTTP over TLS with a client that does not look at its own certificate.
	ask := func(h *http.Client) (status int, err error) {
		r, err := h.Post(host+"/dewpoint.v1.Node/Images", "application/json", strings.NewReader("{}"))
		if err != nil {
			return 0, err
		}
		defer r.Body.Close()
		_, err = io.Copy(io.Discard, r.Body)
		return r.StatusCode, err
	}
	client := func(name string) *http.Client {
		cert, err := tls.LoadX509KeyPair(ca.path(name+".crt"), ca.path(name+".key"))
		if err != nil {
			t.Fatal(err)
		}
		cfg := clientTLS(t, ca)
		cfg.Certificates = []tls.Certificate{cert}
		cfg.ClientSessionCache = tls.NewLRUClientSessionCache(8)
		tr := &http.Transport{TLSClientConfig: cfg}
		t.Cleanup(tr.CloseIdleConnections)
		return &http.Client{Transport: tr}
	}
	ca.sign("late", nil, -time.Minute)
	if status, err := ask(client("late")); err == nil && status == http.StatusOK {
		t.Error("a certificate that has ended is taken")
	}
	ca.sign("root", nil, time.Hour)
	root := client("root")
	if status, err := ask(root); err != nil || status != http.StatusOK {
		t.Fatalf("one that holds: %d, %v", status, err)
	}
	// From now on another authority signs: who has a session comes in no more than others.
	other := newAuthority(t)
	b, err := os.ReadFile(other.path("ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(ca.path("clients.crt"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	root.CloseIdleConnections()
	if status, err := ask(root); err == nil && status == http.StatusOK {
		t.Error("who was signed by an authority that is trusted no longer comes in again")
	}
	if b, err = os.ReadFile(ca.path("ca.crt")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(ca.path("clients.crt"), b, 0o600); err != nil {
		t.Fatal(err)
	}

	var brief *http.Client
	for valid := 3 * time.Second; ; valid *= 2 { // on a busy machine it ends before it is shown
		ca.sign("brief", nil, valid)
		brief = client("brief")
		status, err := ask(brief)
		if err == nil && status == http.StatusOK {
			break
		}
		if valid > time.Minute {
			t.Fatalf("one that ends soon: %d, %v", status, err)
		}
	}
	// on the same connection
	testkit.Eventually(t, "what has ended is not taken", func() bool {
		status, err := ask(brief)
		return err != nil || status == http.StatusUnauthorized
	})
}

// Who may deploy has what he has deployed, and nothing of others'.
func TestOwnContainers(t *testing.T) {
	ca := newAuthority(t)
	for _, name := range []string{"mine", "theirs", "root"} {
		ca.sign(name, nil, time.Hour)
	}
	host := serveTCP(t, ca,
		&api.Access{Clients: map[string]api.Role{"mine": api.Deploy, "theirs": api.Deploy, "root": api.Admin}})
	mine, theirs, root := dialWith(t, host, ca.credentials("mine")), dialWith(t, host, ca.credentials("theirs")),
		dialWith(t, host, ca.credentials("root"))
	ctx := t.Context()
	for name, c := range map[string]*api.Client{"a": mine, "b": mine, "admins": root} {
		if _, err := c.Deploy(ctx, spec.Request{Image: "nginx:1", Name: name, Net: "none", Cmd: []string{"sleep"}},
			spec.Watch{}); err != nil {
			t.Fatal(err)
		}
	}
	touch := func(c *api.Client, name string) []error {
		_, err := c.Inspect(ctx, name)
		return []error{err, c.Kill(ctx, name, "HUP"), c.Stop(ctx, name, 0), c.Start(ctx, name),
			c.Restart(ctx, name, 0), c.Remove(ctx, name, true)}
	}
	for _, err := range slices.Concat(touch(theirs, "a"), touch(theirs, "admins"), touch(mine, "admins")) {
		wantCode(t, err, api.Permission, api.ExitPermission)
	}
	for _, err := range slices.Concat(touch(mine, "a"), touch(root, "b"), touch(root, "admins")) {
		if err != nil {
			t.Error(err)
		}
	}
	wantCode(t, mine.Remove(ctx, "nothing", true), api.NotFound, api.ExitNotFound)
}

// replacing is a node on which another container takes the name of one as soon as that was looked at.
type replacing struct {
	*apitest.Node
	t *testing.T
}

func (n *replacing) Inspect(ctx context.Context, name string) (spec.Inspection, error) {
	i, err := n.Node.Inspect(ctx, name)
	if err == nil {
		err = errors.Join(n.Node.Remove(ctx, name, true), n.deploy(name, "cert:theirs"))
	}
	if err != nil {
		n.t.Error(err)
	}
	return i, err
}

func (n *replacing) deploy(name, caller string) error {
	_, err := n.Node.Deploy(n.t.Context(), spec.Request{Image: "nginx:1", Name: name, Net: "none",
		Cmd: []string{"sleep"}, Terms: spec.Terms{Caller: caller}}, spec.Watch{})
	return err
}

// A call acts on the container that was looked at, though another caller's has its name by then.
func TestNameOfAnother(t *testing.T) {
	ca := newAuthority(t)
	ca.sign("mine", nil, time.Hour)
	n := &replacing{&apitest.Node{}, t}
	n.Add(nginx)
	t.Cleanup(n.Close)
	mine := dialWith(t, serveNode(t, ca, &api.Access{Clients: map[string]api.Role{"mine": api.Deploy}}, n),
		ca.credentials("mine"))
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Limit)
	defer cancel()
	for call, act := range map[string]func(name string) error{
		"stop":    func(name string) error { return mine.Stop(ctx, name, 0) },
		"start":   func(name string) error { return mine.Start(ctx, name) },
		"restart": func(name string) error { return mine.Restart(ctx, name, 0) },
		"kill":    func(name string) error { return mine.Kill(ctx, name, "") },
		"update":  func(name string) error { return mine.Update(ctx, name, spec.Update{Memory: new(int64)}) },
		"remove":  func(name string) error { return mine.Remove(ctx, name, true) },
		"top":     func(name string) error { _, err := mine.Top(ctx, name); return err },
		"attach": func(name string) error {
			_, err := mine.Attach(ctx, name, spec.Size{}, spec.ExecIO{Stdout: io.Discard})
			return err
		},
	} {
		if err := n.deploy(call, "cert:mine"); err != nil {
			t.Fatal(err)
		}
		wantCode(t, act(call), api.NotFound, api.ExitNotFound)
		i, err := n.Node.Inspect(ctx, call)
		if err != nil || i.Container.Caller != "cert:theirs" || i.Container.Status != spec.StatusRunning {
			t.Errorf("%s: the other one's container is %+v, %v", call, i.Container, err)
		}
	}
}

func TestClearOnLoopbackOnly(t *testing.T) {
	if l, err := api.ListenTCP("0.0.0.0:0", nil); err == nil {
		l.Close()
		t.Error("listens everywhere in clear")
	}
	for _, host := range []string{"http://10.0.0.1:1", "http://example.invalid:1", "ftp://x", "https://",
		"https://x/y", "tcp://127.0.0.1:1"} {
		if _, err := api.DialWith(host, api.Credentials{}); err == nil {
			t.Errorf("%s is taken", host)
		}
	}
}

// Who speaks in clear to a node that does not is told what to say.
func TestClearToTLS(t *testing.T) {
	ca := newAuthority(t)
	host := serveTCP(t, ca, &api.Access{})
	_, err := dialWith(t, "http://"+strings.TrimPrefix(host, "https://"), api.Credentials{}).Images(t.Context())
	wantCode(t, err, api.NoDaemon, api.ExitNoDaemon)
	if !strings.Contains(err.Error(), "https://") {
		t.Errorf("%v", err)
	}
}

// Who sends garbage, or floods, does no harm to others.
func TestGarbage(t *testing.T) {
	ca := newAuthority(t)
	ca.sign("root", nil, time.Hour)
	host := serveTCP(t, ca, &api.Access{Clients: map[string]api.Role{"root": api.Admin}})
	addr := strings.TrimPrefix(host, "https://")
	for range 200 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 4096)
		rand.Read(b)
		c.Write(b)
		defer c.Close()
	}
	if _, err := dialWith(t, host, ca.credentials("root")).Images(t.Context()); err != nil {
		t.Error(err)
	}
}
