package peer

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"dewpoint/testkit"

	"github.com/opencontainers/go-digest"
)

func TestKeyFile(t *testing.T) {
	path := keyFile(t)
	st, err := os.Stat(path)
	check(t, err)
	if st.Mode().Perm() != 0o600 {
		t.Error(st.Mode())
	}
	before, err := os.ReadFile(path)
	check(t, err)
	wants(t, NewKey(path), os.ErrExist)
	after, err := os.ReadFile(path)
	check(t, err)
	same(t, after, before)
	if bytes.Equal(before, []byte(mustRead(t, keyFile(t)))) {
		t.Error("two keys are the same")
	}
}

func mustRead(t *testing.T, path string) string {
	b, err := os.ReadFile(path)
	check(t, err)
	return string(b)
}

// However the secret is written, the key is the same, on every node and in every version.
func TestKeyIsAFunctionOfTheSecret(t *testing.T) {
	secret := noise(33)
	secret[0] = 0xff // makes base64 that differs from that of URLs
	for _, text := range []string{
		hex.EncodeToString(secret), strings.ToUpper(hex.EncodeToString(secret)) + "\n",
		base64.StdEncoding.EncodeToString(secret), " " + base64.RawURLEncoding.EncodeToString(secret) + "\r\n",
	} {
		a, err := ReadKey(writeFile(t, "key", text, 0o640))
		check(t, err)
		if a.Fingerprint() != "bd61d44032ee4ca8" {
			t.Errorf("%q is %s", text, a.Fingerprint())
		}
	}
}

func TestBadKeyFiles(t *testing.T) {
	good := hex.EncodeToString(noise(32))
	for text, want := range map[string]string{
		"":                         "0 bytes",
		good[:62]:                  "31 bytes",
		"correct horse":            "neither hex nor base64",
		"key = " + good:            "neither",
		strings.Repeat("a", 70000): "too long",
	} {
		_, err := ReadKey(writeFile(t, "key", text, 0o600))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q: %v", text, err)
		}
	}
	for _, mode := range []os.FileMode{0o604, 0o602, 0o644} {
		if _, err := ReadKey(writeFile(t, "key", good, mode)); err == nil ||
			!strings.Contains(err.Error(), "chmod 600") {
			t.Error(mode, err)
		}
	}
	if _, err := ReadKey(t.TempDir()); err == nil {
		t.Error("a directory is a key")
	}
	_, err := ReadKey(filepath.Join(t.TempDir(), "none"))
	wants(t, err, os.ErrNotExist)
}

// askOnce asks for a table over a connection of its own.
func askOnce(t *testing.T, auth *Auth, addr string, id digest.Digest) error {
	t.Helper()
	_, err := client(t, Config{Auth: auth, Stall: 5 * time.Second}).Table(t.Context(), addr, id)
	return err
}

func TestAnotherKeyIsRefused(t *testing.T) {
	n := newNode()
	id, _ := n.whole(10)
	mine, other := newAuth(t), newAuth(t)
	s, addr := serve(t, Config{Auth: mine, Content: n})
	check(t, askOnce(t, mine, addr, id))
	err := askOnce(t, other, addr, id)
	wants(t, err, ErrRefused)
	if !strings.Contains(err.Error(), "same [pop] key on both nodes?") {
		t.Error(err)
	}
	// One that would talk to anybody is refused by the server.
	for name, certs := range map[string][]tls.Certificate{"other key": other.client.Certificates,
		"no certificate": nil} {
		open := *other
		open.client = open.client.Clone()
		open.client.VerifyConnection = nil
		open.client.Certificates = certs
		err := askOnce(t, &open, addr, id)
		if wants(t, err, ErrRefused); t.Failed() {
			t.Error(name)
		}
	}
	if got := s.Stats().Requests; got != 1 {
		t.Error(got, "requests were let in")
	}
}

// A certificate is public: who has it and not its key is nobody.
func TestCopiedCertificate(t *testing.T) {
	n := newNode()
	id, _ := n.whole(10)
	mine, other := newAuth(t), newAuth(t)
	s, addr := serve(t, Config{Auth: mine, Content: n})
	thief := *other
	thief.client = thief.client.Clone()
	thief.client.VerifyConnection = nil
	thief.client.Certificates = []tls.Certificate{{Certificate: mine.client.Certificates[0].Certificate,
		PrivateKey: other.client.Certificates[0].PrivateKey}}
	wants(t, askOnce(t, &thief, addr, id), ErrRefused)
	// Nor does it help to put the true certificate behind one's own.
	own := other.client.Certificates[0]
	thief.client.Certificates = []tls.Certificate{{Certificate: [][]byte{own.Certificate[0],
		mine.client.Certificates[0].Certificate[0]}, PrivateKey: own.PrivateKey}}
	wants(t, askOnce(t, &thief, addr, id), ErrRefused)
	if got := s.Stats().Requests; got != 0 {
		t.Error(got, "requests were let in")
	}
}

