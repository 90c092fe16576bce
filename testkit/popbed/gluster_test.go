package popbed

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// homes are the bricks that hold a file's bytes, and those that only point to
// another brick.
func (b *Bed) homes(t *testing.T, name string) (data, pointers []int) {
	t.Helper()
	for i, dir := range b.Bricks() {
		info, err := os.Lstat(filepath.Join(dir, name))
		if err != nil {
			continue
		}
		if info.Mode() == fs.ModeSticky {
			pointers = append(pointers, i)
		} else {
			data = append(data, i)
		}
	}
	return data, pointers
}

// testHashes shows what the store's temporary names rely on: GlusterFS hashes
// .NAME.SUFFIX as NAME, so that the rename to NAME moves and points nothing;
// and that other names do not have this.
func testHashes(t *testing.T, b *Bed) {
	away, used := 0, map[int]bool{}
	for n := range 12 {
		hex := fmt.Sprintf("%x", sha256.Sum256([]byte{byte(n)}))
		name := hex + ".data"
		for _, temporary := range []string{"." + name + ".tmp1", name + ".tmp1"} {
			b.write(t, 0, temporary, "x")
			before, _ := b.homes(t, temporary)
			if err := os.Rename(filepath.Join(b.Nodes[0].Store, temporary),
				filepath.Join(b.Nodes[0].Store, name)); err != nil {
				t.Fatal(err)
			}
			after, pointers := b.homes(t, name)
			if len(before) != 1 || len(after) != 1 || before[0] != after[0] {
				t.Fatalf("%s was on bricks %v, %s is on %v", temporary, before, name, after)
			}
			used[after[0]] = true
			if temporary[0] != '.' {
				away += len(pointers)
			} else if len(pointers) > 0 {
				t.Errorf("%s needs a pointer on brick %v", name, pointers)
			}
			b.reads(t, 1, name, "x")
			if err := os.Remove(filepath.Join(b.Nodes[0].Store, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if away == 0 || len(used) != bricks {
		t.Errorf("%d renames of other names needed pointers, and bricks %v were used: this shows nothing", away,
			used)
	}
}
