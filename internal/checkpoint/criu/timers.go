package criu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"google.golang.org/protobuf/encoding/protowire"
)

// Numbers in CRIU's list of open files, and in its description of a timer.
const (
	commonMagic                = 0x54564319
	fileTimer                  = 12
	timerSeconds, timerNanos   = 7, 8
	periodSeconds, periodNanos = 9, 10
)

var errFiles = errors.New("CRIU's list of open files is not understood")

// rearmTimers mends in files.img what the kernel does not tell: a periodic
// timer descriptor that has expired and was not read yet, as all with a short
// period while nothing runs, seems to have nothing left to wait for. Restored
// like that it never expires again. It is made to expire at once.
func rearmTimers(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if len(b) < 8 || binary.LittleEndian.Uint32(b) != commonMagic {
		return errFiles
	}
	changed := false
	for rest := b[8:]; len(rest) > 0; {
		if len(rest) < 4 || int(binary.LittleEndian.Uint32(rest)) > len(rest)-4 {
			return errFiles
		}
		size := int(binary.LittleEndian.Uint32(rest))
		if timer, ok := field(rest[4:4+size], fileTimer); ok && rearm(timer) {
			changed = true
		}
		rest = rest[4+size:]
	}
	if !changed {
		return nil
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		return fmt.Errorf("rearm timers: %w", err)
	}
	return nil
}

// rearm changes a timer in place, where it is periodic and seems to be over.
func rearm(timer []byte) bool {
	number := func(n protowire.Number) ([]byte, uint64) {
		v, _ := field(timer, n)
		x, _ := protowire.ConsumeVarint(v)
		return v, x
	}
	_, seconds := number(timerSeconds)
	place, nanos := number(timerNanos)
	_, everySeconds := number(periodSeconds)
	_, everyNanos := number(periodNanos)
	if seconds != 0 || nanos != 0 || everySeconds == 0 && everyNanos == 0 || len(place) != 1 {
		return false
	}
	place[0] = 1
	return true
}
