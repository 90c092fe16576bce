package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"mime"
	"net/http"
	"strings"

	"connectrpc.com/connect"

	"dewpoint/api/openapi"
)

// detailed gives the refusals that Connect and net/http make themselves, as of a message that cannot
// be parsed or of a path that is no call, the form and the detail that all errors have. Those of gRPC
// that Connect makes stay: it has them in trailers.
func detailed(h http.Handler) http.Handler {
	refuse := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d := &detailWriter{ResponseWriter: w}
		h.ServeHTTP(d, r)
		if d.held == nil {
			return
		}
		if err := d.refusal(r); err != nil {
			for _, name := range []string{"Content-Length", "Content-Type"} {
				w.Header().Del(name)
			}
			_ = refuse.Write(&statusWriter{w, d.status}, r, err)
			return
		}
		w.WriteHeader(d.status)
		_, _ = w.Write(d.held.Bytes())
	})
}

// detailWriter holds an answer back that is a refusal.
type detailWriter struct {
	http.ResponseWriter
	status int
	held   *bytes.Buffer // nil: the answer passes
}

// Unwrap is for http.ResponseController.
func (d *detailWriter) Unwrap() http.ResponseWriter { return d.ResponseWriter }

func (d *detailWriter) WriteHeader(status int) {
	if status >= http.StatusBadRequest && d.Header().Get("Content-Encoding") == "" {
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

// statusWriter writes a refusal under the status that it was given: Connect knows fewer.
type statusWriter struct {
	http.ResponseWriter
	status int
}

// WriteHeader leaves success as it is: some protocols say what failed behind it.
func (s *statusWriter) WriteHeader(status int) {
	if status >= http.StatusBadRequest {
		status = s.status
	}
	s.ResponseWriter.WriteHeader(status)
}

// refusal is what the answer has to be; nil if it is right as it is.
func (d *detailWriter) refusal(r *http.Request) *connect.Error {
	if kind, _, _ := mime.ParseMediaType(d.Header().Get("Content-Type")); kind == "application/json" {
		var e struct {
			Code    connect.Code      `json:"code"`
			Message string            `json:"message"`
			Details []json.RawMessage `json:"details"`
		}
		if json.Unmarshal(d.held.Bytes(), &e) != nil || len(e.Details) > 0 {
			return nil
		}
		return withDetail(e.Code, e.Message)
	}
	said := oneLine(d.held.String())
	switch {
	case d.status == http.StatusNotFound:
		return advised(Unsupported, "there is no call "+oneLine(r.URL.Path),
			"the description of the API, "+openapi.Path+
				", lists the calls; another version of dewd may know others").wire()
	case d.status == http.StatusMethodNotAllowed && said == "":
		said = "the call takes no " + r.Method + ", but " + strings.Join(d.Header().Values("Allow"), ", ")
	case d.status == http.StatusUnsupportedMediaType && said == "":
		said = "say what is sent: a POST with Content-Type: application/json, or a GET with ?encoding=json&message={…}"
	case d.status == http.StatusHTTPVersionNotSupported:
		said = "the call is a stream in both directions: it needs HTTP/2"
	}
	return New(BadRequest, said).wire()
}

// withDetail makes an error with our detail of one that Connect has made.
func withDetail(is connect.Code, message string) *connect.Error {
	code := Internal
	switch is {
	case connect.CodeInvalidArgument, connect.CodeResourceExhausted:
		code = BadRequest
	case connect.CodeUnimplemented:
		code = Unsupported
	case connect.CodeDeadlineExceeded:
		code = Deadline
	case connect.CodeCanceled:
		code = Canceled
	}
	own := New(code, oneLine(message))
	ce := connect.NewError(is, errors.New(own.Message))
	own.addTo(ce)
	return ce
}

// detailer is an interceptor that gives the errors which Connect makes in a stream, as of a
// message that cannot be parsed, our detail.
type detailer struct{}

// WrapUnary implements connect.Interceptor. Connect reads a single message before it asks
// interceptors.
func (detailer) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc { return next }

// WrapStreamingClient implements connect.Interceptor.
func (detailer) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements connect.Interceptor.
func (detailer) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		err := next(ctx, conn)
		var ce *connect.Error
		if errors.As(err, &ce) && unwire(ce) == nil {
			return withDetail(ce.Code(), ce.Message())
		}
		return err
	}
}
