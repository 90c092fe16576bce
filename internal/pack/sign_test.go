package pack_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"dewpoint/internal/pack"

	"github.com/opencontainers/go-digest"
)

func TestSign(t *testing.T) {
	pub, key, err := ed25519.GenerateKey(nil)
	check(t, err)
	other, _, err := ed25519.GenerateKey(nil)
	check(t, err)
	image, header := digest.FromString("image"), digest.FromString("header")
	sig := pack.Sign(key, image, header)
	check(t, pack.Verify(pub, image, header, sig))
	text := "dewpoint pack 1\n" + string(image) + "\n" + string(header) + "\n"
	if !ed25519.Verify(pub, []byte(text), sig) {
		t.Error("it is not the text of the format that is signed")
	}
	bad := bytes.Clone(sig)
	bad[5] ^= 1
	for i, err := range []error{
		pack.Verify(other, image, header, sig), pack.Verify(pub, header, image, sig),
		pack.Verify(pub, image, image, sig),
		pack.Verify(pub, image, header, bad), pack.Verify(pub, image, header, nil),
		pack.Verify(nil, image, header, sig),
	} {
		if err != pack.ErrSignature {
			t.Error(i, err)
		}
	}
}

func TestKeyFiles(t *testing.T) {
	pub, key, err := ed25519.GenerateKey(nil)
	check(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	check(t, err)
	private := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	der, err = x509.MarshalPKIXPublicKey(pub)
	check(t, err)
	public := pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
	if got, err := pack.ParsePrivateKey(private); err != nil || !key.Equal(got) {
		t.Error(err)
	}
	if got, err := pack.ParsePublicKey(public); err != nil || !pub.Equal(got) {
		t.Error(err)
	}
	r, err := rsa.GenerateKey(rand.Reader, 2048)
	check(t, err)
	der, err = x509.MarshalPKCS8PrivateKey(r)
	check(t, err)
	otherKind := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	for i, b := range [][]byte{nil, []byte("key"), public, otherKind,
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte{1}})} {
		if _, err := pack.ParsePrivateKey(b); err == nil {
			t.Errorf("private key %d was read", i)
		}
	}
	for i, b := range [][]byte{nil, []byte("key"), private,
		pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: []byte{1}})} {
		if _, err := pack.ParsePublicKey(b); err == nil {
			t.Errorf("public key %d was read", i)
		}
	}
}

// The keys are those that OpenSSL makes, and it verifies what they sign.
func TestOpenSSL(t *testing.T) {
	if _, err := exec.LookPath("openssl"); err != nil {
		t.Fatal("openssl is not installed: scripts/install test")
	}
	dir := t.TempDir()
	run := func(args ...string) {
		t.Helper()
		cmd := exec.Command("openssl", args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("openssl %v: %v: %s", args, err, out)
		}
	}
	read := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join(dir, name))
		check(t, err)
		return b
	}
	run("genpkey", "-algorithm", "ed25519", "-out", "key")
	run("pkey", "-in", "key", "-pubout", "-out", "pub")
	key, err := pack.ParsePrivateKey(read("key"))
	check(t, err)
	pub, err := pack.ParsePublicKey(read("pub"))
	check(t, err)
	image, header := digest.FromString("image"), digest.FromString("header")
	sig := pack.Sign(key, image, header)
	check(t, pack.Verify(pub, image, header, sig))
	check(t, os.WriteFile(filepath.Join(dir, "text"), []byte("dewpoint pack 1\n"+image+"\n"+header+"\n"), 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "sig"), sig, 0o600))
	run("pkeyutl", "-verify", "-pubin", "-inkey", "pub", "-rawin", "-in", "text", "-sigfile", "sig")
}
