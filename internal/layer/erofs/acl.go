package erofs

import (
	"encoding/binary"
	"fmt"

	"dewpoint/internal/layer/toc"
)

// Tags of the entries of a POSIX access control list, in the order they have
// to stand in.
const (
	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclGroup    = 0x08
	aclMask     = 0x10
	aclOther    = 0x20

	aclVersion = 2
	aclEntry   = 8
)

// normalACL returns an access control list as a file has it after the list was
// set and then the file's mode: its own three classes follow the mode, and a
// list that says no more than the mode is dropped. So does one of an unknown
// version. A list that the kernel would refuse to set is an error.
func normalACL(name, value string, n *toc.Node) (string, error) {
	b := []byte(value)
	if len(b) < 4 || len(b)%aclEntry != 4 {
		return "", fmt.Errorf("%w: access control list of %d bytes", toc.ErrCorrupt, len(b))
	}
	if binary.LittleEndian.Uint32(b) != aclVersion || len(b) == 4 {
		return "", nil
	}
	isDefault := name == "system.posix_acl_default"
	if isDefault && n.Type != toc.Directory {
		return "", fmt.Errorf("%w: default access control list of a %s", toc.ErrCorrupt, n.Type)
	}
	mask, named, err := checkACL(b[4:])
	if err != nil {
		return "", err
	}
	if isDefault {
		return string(b), nil
	}
	if !mask && !named {
		return "", nil
	}
	for e := b[4:]; len(e) > 0; e = e[aclEntry:] {
		switch tag := binary.LittleEndian.Uint16(e); {
		case tag == aclUserObj:
			setPerm(e, n.Mode>>6)
		case tag == aclMask, tag == aclGroupObj && !mask:
			setPerm(e, n.Mode>>3)
		case tag == aclOther:
			setPerm(e, n.Mode)
		}
	}
	return string(b), nil
}

func setPerm(e []byte, perm uint32) { binary.LittleEndian.PutUint16(e[2:], uint16(perm&7)) }

// checkACL checks that the entries are what the kernel accepts, and clears the
// ids of those that have none.
func checkACL(b []byte) (mask, named bool, err error) {
	bad := fmt.Errorf("%w: access control list out of order", toc.ErrCorrupt)
	last := uint16(0)
	seen := uint16(0)
	for ; len(b) > 0; b = b[aclEntry:] {
		tag, perm := binary.LittleEndian.Uint16(b), binary.LittleEndian.Uint16(b[2:])
		repeats := tag == last && (tag == aclUser || tag == aclGroup)
		if perm > 7 || tag < last || tag == last && !repeats || !oneOf(tag) {
			return false, false, bad
		}
		if tag == aclUser || tag == aclGroup {
			named = true
			if binary.LittleEndian.Uint32(b[4:]) == 1<<32-1 {
				return false, false, bad
			}
		} else {
			binary.LittleEndian.PutUint32(b[4:], 1<<32-1)
		}
		last, seen = tag, seen|tag
	}
	const needed = aclUserObj | aclGroupObj | aclOther
	mask = seen&aclMask != 0
	if seen&needed != needed || named && !mask {
		return false, false, bad
	}
	return mask, named, nil
}

func oneOf(tag uint16) bool {
	return tag != 0 && tag&(tag-1) == 0 && tag <= aclOther
}
