package internal

import (
	"go/ast"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
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

// references are held to the code, or generated from it.
var references = []string{"docs/use/cli.md", "docs/use/docker-run.md", "docs/operate/api.md", "docs/operate/configuration.md",
	"docs/operate/metrics.md"}

func documents(t *testing.T) (found []string) {
	t.Helper()
	err := filepath.WalkDir("../docs", func(path string, d fs.DirEntry, err error) error {
		if filepath.Ext(path) == ".md" {
			found = append(found, strings.TrimPrefix(path, "../"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestDocumentsAreFew(t *testing.T) {
	const most = 2000
	sum := 0
	for _, path := range documents(t) {
		if !slices.Contains(references, path) {
			sum += len(document(t, path))
		}
	}
	if sum > most {
		t.Errorf("docs/ has %d lines beside its references, more than %d", sum, most)
	}
}

// Words that the glossary has leave, and that have left the documents.
var left = map[string]string{
	"site": "sites?", "keep house": "(keep|keeps|keeping|kept) house", "keeper": "keepers?", "rouse": "rous(e|es|ed|ing)",
	"make ready": "(make|makes|making|made) ready", "owed": "owe[sd]?", "lied": "lied", "shun": "shun(s|ned)?",
	"door": "doors?", "desk": "desks?", "glance": "glanc(e|es|ed)", "foreign": "foreign",
}

var code = regexp.MustCompile("(?s)```.*?```|`[^`\n]*`")

func TestWordsThatLeftStayAway(t *testing.T) {
	glossary := strings.Join(document(t, "docs/glossary.md"), " ")
	for word, forms := range left {
		if !strings.Contains(glossary, " "+word+" -> ") {
			t.Errorf("%q is not among the words that leave", word)
		}
		forbidden := regexp.MustCompile(`(?i)\b(` + forms + `)\b`)
		for _, path := range append(documents(t), "README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md",
			"api/dewpoint/v1/node.proto") {
			if path == "docs/glossary.md" || path == "docs/roadmap.md" {
				continue
			}
			text := code.ReplaceAllString(strings.Join(document(t, path), "\n"), "")
			if said := forbidden.FindString(text); said != "" {
				t.Errorf("%s says %q: docs/glossary.md has another word", path, said)
			}
		}
	}
}

// Words that left the documents stay away from the code, too: from comments, from the words of names and from
// messages, which are texts with a blank. Other texts may be a format's.
func TestWordsThatLeftTheCodeStayAway(t *testing.T) {
	var forms []string
	for _, f := range left {
		forms = append(forms, f)
	}
	forbidden := regexp.MustCompile(`(?i)\b(` + strings.Join(forms, "|") + `)\b`)
	files, set := tree(t)
	fine := map[string]bool{"DockerForeignLayer": true} // names that have no such word, or are of another's format
	for path, f := range files {
		says := func(at token.Pos, text string) bool {
			said := forbidden.FindString(text)
			if said != "" {
				t.Errorf("%s:%d says %q: docs/glossary.md has another word", path, set.Position(at).Line, said)
			}
			return said != ""
		}
		for _, c := range f.Comments {
			says(c.Pos(), quoted.ReplaceAllString(c.Text(), ""))
		}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.Ident:
				if !fine[n.Name] {
					fine[n.Name] = !says(n.Pos(), nameWord.ReplaceAllString(n.Name, " $0"))
				}
			case *ast.BasicLit:
				if isProduct(path) && strings.Contains(n.Value, " ") {
					says(n.Pos(), n.Value)
				}
			}
			return true
		})
	}
}

var (
	quoted   = regexp.MustCompile("\"[^\"\n]*\"|`[^`\n]*`")
	nameWord = regexp.MustCompile(`[A-Z][a-z]+`)
)

func TestChangesAreShort(t *testing.T) {
	for _, l := range document(t, "CHANGELOG.md") {
		if strings.HasPrefix(l, "- ") && len(strings.Fields(l[2:])) > 20 {
			t.Errorf("more than 20 words: %s", l)
		}
	}
}

var linked = regexp.MustCompile(`\]\(([^)#\s]+)(#[^)]*)?\)`)

func TestLinksLeadSomewhere(t *testing.T) {
	for _, path := range append(documents(t), "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md") {
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
	flagName    = regexp.MustCompile(`\.\w+VarP?\([^"]*"([a-z-]+)"(?:, "([a-zA-Z])")?`)
	errorCode   = regexp.MustCompile(`\bCode\s+= "([a-z_]+)"`)
)

// docs/use/cli.md has the commands with their flags, long or short, and the codes of errors.
func TestCommandsAreDocumented(t *testing.T) {
	text := strings.Join(document(t, "docs/use/cli.md"), "\n")
	says := func(word string) bool {
		return regexp.MustCompile("[`\\[ ]" + word + "[`\\] ,|]").MatchString(text)
	}
	sources, err := filepath.Glob("cli/*.go")
	if err != nil || len(sources) == 0 {
		t.Fatal(sources, err)
	}
	for _, path := range append(sources, "api/error.go") {
		source := strings.Join(document(t, filepath.Join("internal", path)), "\n")
		for _, m := range commandName.FindAllStringSubmatch(source, -1) {
			if !strings.Contains(text, "\n| `"+m[1]) {
				t.Errorf("docs/use/cli.md has no command %s", m[1])
			}
		}
		for _, m := range errorCode.FindAllStringSubmatch(source, -1) {
			if !strings.Contains(text, "`"+m[1]+"`") {
				t.Errorf("docs/use/cli.md has no code %s", m[1])
			}
		}
		for _, m := range flagName.FindAllStringSubmatch(source, -1) {
			if short := "-" + m[2]; m[1] != "network" && !says("--"+m[1]) && // network is --net
				(short == "-" || !says(short)) {
				t.Errorf("docs/use/cli.md has no flag --%s", m[1])
			}
		}
	}
}

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
