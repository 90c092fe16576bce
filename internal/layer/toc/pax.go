package toc

import (
	"bytes"
	"strconv"
	"strings"
)

// pax is what one PAX extended header says. An empty string is an absent
// record, as the format has it; only attributes may have empty values.
type pax struct {
	path, linkpath, size, uid, gid   string
	mtime, atime, ctime              string
	xattrs                           map[string]string
	sparseMajor, sparseMinor         string
	sparseMap, sparseBlocks          string
	sparseName, sparseSize, realSize string
}

const xattrRecord = "SCHILY.xattr."

// parsePAX reads the records of an extended header. It keeps no reference to b.
func parsePAX(b []byte) (*pax, bool) {
	p := &pax{}
	var pairs []string // of sparse format 0.0, which repeats two keys
	for len(b) > 0 {
		key, value, rest, ok := paxRecord(b)
		if !ok {
			return nil, false
		}
		b = rest
		switch k := string(key); k {
		case "GNU.sparse.offset", "GNU.sparse.numbytes":
			even := len(pairs)%2 == 0
			if even != (k == "GNU.sparse.offset") || bytes.IndexByte(value, ',') >= 0 {
				return nil, false
			}
			pairs = append(pairs, string(value))
		default:
			if !p.set(k, value) {
				return nil, false
			}
		}
	}
	if len(pairs) > 0 {
		p.sparseMap = strings.Join(pairs, ",")
	}
	return p, true
}

// set takes one record; it reports false if a name holds a NUL.
func (p *pax) set(key string, value []byte) bool {
	field := p.field(key)
	switch {
	case field != nil:
		*field = string(value)
		return (key != "path" && key != "linkpath") || bytes.IndexByte(value, 0) < 0
	case key == "uname" || key == "gname":
		return bytes.IndexByte(value, 0) < 0
	case strings.HasPrefix(key, xattrRecord):
		if p.xattrs == nil {
			p.xattrs = make(map[string]string)
		}
		p.xattrs[key[len(xattrRecord):]] = string(value)
	}
	return true
}

func (p *pax) field(key string) *string {
	switch key {
	case "path":
		return &p.path
	case "linkpath":
		return &p.linkpath
	case "size":
		return &p.size
	case "uid":
		return &p.uid
	case "gid":
		return &p.gid
	case "mtime":
		return &p.mtime
	case "atime":
		return &p.atime
	case "ctime":
		return &p.ctime
	case "GNU.sparse.major":
		return &p.sparseMajor
	case "GNU.sparse.minor":
		return &p.sparseMinor
	case "GNU.sparse.map":
		return &p.sparseMap
	case "GNU.sparse.numblocks":
		return &p.sparseBlocks
	case "GNU.sparse.name":
		return &p.sparseName
	case "GNU.sparse.size":
		return &p.sparseSize
	case "GNU.sparse.realsize":
		return &p.realSize
	}
	return nil
}

// paxRecord splits one "LENGTH KEY=VALUE\n" off b.
func paxRecord(b []byte) (key, value, rest []byte, ok bool) {
	digits, after, found := bytes.Cut(b, []byte{' '})
	if !found || len(digits) > 20 {
		return nil, nil, nil, false
	}
	n, err := strconv.ParseInt(string(digits), 10, 64)
	if err != nil || n < 5 || n > int64(len(b)) {
		return nil, nil, nil, false
	}
	n -= int64(len(digits) + 1)
	if n <= 0 || after[n-1] != '\n' {
		return nil, nil, nil, false
	}
	key, value, found = bytes.Cut(after[:n-1], []byte{'='})
	if !found || len(key) == 0 || bytes.IndexByte(key, 0) >= 0 {
		return nil, nil, nil, false
	}
	return key, value, after[n:], true
}

// apply overrides the header's fields with the records.
func (p *pax) apply(h *header) bool {
	if p.path != "" {
		h.name = []byte(p.path)
	}
	if p.linkpath != "" {
		h.link = []byte(p.linkpath)
	}
	ok := true
	num := func(dst *int64, s string) {
		if s == "" {
			return
		}
		n, err := strconv.ParseInt(s, 10, 64)
		*dst, ok = n, ok && err == nil
	}
	num(&h.size, p.size)
	num(&h.uid, p.uid)
	num(&h.gid, p.gid)
	for _, s := range []string{p.atime, p.ctime} {
		if s != "" {
			_, _, good := paxTime(s)
			ok = ok && good
		}
	}
	if p.mtime != "" {
		var good bool
		h.sec, h.nsec, good = paxTime(p.mtime)
		ok = ok && good
	}
	return ok
}

// paxTime reads "SECONDS[.FRACTION]"; digits beyond nanoseconds are dropped.
func paxTime(s string) (sec, nsec int64, ok bool) {
	whole, frac, _ := strings.Cut(s, ".")
	sec, err := strconv.ParseInt(whole, 10, 64)
	if err != nil {
		return 0, 0, false
	}
	scale := int64(100_000_000)
	for _, c := range []byte(frac) {
		if c < '0' || c > '9' {
			return 0, 0, false
		}
		nsec += int64(c-'0') * scale
		scale /= 10
	}
	if whole[0] == '-' {
		nsec = -nsec
	}
	return sec, nsec, true
}
