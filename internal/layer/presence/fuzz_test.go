package presence

import (
	"os"
	"path/filepath"
	"testing"

	"dewpoint/internal/durable"
)

// FuzzView opens what claims to be a presence file of this boot.
func FuzzView(f *testing.F) {
	path := filepath.Join(f.TempDir(), "present")
	m, err := Create(path, 10*Page+1)
	if err != nil {
		f.Fatal(err)
	}
	m.Close()
	b, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(b[:headerSize])
	f.Add(append(b, 1))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= bootAt+bootLen {
			copy(b, magic)
			copy(b[bootAt:], durable.BootID())
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		file, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		m, err := View(file)
		if err != nil {
			file.Close()
			return
		}
		defer m.Close()
		for _, from := range []int64{0, m.Size() / 2, m.Size() - 1, m.Size() + 5} {
			if at, to := m.Absent(max(from, 0), m.Size()); to < at {
				t.Fatalf("[%d, %d) of %d", at, to, m.Size())
			}
		}
	})
}
