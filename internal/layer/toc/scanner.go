package toc

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"
)

// Scanner reads a tar's entries one after the other. It reads headers only,
// through a small window, and skips contents, which need not be there yet. It
// is not safe for concurrent use.
type Scanner struct {
	r    io.ReaderAt
	win  []byte // bytes of the archive from winOff on
	off  int64  // of win
	next int64  // where the next header lies
	data int64  // where the current entry's contents begin, past any sparse map
	end  int64  // where the last entry's contents end
	err  error  // sticky

	head    int64  // where the current header lies, and
	name    []byte // its entry's name, for errors
	pend    pending
	scratch []byte
	entries int
	meta    int64
	mem     arena
	seen    func(from, to int64) // told of the bytes that headers and sparse maps take; nil but for MakeTable
}

// pending is what special entries say of the entry that follows them.
type pending struct {
	pax                *pax
	longName, longLink []byte
}

// A window is minWindow bytes after contents were skipped and grows up to
// maxWindow while headers follow closely.
const (
	minWindow = 4 << 10
	maxWindow = 64 << 10
)

var errTruncated = fmt.Errorf("%w: %w", ErrCorrupt, io.ErrUnexpectedEOF)

// NewScanner returns a Scanner of the tar that r holds. r.ReadAt may block until
// the bytes asked for have arrived; it returns io.EOF at the tar's end only.
func NewScanner(r io.ReaderAt) *Scanner { return &Scanner{r: r} }

// Next returns the next entry, or io.EOF at the end-of-archive marker or where
// the data ends after a whole entry. The entry is the caller's to keep. Any
// other error is an *Error, and final.
func (s *Scanner) Next() (*Entry, error) {
	if s.err != nil {
		return nil, s.err
	}
	e, err := s.advance()
	s.err = err
	return e, err
}

// Offset is how far into the tar the entries returned so far reach, contents
// and padding included.
func (s *Scanner) Offset() int64 { return s.next }

func (s *Scanner) advance() (*Entry, error) {
	s.pend = pending{}
	for {
		b, err := s.header()
		if err != nil {
			return nil, err
		}
		var h header
		if !h.parse(b, &s.scratch) {
			return nil, s.fail(ErrCorrupt, "bad header")
		}
		s.data = s.head + blockSize
		switch h.typeflag {
		case 'x', 'g', 'L', 'K':
			err = s.special(&h)
		default:
			var e *Entry
			if e, err = s.entry(&h, b); e != nil {
				return e, nil
			}
			s.pend = pending{}
		}
		if err != nil {
			return nil, err
		}
	}
}

// header returns the next header block, or io.EOF at the archive's end.
func (s *Scanner) header() (block, error) {
	s.head, s.name = s.next, nil
	b, err := s.at(s.head, blockSize)
	if err == io.EOF {
		return nil, s.checkEnd()
	}
	if err != nil || !block(b).zero() {
		s.note(s.head, blockSize)
		return b, err
	}
	if b, err = s.at(s.head+blockSize, blockSize); err != nil {
		return nil, err // io.EOF: one zero block will do
	}
	if !block(b).zero() {
		return nil, s.fail(ErrCorrupt, "data after a zero block")
	}
	return nil, io.EOF
}

// checkEnd tells an archive without end marker from one whose last contents
// are cut short. The padding after them may be missing.
func (s *Scanner) checkEnd() error {
	if s.end == 0 {
		return io.EOF
	}
	var one [1]byte
	n, err := s.r.ReadAt(one[:], s.end-1)
	switch {
	case n == 1:
		return io.EOF
	case err == nil || err == io.EOF:
		return s.fail(errTruncated, "")
	}
	return s.fail(err, "")
}

// at returns n bytes of the archive, valid until the next call. It gives io.EOF
// itself if the archive ends at or before off.
func (s *Scanner) at(off int64, n int) ([]byte, error) {
	if end := s.off + int64(len(s.win)); off < s.off || off+int64(n) > end {
		if err := s.fill(off, n, end); err != nil {
			return nil, err
		}
	}
	i := off - s.off
	return s.win[i : i+int64(n)], nil
}

