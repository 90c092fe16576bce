package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"

	"connectrpc.com/connect"

	"dewpoint/api/openapi"
)

// detailed gives the errors that Connect answers itself, as of a message that cannot be parsed, the
// detail that all others have. Those of gRPC stay: it has them in trailers.
func detailed(h http.Handler) http.Handler {
	refuse := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d := &detailWriter{ResponseWriter: w}
		h.ServeHTTP(d, r)
		if d.held == nil {
			return
		}
		if err := withDetail(d.held.Bytes()); err != nil {
			w.Header().Del("Content-Length")
			if refuse.Write(w, r, err) == nil {
				return
			}
		}
		w.WriteHeader(d.status)
		_, _ = w.Write(d.held.Bytes())
	})
}

// detailWriter holds an answer back that is an error in JSON.
type detailWriter struct {
	http.ResponseWriter
	status int
	held   *bytes.Buffer // nil: the answer passes
}

// Unwrap is for http.ResponseController.
func (d *detailWriter) Unwrap() http.ResponseWriter { return d.ResponseWriter }

func (d *detailWriter) WriteHeader(status int) {
	h := d.Header()
	if status >= http.StatusBadRequest && h.Get("Content-Type") == "application/json" && h.Get("Content-Encoding") == "" {
		d.status, d.held = status, new(bytes.Buffer)
		return
	}
	d.ResponseWriter.WriteHeader(status)
}

func (d *detailWriter) Write(p []byte) (int, error) {
	if d.held != nil {
		return d.held.Write(p)
	}
	return d.ResponseWriter.Write(p)
}

func (d *detailWriter) Flush() {
	if d.held == nil {
		_ = http.NewResponseController(d.ResponseWriter).Flush()
	}
}

// withDetail makes an error with a detail of one without; nil of any other.
func withDetail(text []byte) *connect.Error {
	var e struct {
		Code    connect.Code      `json:"code"`
		Message string            `json:"message"`
		Details []json.RawMessage `json:"details"`
	}
	if json.Unmarshal(text, &e) != nil || len(e.Details) > 0 {
		return nil
	}
	code := Internal
	switch e.Code {
	case connect.CodeInvalidArgument, connect.CodeResourceExhausted:
		code = BadRequest
	case connect.CodeUnimplemented:
		code = Unsupported
	case connect.CodeDeadlineExceeded:
		code = Deadline
	case connect.CodeCanceled:
		code = Canceled
	}
	own := New(code, oneLine(e.Message))
	if own.Remedy == "" {
		own.Remedy = "the description of the API, " + openapi.Path + ", says what a call takes"
	}
	ce := connect.NewError(e.Code, errors.New(own.Message))
	own.addTo(ce)
	return ce
}
