//go:build (amd64 || arm64) && !inflate_checked

package inflate

import "unsafe"

// The functions of this file read and write without bounds checks, in a
// processor's own order, which on these architectures is little-endian. The
// fast loop, their only caller, checks its bounds once per round (fast.go says
// why they hold). The build tag inflate_checked puts the checks back; tests
// and fuzzing run with it too.

func load64(b []byte, i int) uint64 {
	return *(*uint64)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(b)), i))
}

func store64(b []byte, i int, v uint64) {
	*(*uint64)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(b)), i)) = v
}

func store32(b []byte, i int, v uint32) {
	*(*uint32)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(b)), i)) = v
}

// copy16 copies 16 bytes from b[from:] to b[to:], as if through a register.
func copy16(b []byte, to, from int) {
	p := unsafe.Pointer(unsafe.SliceData(b))
	*(*[16]byte)(unsafe.Add(p, to)) = *(*[16]byte)(unsafe.Add(p, from))
}
