package presence

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
)

// TestAgainstModel compares a map with a slice of bools over random additions.
func TestAgainstModel(t *testing.T) {
	const size = 300*Page + 17
	path := filepath.Join(t.TempDir(), "present")
	m, err := Create(path, size)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	other, err := View(f)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	r := rand.New(rand.NewPCG(1, 2))
	model := make([]bool, 301)
	for range 400 {
		from := r.Int64N(size)
		to := min(size, from+r.Int64N(6*Page))
		m.Add(from, to)
		for p := range model {
			a, b := int64(p)*Page, min(int64(p+1)*Page, size)
			model[p] = model[p] || from <= a && to >= b
		}
		check(t, other, model, r.Int64N(size), r.Int64N(9*Page))
	}
	reopened, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer reopened.Close()
	check(t, reopened, model, 0, size)
	n := int64(0)
	for _, there := range model {
		if there {
			n++
		}
	}
	if got, all := reopened.Count(); got != n || all != 301 {
		t.Errorf("Count() = %d, %d, want %d, 301", got, all, n)
	}
}

func check(t *testing.T, m *Map, model []bool, from, n int64) {
	t.Helper()
	to := min(from+n, m.Size())
	whole := true
	var a, b int64 = -1, -1
	for p := from / Page; p*Page < to; p++ {
		if !model[p] {
			whole = false
			if a < 0 {
				a = p * Page
			}
			if b < 0 || b == p*Page {
				b = min((p+1)*Page, m.Size())
			}
		}
	}
	if got := m.HasRange(from, to); got != whole {
		t.Fatalf("Has(%d, %d) = %v", from, to, got)
	}
	if ga, gb := m.Absent(from, to); !whole && (ga != a || gb != b) {
		t.Fatalf("Absent(%d, %d) = %d, %d, want %d, %d", from, to, ga, gb, a, b)
	}
}

func TestEmptyData(t *testing.T) {
	m, err := Create(filepath.Join(t.TempDir(), "present"), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	m.Add(0, 10)
	if !m.HasRange(0, 4096) {
		t.Error("data of no bytes lacks some")
	}
}

func TestStale(t *testing.T) {
	path := filepath.Join(t.TempDir(), "present")
	m, err := Create(path, 5*Page)
	if err != nil {
		t.Fatal(err)
	}
	m.Close()
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func([]byte) []byte{
		"another boot": func(b []byte) []byte { b[bootAt] ^= 1; return b },
		"no magic":     func(b []byte) []byte { b[0] = 0; return b },
		"size":         func(b []byte) []byte { b[sizeAt+7] = 0xff; return b },
		"cut":          func(b []byte) []byte { return b[:headerSize] },
		"empty":        func([]byte) []byte { return nil },
	} {
		if err := os.WriteFile(path, spoil(append([]byte(nil), good...)), 0o600); err != nil {
			t.Fatal(err)
		}
		if m, err := Open(path); !errors.Is(err, ErrStale) {
			t.Errorf("%s: Open gave %v, %v", name, m, err)
		}
	}
}
