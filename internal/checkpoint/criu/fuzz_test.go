package criu

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
)

// FuzzFiles mends what claims to be CRIU's list of open files.
func FuzzFiles(f *testing.F) {
	var timer []byte
	for n, v := range map[protowire.Number]uint64{timerSeconds: 0, timerNanos: 0, periodNanos: 5} {
		timer = protowire.AppendVarint(protowire.AppendTag(timer, n, protowire.VarintType), v)
	}
	entry := protowire.AppendBytes(protowire.AppendTag(nil, fileTimer, protowire.BytesType), timer)
	b := binary.LittleEndian.AppendUint32(nil, commonMagic)
	b = binary.LittleEndian.AppendUint32(append(b, 0, 0, 0, 0), uint32(len(entry)))
	f.Add(append(b, entry...))
	f.Add(append(b, 0xff, 0xff, 0xff, 0xff))
	path := filepath.Join(f.TempDir(), "files.img")
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		_ = rearmTimers(path)
		if after, err := os.ReadFile(path); err != nil || len(after) != len(b) {
			t.Fatalf("%d bytes of %d, %v", len(after), len(b), err)
		}
		if n, err := pagesWritten(path); err != nil && n != 0 {
			t.Fatal(n, err)
		}
	})
}
