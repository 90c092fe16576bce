package registrytest

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"time"
)

// certs are the certificates of one server: an authority, and what it signed.
type certs struct {
	ca     []byte // PEM
	caCert *x509.Certificate
	pair   tls.Certificate
	client []byte // PEM, certificate and key
}

// CA is the PEM of the authority that signed the server's certificate; nil without TLS.
func (s *Server) CA() []byte {
	if s.certs == nil {
		return nil
	}
	return s.certs.ca
}

// ClientPair is the PEM of a client's certificate and key that the server
// accepts; nil without TLS.
func (s *Server) ClientPair() []byte {
	if s.certs == nil {
		return nil
	}
	return s.certs.client
}

func (c *certs) server(clients bool) *tls.Config {
	cfg := &tls.Config{Certificates: []tls.Certificate{c.pair}, MinVersion: tls.VersionTLS12,
		NextProtos: []string{"http/1.1"}}
	if clients {
		cfg.ClientCAs = x509.NewCertPool()
		cfg.ClientCAs.AddCert(c.caCert)
		cfg.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return cfg
}

func newCerts(addr string) (*certs, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	ca := template(1, "test authority")
	ca.IsCA, ca.BasicConstraintsValid, ca.KeyUsage = true, true, x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, ca, ca, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	c := &certs{ca: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
	if c.caCert, err = x509.ParseCertificate(der); err != nil {
		return nil, err
	}
	leaf := template(2, "test registry")
	leaf.DNSNames = []string{"localhost", host}
	if ip := net.ParseIP(host); ip != nil {
		leaf.DNSNames, leaf.IPAddresses = []string{"localhost"}, []net.IP{ip, net.IPv4(127, 0, 0, 1)}
	}
	if c.client, err = sign(leaf, c.caCert, key); err != nil {
		return nil, err
	}
	c.pair, err = tls.X509KeyPair(c.client, c.client)
	return c, err
}

// sign makes a certificate and key, as PEM.
func sign(leaf, ca *x509.Certificate, caKey *ecdsa.PrivateKey) ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
	if err != nil {
		return nil, err
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	pem.Encode(&out, &pem.Block{Type: "CERTIFICATE", Bytes: der})
	pem.Encode(&out, &pem.Block{Type: "EC PRIVATE KEY", Bytes: private})
	return out.Bytes(), nil
}

func template(serial int64, name string) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(serial),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(24 * time.Hour),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
}
