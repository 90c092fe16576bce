package snapshot

import (
	"fmt"
	"testing"
)

// FuzzLabels takes the labels of snapshots, which callers give.
func FuzzLabels(f *testing.F) {
	f.Add("sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", "0:100000:65536,1:2:3")
	f.Add("sha256:../x", "0:-1:4294967296")
	f.Fuzz(func(t *testing.T, id, mapping string) {
		if d, ok := parseDigest(id); ok && (d.Validate() != nil || d.String() != id) {
			t.Fatalf("%q gives %q", id, d)
		}
		if host, err := mappedRoot(mapping); err == nil && (host < 0 || host > 1<<32-1) {
			t.Fatalf("%q gives %d", mapping, host)
		}
		inner, host, size, err := parseMapping(mapping)
		if err != nil {
			return
		}
		a, b, c, err := parseMapping(fmt.Sprintf("%d:%d:%d", inner, host, size))
		if err != nil || a != inner || b != host || c != size {
			t.Fatalf("%q: %d, %d, %d, %v", mapping, a, b, c, err)
		}
	})
}
