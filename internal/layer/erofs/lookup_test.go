package erofs_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/erofs"
	"dewpoint/testkit/treetest"
)

// What the kernel shows of a mounted file is what the index says of its inode
// number: the bytes of its ranges are in the tar where they are said to be, and
// between the ranges of what is all in the tar are zeros.
func TestIndexLeadsFromInodeToTar(t *testing.T) {
	for _, c := range treetest.Cases() {
		t.Run(c.Name, func(t *testing.T) { followInodes(t, c.Tar) })
	}
}

func followInodes(t *testing.T, tar []byte) {
	data := writeTar(t, tar)
	root := mounted(t, data)
	f, err := os.Open(data + ".index")
	check(t, err)
	defer f.Close()
	x, err := erofs.OpenIndex(f)
	check(t, err)
	names := map[uint64]string{}
	check(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		check(t, unix.Lstat(path, &st))
		names[st.Ino] = ""
		file, err := x.File(st.Ino)
		check(t, err)
		if (file != nil) != (st.Mode&unix.S_IFMT == unix.S_IFREG) {
			t.Errorf("%s: mode %o, file %v", path, st.Mode, file)
		}
		if file != nil {
			compareRanges(t, path, file, tar, st.Size)
		}
		return nil
	}))
	check(t, x.Names(names))
	for ino, name := range names {
		var st unix.Stat_t
		check(t, unix.Lstat(filepath.Join(root, name), &st))
		if st.Ino != ino {
			t.Errorf("inode %d is said to be %q, which is %d", ino, name, st.Ino)
		}
	}
}

func compareRanges(t *testing.T, path string, file *erofs.File, tar []byte, size int64) {
	t.Helper()
	want, err := os.ReadFile(path)
	check(t, err)
	if file.Size != size || size != int64(len(want)) {
		t.Errorf("%s: %d bytes, the index says %d", path, size, file.Size)
	}
	const page = 4096
	for from := int64(0); from < size; from += page {
		ranges, err := file.Ranges(from, from+page)
		check(t, err)
		for _, r := range ranges {
			if r.File < from || r.File+r.Length > min(from+page, size) {
				t.Fatalf("%s: range %+v of the page at %d", path, r, from)
			}
			if !bytes.Equal(want[r.File:r.File+r.Length], tar[r.Data:r.Data+r.Length]) {
				t.Fatalf("%s: bytes at %d are not those at %d of the tar", path, r.File, r.Data)
			}
		}
	}
}

// Files whose contents lie in the tar in one piece are found whole.
func TestIndexFindsWholeFiles(t *testing.T) {
	var a treetest.Archive
	body := treetest.Text(100_001)
	a.Dir("d").File("d/a", body).File("b", "x").Link("c", "d/a").File("end", "")
	root := mounted(t, writeTar(t, a.Bytes()))
	for _, name := range []string{"d/a", "c"} {
		var st unix.Stat_t
		check(t, unix.Lstat(filepath.Join(root, name), &st))
		x, err := erofs.OpenIndex(bytes.NewReader(index(t, a.Bytes())))
		check(t, err)
		f, err := x.File(st.Ino)
		check(t, err)
		got, err := f.Ranges(0, 1<<40)
		check(t, err)
		if len(got) != 1 || got[0].Length != int64(len(body)) || got[0].Data != 1024 {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// An image that is cut or damaged gives errors, not wrong places beyond its end.
func TestIndexRefusesDamage(t *testing.T) {
	var a treetest.Archive
	a.Dir("d").File("d/a", treetest.Text(9000))
	whole := index(t, a.Bytes())
	for n := 0; n < len(whole); n += 100 {
		if _, err := erofs.OpenIndex(bytes.NewReader(whole[:min(n, 1535)])); err == nil {
			t.Errorf("%d bytes were taken for an index", n)
		}
	}
	if _, err := erofs.OpenIndex(bytes.NewReader(make([]byte, 4096))); !errors.Is(err, erofs.ErrIndex) {
		t.Errorf("zeros: %v", err)
	}
	for i := 1536; i < len(whole); i++ {
		bad := bytes.Clone(whole)
		bad[i] ^= 0xff
		x, err := erofs.OpenIndex(bytes.NewReader(bad))
		check(t, err)
		for nid := range uint64(20) {
			if f, err := x.File(nid); err == nil && f != nil {
				f.Ranges(0, 1<<13)
			}
		}
		x.Names(map[uint64]string{1 << 40: ""})
	}
}
