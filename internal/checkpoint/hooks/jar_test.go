package hooks

import (
	"archive/zip"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
)

// The jars that are checked in were made of the sources beside them: "go generate" makes them anew.
func TestJarsAreOfTheirSources(t *testing.T) {
	for jar, source := range map[string]string{"agents/jvm.jar": "agents/jvm/dewpoint/Agent.java",
		"testdata/draw.jar": "testdata/Draw.java"} {
		text, err := os.ReadFile(source)
		if err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("Source: %x", sha256.Sum256(text))
		if got := manifest(t, jar); !strings.Contains(unfold(got), want) {
			t.Errorf("%s was not made of %s as it is: %q", jar, source, got)
		}
	}
}

func manifest(t *testing.T, jar string) string {
	t.Helper()
	z, err := zip.OpenReader(jar)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	f, err := z.Open("META-INF/MANIFEST.MF")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// unfold joins a manifest's lines that were cut after 72 bytes.
func unfold(text string) string {
	return strings.ReplaceAll(strings.ReplaceAll(text, "\r\n", "\n"), "\n ", "")
}
