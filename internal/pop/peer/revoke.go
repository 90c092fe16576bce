package peer

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
)

var errRevoked = errors.New("its certificate is revoked")

// trust is in an authority, which vouches for the certificates of nodes, and takes that back by lists of what
// it has revoked (RFC 5280). A list counts, however old it is, until there is another one.
type trust struct {
	file  string
	certs []*x509.Certificate // read once
	pool  *x509.CertPool      // of them

	mu    sync.Mutex
	lists lists          // guarded by mu
	open  map[*kept]bool // guarded by mu: connections whose other side was accepted
}

type chain = []*x509.Certificate

// lists are the serial numbers that are revoked, by the public key of who has issued them.
type lists map[string]map[string]bool

func readTrust(file string) (*trust, error) {
	ca := &trust{file: file, pool: x509.NewCertPool(), open: map[*kept]bool{}}
	err := ca.blocks("CERTIFICATE", func(der []byte) error {
		c, err := x509.ParseCertificate(der)
		if err == nil {
			ca.certs = append(ca.certs, c)
			ca.pool.AddCert(c)
		}
		return err
	})
	if err == nil && len(ca.certs) == 0 {
		err = errors.New("no certificate in it")
	}
	if err != nil {
		return nil, err
	}
	ca.lists, err = ca.readLists()
	return ca, err
}

// blocks gives what the file has of a kind. A block that cannot be read is an error: it may be a list.
func (ca *trust) blocks(kind string, take func(der []byte) error) error {
	text, err := os.ReadFile(ca.file)
	if err != nil {
		return err
	}
	broken := bytes.Count(text, []byte("-----BEGIN "))
	for b, rest := pem.Decode(text); b != nil; b, rest = pem.Decode(rest) {
		if broken--; b.Type != kind {
			continue
		}
		if err := take(b.Bytes); err != nil {
			return err
		}
	}
	if broken > 0 {
		return fmt.Errorf("%d of its PEM blocks cannot be read: copy the file again", broken)
	}
	return nil
}

// readLists reads all lists of the file. One that nobody signed whom it may come from is an error, and so is
// one that says more than is understood here.
func (ca *trust) readLists() (lists, error) {
	all := lists{}
	err := ca.blocks("X509 CRL", func(der []byte) error {
		l, err := x509.ParseRevocationList(der)
		if err != nil {
			return fmt.Errorf("a list of revoked certificates: %w", err)
		}
		by := slices.IndexFunc(ca.certs, func(c *x509.Certificate) bool { return l.CheckSignatureFrom(c) == nil })
		if by < 0 {
			return fmt.Errorf("the list of revoked certificates of %q: no certificate of the file has signed it", l.Issuer)
		}
		exts := slices.Clone(l.Extensions)
		serials := all.of(ca.certs[by])
		for _, e := range l.RevokedCertificateEntries {
			serials[e.SerialNumber.String()] = true
			exts = append(exts, e.Extensions...)
		}
		for _, e := range exts {
			if e.Critical {
				return fmt.Errorf("the list of revoked certificates of %q: it is of a kind (%s) that is not understood: make a full one", l.Issuer, e.Id)
			}
		}
		return nil
	})
	return all, err
}

// of are the serial numbers of an issuer.
func (l lists) of(issuer *x509.Certificate) map[string]bool {
	key := string(issuer.RawSubjectPublicKeyInfo)
	if l[key] == nil {
		l[key] = map[string]bool{}
	}
	return l[key]
}

// check accepts a certificate of which one chain has nothing that is revoked. If there are lists, each issuer
// in the chain must have one.
func (l lists) check(chains []chain) error {
	if len(l) == 0 {
		return nil
	}
	err := errRevoked
	for _, c := range chains {
		if err = l.checkOne(c); err == nil {
			return nil
		}
	}
	return err
}

func (l lists) checkOne(c chain) error {
	for i := range len(c) - 1 {
		serials, ok := l[string(c[i+1].RawSubjectPublicKeyInfo)]
		if !ok {
			return fmt.Errorf("%w, or may be: there is no list of %q", errRevoked, c[i+1].Subject)
		}
		if serials[c[i].SerialNumber.String()] {
			return errRevoked
		}
	}
	return nil
}

// kept is a connection that is closed when the other side's certificate is revoked.
type kept struct {
	net.Conn
	ca *trust

	chains []chain // guarded by ca.mu: of who was accepted
	closed bool    // guarded by ca.mu
}

// admit accepts the other side, or says why not. It is a tls.Config's VerifyConnection.
func (c *kept) admit(s tls.ConnectionState) error {
	c.ca.mu.Lock()
	defer c.ca.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	if err := c.ca.lists.check(s.VerifiedChains); err != nil {
		return err
	}
	c.chains, c.ca.open[c] = s.VerifiedChains, true
	return nil
}

func (c *kept) Close() error {
	c.ca.mu.Lock()
	delete(c.ca.open, c)
	c.closed = true
	c.ca.mu.Unlock()
	return c.Conn.Close()
}

// Revoked is how many lists of revoked certificates are in force, and how many certificates they have. ok is
// false where there is no authority.
func (a *Auth) Revoked() (lists, certificates int, ok bool) {
	if a == nil || a.ca == nil {
		return 0, 0, false
	}
	a.ca.mu.Lock()
	defer a.ca.mu.Unlock()
	for _, serials := range a.ca.lists {
		certificates += len(serials)
	}
	return len(a.ca.lists), certificates, true
}

// Reread reads the authority's lists of revoked certificates again, and closes the connections with nodes
// that are on one now. closed is how many connections it ended. After an error the lists of before count on.
// The authority itself is not read again.
func (a *Auth) Reread() (closed int, err error) {
	if a == nil || a.ca == nil {
		return 0, nil
	}
	l, err := a.ca.readLists()
	if err != nil {
		return 0, fmt.Errorf("pop ca %s: %w", a.ca.file, err)
	}
	cut, err := a.ca.change(l)
	for _, c := range cut {
		c.Close()
	}
	return len(cut), err
}

// change puts lists into force, and gives the connections that end by them.
func (ca *trust) change(l lists) (cut []*kept, err error) {
	ca.mu.Lock()
	defer ca.mu.Unlock()
	if len(l) < len(ca.lists) {
		return nil, fmt.Errorf("pop ca %s: a list of revoked certificates is missing that was there", ca.file)
	}
	ca.lists = l
	for c := range ca.open {
		if l.check(c.chains) != nil {
			cut = append(cut, c)
		}
	}
	return cut, nil
}

// over is a client's TLS over c, with a node that is asked at host.
func (a *Auth) over(c net.Conn, host string) *tls.Conn {
	t := a.client.Clone()
	t.ServerName = host
	if a.ca != nil {
		k := &kept{Conn: c, ca: a.ca}
		c, t.VerifyConnection = k, k.admit
	}
	return tls.Client(c, t)
}

// serverTLS is for connections of listener.
func (a *Auth) serverTLS() *tls.Config {
	t := a.server.Clone()
	if a.ca != nil {
		t.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			own := a.server.Clone()
			own.VerifyConnection = h.Conn.(*kept).admit
			return own, nil
		}
	}
	return t
}

// listener gives the connections of l, which the authority may close.
func (a *Auth) listener(l net.Listener) net.Listener {
	if a.ca == nil {
		return l
	}
	return &keeping{l, a.ca}
}

type keeping struct {
	net.Listener
	ca *trust
}

func (l *keeping) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &kept{Conn: c, ca: l.ca}, nil
}
