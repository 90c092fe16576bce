package image

import (
	"encoding/json"
	"reflect"
	"testing"
)

// FuzzStored takes an image's record as a neighbour, or a disk that fails, gives it. What is accepted is the
// same after it was written and read again.
func FuzzStored(f *testing.F) {
	img, err := someParts(2).image(f)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(marshal(f, img))
	f.Add([]byte(`{}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var got, again Image
		if json.Unmarshal(b, &got) != nil || string(b) == "null" {
			return
		}
		if len(got.Layers) != len(got.ChainIDs()) || got.Desc.Digest.Validate() != nil ||
			got.Target.Digest.Validate() != nil {
			t.Fatalf("%+v", got)
		}
		if err := json.Unmarshal(marshal(t, &got), &again); err != nil || !reflect.DeepEqual(got, again) {
			t.Fatalf("%+v, then %+v, %v", got, again, err)
		}
	})
}