func TestOldTLSAndResumption(t *testing.T) {
	n := newNode()
	mine := newAuth(t)
	_, addr := serve(t, Config{Auth: mine, Content: n})
	old := mine.client.Clone()
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	if c, err := tls.Dial("tcp", addr, old); err == nil {
		c.Close()
		t.Error("TLS 1.2 is spoken")
	}
	again := mine.client.Clone()
	again.SessionTicketsDisabled, again.ClientSessionCache = false, tls.NewLRUClientSessionCache(1)
	for range 2 {
		c, err := tls.Dial("tcp", addr, again)
		check(t, err)
		_, err = io.WriteString(c, "GET /v1/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		check(t, err)
		_, err = io.ReadAll(c)
		check(t, err)
		if c.ConnectionState().DidResume {
			t.Error("a session was resumed")
		}
		if p := c.ConnectionState().NegotiatedProtocol; p == "h2" {
			t.Error("HTTP/2")
		}
		c.Close()
	}
}

func TestPlainHTTP(t *testing.T) {
	n := newNode()
	id, _ := n.whole(10)
	mine := newAuth(t)
	s, addr := serve(t, Config{Auth: mine, Content: n})
	res, err := http.Get("http://" + addr + "/v1/layers/" + string(id) + "/table")
	check(t, err)
	defer http.DefaultClient.CloseIdleConnections()
	defer res.Body.Close()
	if res.StatusCode != http.StatusBadRequest || s.Stats().Requests != 0 {
		t.Error(res.Status)
	}
	plain := raw(t, func(c net.Conn) {
		io.WriteString(c, "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
	})
	wants(t, askOnce(t, mine, plain, id), ErrRefused)
}

func TestAway(t *testing.T) {
	mine := newAuth(t)
	id := digest.FromString("x")
	closed := testkit.FreeAddress(t)
	for _, addr := range []string{closed, "", "nonsense", "127.0.0.1:99999", "a b:1", "x@y/z?:1"} {
		wants(t, askOnce(t, mine, addr, id), ErrAway)
	}
	// One that accepts and says nothing.
	silent := raw(t, func(c net.Conn) { io.Copy(io.Discard, c) })
	_, err := client(t, Config{Auth: mine, Connect: 50 * time.Millisecond}).Table(t.Context(), silent, id)
	wants(t, err, ErrAway)
	// One that hangs up.
	rude := raw(t, func(net.Conn) {})
	wants(t, askOnce(t, mine, rude, id), ErrAway)
	// One that shakes hands and never answers.
	mute := raw(t, func(c net.Conn) { io.Copy(io.Discard, tls.Server(c, mine.server)) })
	_, err = client(t, Config{Auth: mine, Stall: 100 * time.Millisecond}).Table(t.Context(), mute, id)
	wants(t, err, ErrAway)
}

// authority makes certificates.
type authority struct {
	t    testing.TB
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	file string
}

func newAuthority(t testing.TB) *authority {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, err)
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	check(t, err)
	c, err = x509.ParseCertificate(der)
	check(t, err)
	return &authority{t: t, key: key, cert: c,
		file: writeFile(t, "ca.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
			0o644)}
}

var bothExt = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}

// issue gives the files of a certificate for 127.0.0.1, after change.
func (a *authority) issue(change func(*x509.Certificate)) (cert, key string) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(a.t, err)
	c := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "node"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore:   time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: bothExt,
	}
	if change != nil {
		change(c)
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, k.Public(), a.key)
	check(a.t, err)
	kder, err := x509.MarshalPKCS8PrivateKey(k)
	check(a.t, err)
	return writeFile(a.t, "cert.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
			0o644),
		writeFile(a.t, "key.pem", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kder})), 0o600)
}

func (a *authority) auth(change func(*x509.Certificate)) *Auth {
	cert, key := a.issue(change)
	auth, err := ReadCertificates(a.file, cert, key)
	check(a.t, err)
	return auth
}

