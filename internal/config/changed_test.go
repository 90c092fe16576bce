package config

import (
	"slices"
	"testing"
)

func TestChanged(t *testing.T) {
	parse := func(s string) Config {
		t.Helper()
		c, err := Parse([]byte(s))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	a := parse("[link]\nlimit = \"20Mbit\"\n[registry.\"a:5000\"]\nplain_http = true\n")
	b := parse("[link]\nlimit = \"10Mbit\"\n[cache]\nmax_bytes = \"1GB\"\n")
	if got, want := Changed(a, b), []string{"registry", "cache.max_bytes", "link.limit"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if got := Changed(a, a); len(got) > 0 {
		t.Errorf("a configuration differs from itself in %q", got)
	}
}
