package api

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
)

// FuzzStrict takes a request as JSON. What is accepted is the same after it was written and read again.
func FuzzStrict(f *testing.F) {
	f.Add([]byte(`{"reference":"nginx:1","name":"web"}`))
	f.Add([]byte(`{"memroy":1}`))
	f.Add([]byte(`{"env":{"a":"\ud800"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := strict{"json"}
		var got, again pb.DeployRequest
		if s.Unmarshal(b, &got) != nil {
			return
		}
		out, err := s.MarshalStable(&got)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Unmarshal(out, &again); err != nil || !proto.Equal(&got, &again) {
			t.Fatalf("%s, then %s: %v", b, out, err)
		}
	})
}

// FuzzTokens takes the file of tokens.
func FuzzTokens(f *testing.F) {
	f.Add([]byte("# a\nci deploy sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\n"))
	f.Add([]byte("ci root sha256:00"))
	file := filepath.Join(f.TempDir(), "tokens")
	f.Fuzz(func(t *testing.T, b []byte) {
		read := func(b []byte) ([]token, error) {
			if err := os.WriteFile(file, b, 0o600); err != nil {
				t.Fatal(err)
			}
			return readTokens(file)
		}
		all, err := read(b)
		if err != nil {
			return
		}
		var out []byte
		for _, k := range all {
			if _, err := ParseRole(k.role.String()); k.name == "" || err != nil {
				t.Fatalf("%+v", k)
			}
			out = fmt.Appendf(out, "%s %s sha256:%s\n", k.name, k.role, hex.EncodeToString(k.sum[:]))
		}
		again, err := read(out)
		if err != nil || len(again) != len(all) {
			t.Fatalf("%q, then %q: %v", b, out, err)
		}
		for i := range all {
			if all[i] != again[i] {
				t.Fatalf("%+v, then %+v", all[i], again[i])
			}
		}
	})
}
