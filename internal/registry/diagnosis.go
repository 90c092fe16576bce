package registry

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

const maxErrorBody = 64 << 10 // bytes read of an error's document

// diagnosis is what the registry itself says of its refusal: its code, "" if
// there is none, and its words; nil if nothing that could be shown.
func diagnosis(h http.Header, body []byte) (transport.ErrorCode, error) {
	var doc transport.Error
	if json.Unmarshal(body, &doc) == nil && len(doc.Errors) > 0 {
		d := doc.Errors[0]
		if d.Message == "" {
			return d.Code, errors.New(string(d.Code))
		}
		return d.Code, errors.New(d.Message)
	}
	line, _, _ := strings.Cut(strings.TrimSpace(string(body)), "\n")
	if line == "" || strings.HasPrefix(h.Get("Content-Type"), "text/html") {
		return "", nil
	}
	return "", errors.New(line)
}

// retryAfter reads the header of that name: seconds, or a date. 0 is none.
func retryAfter(h http.Header) time.Duration {
	v := h.Get("Retry-After")
	if v == "" {
		return 0
	}
	if s, err := strconv.ParseInt(v, 10, 32); err == nil {
		return max(0, time.Duration(s)*time.Second)
	}
	if t, err := http.ParseTime(v); err == nil {
		return max(0, time.Until(t))
	}
	return 0
}
