package treetest

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"strings"
	"time"
)

// Archive makes tars, also such as no library writes. The zero value is empty.
type Archive struct {
	buf bytes.Buffer
}

// Time is the modification time of entries that are given none.
var Time = time.Unix(1_600_000_000, 0)

// Add appends an entry as archive/tar writes it, in PAX format where needed.
func (a *Archive) Add(h tar.Header, body string) *Archive {
	if h.ModTime.IsZero() {
		h.ModTime = Time
	}
	if h.ModTime.Nanosecond() != 0 || h.PAXRecords != nil {
		h.Format = tar.FormatPAX
	}
	if h.Mode == 0 {
		h.Mode = map[bool]int64{true: 0o755, false: 0o644}[h.Typeflag == tar.TypeDir]
	}
	if h.Typeflag == 0 {
		h.Typeflag = tar.TypeReg
	}
	h.Size = int64(len(body))
	w := tar.NewWriter(&a.buf)
	if err := w.WriteHeader(&h); err != nil {
		panic(fmt.Sprintf("header %q: %v", h.Name, err))
	}
	if _, err := io.WriteString(w, body); err != nil {
		panic(err)
	}
	if err := w.Flush(); err != nil {
		panic(err)
	}
	return a
}

// File, Dir, Symlink and Link append an entry with the usual attributes.
func (a *Archive) File(name, body string) *Archive { return a.Add(tar.Header{Name: name}, body) }

func (a *Archive) Dir(name string) *Archive {
	return a.Add(tar.Header{Name: name + "/", Typeflag: tar.TypeDir}, "")
}

func (a *Archive) Symlink(name, target string) *Archive {
	return a.Add(tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777}, "")
}

func (a *Archive) Link(name, target string) *Archive {
	return a.Add(tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: target}, "")
}

// Bytes returns the archive with its end marker.
func (a *Archive) Bytes() []byte {
	return append(bytes.Clone(a.buf.Bytes()), make([]byte, 1024)...)
}

// Raw is a header block, field by field; empty fields are left NUL.
type Raw struct {
	Name, Link, Magic, Prefix string
	Mode, UID, GID, Size      string
	Mtime, Major, Minor       string
	Type                      byte
	At                        map[int]string // more bytes, by offset
}

// Magics of the formats.
const (
	MagicUstar = "ustar\x0000"
	MagicGNU   = "ustar  \x00"
)

// Raw appends a header and its contents, padded.
func (a *Archive) Raw(r Raw, body string) *Archive {
	b := make([]byte, 512)
	if r.Size == "" {
		r.Size = fmt.Sprintf("%011o", len(body))
	}
	for _, f := range []struct {
		at int
		s  string
	}{
		{0, r.Name}, {100, r.Mode}, {108, r.UID}, {116, r.GID}, {124, r.Size}, {136, r.Mtime}, {157, r.Link},
		{257, r.Magic}, {329, r.Major}, {337, r.Minor}, {345, r.Prefix},
	} {
		copy(b[f.at:], f.s)
	}
	for at, s := range r.At {
		copy(b[at:], s)
	}
	b[156] = r.Type
	copy(b[148:156], "        ")
	var sum int
	for _, c := range b {
		sum += int(c)
	}
	copy(b[148:156], fmt.Sprintf("%06o\x00 ", sum))
	a.buf.Write(b)
	return a.Body(body)
}

// Body appends contents, padded.
func (a *Archive) Body(s string) *Archive {
	a.buf.WriteString(s)
	a.buf.Write(make([]byte, -len(s)&511))
	return a
}

// PAX appends an extended header of type x or g with the records, in order.
func (a *Archive) PAX(typ byte, records ...string) *Archive {
	var b strings.Builder
	for i := 0; i < len(records); i += 2 {
		b.WriteString(record(records[i], records[i+1]))
	}
	return a.Raw(Raw{Name: "pax", Magic: MagicUstar, Type: typ}, b.String())
}

func record(key, value string) string {
	n := len(key) + len(value) + 3
	for len(fmt.Sprint(n))+len(key)+len(value)+3 != n {
		n++
	}
	return fmt.Sprintf("%d %s=%s\n", n, key, value)
}

// Base256 encodes a number as GNU tar does what octal digits cannot hold.
func Base256(n int64, width int) string {
	b := make([]byte, width)
	for i := width - 1; i >= 0; i-- {
		b[i] = byte(n)
		n >>= 8
	}
	b[0] |= 0x80
	return string(b)
}
