package deploy

import (
	"os"
	"path/filepath"
	"testing"
)

// What containers may yet take of their limits is counted until they end, in cgroups of either version.
func TestLimits(t *testing.T) {
	group := func(files map[string]string) string {
		dir := t.TempDir()
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	one := group(map[string]string{"memory.limit_in_bytes": "1000000\n",
		"memory.stat": "rss 5\ntotal_rss 300000\n"})
	two := group(map[string]string{"memory.max": "500000\n", "memory.stat": "anon 100000\nfile 7000\n"})
	over := group(map[string]string{"memory.max": "50000\n", "memory.stat": "anon 60000\n"})
	var l limits
	if n := l.Unused(); n != 0 {
		t.Errorf("%d bytes are unused", n)
	}
	for _, dir := range []string{one, two, over, two, "", "/nonexistent",
		group(map[string]string{"memory.max": "max\n"}),
		group(map[string]string{"memory.limit_in_bytes": "9223372036854771712\n"})} {
		l.add(dir)
	}
	if n := l.Unused(); n != 700000+400000 || len(l.all) != 3 {
		t.Errorf("%d bytes of %d", n, len(l.all))
	}
	gone := group(map[string]string{"memory.max": "90000\n"})
	l.add(gone)
	if err := os.WriteFile(filepath.Join(gone, "memory.max"), []byte("max\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if l.add(gone); len(l.all) != 3 {
		t.Errorf("a limit that was taken away is kept: %d", len(l.all))
	}
	if err := os.RemoveAll(one); err != nil {
		t.Fatal(err)
	}
	if n := l.Unused(); n != 400000 || len(l.all) != 2 {
		t.Errorf("%d bytes of %d after one has ended", n, len(l.all))
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
