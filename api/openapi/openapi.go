// Package openapi has the description of a node's API in OpenAPI 3.0, made from the
// protobuf file by "make generate". dewd serves it at /openapi.yaml.
package openapi

import (
	_ "embed"
	"net/http"
)

//go:embed openapi.yaml
var description string

// Path is where the description is served.
const Path = "/openapi.yaml"

// ServeHTTP answers with the description.
func ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "the description can only be read", http.StatusMethodNotAllowed)
		return
	}
	w.Header().Set("Content-Type", "application/yaml") // RFC 9512
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = w.Write([]byte(description))
}