func TestCertificates(t *testing.T) {
	n := newNode()
	id, _ := n.whole(10)
	ca, otherCA := newAuthority(t), newAuthority(t)
	expired := func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }
	elsewhere := func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 9)} }
	s, addr := serve(t, Config{Auth: ca.auth(nil), Content: n})
	check(t, askOnce(t, ca.auth(nil), addr, id))
	check(t, askOnce(t, ca.auth(elsewhere), addr, id)) // only who is asked must be where it says

	trusting := func(a *Auth) *Auth { // trusts our authority, shows what it has
		a.client.RootCAs = ca.auth(nil).client.RootCAs
		return a
	}
	for name, auth := range map[string]*Auth{
		"expired": ca.auth(expired), "other authority": otherCA.auth(nil),
		"other authority, trusting": trusting(otherCA.auth(nil)), "a PoP key": newAuth(t),
	} {
		if err := askOnce(t, auth, addr, id); err == nil || !strings.Contains(err.Error(), ErrRefused.Error()) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := s.Stats().Requests; got != 2 {
		t.Error(got, "requests were let in")
	}
	for name, auth := range map[string]*Auth{"expired": ca.auth(expired), "elsewhere": ca.auth(elsewhere),
		"other authority": otherCA.auth(nil)} {
		_, addr := serve(t, Config{Auth: auth, Content: n})
		err := askOnce(t, ca.auth(nil), addr, id)
		if wants(t, err, ErrRefused); !strings.Contains(err.Error(), "[pop] ca") {
			t.Errorf("server %s: %v", name, err)
		}
	}
}

// The server hangs up on a bad certificate while the client is already asking. Whichever is faster, it is a
// refusal.
func TestRefusalIsNotLost(t *testing.T) {
	ca := newAuthority(t)
	_, addr := serve(t, Config{Auth: ca.auth(nil), Content: newNode()})
	expired := ca.auth(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) })
	for range 50 {
		wants(t, askOnce(t, expired, addr, digest.FromString("x")), ErrRefused)
	}
	// The slower way for certain: all that the client saw is that it could not write.
	lost := &net.OpError{Op: "write", Err: syscall.EPIPE}
	wants(t, client(t, Config{Auth: expired}).unanswered(t.Context(), addr, lost), ErrRefused)
	wants(t, client(t, Config{Auth: ca.auth(nil), Connect: 100 * time.Millisecond}).unanswered(t.Context(), addr,
		lost), ErrAway)
}

func TestRenewedCertificateCounts(t *testing.T) {
	n := newNode()
	id, _ := n.whole(10)
	ca := newAuthority(t)
	cert, key := ca.issue(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) })
	auth, err := ReadCertificates(ca.file, cert, key)
	check(t, err)
	_, addr := serve(t, Config{Auth: auth, Content: n})
	wants(t, askOnce(t, ca.auth(nil), addr, id), ErrRefused)
	newCert, newKey := ca.issue(nil)
	check(t, os.Rename(newCert, cert))
	check(t, os.Rename(newKey, key))
	check(t, askOnce(t, ca.auth(nil), addr, id))
	check(t, askOnce(t, auth, addr, id))
}

func TestBadCertificateFiles(t *testing.T) {
	ca := newAuthority(t)
	cert, key := ca.issue(nil)
	_, otherKey := ca.issue(nil)
	serverOnly, serverKey := ca.issue(func(c *x509.Certificate) { c.ExtKeyUsage = bothExt[:1] })
	open := writeFile(t, "open", mustRead(t, key), 0o644)
	for _, f := range []struct{ ca, cert, key, want string }{
		{ca.file, cert, otherKey, "pop certificate"},
		{ca.file, serverOnly, serverKey, "serverAuth, clientAuth"},
		{ca.file, cert, open, "chmod 600"},
		{key, cert, key, "no certificate"},
		{ca.file + "x", cert, key, "pop ca"},
		{ca.file, cert + "x", key, "pop certificate"},
	} {
		if _, err := ReadCertificates(f.ca, f.cert, f.key); err == nil || !strings.Contains(err.Error(), f.want) {
			t.Errorf("%s: %v", f.want, err)
		}
	}
}

// Try tells nodes that can be asked from others, whatever they have; the log tells of a refusal once.
func TestTry(t *testing.T) {
	mine, other := newAuth(t), newAuth(t)
	_, addr := serve(t, Config{Auth: mine, Content: newNode()})
	check(t, client(t, Config{Auth: mine}).Try(t.Context(), addr))
	var log bytes.Buffer
	c := client(t, Config{Auth: other, Connect: time.Second, Log: slog.New(slog.NewTextHandler(&log, nil))})
	for range 3 {
		wants(t, c.Try(t.Context(), addr), ErrRefused)
	}
	wants(t, c.Try(t.Context(), "127.0.0.1:1"), ErrAway)
	if got := log.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, addr) {
		t.Errorf("logged: %s", got)
	}
}
