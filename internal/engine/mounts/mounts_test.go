package mounts

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

func TestUnderInit(t *testing.T) {
	had := inits
	defer func() { inits = had }()
	inits = []string{"/proc/self/status", "/nowhere/init"}
	if _, _, err := UnderInit(nil, []string{"/app"}); err == nil || !strings.Contains(err.Error(), "/nowhere/init") {
		t.Errorf("without an init: %v", err)
	}
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	inits = append(inits, own)
	m, args, err := UnderInit([]specs.Mount{{Destination: "/a/b/c"}}, []string{"/app", "x"})
	if !static(own) { // as with the race detector
		if err == nil {
			t.Error("a program that needs files of the node is an init")
		}
	} else if err != nil || !slices.Equal(args, []string{initTarget, "--", "/app", "x"}) || len(m) != 2 ||
		m[0].Source != own || m[0].Destination != initTarget || !slices.Contains(m[0].Options, "ro") {
		t.Errorf("%+v, %q, %v", m, args, err)
	}
	if static(filepath.Join(t.TempDir(), "none")) {
		t.Error("a file that there is not is a program")
	}
}
