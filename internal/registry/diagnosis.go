package registry

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

const maxErrorBody = 64 << 10 // bytes read of an error's document

// diagnosis is what the registry itself says of its refusal; nil if nothing
// that could be shown.
func diagnosis(res *http.Response) error {
	body, err := io.ReadAll(io.LimitReader(res.Body, maxErrorBody))
	if err != nil || len(body) == 0 {
		return nil
	}
	var doc transport.Error
	if json.Unmarshal(body, &doc) == nil && len(doc.Errors) > 0 {
		d := doc.Errors[0]
		if d.Message == "" {
			return errors.New(string(d.Code))
		}
		return errors.New(d.Message)
	}
	if strings.HasPrefix(res.Header.Get("Content-Type"), "text/html") {
		return nil
	}
	line, _, _ := strings.Cut(strings.TrimSpace(string(body)), "\n")
	return errors.New(line)
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
