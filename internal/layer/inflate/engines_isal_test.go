//go:build cgo && isal

package inflate

import "testing"

var engines = map[string]func() engine{
	"go":   func() engine { return newDecoder() },
	"isal": func() engine { return newISAL() },
}

func TestISALIsUsed(t *testing.T) {
	if !isalStops() {
		t.Fatal("this isa-l does not stop at a block's end; the Go engine is used instead")
	}
	t.Log(Engine())
}
