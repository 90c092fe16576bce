//go:build cgo && isal

package inflate

import (
	"fmt"
	"sync"
)

func newEngine() engine {
	if isalStops() {
		return newISAL()
	}
	return newDecoder()
}

func engineName() string {
	if isalStops() {
		return fmt.Sprintf("isa-l %d.%d", isalMajor, isalMinor)
	}
	return "go"
}

// isalStops tries whether the ISA-L that was linked at run time stops at a
// block's end in the way that isal.go relies on. From 2.32.1 on it forgets the
// bits of the byte in which a stream ends; then the Go engine does the work.
var isalStops = sync.OnceValue(func() bool {
	// Two blocks of fixed codes, "a" and "b", of 18 bits each.
	stream := []byte{0x4a, 0x04, 0x2c, 0x09, 0x00}
	out := make([]byte, minOut)
	e := newISAL()
	defer e.close()
	_, n, st, err := e.inflate(stream[:2], out, false)
	if err != nil || st != needInput {
		return false
	}
	used, more, st, err := e.inflate(stream[2:], out[n:], true)
	if err != nil || st != atBlock || e.held() != 6 || used != 1 || string(out[:n+more]) != "a" {
		return false
	}
	_, n, st, err = e.inflate(stream[3:], out, false)
	return err == nil && st == atEnd && string(out[:n]) == "b"
})
