package upper

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const block = 512

// maxSpans bounds a sparse file's map: of one with more the zeros are written, and if that is not enough, it
// is written whole.
var maxSpans = 4096

// minHole is the smallest hole that is worth the headers of a sparse file.
const minHole = 64 << 10

// span is a run of a file's bytes that are there.
type span struct{ off, len int64 }

// contents writes a regular file that has some.
func (t *writer) contents(at string, h *tar.Header, st *syscall.Stat_t) error {
	f, err := os.OpenFile(at, os.O_RDONLY|unix.O_NOATIME, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	spans := []span{{0, h.Size}}
	blocks := st.Blocks * block
	if t.over != nil {
		blocks = 0 // a layer's file system does not say
	}
	if h.Size-blocks >= minHole {
		if spans, err = data(f, h.Size); err != nil {
			return fmt.Errorf("holes of %s: %w", at, err)
		}
	}
	if h.Size >= minHole && t.over == nil { // in a layer that was saved they are holes already
		less, err := t.withoutZeros(f, spans)
		if err != nil {
			return fmt.Errorf("zeros of %s: %w", at, err)
		}
		if len(less) <= maxSpans {
			spans = less
		}
	}
	if len(spans) > maxSpans || len(spans) == 1 && spans[0].len == h.Size {
		spans = []span{{0, h.Size}}
		t.info.Bytes += h.Size
		if err := t.tar.WriteHeader(h); err != nil {
			return fmt.Errorf("%s: %w", at, err)
		}
		return t.copy(t.tar, f, spans[0])
	}
	return t.sparse(f, h, spans)
}

// data are the runs of a file that are no holes, at block boundaries.
func data(f *os.File, size int64) ([]span, error) {
	var all []span
	for off := int64(0); off < size; {
		from, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // a hole up to the end
		}
		if err != nil {
			return nil, err
		}
		to, err := unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE)
		if err != nil {
			return nil, err
		}
		from, to = from&^(block-1), min(size, (to+block-1)&^(block-1))
		if n := len(all); n > 0 && from-(all[n-1].off+all[n-1].len) < minHole {
			all[n-1].len = to - all[n-1].off
		} else {
			all = append(all, span{from, to - from})
		}
		off = to
	}
	return all, nil
}

// withoutZeros leaves out of the spans what is nothing but zeros, minHole of them at least and as many to a
// boundary of minHole: databases write their logs and tables ahead, and overlayfs copies all that is no hole
// when such a file is opened for writing.
func (t *writer) withoutZeros(f *os.File, spans []span) ([]span, error) {
	var all []span
	piece := make([]byte, minHole)
	for _, s := range spans {
		for off, end := s.off, s.off+s.len; off < end; {
			next := min(end, off&^(minHole-1)+minHole)
			zero, err := false, t.ctx.Err()
			if next-off == minHole && err == nil {
				zero, err = isZero(f, off, piece)
			}
			if err != nil {
				return nil, err
			}
			switch n := len(all); {
			case zero:
			case n > 0 && all[n-1].off+all[n-1].len == off:
				all[n-1].len = next - all[n-1].off
			default:
				all = append(all, span{off, next - off})
			}
			off = next
		}
	}
	return all, nil
}

// isZero reports whether so many bytes as b has are zero. Of most others it reads the first alone.
func isZero(f *os.File, off int64, b []byte) (bool, error) {
	const first = 4 << 10
	for _, part := range [][]byte{b[:first], b[first:]} {
		if _, err := f.ReadAt(part, off); err != nil {
			return false, err
		}
		if !bytes.Equal(part, zeros[:len(part)]) {
			return false, nil
		}
		off += int64(len(part))
	}
	return true, nil
}

var zeros [minHole]byte

