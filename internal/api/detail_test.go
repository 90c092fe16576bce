package api_test

import (
	"encoding/binary"
	"io"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

// envelope is a message of a stream, as Connect has it.
func envelope(s string) string {
	return string(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(s)))) + s
}

// What Connect refuses by itself is refused with our detail, a code and a remedy, too.
func TestRefusedByConnect(t *testing.T) {
	n, post := plainly(t)
	for name, c := range map[string]struct {
		method, kind, body string
		status             int
		code               string
	}{
		"no JSON":           {"List", "application/json", "{{{{", http.StatusBadRequest, "bad_request"},
		"no JSON, a stream": {"Pull", "application/json", "{{{{", http.StatusBadRequest, "bad_request"},
		"another type":      {"Inspect", "application/json", `{"name": 7}`, http.StatusBadRequest, "bad_request"},
		"an unknown field": {"Stop", "application/json", `{"name": "x", "tmeout": "1s"}`, http.StatusBadRequest,
			`has no field \"tmeout\"`},
		"one of a part's": {"Deploy", "application/json; charset=utf-8",
			`{"spec": {"image": "nginx:1", "memroy": "1000"}}`, http.StatusBadRequest, `has no field \"memroy\"`},
		"in an envelope": {"Deploy", "application/connect+json", envelope(`{"key": "k", "deadlin": "1s"}`),
			http.StatusOK, `has no field \"deadlin\"`},
		"another kind": {"List", "text/plain", `{}`, http.StatusUnsupportedMediaType, "bad_request"},
		"Exec without HTTP/2": {"Exec", "application/json", `{}`, http.StatusUnsupportedMediaType,
			"both directions"},
		"no such call": {"Lisp", "application/json", `{}`, http.StatusNotFound, "unsupported"},
		"no protobuf": {"List", "application/proto", "\xff\xff\xff\xff", http.StatusBadRequest,
			"bad_request"},
		"too long": {"List", "application/json", `{"all": ` + strings.Repeat(" ", 2<<20) + "true}",
			http.StatusTooManyRequests, "bad_request"},
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
	if all, err := n.ListDeployments(t.Context(), spec.DeploymentQuery{All: true}); err != nil || len(all) > 0 {
		t.Errorf("what was refused is deployed: %+v, %v", all, err)
	}
	// What the node itself refuses is as it was.
	r := post("Inspect", "application/json", `{"name": "nobody"}`)
	b, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusNotFound || !strings.Contains(string(b), string(api.NotFound)) ||
		!strings.Contains(string(b), connect.CodeNotFound.String()) {
		t.Errorf("%s: %s, %v", r.Status, b, err)
	}
}
