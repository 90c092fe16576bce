package erofs

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"dewpoint/internal/layer/toc"
)

// attrs are an inode's extended attributes as they lie behind it.
type attrs struct {
	shared []uint32 // places of shared entries, in units of 4 bytes
	inline [][]byte // other entries, encoded
	size   int      // of all of it, with the header; 0 for none
}

const (
	attrHeader = 12
	maxShared  = 255
	maxAttrs   = attrHeader + 4*(1<<16-2)
	// overlayfs hides what lower layers have in a directory with this one.
	opaqueName, opaqueValue = "trusted.overlay.opaque", "y"
)

var attrPrefixes = []struct {
	prefix string
	index  byte
}{
	{"user.", 1},
	{"system.posix_acl_access", 2},
	{"system.posix_acl_default", 3},
	{"trusted.", 4},
	{"security.", 6},
}

func (p *plan) attrSize(id int32) int {
	if a := p.place[id].attrs; a >= 0 {
		return p.attrs[a].size
	}
	return 0
}

// planAttrs encodes the attributes of all names that have any, and decides
// which lie in the shared area: those that several inodes have.
func (p *plan) planAttrs() error {
	count := map[string]uint32{}
	owners := []int32{}
	for i := range p.tree.Names {
		name := &p.tree.Names[i]
		if name.Node < 0 || p.place[name.Node].attrs >= 0 {
			continue
		}
		node := &p.tree.Nodes[name.Node]
		opaque := name.Hides && node.Type == toc.Directory
		if len(node.Xattrs) == 0 && !opaque {
			continue
		}
		entries, err := encodeAttrs(node, opaque)
		if err != nil {
			return &toc.Error{Name: name.Path, Offset: -1, Err: err}
		}
		if len(entries) == 0 {
			continue
		}
		for _, e := range entries {
			count[string(e)]++
		}
		p.place[name.Node].attrs = int32(len(p.attrs))
		p.attrs = append(p.attrs, attrs{inline: entries})
		owners = append(owners, int32(i))
	}
	where := map[string]uint32{}
	for i := range p.attrs {
		if err := p.share(&p.attrs[i], count, where); err != nil {
			return &toc.Error{Name: p.tree.Names[owners[i]].Path, Offset: -1, Err: err}
		}
	}
	return nil
}

// share moves the entries that others have too to the shared area.
func (p *plan) share(a *attrs, count, where map[string]uint32) error {
	inline := a.inline[:0]
	a.size = attrHeader
	for _, e := range a.inline {
		if count[string(e)] < 2 || len(a.shared) == maxShared {
			inline = append(inline, e)
			a.size += len(e)
			continue
		}
		at, ok := where[string(e)]
		if !ok {
			at = uint32(len(p.shared) / 4)
			where[string(e)] = at
			p.shared = append(p.shared, e...)
		}
		a.shared = append(a.shared, at)
		a.size += 4
	}
	if a.inline = inline; a.size > maxAttrs {
		return fmt.Errorf("%w: extended attributes of %d bytes", ErrTooLarge, a.size)
	}
	return nil
}

// encodeAttrs returns a node's attributes as entries, in the order of their names.
func encodeAttrs(n *toc.Node, opaque bool) ([][]byte, error) {
	var out [][]byte
	for name, value := range n.Xattrs {
		if strings.HasPrefix(name, "system.posix_acl_") {
			var err error
			if value, err = normalACL(name, value, n); err != nil {
				return nil, err
			}
			if value == "" {
				continue
			}
		}
		e, err := encodeAttr(name, value)
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	if opaque {
		e, err := encodeAttr(opaqueName, opaqueValue)
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	slices.SortFunc(out, slices.Compare)
	return out, nil
}

func encodeAttr(name, value string) ([]byte, error) {
	for _, p := range attrPrefixes {
		rest, ok := strings.CutPrefix(name, p.prefix)
		if !ok {
			continue
		}
		if len(rest) > 255 || len(value) > toc.MaxXattr {
			return nil, fmt.Errorf("%w: extended attribute %q of %d bytes", ErrTooLarge, name, len(value))
		}
		e := make([]byte, align(int64(4+len(rest)+len(value)), 4))
		e[0], e[1] = byte(len(rest)), p.index
		binary.LittleEndian.PutUint16(e[2:], uint16(len(value)))
		copy(e[4:], rest)
		copy(e[4+len(rest):], value)
		return e, nil
	}
	return nil, fmt.Errorf("%w: extended attribute %q of no known namespace", toc.ErrCorrupt, name)
}

// appendTo appends the attributes as they lie behind the inode.
func (a *attrs) appendTo(b []byte) []byte {
	var head [attrHeader]byte
	head[4] = byte(len(a.shared))
	b = append(b, head[:]...)
	for _, at := range a.shared {
		b = binary.LittleEndian.AppendUint32(b, at)
	}
	for _, e := range a.inline {
		b = append(b, e...)
	}
	return b
}