// sparse writes a file with holes in GNU's format 0.1, whose map is among the
// PAX records. archive/tar does not write such files, so both headers are ours.
func (t *writer) sparse(f *os.File, h *tar.Header, spans []span) error {
	if err := t.tar.Flush(); err != nil {
		return err
	}
	var there int64
	var m []string
	for _, s := range spans {
		there += s.len
		m = append(m, strconv.FormatInt(s.off, 10), strconv.FormatInt(s.len, 10))
	}
	t.info.Bytes += there
	records := sparseRecords(h, len(spans), strings.Join(m, ","))
	if err := t.extended(records); err != nil {
		return err
	}
	if err := t.rawHeader("GNUSparseFile", tar.TypeReg, h.Mode, there); err != nil {
		return err
	}
	for _, s := range spans {
		if err := t.copy(t.raw, f, s); err != nil {
			return err
		}
	}
	return t.pad(there)
}

// sparseRecords are a sparse file's PAX records.
func sparseRecords(h *tar.Header, n int, spans string) []byte {
	var b bytes.Buffer
	for _, r := range [][2]string{
		{"GNU.sparse.major", "0"}, {"GNU.sparse.minor", "1"}, {"GNU.sparse.name", h.Name},
		{"GNU.sparse.size", strconv.FormatInt(h.Size, 10)},
		{"GNU.sparse.numblocks", strconv.Itoa(n)}, {"GNU.sparse.map", spans},
		{"uid", strconv.Itoa(h.Uid)}, {"gid", strconv.Itoa(h.Gid)},
		{"mtime", fmt.Sprintf("%d.%09d", h.ModTime.Unix(), h.ModTime.Nanosecond())},
	} {
		record(&b, r[0], r[1])
	}
	for _, k := range slices.Sorted(maps.Keys(h.PAXRecords)) {
		record(&b, k, h.PAXRecords[k])
	}
	return b.Bytes()
}

// record appends one PAX record, whose length counts its own digits.
func record(b *bytes.Buffer, key, value string) {
	n := len(key) + len(value) + 3
	size := n + len(strconv.Itoa(n))
	if len(strconv.Itoa(size)) > len(strconv.Itoa(n)) {
		size++
	}
	fmt.Fprintf(b, "%d %s=%s\n", size, key, value)
}

func (t *writer) extended(records []byte) error {
	if err := t.rawHeader("PaxHeaders/sparse", tar.TypeXHeader, 0o644, int64(len(records))); err != nil {
		return err
	}
	if _, err := t.raw.Write(records); err != nil {
		return err
	}
	return t.pad(int64(len(records)))
}

// rawHeader writes one block of the ustar format. Sizes from 8 GiB on are in
// base 256, as GNU has them.
func (t *writer) rawHeader(name string, kind byte, mode, size int64) error {
	var b [block]byte
	copy(b[:100], name)
	copy(b[100:108], fmt.Sprintf("%07o", mode))
	copy(b[108:116], "0000000")
	copy(b[116:124], "0000000")
	if size < 1<<33 {
		copy(b[124:136], fmt.Sprintf("%011o", size))
	} else {
		for i, n := 135, size; i > 124; i, n = i-1, n>>8 {
			b[i] = byte(n)
		}
		b[124] = 0x80
	}
	copy(b[136:148], "00000000000")
	copy(b[148:156], "        ")
	b[156] = kind
	copy(b[257:265], "ustar\x0000")
	sum := 0
	for _, c := range b {
		sum += int(c)
	}
	copy(b[148:156], fmt.Sprintf("%06o\x00 ", sum))
	_, err := t.raw.Write(b[:])
	return err
}

func (t *writer) pad(written int64) error {
	if n := written % block; n > 0 {
		_, err := t.raw.Write(make([]byte, block-n))
		return err
	}
	return nil
}

// copy writes a span of f, all of it: a file that is shorter by now is an error.
func (t *writer) copy(w io.Writer, f *os.File, s span) error {
	const piece = 4 << 20
	for off, end := s.off, s.off+s.len; off < end; off += piece {
		if err := t.ctx.Err(); err != nil {
			return err
		}
		n := min(piece, end-off)
		if _, err := io.CopyN(w, io.NewSectionReader(f, off, n), n); err != nil {
			return fmt.Errorf("read %s: %w", f.Name(), err)
		}
	}
	return nil
}
