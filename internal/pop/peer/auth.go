package peer

import (
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"time"

	"dewpoint/internal/durable"

	"golang.org/x/sys/unix"
)

// minSecret is how many bytes a PoP key has at least.
const minSecret = 32

// keyUse makes the key pair one that is good for this protocol only.
const keyUse = "dewpoint peer 1 ed25519"

var (
	errOtherKey = errors.New("it has another PoP key")
	errNotTLS   = errors.New("it does not speak TLS")
)

// Auth is how this node proves that it is of the PoP, and how it knows that others are.
type Auth struct {
	server, client *tls.Config
	ca             *trust // nil: a key, which nobody can revoke
	advice         string // what to do when the nodes do not accept each other
	fingerprint    string
}

// Fingerprint tells PoP keys apart without giving them away; "" for certificates. Nodes
// with the same one accept each other.
func (a *Auth) Fingerprint() string { return a.fingerprint }

// NewKey makes a PoP key and writes it to a file that does not exist yet, mode 0600.
func NewKey(path string) error {
	secret := make([]byte, minSecret)
	rand.Read(secret)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%w: a key that is in use is not overwritten", err)
	}
	if err != nil {
		return err
	}
	_, err = io.WriteString(f, hex.EncodeToString(secret)+"\n")
	if err == nil {
		err = durable.Sync(f)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		os.Remove(path)
		return fmt.Errorf("write %s: %w", path, err)
	}
	return durable.SyncDir(filepath.Dir(path))
}

// ReadKey reads a PoP key: a secret of 32 random bytes or more, in hex or base64.
func ReadKey(path string) (*Auth, error) {
	text, err := readSecret(path)
	if err != nil {
		return nil, fmt.Errorf("pop key: %w", err)
	}
	secret, err := parseSecret(strings.TrimSpace(string(text)))
	if err != nil {
		return nil, fmt.Errorf("pop key %s: %w", path, err)
	}
	return keyAuth(secret)
}

// readSecret reads a small file that only its owner and group may.
func readSecret(path string) ([]byte, error) {
	// Not blocking, should somebody have named a pipe.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a file", path)
	}
	if st.Mode().Perm()&0o007 != 0 {
		return nil, fmt.Errorf("%s can be used by everybody (mode %04o): chmod 600 %s", path, st.Mode().Perm(),
			path)
	}
	const most = 64 << 10
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && len(b) > most {
		err = fmt.Errorf("%s is too long for a key", path)
	}
	return b, err
}

// parseSecret takes hex for hex, also where it could be base64.
func parseSecret(text string) ([]byte, error) {
	secret, err := hex.DecodeString(text)
	if err != nil {
		plain := strings.TrimRight(strings.NewReplacer("-", "+", "_", "/").Replace(text), "=")
		secret, err = base64.RawStdEncoding.DecodeString(plain)
	}
	if err != nil {
		return nil, fmt.Errorf("neither hex nor base64; make one with `dew pop key`")
	}
	if len(secret) < minSecret {
		return nil, fmt.Errorf("%d bytes, and at least %d are needed; make one with `dew pop key`", len(secret),
			minSecret)
	}
	return secret, nil
}

func keyAuth(secret []byte) (*Auth, error) {
	seed, err := hkdf.Key(sha256.New, secret, nil, keyUse, ed25519.SeedSize)
	if err != nil {
		return nil, err
	}
	key := ed25519.NewKeyFromSeed(seed)
	pub := key.Public().(ed25519.PublicKey)
	cert, err := selfSigned(key)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(pub)
	a := &Auth{server: baseTLS(), client: baseTLS(), advice: "is the same [pop] key on both nodes?",
		fingerprint: hex.EncodeToString(sum[:8])}
	for _, t := range []*tls.Config{a.server, a.client} {
		t.Certificates = []tls.Certificate{cert}
		t.VerifyConnection = func(s tls.ConnectionState) error { return sameKey(s, pub) }
	}
	a.server.ClientAuth = tls.RequireAnyClientCert
	a.client.InsecureSkipVerify = true // sameKey is stricter: one key, whatever its certificate says
	return a, nil
}

// sameKey accepts a connection whose other side has proved to have the key. It is called for each one.
func sameKey(s tls.ConnectionState, pub ed25519.PublicKey) error {
	if len(s.PeerCertificates) == 0 {
		return errOtherKey
	}
	if k, ok := s.PeerCertificates[0].PublicKey.(ed25519.PublicKey); !ok || !k.Equal(pub) {
		return errOtherKey
	}
	return nil
}

// selfSigned makes what TLS carries a public key in. Nobody looks at the rest of it.
func selfSigned(key ed25519.PrivateKey) (tls.Certificate, error) {
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "dewpoint PoP key"},
		NotBefore:    time.Unix(0, 0),
		NotAfter:     time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}

func baseTLS() *tls.Config {
	return &tls.Config{
		MinVersion:                  tls.VersionTLS13,
		NextProtos:                  []string{"http/1.1"},
		SessionTicketsDisabled:      true,
		DynamicRecordSizingDisabled: true, // these are bulk data
	}
}

// ReadCertificates reads the authority that vouches for all nodes, and this node's certificate and key, all
// in PEM. The certificate must be for servers and for clients, and for the address that others ask this node
// at. It is read again for each connection, so that a renewed one counts at once. The file of the authority
// may have its lists of revoked certificates (X509 CRL), which Reread reads again.
func ReadCertificates(ca, cert, key string) (*Auth, error) {
	vouches, err := readTrust(ca)
	if err != nil {
		return nil, fmt.Errorf("pop ca %s: %w", ca, err)
	}
	pair, err := readPair(cert, key)
	if err != nil {
		return nil, err
	}
	if err := bothUses(pair.Leaf); err != nil {
		return nil, fmt.Errorf("pop certificate %s: %w", cert, err)
	}
	a := &Auth{server: baseTLS(), client: baseTLS(), ca: vouches,
		advice: "have both a valid certificate of the same [pop] ca, for its own address?"}
	a.server.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return readPair(cert, key) }
	a.server.ClientAuth = tls.RequireAndVerifyClientCert
	a.server.ClientCAs = vouches.pool
	a.client.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		return readPair(cert, key)
	}
	a.client.RootCAs = vouches.pool
	return a, nil
}

func readPair(cert, key string) (*tls.Certificate, error) {
	c, err := os.ReadFile(cert)
	if err != nil {
		return nil, fmt.Errorf("pop certificate: %w", err)
	}
	k, err := readSecret(key)
	if err != nil {
		return nil, fmt.Errorf("pop certificate's key: %w", err)
	}
	pair, err := tls.X509KeyPair(c, k)
	if err != nil {
		return nil, fmt.Errorf("pop certificate %s: %w", cert, err)
	}
	return &pair, nil
}

// bothUses tells early what each handshake would only call a bad certificate.
func bothUses(c *x509.Certificate) error {
	var server, client bool
	for _, u := range c.ExtKeyUsage {
		server = server || u == x509.ExtKeyUsageServerAuth || u == x509.ExtKeyUsageAny
		client = client || u == x509.ExtKeyUsageClientAuth || u == x509.ExtKeyUsageAny
	}
	if none := len(c.ExtKeyUsage)+len(c.UnknownExtKeyUsage) == 0; none || server && client {
		return nil
	}
	return errors.New("it must be for servers and for clients (extended key usage serverAuth, clientAuth)")
}
