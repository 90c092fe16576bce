package peer

import (
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"testing"
	"time"
)

// FuzzLists takes what follows the authority in its file. Nobody who has not the authority's key revokes
// anything.
func FuzzLists(f *testing.F) {
	ca := newAuthority(f)
	trusted, err := readTrust(ca.file)
	check(f, err)
	l := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Unix(0, 0), NextUpdate: time.Unix(1, 0),
		RevokedCertificateEntries: []x509.RevocationListEntry{
			{SerialNumber: big.NewInt(7), RevocationTime: time.Unix(1, 0)}}}
	other := newAuthority(f)
	stranger, err := x509.CreateRevocationList(rand.Reader, l, other.cert, other.key)
	check(f, err)
	f.Add(pemBlock("X509 CRL", stranger), stranger)
	f.Add("-----BEGIN X509 CRL-----\nAA\n", []byte{})
	f.Fuzz(func(t *testing.T, text string, der []byte) {
		for _, s := range []string{text, string(pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der}))} {
			check(t, os.WriteFile(ca.file, []byte(pemBlock("CERTIFICATE", ca.cert.Raw)+s), 0o600))
			if got, err := trusted.readLists(); err == nil && len(got) > 0 {
				t.Fatalf("%q revokes %v", s, got)
			}
		}
	})
}
