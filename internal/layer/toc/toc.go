// Package toc reads the table of contents of a layer: which entries its tar
// holds, and at which byte ranges of the tar their contents lie.
//
// A layer arrives as a tar archive and stays one: it is the layer's data file,
// and nothing is unpacked. What the rest of the program needs is the list of
// entries, and this package gets it by reading headers only, skipping contents:
//
//	data (tar) --Scanner--> Entry, Entry, ... --Tree--> the layer's final tree
//
// Scanner knows the tar format: v7, ustar, GNU and PAX headers, long names,
// base-256 numbers and the four sparse formats. It gives what containerd's
// applier would act on: the same names, numbers, times and attributes, so that
// an image looks alike under both. It runs while the layer is still being
// written, over an io.ReaderAt that waits for bytes which have not arrived.
//
// Tree knows what a sequence of entries means: the last entry of a name wins,
// directories merge, missing parents appear, hard links share an inode,
// whiteouts hide what lower layers have. Package erofs lays a Tree out as a
// file system image.
//
// A layer is input of strangers. Names that leave the root, paths through symbolic
// links, sizes that cannot be, and archives beyond the stated limits are
// refused with an Error that names the entry and wraps ErrUnsafe, ErrCorrupt
// or ErrLimit. docs/design/erofs.md says which names are refused and why.
package toc

import (
	"io"
	"time"
)

// Limits of one layer. An archive beyond them is refused with ErrLimit.
const (
	MaxEntries  = 2_000_000 // entries, and names in a Tree with implied parents
	MaxMetadata = 512 << 20 // bytes of names, link targets, attributes and sparse maps
	MaxHeader   = 1 << 20   // bytes of one PAX header, GNU long name or sparse map
	MaxFileSize = 1 << 44   // bytes of one file, holes included
	MaxName     = 4095      // bytes of a name or link target
	MaxBaseName = 255       // bytes of one component of a name
	MaxXattr    = 65535     // bytes of an extended attribute's value
)

// Type is the kind of a tar entry.
type Type uint8

const (
	Regular Type = iota
	Directory
	Symlink
	Hardlink
	Char
	Block
	Fifo
	Whiteout // AUFS ".wh.NAME": NAME is absent from the layers below
	Opaque   // AUFS ".wh..wh..opq": the directory hides those below
)

var typeNames = [...]string{"file", "directory", "symbolic link", "hard link", "character device",
	"block device", "fifo", "whiteout", "opaque marker"}

func (t Type) String() string {
	if int(t) < len(typeNames) {
		return typeNames[t]
	}
	return "unknown"
}

// Range is Length bytes of a file that start at File bytes into it and lie at
// Data bytes into the layer's tar. Bytes of a file in no Range are zero.
type Range struct{ File, Data, Length int64 }

// Entry is one entry of a layer, in tar order. Of a Whiteout and an Opaque only
// the name and type are set.
type Entry struct {
	Name     string // cleaned, relative, "" is the root; any bytes but NUL
	Type     Type
	Mode     uint32 // permission, setuid, setgid and sticky bits (07777)
	UID, GID uint32
	Size     int64 // of a regular file, holes included
	ModTime  time.Time
	Link     string // target of a Symlink (verbatim) or Hardlink (cleaned like Name)
	Major    uint32 // of Char and Block
	Minor    uint32
	Xattrs   map[string]string // nil if none; those that containerd would set
	Ranges   []Range           // of a Regular, ascending, not overlapping
}

// TOC is a layer's whole table of contents.
type TOC struct {
	Entries []*Entry
	// End is how many bytes of the tar the entries and their contents take,
	// without the end-of-archive marker.
	End int64
}

// Read reads the table of contents of the tar in r.
func Read(r io.ReaderAt) (*TOC, error) {
	s := NewScanner(r)
	t := &TOC{}
	for {
		e, err := s.Next()
		if err == io.EOF {
			t.End = s.Offset()
			return t, nil
		}
		if err != nil {
			return nil, err
		}
		t.Entries = append(t.Entries, e)
	}
}
