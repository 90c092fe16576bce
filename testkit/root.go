package testkit

import (
	"flag"
	"fmt"
	"os"
	"testing"
)

// RequireRoot is the first call of a TestMain whose tests need root, and why says for what. Without root it
// leaves all of them out and ends the program: go test says "no tests to run" of the package.
func RequireRoot(m *testing.M, why string) {
	if os.Geteuid() == 0 {
		return
	}
	fmt.Fprintln(os.Stderr, "left out, because they need root:", why)
	flag.Parse()
	if err := flag.Set("test.skip", "."); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// NeedRoot leaves a test out that runs without root, and why says for what it needs root.
func NeedRoot(t testing.TB, why string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: " + why)
	}
}
