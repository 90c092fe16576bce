package setup

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// FuzzEdit takes files that others have written. What dew setup takes, it undoes to the byte; of text
// that has its own marks nothing more is asked than that it ends.
func FuzzEdit(f *testing.F) {
	f.Add([]byte("version = 3\n[plugins.\"io.containerd.cri.v1.images\"]\n  snapshotter = \"overlayfs\"\n"))
	f.Add([]byte("version = 2\n[plugins]\n[plugins.\"io.containerd.transfer.v1.local\"]\nunpack_config = []"))
	f.Add([]byte(`{"features":{"a":true},"storage-driver":"overlay2","x":1.0}`))
	f.Add([]byte("snapshotter = '''\na'''"))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text []byte) {
		_, _ = undo(text)
		if strings.Contains(string(text), "dewpoint") || strings.Contains(string(text), "dew setup") || len(text) == 0 {
			return
		}
		for name, change := range map[string]func([]byte) ([]byte, error){"nerdctl": nerdctlConfig,
			"containerd": func(b []byte) ([]byte, error) { return containerdConfig(b, version{2, 1, 0}, "/s") }} {
			joined, err := change(text)
			if err != nil {
				continue
			}
			if back, gone := undo(joined); gone || !bytes.Equal(back, text) {
				t.Fatalf("%s: %q becomes %q and then %q", name, text, joined, back)
			}
		}
		joined, err := dockerConfig(text)
		if err != nil {
			return
		}
		backup := filepath.Join(dir, "backup")
		if err := os.WriteFile(backup, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if back, gone, err := undoJSON(joined, backup); err != nil || gone || !bytes.Equal(back, text) {
			t.Fatalf("%q becomes %q and then %q, %v", text, joined, back, err)
		}
		before, _ := parseJSON(text)
		after, err := parseJSON(joined)
		for k, v := range before {
			if k != "storage-driver" && k != "features" && !reflect.DeepEqual(after[k], v) {
				t.Fatalf("%q loses %q: %v", text, k, err)
			}
		}
	})
}
