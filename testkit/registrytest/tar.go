package registrytest

import (
	"archive/tar"
	"bytes"
	"fmt"
	"math/rand/v2"
	"time"
)

// File is an entry for Tar.
type File struct {
	Name   string // a trailing slash makes a directory
	Body   string
	Mode   int64 // 0 is 0644, 0755 for directories
	Link   string
	Type   byte // a tar type flag; 0 is a regular file, or what Name and Link say
	Xattrs map[string]string
}

// Tar makes a layer's tar of the files, in their order.
func Tar(files ...File) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := f.header()
		if err := w.WriteHeader(h); err != nil {
			panic(err)
		}
		if h.Typeflag == tar.TypeReg {
			w.Write([]byte(f.Body))
		}
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}

func (f File) header() *tar.Header {
	h := &tar.Header{Name: f.Name, Mode: f.Mode, Linkname: f.Link, Typeflag: f.Type,
		ModTime: time.Unix(1_700_000_000, 0)}
	switch {
	case h.Typeflag != 0:
	case f.Name[len(f.Name)-1] == '/':
		h.Typeflag = tar.TypeDir
	case f.Link != "":
		h.Typeflag = tar.TypeSymlink
	default:
		h.Typeflag = tar.TypeReg
	}
	if h.Typeflag == tar.TypeReg {
		h.Size = int64(len(f.Body))
	}
	if h.Mode == 0 {
		h.Mode = 0o644
		if h.Typeflag == tar.TypeDir {
			h.Mode = 0o755
		}
	}
	for k, v := range f.Xattrs {
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords["SCHILY.xattr."+k] = v
	}
	return h
}

// RandomTar makes a tar of about size bytes in files regular files under dir/,
// the same for the same seed. It shrinks to about half when compressed.
func RandomTar(seed uint64, files, size int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	list := []File{{Name: "dir/"}}
	for n := range files {
		body := make([]byte, size/files)
		for i := 0; i+8 <= len(body); i += 8 {
			// four random bytes and four that repeat
			v := r.Uint32()
			copy(body[i:], []byte{byte(v), byte(v >> 8), byte(v >> 16), byte(v >> 24), 'd', 'e', 'w', ' '})
		}
		list = append(list, File{Name: fmt.Sprintf("dir/file%06d", n), Body: string(body)})
	}
	return Tar(list...)
}
