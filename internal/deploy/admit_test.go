package deploy

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/spec"
)

// What can never fit, or comes to a full queue, is refused before anything is made of it.
func TestEnterRefuses(t *testing.T) {
	d := New(Config{Admit: admit.Config{Max: 1, Queue: 1, Memory: func() (admit.Memory, error) {
		return admit.Memory{Available: 1 << 30, Total: 1 << 30}, nil
	}}})
	defer d.Close()
	deploy := func(memory int64) error {
		_, err := d.Deploy(t.Context(), spec.Request{Image: "app:1", Memory: memory}, spec.Watch{})
		return err
	}
	var never *admit.NeverError
	if err := deploy(2 << 30); !errors.As(err, &never) {
		t.Errorf("%v", err)
	}
	o, err := d.parse(spec.Request{Image: "app:1"})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		k, err := d.enter(o, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		defer k.Done(0)
	}
	var busy *admit.BusyError
	if err := deploy(0); !errors.As(err, &busy) {
		t.Errorf("%v", err)
	}
}

func TestMemoryIn(t *testing.T) {
	for text, want := range map[string]int64{
		"anon 4096\nfile 99\n":                             4096,
		"cache 7\nrss 8\ntotal_cache 9\ntotal_rss 12288\n": 12288,
		"file 99\n": 0,
		"anon x\n":  0,
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "memory.stat"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := memoryIn(dir); got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
	if n := memoryIn(""); n != 0 {
		t.Errorf("%d of no cgroup", n)
	}
}
