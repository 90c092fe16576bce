package setup

import (
	"os"
	"path/filepath"
	"testing"
)

// What others have made of daemon.json since is no reason to panic.
func TestUndoOfChangedJSON(t *testing.T) {
	backup := filepath.Join(t.TempDir(), "backup")
	for _, c := range []struct{ before, now, want string }{
		{`{"features":{"containerd-snapshotter":false}}`, `{"storage-driver":"dewpoint"}`,
			"{\n  \"features\": {\n    \"containerd-snapshotter\": false\n  }\n}\n"},
		{`null`, `null`, "null"},
	} {
		if err := os.WriteFile(backup, []byte(c.before), 0o600); err != nil {
			t.Fatal(err)
		}
		out, _, err := undoJSON([]byte(c.now), backup)
		if err != nil || string(out) != c.want && string(out) != c.before {
			t.Errorf("of %s, now %s: %q, %v", c.before, c.now, out, err)
		}
		if _, err := dockerConfig([]byte(c.before)); err != nil {
			t.Error(err)
		}
	}
}
