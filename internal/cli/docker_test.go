package cli

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"dewpoint/internal/cli/docker"
)

var update = flag.Bool("update", false, "write the documents that are made of the program")

// dockerTable is the table of docker run's options in the document.
func dockerTable() string {
	var b strings.Builder
	b.WriteString("| option of `docker run` | `dew run` | |\n|---|---|---|\n")
	for _, o := range docker.Run {
		has := "no"
		if runFlag(o.Name) != nil || o.Name == "help" {
			has = "yes"
		}
		fmt.Fprintf(&b, "| `--%s` | %s | %s |\n", o.Name, has, o.Why)
	}
	return b.String()
}

// The document tells of each option whether the program has it.
func TestDockerTable(t *testing.T) {
	const path = "../../docs/use/docker-run.md"
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, _, ok := strings.Cut(string(b), "| option of")
	if want := head + dockerTable(); !ok || string(b) != want {
		if *update {
			err = os.WriteFile(path, []byte(want), 0o644)
		}
		t.Errorf("%s is not what the program has; -update writes it (%v)", path, err)
	}
}

// What dew has not is refused by name, with what there is instead.
func TestDockerOptionsAreAnswered(t *testing.T) {
	seen := map[string]bool{}
	for _, o := range docker.Run {
		if seen[o.Name] {
			t.Errorf("--%s is there twice", o.Name)
		}
		seen[o.Name] = true
		if runFlag(o.Name) == nil && o.Why == "" {
			t.Errorf("dew has no --%s: say what there is instead", o.Name)
		}
	}
	for short, name := range docker.Short {
		if !seen[name] {
			t.Errorf("-%s: there is no --%s", short, name)
		}
	}
}

func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		n    int
	}{{"", "", 0}, {"run", "run", 0}, {"rnu", "run", 1}, {"rum", "run", 1}, {"pul", "pull", 1}, {"pulll", "pull", 1},
		{"", "abc", 3}, {"kitten", "sitting", 3}} {
		if got := distance(c.a, c.b); got != c.n {
			t.Errorf("%q, %q: %d, want %d", c.a, c.b, got, c.n)
		}
	}
}
