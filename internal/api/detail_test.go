package api_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"dewpoint/internal/api"
)

// What Connect refuses by itself is refused with our detail, a code and a remedy, too.
func TestRefusedByConnect(t *testing.T) {
	_, post := plainly(t)
	for name, c := range map[string]struct {
		method, kind, body string
		status             int
		code               string
	}{
		"no JSON":           {"List", "application/json", "{{{{", http.StatusBadRequest, "bad_request"},
		"no JSON, a stream": {"Pull", "application/json", "{{{{", http.StatusBadRequest, "bad_request"},
		"an unknown field":  {"Inspect", "application/json", `{"name": 7}`, http.StatusBadRequest, "bad_request"},
		"no protobuf":       {"List", "application/proto", "\xff\xff\xff\xff", http.StatusBadRequest, "bad_request"},
		"too long":          {"List", "application/json", `{"all": ` + strings.Repeat(" ", 2<<20) + "true}", http.StatusTooManyRequests, "bad_request"},
	} {
		r := post(c.method, c.kind, c.body)
		b, err := io.ReadAll(r.Body)
		if err != nil || r.StatusCode != c.status {
			t.Errorf("%s: %s, %v", name, r.Status, err)
		}
		for _, want := range []string{`"details":`, `dewpoint.v1.Error`, c.code, "openapi.yaml"} {
			if !strings.Contains(string(b), want) {
				t.Errorf("%s: no %s in %s", name, want, b)
			}
		}
	}
	// What the node itself refuses is as it was.
	r := post("Inspect", "application/json", `{"name": "nobody"}`)
	b, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusNotFound || !strings.Contains(string(b), string(api.NotFound)) || !strings.Contains(string(b), connect.CodeNotFound.String()) {
		t.Errorf("%s: %s, %v", r.Status, b, err)
	}
}
