package internal

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func document(t *testing.T, path string) []string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", path))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSuffix(string(b), "\n"), "\n")
}

func TestDocumentsAreShort(t *testing.T) {
	for path, most := range map[string]int{"README.md": 150, "docs/roadmap.md": 60, "docs/architecture.md": 80,
		"CONTRIBUTING.md": 80, "SECURITY.md": 80} {
		if n := len(document(t, path)); n > most {
			t.Errorf("%s has %d lines, more than %d", path, n, most)
		}
	}
	terms := 0
	for _, l := range document(t, "docs/glossary.md") {
		if strings.HasPrefix(l, "| ") && !strings.HasPrefix(l, "| term ") {
			terms++
		}
	}
	if terms == 0 || terms > 40 {
		t.Errorf("the glossary has %d terms, not 1 to 40", terms)
	}
}

func TestChangesAreShort(t *testing.T) {
	for _, l := range document(t, "CHANGELOG.md") {
		if strings.HasPrefix(l, "- ") && len(strings.Fields(l[2:])) > 20 {
			t.Errorf("more than 20 words: %s", l)
		}
	}
}

var linked = regexp.MustCompile(`\]\(([^)#\s]+)(#[^)]*)?\)`)

func TestLinksLeadSomewhere(t *testing.T) {
	documents := []string{"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"}
	err := filepath.WalkDir("../docs", func(path string, d fs.DirEntry, err error) error {
		if filepath.Ext(path) == ".md" {
			documents = append(documents, strings.TrimPrefix(path, "../"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range documents {
		for _, m := range linked.FindAllStringSubmatch(strings.Join(document(t, path), "\n"), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join("..", filepath.Dir(path), m[1])); err != nil {
				t.Errorf("%s: the link to %s leads nowhere", path, m[1])
			}
		}
	}
}

var (
	commandLine = regexp.MustCompile(`(?m)^\s{4}(?:sudo )?(?:bin/)?dew (?:--json )?([a-z]+)`)
	commandName = regexp.MustCompile(`\{name: "([a-z]+)"`)
)

// Snippets of the README name commands that there are.
func TestSnippetsNameCommands(t *testing.T) {
	known := map[string]bool{}
	for _, m := range commandName.FindAllStringSubmatch(strings.Join(document(t, "internal/cli/cli.go"), "\n"),
		-1) {
		known[m[1]] = true
	}
	found := commandLine.FindAllStringSubmatch(strings.Join(document(t, "README.md"), "\n"), -1)
	if len(known) == 0 || len(found) == 0 {
		t.Fatalf("%d commands, %d snippets", len(known), len(found))
	}
	for _, m := range found {
		if !known[m[1]] {
			t.Errorf("there is no command dew %s", m[1])
		}
	}
}