func (s *Scanner) fill(off int64, n int, end int64) error {
	size := minWindow
	if off-end < minWindow/2 {
		size = min(max(2*len(s.win), minWindow), maxWindow)
	}
	if cap(s.win) < size {
		s.win = make([]byte, size)
	}
	got, err := s.r.ReadAt(s.win[:size], off)
	s.win, s.off = s.win[:got], off
	switch {
	case got >= n:
		return nil
	case err == nil:
		return s.fail(io.ErrNoProgress, "")
	case err != io.EOF:
		return s.fail(err, "")
	case got == 0:
		return io.EOF
	}
	return s.fail(errTruncated, "")
}

// nextBytes returns the next n bytes of the current entry's data area.
func (s *Scanner) nextBytes(n int) ([]byte, error) {
	b, err := s.at(s.data, n)
	if err == io.EOF {
		err = s.fail(errTruncated, "")
	}
	s.note(s.data, int64(n))
	s.data += int64(n)
	return b, err
}

// note tells of n bytes of the archive that entries are made of.
func (s *Scanner) note(off, n int64) {
	if s.seen != nil {
		s.seen(off, off+n)
	}
}

// fail makes the Error for the current entry.
func (s *Scanner) fail(err error, why string) error {
	return &Error{Name: string(s.name[:min(len(s.name), MaxName)]), Offset: s.head, Why: why, Err: err}
}

// finish sets where the current entry's contents end and the next header lies.
func (s *Scanner) finish(size int64) error {
	if size < 0 || size > math.MaxInt64-s.data-blockSize {
		return s.fail(ErrCorrupt, "impossible size")
	}
	s.next = s.data + (size+blockSize-1)&^(blockSize-1)
	if size > 0 {
		s.end = s.data + size
	}
	return nil
}

// special reads an entry that describes the next one. A global header is
// checked and ignored, with what came before it, as containerd does.
func (s *Scanner) special(h *header) error {
	if err := s.finish(h.size); err != nil {
		return err
	}
	if h.size > MaxHeader {
		return s.fail(ErrLimit, "extended header too long")
	}
	s.note(s.data, h.size)
	buf := make([]byte, h.size)
	if n, err := s.readAt(buf, s.data); n < len(buf) {
		if err == io.EOF || err == nil {
			err = errTruncated
		}
		return s.fail(err, "")
	}
	switch h.typeflag {
	case 'L':
		s.pend.longName = cString(buf)
		return nil
	case 'K':
		s.pend.longLink = cString(buf)
		return nil
	}
	p, ok := parsePAX(buf)
	if !ok {
		return s.fail(ErrCorrupt, "bad PAX header")
	}
	if s.pend.pax = p; h.typeflag == 'g' {
		s.pend = pending{}
	}
	return nil
}

// readAt fills b, from the window where that has it.
func (s *Scanner) readAt(b []byte, off int64) (int, error) {
	if off >= s.off && off+int64(len(b)) <= s.off+int64(len(s.win)) {
		return copy(b, s.win[off-s.off:]), nil
	}
	return s.r.ReadAt(b, off)
}

// entry makes the Entry of a header, with what preceded it. It returns nil for
// one that names nothing in the layer.
func (s *Scanner) entry(h *header, b block) (*Entry, error) {
	if p := s.pend.pax; p != nil && !p.apply(h) {
		return nil, s.fail(ErrCorrupt, "bad PAX header")
	}
	if len(s.pend.longName) > 0 {
		h.name = s.pend.longName
	}
	if len(s.pend.longLink) > 0 {
		h.link = s.pend.longLink
	}
	s.name = h.name
	t, ok := entryType(h)
	if !ok {
		return nil, s.fail(ErrCorrupt, fmt.Sprintf("unknown entry type %q", h.typeflag))
	}
	if h.size < 0 {
		return nil, s.fail(ErrCorrupt, "impossible size")
	}
	e := s.mem.entry()
	*e = Entry{Type: t}
	if err := s.contents(e, h, b); err != nil {
		return nil, err
	}
	if s.entries++; s.entries > MaxEntries {
		return nil, s.fail(ErrLimit, "too many entries")
	}
	if keep, err := s.identify(e, h); err != nil || !keep {
		return nil, err
	}
	if e.Type == Whiteout || e.Type == Opaque {
		*e = Entry{Name: e.Name, Type: e.Type}
	} else if err := s.describe(e, h); err != nil {
		return nil, err
	}
	if s.meta += int64(len(e.Name) + len(e.Link)); s.meta > MaxMetadata {
		return nil, s.fail(ErrLimit, "too much metadata")
	}
	return e, nil
}

