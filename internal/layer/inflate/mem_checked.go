//go:build !(amd64 || arm64) || inflate_checked

package inflate

import "encoding/binary"

func load64(b []byte, i int) uint64 { return binary.LittleEndian.Uint64(b[i:]) }

func store64(b []byte, i int, v uint64) { binary.LittleEndian.PutUint64(b[i:], v) }

func store32(b []byte, i int, v uint32) { binary.LittleEndian.PutUint32(b[i:], v) }

// copy16 copies 16 bytes from b[from:] to b[to:], as if through a register.
func copy16(b []byte, to, from int) { copy(b[to:to+16], b[from:from+16]) }
