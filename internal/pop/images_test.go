package pop

import (
	"encoding/json"
	"errors"
	"testing"
)

// FuzzImageRecord reads what another node has written of an image.
func FuzzImageRecord(f *testing.F) {
	f.Add([]byte(`{"config":"eyJyb290ZnMiOnsiZGlmZl9pZHMiOlsic2hhMjU2OjAwIl19fQ=="} rest`))
	f.Add([]byte(`{"config":5}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := firstValue(b)
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Fatal(err)
			}
			return
		}
		if !json.Valid(v) {
			t.Fatalf("%q of %q", v, b)
		}
		if _, err := layersOf(b); err != nil {
			return
		}
	})
}
