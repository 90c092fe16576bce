package peer

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"io"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"dewpoint/testkit"
)

// serial issues a certificate of this number.
func serial(n int64) func(*x509.Certificate) {
	return func(c *x509.Certificate) { c.SerialNumber = big.NewInt(n) }
}

// revoke writes the authority's certificate and its list into its file, as change has it.
func (a *authority) revoke(change func(*x509.RevocationList), serials ...int64) {
	l := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now().Add(-time.Hour),
		NextUpdate: time.Now().Add(-time.Minute)} // one that is late counts
	for _, n := range serials {
		l.RevokedCertificateEntries = append(l.RevokedCertificateEntries,
			x509.RevocationListEntry{SerialNumber: big.NewInt(n), RevocationTime: l.ThisUpdate})
	}
	if change != nil {
		change(l)
	}
	der, err := x509.CreateRevocationList(rand.Reader, l, a.cert, a.key)
	check(a.t, err)
	a.write(pemBlock("CERTIFICATE", a.cert.Raw), pemBlock("X509 CRL", der))
}

func pemBlock(kind string, der []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
}

func (a *authority) write(blocks ...string) {
	check(a.t, os.WriteFile(a.file, []byte(strings.Join(blocks, "")), 0o644))
}

// endless begins to follow a layer that does not end. add has its second byte come, or ended says why not.
func endless(t *testing.T, auth *Auth, addr string, n *node) (add func(), ended <-chan error) {
	t.Helper()
	id := n.growing(-1)
	n.add(id, []byte("a"))
	c := client(t, Config{Auth: auth, Stall: 20 * time.Second})
	r, _, err := c.Follow(t.Context(), addr, id, 0)
	check(t, err)
	t.Cleanup(func() { r.Close() })
	_, err = io.ReadFull(r, make([]byte, 1))
	check(t, err)
	out := make(chan error, 1)
	go func() {
		_, err := io.ReadFull(r, make([]byte, 1))
		out <- err
	}()
	return func() { n.add(id, []byte("b")) }, out
}

// soon is what a stream has come to.
func soon(t *testing.T, ended <-chan error) error {
	t.Helper()
	select {
	case err := <-ended:
		return err
	case <-time.After(testkit.Limit):
		t.Fatal("the stream goes on")
		return nil
	}
}

// A node whose certificate is revoked while it is connected is cut off, as a client and as a server, and is
// refused from then on; the others' streams go on.
func TestRevoked(t *testing.T) {
	ca := newAuthority(t)
	good, bad, other := ca.auth(serial(2)), ca.auth(serial(3)), ca.auth(serial(4))
	n := newNode()
	id, _ := n.whole(10)
	s, addr := serve(t, Config{Auth: good, Content: n})
	_, badAddr := serve(t, Config{Auth: bad, Content: n})
	_, asClient := endless(t, bad, addr, n)
	_, asServer := endless(t, good, badAddr, n)
	add, others := endless(t, other, addr, n)
	idle := client(t, Config{Auth: bad})
	_, err := idle.Table(t.Context(), addr, id)
	check(t, err)

	ca.revoke(nil, 3)
	closed, err := good.Reread()
	if _, revoked, _ := good.Revoked(); err != nil || revoked != 1 || closed != 3 {
		t.Errorf("%d revoked, %d closed, %v", revoked, closed, err)
	}
	wants(t, soon(t, asClient), ErrAway, io.ErrUnexpectedEOF)
	wants(t, soon(t, asServer), ErrAway, io.ErrUnexpectedEOF)
	let := s.Stats().Requests
	_, err = idle.Table(t.Context(), addr, id)
	wants(t, err, ErrRefused)
	wants(t, askOnce(t, bad, addr, id), ErrRefused)
	if got := s.Stats().Requests; got != let {
		t.Error("a revoked node was let in")
	}
	err = askOnce(t, good, badAddr, id)
	if wants(t, err, ErrRefused); !strings.Contains(err.Error(), "is revoked") {
		t.Error(err)
	}
	add()
	check(t, soon(t, others))
	check(t, askOnce(t, other, addr, id))
	// A node that starts with the list has it in force.
	_, late := serve(t, Config{Auth: ca.auth(serial(2)), Content: n})
	wants(t, askOnce(t, bad, late, id), ErrRefused)
	for _, a := range []*Auth{good, other} {
		a.ca.mu.Lock()
		for c := range a.ca.open {
			if c.closed {
				t.Error("a closed connection is kept")
			}
		}
		a.ca.mu.Unlock()
	}
}

