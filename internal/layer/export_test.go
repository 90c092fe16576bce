package layer

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"dewpoint/internal/durable"
)

// DurableSizes are the lengths of files that the durable progress in dir
// vouches for.
func DurableSizes(t *testing.T, dir string) map[string]int64 {
	t.Helper()
	p, err := readProgress(filepath.Join(dir, progressFile))
	if err != nil {
		t.Fatal(err)
	}
	return map[string]int64{"data": p.Point.Out, "blob": p.Kept}
}

// MakeIncomplete turns a complete layer into what a process leaves that is
// killed after the layer became readable.
func MakeIncomplete(t *testing.T, dir string) {
	t.Helper()
	l, err := readLayer(dir, layerFile)
	if err != nil {
		t.Fatal(err)
	}
	l.Boot = durable.BootID()
	b, err := json.Marshal(l)
	err = errors.Join(err, os.WriteFile(filepath.Join(dir, readyFile), b, 0o600),
		os.Remove(filepath.Join(dir, layerFile)))
	if err != nil {
		t.Fatal(err)
	}
}
