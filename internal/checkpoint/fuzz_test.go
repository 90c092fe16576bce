package checkpoint

import (
	"encoding/json"
	"testing"

	"dewpoint/internal/checkpoint/store"
)

// FuzzFit takes what the record of a neighbour's checkpoint says of where it can be restored.
func FuzzFit(f *testing.F) {
	f.Add("0123456789abcdef", []byte(`{"manifest":"m","args":["a"],"env":{"A":"b"},"cpu":["sse"],"page_size":4096}`))
	f.Add("", []byte(`null`))
	f.Fuzz(func(t *testing.T, id string, b []byte) {
		got, err := fitIn(store.Record{ID: id, Fit: b})
		if err != nil {
			return
		}
		out, err := json.Marshal(got)
		if err != nil {
			t.Fatal(err)
		}
		again, err := fitIn(store.Record{ID: id, Fit: out})
		if err != nil || again.Key() != got.Key() {
			t.Fatalf("%+v, then %+v, %v", got, again, err)
		}
		if why := got.Why(again); len(why) > 0 {
			t.Fatalf("it does not fit itself: %q", why)
		}
	})
}
