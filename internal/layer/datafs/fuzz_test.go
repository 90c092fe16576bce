package datafs

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/testkit/mounttest"
	"dewpoint/testkit/treetest"
)

// FuzzIndex reads a tree of what claims to be an index, as the kernel would ask for it.
func FuzzIndex(f *testing.F) {
	dir := f.TempDir()
	for _, c := range treetest.Cases() {
		if len(c.Tar) > 8<<10 {
			continue
		}
		data := filepath.Join(dir, "data")
		if err := os.WriteFile(data, c.Tar, 0o600); err != nil {
			f.Fatal(err)
		}
		files, err := mounttest.Layer(dir, data, false)
		if err != nil {
			f.Fatal(err)
		}
		b, err := os.ReadFile(files.Index)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := openIndex(bytes.NewReader(b), int64(len(b)))
		if err != nil {
			return
		}
		todo, seen := []uint32{x.root}, map[uint32]bool{x.root: true}
		for ; len(todo) > 0 && len(seen) < 100; todo = todo[1:] {
			n, err := x.inode(todo[0])
			if err != nil {
				continue
			}
			readAll(t, x, &n)
			left := 100
			_ = x.list(&n, 0, func(nid uint32, _ uint64, _ byte, name string) bool {
				_, _ = x.lookup(&n, name)
				if !seen[nid] {
					seen[nid] = true
					todo = append(todo, nid)
				}
				left--
				return left > 0
			})
		}
	})
}

// readAll reads what an inode has besides names.
func readAll(t *testing.T, x *index, n *inode) {
	_, _ = x.link(n)
	_ = x.attrs(n, func(string, []byte) bool { return true })
	for _, off := range []int64{0, 511, n.size / 2, n.size - 1} {
		parts, err := x.parts(nil, n, max(off, 0), maxRead)
		if err != nil {
			continue
		}
		sum := int64(0)
		for _, p := range parts {
			if p.n <= 0 || p.off < 0 {
				t.Fatalf("%+v", p)
			}
			sum += int64(p.n)
		}
		if want := min(maxRead, n.size-max(off, 0)); sum != max(want, 0) {
			t.Fatalf("%d bytes of %d from %d on", sum, n.size, off)
		}
	}
}

// FuzzMessage reads a packet of the other process.
func FuzzMessage(f *testing.F) {
	f.Add((&message{kind: 1, number: 3, from: 5, to: 7, id: strings.Repeat("0a", 32)}).encode())
	f.Add(make([]byte, messageSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMessage(b)
		if err != nil {
			return
		}
		back, err := decodeMessage(m.encode())
		if err != nil || back.kind != m.kind || back.flags != m.flags || back.number != m.number ||
			back.from != m.from || back.to != m.to || back.id != m.id || m.id != "" && !validID(m.id) {
			t.Fatalf("%+v, then %+v, %v", m, back, err)
		}
	})
}

// FuzzRequest reads a request of the kernel.
func FuzzRequest(f *testing.F) {
	b := make([]byte, 80)
	binary.NativeEndian.PutUint32(b, 80)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		r, ok := parseRequest(b)
		if !ok {
			return
		}
		if strings.ContainsRune(r.name(), 0) {
			t.Fatalf("%q", r.name())
		}
		if in, ok := r.readIn(); ok && (in.off < 0 || in.size > maxRead || in.off+int64(in.size) < in.off) {
			t.Fatalf("%+v", in)
		}
	})
}
