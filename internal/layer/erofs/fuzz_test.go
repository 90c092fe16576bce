package erofs_test

import (
	"bytes"
	"testing"

	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/toc"
	"dewpoint/testkit/treetest"
)

// FuzzOpenIndex asks what claims to be an index for names and for places in the tar.
func FuzzOpenIndex(f *testing.F) {
	for _, c := range treetest.Cases() {
		if len(c.Tar) > 8<<10 {
			continue
		}
		list, err := toc.Read(bytes.NewReader(c.Tar))
		if err != nil {
			continue
		}
		var w bytes.Buffer
		if err := erofs.Build(&w, list, erofs.Options{DataSize: int64(len(c.Tar)),
			Data: bytes.NewReader(c.Tar)}); err == nil {
			f.Add(w.Bytes(), uint64(38))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, nid uint64) {
		x, err := erofs.OpenIndex(bytes.NewReader(b))
		if err != nil {
			return
		}
		_ = x.Names(map[uint64]string{nid: "", nid + 1: ""})
		file, err := x.File(nid)
		if err != nil || file == nil {
			return
		}
		for _, from := range []int64{0, file.Size / 2, file.Size - 100} {
			ranges, err := file.Ranges(from, from+100)
			if err != nil {
				continue
			}
			for _, r := range ranges {
				if r.Length <= 0 || r.File < 0 || r.File+r.Length > file.Size || r.Data < 0 {
					t.Fatalf("%+v of a file of %d bytes", r, file.Size)
				}
			}
		}
	})
}
