package api

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"

	"connectrpc.com/connect"

	"dewpoint/api/openapi"
	pb "dewpoint/internal/api/gen/dewpoint/v1"
)

// linesType is what the answers of a stream are as lines.
const linesType = "application/x-ndjson"

// lines lets who speaks plain HTTP and JSON call what answers with a stream: the request is one JSON object,
// as of other calls, and the answer a line for each message. Connect has both in envelopes, which a shell
// cannot make. A call that fails before it has sent anything fails as others do, by its status; one
// that fails later says so by a last line, {"error": …}.
func lines(h http.Handler) http.Handler {
	streams, both := streams()
	paths := paths()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
		switch {
		case r.Method == http.MethodPost && streams[r.URL.Path] && kind == "application/json":
			serveLines(h, w, r)
		case !paths[r.URL.Path]:
			http.NotFound(w, r)
		case r.Method == http.MethodPost && !known(kind) && r.URL.Path != openapi.Path:
			http.Error(w, "say what is sent: Content-Type: application/json", http.StatusUnsupportedMediaType)
		case r.Method == http.MethodPost && both[r.URL.Path] && kind == "application/json":
			http.Error(w, "the call is a stream in both directions: it needs HTTP/2, and Connect's envelopes or gRPC",
				http.StatusUnsupportedMediaType)
		default:
			h.ServeHTTP(w, r)
		}
	})
}

// streams are the paths of the calls that answer with a stream, and of those where both sides send one.
func streams() (out, both map[string]bool) {
	out, both = map[string]bool{}, map[string]bool{}
	methods := pb.File_dewpoint_v1_node_proto.Services().Get(0).Methods()
	for i := range methods.Len() {
		m := methods.Get(i)
		path := "/" + string(m.Parent().FullName()) + "/" + string(m.Name())
		out[path], both[path] = m.IsStreamingServer() && !m.IsStreamingClient(), m.IsStreamingClient()
	}
	return out, both
}

// paths are those that a node answers.
func paths() map[string]bool {
	out, _ := streams()
	all := map[string]bool{openapi.Path: true}
	for path := range out {
		all[path] = true
	}
	return all
}

// known are the content types that Connect speaks.
func known(kind string) bool {
	return kind == "application/json" || kind == "application/proto" ||
		slices.ContainsFunc([]string{"application/connect+", "application/grpc"}, func(p string) bool {
			return strings.HasPrefix(kind, p)
		})
}

func serveLines(h http.Handler, w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxMessage+1)) // what is more Connect refuses
	if err != nil {
		http.Error(w, "the request is too long, or was cut", http.StatusBadRequest)
		return
	}
	env := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))), body...)
	r = r.Clone(r.Context())
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(env)), int64(len(env))
	r.Header.Set("Content-Type", "application/connect+json")
	r.Header.Set("Connect-Protocol-Version", "1")
	r.Header.Del("Connect-Accept-Encoding")
	h.ServeHTTP(&lineWriter{w: w, status: http.StatusOK}, r)
}

// lineWriter takes the envelopes of a stream and writes lines. The status is sent with the first.
type lineWriter struct {
	w      http.ResponseWriter
	status int
	begun  bool   // the status has been sent
	rest   []byte // of an envelope that is not whole yet
}

// Unwrap is for http.ResponseController.
func (l *lineWriter) Unwrap() http.ResponseWriter { return l.w }

func (l *lineWriter) Header() http.Header { return l.w.Header() }

func (l *lineWriter) WriteHeader(status int) { l.status = status }

// Flush sends what there is, the status too: the caller learns that he is heard.
func (l *lineWriter) Flush() {
	l.begin(l.status)
	_ = http.NewResponseController(l.w).Flush()
}

func (l *lineWriter) begin(status int) {
	if l.begun {
		return
	}
	l.begun = true
	if h := l.w.Header(); strings.HasPrefix(h.Get("Content-Type"), "application/connect+") {
		h.Set("Content-Type", linesType)
	}
	l.w.WriteHeader(status)
}

func (l *lineWriter) Write(p []byte) (int, error) {
	if !strings.HasPrefix(l.w.Header().Get("Content-Type"), "application/connect+") && !l.begun {
		l.begin(l.status) // no stream: Connect has refused the request itself
	}
	if l.begun && l.w.Header().Get("Content-Type") != linesType {
		return l.w.Write(p)
	}
	l.rest = append(l.rest, p...)
	for len(l.rest) >= 5 {
		n := 5 + int(binary.BigEndian.Uint32(l.rest[1:]))
		if len(l.rest) < n {
			break
		}
		if err := l.message(l.rest[0]&2 != 0, l.rest[5:n]); err != nil {
			return 0, err
		}
		l.rest = l.rest[n:]
	}
	l.rest = slices.Clone(l.rest)
	return len(p), nil
}

// message writes a line; of the last one, which says how the call ended, only that it failed.
func (l *lineWriter) message(last bool, text []byte) error {
	if last {
		var end struct {
			Error json.RawMessage `json:"error"`
		}
		if err := json.Unmarshal(text, &end); err != nil {
			return err
		}
		if end.Error == nil {
			l.begin(http.StatusOK)
			return nil
		}
		if !l.begun {
			l.w.Header().Set("Content-Type", "application/json")
			l.begin(statusOf(end.Error))
			text = end.Error
		}
	}
	l.begin(http.StatusOK)
	_, err := l.w.Write(append(slices.Clip(text), '\n'))
	return err
}

// statusOf is the HTTP status of an error, as Connect has it of calls that do not stream.
func statusOf(failure []byte) int {
	var e struct {
		Code connect.Code `json:"code"`
	}
	if json.Unmarshal(failure, &e) != nil {
		return http.StatusInternalServerError
	}
	switch e.Code {
	case connect.CodeInvalidArgument, connect.CodeFailedPrecondition, connect.CodeOutOfRange:
		return http.StatusBadRequest
	case connect.CodeUnauthenticated:
		return http.StatusUnauthorized
	case connect.CodePermissionDenied:
		return http.StatusForbidden
	case connect.CodeNotFound:
		return http.StatusNotFound
	case connect.CodeAlreadyExists, connect.CodeAborted:
		return http.StatusConflict
	case connect.CodeResourceExhausted:
		return http.StatusTooManyRequests
	case connect.CodeCanceled:
		return 499
	case connect.CodeUnimplemented:
		return http.StatusNotImplemented
	case connect.CodeUnavailable:
		return http.StatusServiceUnavailable
	case connect.CodeDeadlineExceeded:
		return http.StatusGatewayTimeout
	}
	return http.StatusInternalServerError
}