func entryType(h *header) (Type, bool) {
	switch h.typeflag {
	case 0:
		if len(h.name) > 0 && h.name[len(h.name)-1] == '/' {
			return Directory, true
		}
		return Regular, true
	case '0', 'S':
		return Regular, true
	case '1':
		return Hardlink, true
	case '2':
		return Symlink, true
	case '3':
		return Char, true
	case '4':
		return Block, true
	case '5':
		return Directory, true
	case '6':
		return Fifo, true
	}
	return 0, false
}

// contents finds out where the entry's bytes lie and where the next header is.
func (s *Scanner) contents(e *Entry, h *header, b block) error {
	if e.Type != Regular {
		if p := s.pend.pax; p != nil && p.sparseMajor+p.sparseMinor+p.sparseMap != "" {
			return s.fail(ErrCorrupt, "sparse map of what is no file")
		}
		return s.finish(0)
	}
	size, segs, sparse, err := s.sparse(h, b, s.pend.pax)
	if err != nil {
		return err
	}
	if err := s.finish(h.size); err != nil {
		return err
	}
	switch {
	case sparse:
		ranges, ok := s.ranges(segs, size, s.data, h.size)
		if !ok {
			return s.fail(ErrCorrupt, "sparse map does not fit the contents")
		}
		e.Size, e.Ranges = size, ranges
		s.meta += int64(len(ranges)) * 24
	case h.size > 0:
		e.Size, e.Ranges = h.size, s.mem.oneRange(Range{Data: s.data, Length: h.size})
	}
	if e.Size > MaxFileSize || e.Size < 0 {
		return s.fail(ErrLimit, fmt.Sprintf("file of %d bytes", e.Size))
	}
	return nil
}

// describe fills in the entry's attributes.
func (s *Scanner) describe(e *Entry, h *header) error {
	var ok1, ok2 bool
	e.UID, ok1 = userID(h.uid)
	e.GID, ok2 = userID(h.gid)
	if !ok1 || !ok2 {
		return s.fail(ErrCorrupt, fmt.Sprintf("impossible owner %d:%d", h.uid, h.gid))
	}
	e.Mode = uint32(h.mode) & 0o7777
	e.ModTime = boundTime(h.sec, h.nsec)
	switch e.Type {
	case Symlink:
		e.Mode = 0o777
	case Char, Block:
		if h.major < 0 || h.major >= 1<<12 || h.minor < 0 || h.minor >= 1<<20 {
			return s.fail(ErrCorrupt, fmt.Sprintf("impossible device number %d:%d", h.major, h.minor))
		}
		e.Major, e.Minor = uint32(h.major), uint32(h.minor)
	}
	if p := s.pend.pax; p != nil && p.xattrs != nil {
		return s.setXattrs(e, p.xattrs)
	}
	return nil
}

// userID accepts what the kernel's 32-bit type can hold. Negative numbers wrap;
// -1 means "leave as it is" to the kernel, which is root for a new file.
func userID(n int64) (uint32, bool) {
	if n < math.MinInt32 || n > math.MaxUint32 {
		return 0, false
	}
	if id := uint32(n); id != math.MaxUint32 {
		return id, true
	}
	return 0, true
}

// boundTime gives the epoch for times before it or after the year 2262, as
// containerd does.
func boundTime(sec, nsec int64) time.Time {
	const second = int64(time.Second)
	const lastSec, lastNsec = math.MaxInt64 / second, math.MaxInt64 % second
	if sec < 0 || nsec < 0 || sec > lastSec || sec == lastSec && nsec > lastNsec {
		sec, nsec = 0, 0
	}
	return time.Unix(sec, nsec).UTC()
}

// setXattrs takes the attributes that containerd would set: none of trusted.*,
// none in namespaces the kernel does not have.
func (s *Scanner) setXattrs(e *Entry, all map[string]string) error {
	for k, v := range all {
		keep, valid := xattrKept(k, e.Type)
		if !valid || len(v) > MaxXattr {
			return s.fail(ErrCorrupt, fmt.Sprintf("impossible extended attribute %.300q of %d bytes", k, len(v)))
		}
		if !keep {
			continue
		}
		if e.Xattrs == nil {
			e.Xattrs = make(map[string]string)
		}
		e.Xattrs[k] = v
		s.meta += int64(len(k)+len(v)) + 64
	}
	return nil
}

