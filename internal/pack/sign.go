package pack

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"

	"github.com/opencontainers/go-digest"
)

// ErrSignature says that a signature is not that of a key over a header.
var ErrSignature = errors.New("pack signature does not verify")

func signedText(manifest, header digest.Digest) []byte {
	return fmt.Appendf(nil, "dewpoint pack 1\n%s\n%s\n", manifest, header)
}

// Sign signs the header with the given digest (Stream.HeaderDigest) as that of
// a pack of the manifest.
func Sign(key ed25519.PrivateKey, manifest, header digest.Digest) []byte {
	return ed25519.Sign(key, signedText(manifest, header))
}

// Verify returns ErrSignature unless sig is Sign's result for the key.
func Verify(key ed25519.PublicKey, manifest, header digest.Digest, sig []byte) error {
	if len(key) != ed25519.PublicKeySize || !ed25519.Verify(key, signedText(manifest, header), sig) {
		return ErrSignature
	}
	return nil
}

// ParsePrivateKey reads an Ed25519 key as "openssl genpkey -algorithm ed25519"
// writes it: PKCS #8 in PEM, without a password.
func ParsePrivateKey(text []byte) (ed25519.PrivateKey, error) {
	b, err := pemBlock(text, "PRIVATE KEY")
	if err != nil {
		return nil, err
	}
	key, err := x509.ParsePKCS8PrivateKey(b)
	if err != nil {
		return nil, fmt.Errorf("read private key: %w", err)
	}
	if k, ok := key.(ed25519.PrivateKey); ok {
		return k, nil
	}
	return nil, fmt.Errorf("read private key: it is a %T; make one with openssl genpkey -algorithm ed25519", key)
}

// ParsePublicKey reads an Ed25519 key as "openssl pkey -pubout" writes it: PKIX
// in PEM.
func ParsePublicKey(text []byte) (ed25519.PublicKey, error) {
	b, err := pemBlock(text, "PUBLIC KEY")
	if err != nil {
		return nil, err
	}
	key, err := x509.ParsePKIXPublicKey(b)
	if err != nil {
		return nil, fmt.Errorf("read public key: %w", err)
	}
	if k, ok := key.(ed25519.PublicKey); ok {
		return k, nil
	}
	return nil, fmt.Errorf("read public key: it is a %T, not an Ed25519 key", key)
}

func pemBlock(text []byte, kind string) ([]byte, error) {
	b, _ := pem.Decode(text)
	if b == nil {
		return nil, fmt.Errorf("read key: no PEM block %q", kind)
	}
	if b.Type != kind {
		return nil, fmt.Errorf("read key: a PEM block %q, not %q", b.Type, kind)
	}
	return b.Bytes, nil
}