// A file that cannot be meant leaves the lists of before in force.
func TestWrongLists(t *testing.T) {
	ca, stranger := newAuthority(t), newAuthority(t)
	n := newNode()
	id, _ := n.whole(10)
	ca.revoke(nil, 3)
	good, bad := ca.auth(serial(2)), ca.auth(serial(3))
	_, addr := serve(t, Config{Auth: good, Content: n})
	own := pemBlock("CERTIFICATE", ca.cert.Raw)
	critical := []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 27}, Critical: true,
		Value: []byte{2, 1, 1}}}
	for want, write := range map[string]func(){
		"is missing that was there": func() { ca.write(own) },
		"has signed it": func() {
			stranger.revoke(nil, 9)
			ca.write(own, mustRead(t, stranger.file))
		},
		"is not understood": func() {
			ca.revoke(func(l *x509.RevocationList) { l.ExtraExtensions = critical })
		},
		"kind (2.5.29.27)": func() {
			ca.revoke(func(l *x509.RevocationList) { l.RevokedCertificateEntries[0].ExtraExtensions = critical }, 9)
		},
		"malformed tbs crl": func() { ca.write(own, pemBlock("X509 CRL", []byte{48, 0})) },
		"1 of its PEM blocks": func() { // the end is missing, or a line is not base64
			ca.write(own, strings.Replace(mustRead(t, ca.file)[len(own):], "-----END", "", 1))
		},
		"blocks cannot be read": func() {
			ca.write(own, strings.Replace(mustRead(t, ca.file)[len(own):], "CRL-----\n", "CRL-----\n*", 1))
		},
		"no such file": func() { check(t, os.Remove(ca.file)) },
	} {
		write()
		if _, err := good.Reread(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, and not %q", err, want)
		}
		wants(t, askOnce(t, bad, addr, id), ErrRefused)
		check(t, os.WriteFile(ca.file, nil, 0o644))
		ca.revoke(nil, 3)
	}
	stranger.revoke(nil, 9)
	ca.write(own, regexp.MustCompile("(?s)-----BEGIN X509.*").FindString(mustRead(t, stranger.file)))
	if _, err := readTrust(ca.file); err == nil || !strings.Contains(err.Error(), "has signed it") {
		t.Errorf("a start with a list of another authority: %v", err)
	}
	ca.write(own, pemBlock("X509 CRL", []byte{48, 0})[:30])
	if _, err := readTrust(ca.file); err == nil || !strings.Contains(err.Error(), "PEM blocks") {
		t.Errorf("a start with half a list: %v", err)
	}
	// What an older list does not have any more is not revoked.
	ca.revoke(nil)
	_, err := good.Reread()
	check(t, err)
	check(t, askOnce(t, bad, addr, id))
}

// A node is not trusted whose issuer has no list, where there are lists.
func TestRevokedIssuer(t *testing.T) {
	root := newAuthority(t)
	middle := newAuthority(t)
	c := *middle.cert
	c.SerialNumber = big.NewInt(7)
	der, err := x509.CreateCertificate(rand.Reader, &c, root.cert, middle.key.Public(), root.key)
	check(t, err)
	middle.cert, err = x509.ParseCertificate(der)
	check(t, err)
	leaf := func(n int64) *Auth {
		cert, key := middle.issue(serial(n))
		check(t, os.WriteFile(cert, []byte(mustRead(t, cert)+pemBlock("CERTIFICATE", der)), 0o644))
		a, err := ReadCertificates(root.file, cert, key)
		check(t, err)
		return a
	}
	n := newNode()
	id, _ := n.whole(10)
	good, asks := root.auth(nil), leaf(3)
	_, addr := serve(t, Config{Auth: good, Content: n})
	try := func(want error) {
		t.Helper()
		_, err := good.Reread()
		check(t, err)
		wants(t, askOnce(t, asks, addr, id), want)
	}
	check(t, askOnce(t, asks, addr, id))
	root.revoke(nil)
	try(ErrRefused) // there is no list of middle
	middle.revoke(nil, 4)
	list := regexp.MustCompile("(?s)-----BEGIN X509.*").FindString(mustRead(t, middle.file))
	both := func(revoked ...int64) {
		root.revoke(nil, revoked...)
		root.write(mustRead(t, root.file), pemBlock("CERTIFICATE", der), list)
	}
	both()
	good = root.auth(nil)
	_, addr = serve(t, Config{Auth: good, Content: n})
	check(t, askOnce(t, asks, addr, id))
	wants(t, askOnce(t, leaf(4), addr, id), ErrRefused)
}

// docs/operate/configuration.md says by which commands an operator makes certificates, and revokes one.
func TestOperatorsRecipe(t *testing.T) {
	text := mustRead(t, "../../../docs/operate/configuration.md")
	_, text, _ = strings.Cut(text, "## A key for each node")
	scripts := regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(text, 2)
	if len(scripts) != 2 {
		t.Fatalf("%d scripts in the document", len(scripts))
	}
	dir := t.TempDir()
	run := func(script string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "bash", "-euc", script)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	make1 := strings.ReplaceAll(scripts[0][1], "10.0.0.3", "127.0.0.1")
	run(make1)
	ca := filepath.Join(dir, "pop-ca.pem")
	auth := func(name string) *Auth {
		a, err := ReadCertificates(ca, filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key"))
		check(t, err)
		return a
	}
	_, again, ok := strings.Cut(make1, "openssl req -newkey")
	if !ok {
		t.Fatal("the recipe makes no node's certificate")
	}
	run(strings.ReplaceAll("openssl req -newkey"+again, "n3", "n1"))
	n := newNode()
	id, _ := n.whole(10)
	n1, n3 := auth("n1"), auth("n3")
	_, addr := serve(t, Config{Auth: n1, Content: n})
	check(t, askOnce(t, n3, addr, id))
	run(scripts[1][1])
	closed, err := n1.Reread()
	if _, revoked, _ := n1.Revoked(); err != nil || revoked != 1 || closed != 1 {
		t.Errorf("%d revoked, %d closed, %v", revoked, closed, err)
	}
	wants(t, askOnce(t, n3, addr, id), ErrRefused)
	check(t, askOnce(t, n1, addr, id))
}