func xattrKept(name string, t Type) (keep, valid bool) {
	ns, rest, found := strings.Cut(name, ".")
	switch {
	case ns == "trusted" && found:
		return false, true
	case len(name) > 255 || name == "":
		return false, false
	case !found:
		return false, true
	case ns == "user":
		return rest != "" && (t == Regular || t == Directory || t == Hardlink), rest != ""
	case ns == "security":
		return rest != "", rest != ""
	case name == "system.posix_acl_access", name == "system.posix_acl_default":
		return t != Symlink, true
	}
	return false, true
}

const (
	whiteoutPrefix = ".wh."
	opaqueMarker   = ".wh..wh..opq"
)

// identify sets the entry's names and turns AUFS's markers into their types.
// It reports false for what containerd ignores: entries of the root that are
// no directory, and AUFS's own files.
func (s *Scanner) identify(e *Entry, h *header) (bool, error) {
	name, err := s.clean(h.name)
	if err != nil {
		return false, err
	}
	dir, base := splitName(name)
	switch {
	case base == opaqueMarker:
		e.Name, e.Type = dir, Opaque
	case strings.HasPrefix(base, whiteoutPrefix+whiteoutPrefix):
		return false, nil
	case strings.HasPrefix(base, whiteoutPrefix):
		hidden := base[len(whiteoutPrefix):]
		if hidden == "" || hidden == "." || hidden == ".." {
			return false, s.fail(ErrUnsafe, "whiteout of no name")
		}
		e.Name, e.Type = joinName(dir, hidden), Whiteout
	case name == "" && e.Type != Directory:
		return false, nil
	default:
		e.Name = name
		err = s.setLink(e, h)
	}
	return true, err
}

func (s *Scanner) setLink(e *Entry, h *header) (err error) {
	switch e.Type {
	case Symlink:
		if len(h.link) == 0 || len(h.link) > MaxName {
			return s.fail(ErrCorrupt, fmt.Sprintf("symbolic link target of %d bytes", len(h.link)))
		}
		e.Link = s.mem.string(h.link)
	case Hardlink:
		if e.Link, err = s.clean(h.link); err != nil {
			return err
		}
		if e.Link == "" || e.Link == e.Name {
			return s.fail(ErrCorrupt, fmt.Sprintf("hard link to %q", h.link))
		}
	}
	return nil
}

// clean makes a name relative to the root: "/etc", "./etc/" and "a/../etc" are
// all "etc". It refuses names that climb above the root.
func (s *Scanner) clean(raw []byte) (string, error) {
	if len(raw) > MaxName {
		return "", s.fail(ErrCorrupt, fmt.Sprintf("name of %d bytes", len(raw)))
	}
	out, err := cleanName(s.mem.tmp[:0], raw)
	if err != nil {
		return "", s.fail(err, fmt.Sprintf("name %q", raw))
	}
	return s.mem.string(out), nil
}

var errClimbs = fmt.Errorf("%w: leaves the layer's root", ErrUnsafe)
var errLong = errors.New("component of a name too long")

// cleanName appends the cleaned form of raw to out, which is empty.
func cleanName(out, raw []byte) ([]byte, error) {
	for len(raw) > 0 {
		i := 0
		for i < len(raw) && raw[i] != '/' {
			i++
		}
		part := raw[:i]
		raw = raw[min(i+1, len(raw)):]
		switch {
		case i == 0 || i == 1 && part[0] == '.':
		case i == 2 && part[0] == '.' && part[1] == '.':
			if len(out) == 0 {
				return nil, errClimbs
			}
			out = out[:max(bytes.LastIndexByte(out, '/'), 0)]
		case i > MaxBaseName:
			return nil, fmt.Errorf("%w: %w", ErrCorrupt, errLong)
		default:
			if len(out) > 0 {
				out = append(out, '/')
			}
			out = append(out, part...)
		}
	}
	return out, nil
}

// splitName splits off the last component. The directory of "a" is "".
func splitName(name string) (dir, base string) {
	if i := strings.LastIndexByte(name, '/'); i >= 0 {
		return name[:i], name[i+1:]
	}
	return "", name
}

func joinName(dir, base string) string {
	if dir == "" {
		return base
	}
	return dir + "/" + base
}
