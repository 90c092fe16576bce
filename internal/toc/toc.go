// Package toc reads the table of contents of a layer: which entries its tar
// holds, and at which byte ranges of the tar their contents lie.
package toc

import "time"

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

// Range is Length bytes of a file that start at File bytes into it and lie at
// Data bytes into the layer's tar. Bytes of a file in no Range are zero.
type Range struct{ File, Data, Length int64 }

// Entry is one entry of a layer, in tar order.
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
	Xattrs   map[string]string // nil if none
	Ranges   []Range           // of a Regular, ascending, not overlapping
}
