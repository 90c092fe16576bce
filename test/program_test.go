package test

import (
	"debug/elf"
	"path/filepath"
	"strings"
	"testing"
)

// dewd has no templates in it: whatever runs one may call any method of any type by its name, so that the
// linker leaves all of them in, and a quarter of the program's pages with them.
func TestProgramHasNoTemplates(t *testing.T) {
	f, err := elf.Open(filepath.Join(programs, "dewd"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.Symbols()
	if err != nil || len(symbols) < 10000 {
		t.Fatalf("%d symbols, %v", len(symbols), err)
	}
	for _, s := range symbols {
		if strings.HasPrefix(s.Name, "text/template.(*state)") {
			t.Fatalf("it has %s", s.Name)
		}
	}
}
