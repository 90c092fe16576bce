package registrytest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
)

// serve answers one request and logs it.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	s.enter(1)
	defer s.enter(-1)
	a := &answer{ResponseWriter: w, s: s, r: r, faults: s.befall(r)}
	for _, at := range []string{"/blobs/", "/storage/"} {
		if _, d, ok := split(r.URL.Path, at); ok {
			a.digest = digest.Digest(d)
		}
	}
	if a.digest.Validate() != nil {
		a.digest = "" // an upload
	}
	a.entry = s.record(Request{
		Time: time.Now(), From: r.RemoteAddr, Method: r.Method, Path: r.URL.RequestURI(),
		Range: r.Header.Get("Range"),
		Auth:  r.Header.Get("Authorization"), Header: r.Header, Digest: a.digest,
	})
	if far := a.quirks().Far; far > 0 {
		select {
		case <-time.After(far):
		case <-r.Context().Done():
			panic(http.ErrAbortHandler)
		}
	}
	if a.faults.hasFault(Hang) {
		<-r.Context().Done()
		panic(http.ErrAbortHandler)
	}
	if f, ok := a.faults.find(Status); ok {
		if f.RetryAfter != "" {
			w.Header().Set("Retry-After", f.RetryAfter)
		}
		a.fail(f.Status, "INJECTED", f.Message)
		return
	}
	a.route()
}

// answer is one response under way.
type answer struct {
	http.ResponseWriter
	s       *Server
	r       *http.Request
	faults  faults
	digest  digest.Digest // of the blob asked for
	serving bool          // what is sent is the blob
	entry   *Request      // in the log
}

func (a *answer) route() {
	path := a.r.URL.Path
	if path == "/token" {
		a.token()
		return
	}
	if strings.HasPrefix(path, "/storage/") {
		a.blob() // where Redirect leads: no authentication, as with signed URLs
		return
	}
	if !a.authorized() || !a.writable() {
		return
	}
	if path == "/v2/" || path == "/v2" {
		a.document("application/json", []byte("{}"))
		return
	}
	rest, ok := strings.CutPrefix(path, "/v2/")
	if !ok {
		a.fail(http.StatusNotFound, "NOT_FOUND", "no such path")
		return
	}
	if repo, object, ok := split(rest, "/manifests/"); ok && a.r.Method == http.MethodPut {
		a.putManifest(repo, object)
	} else if ok {
		a.manifest(repo, object)
	} else if repo, subject, ok := split(rest, "/referrers/"); ok {
		a.referrers(repo, subject)
	} else if repo, id, ok := split(rest, "/blobs/uploads/"); ok {
		a.upload(repo, id)
	} else if _, _, ok := split(rest, "/blobs/"); ok {
		a.blobOrRedirect()
	} else {
		a.fail(http.StatusNotFound, "NOT_FOUND", "no such path")
	}
}

func split(path, at string) (before, after string, ok bool) {
	n := strings.LastIndex(path, at)
	if n < 0 {
		return "", "", false
	}
	return path[:n], path[n+len(at):], true
}

func (a *answer) manifest(repo, object string) {
	m, ok := a.s.Store.manifest(repo, object)
	if !ok {
		a.fail(http.StatusNotFound, "MANIFEST_UNKNOWN", "manifest unknown")
		return
	}
	switch {
	case a.faults.hasFault(NoDigest):
	case a.faults.hasFault(WrongDigest):
		a.Header().Set("Docker-Content-Digest", digest.FromString("wrong").String())
	default:
		a.Header().Set("Docker-Content-Digest", m.digest.String())
	}
	body := m.body
	if f, ok := a.faults.find(Garbage); ok {
		body = make([]byte, f.At)
	}
	if f, ok := a.faults.find(Flip); ok && f.At < int64(len(body)) {
		body = append([]byte(nil), body...)
		body[f.At] ^= 1
	}
	a.document(m.mediaType, body)
}

// document sends a small body whole.
func (a *answer) document(mediaType string, body []byte) {
	a.Header().Set("Content-Type", mediaType)
	a.Header().Set("Content-Length", strconv.Itoa(len(body)))
	a.WriteHeader(http.StatusOK)
	if a.r.Method != http.MethodHead {
		a.send(body)
	}
}

// fail sends an error as registries word it.
func (a *answer) fail(status int, code, message string) {
	type diagnostic struct {
		Code    string `json:"code"`
		Message string `json:"message"`
	}
	body, err := json.Marshal(map[string][]diagnostic{"errors": {{code, message}}})
	if err != nil {
		panic(err)
	}
	a.Header().Set("Content-Type", "application/json")
	a.WriteHeader(status)
	a.send(body)
}

// WriteHeader keeps the status for the log.
func (a *answer) WriteHeader(status int) {
	a.s.mu.Lock()
	a.entry.Status = status
	a.s.mu.Unlock()
	a.ResponseWriter.WriteHeader(status)
}

// send writes b; a client that has gone ends the request.
func (a *answer) send(b []byte) {
	a.count(len(b)) // before the client can have them
	n, err := a.Write(b)
	if n < len(b) {
		a.count(n - len(b))
	}
	if err != nil {
		panic(http.ErrAbortHandler)
	}
}

func (a *answer) blobOrRedirect() {
	f, ok := a.faults.find(Redirect)
	if !ok {
		a.blob()
		return
	}
	a.Header().Set("Location", fmt.Sprintf("%s/storage/%s?signature=secret", f.To.URL(), a.digest))
	a.WriteHeader(http.StatusTemporaryRedirect)
}

func (a *answer) blob() {
	b, ok := a.s.Store.blob(a.digest)
	if !ok {
		a.fail(http.StatusNotFound, "BLOB_UNKNOWN", "blob unknown to registry")
		return
	}
	from, to, partial, ok := parseRange(a.r.Header.Get("Range"), b.size)
	if !ok {
		a.Header().Set("Content-Range", fmt.Sprintf("bytes */%d", b.size))
		a.fail(http.StatusRequestedRangeNotSatisfiable, "RANGE_INVALID", "range not satisfiable")
		return
	}
	if a.faults.hasFault(IgnoreRange) {
		from, to, partial = 0, b.size, false
	}
	if f, ok := a.faults.find(LieRange); ok && partial {
		from = min(from+f.At, to)
	}
	a.head(b, from, to, partial)
	if a.faults.hasFault(Chunked) {
		a.flush() // else net/http finds out the length of a short body
	}
	if a.r.Method == http.MethodHead {
		return
	}
	a.serving = true
	a.s.sending(1)
	defer a.s.sending(-1)
	a.body(b, from, to)
}

// head sends the header for the bytes from..to of the blob.
func (a *answer) head(b blob, from, to int64, partial bool) {
	h, length := a.Header(), to-from
	if f, ok := a.faults.find(Extra); ok {
		length += f.At
	}
	if f, ok := a.faults.find(Short); ok {
		length -= min(f.At, length)
	}
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Accept-Ranges", "bytes")
	if !a.faults.hasFault(Chunked) {
		h.Set("Content-Length", strconv.FormatInt(length, 10))
	}
	if !partial {
		a.WriteHeader(http.StatusOK)
		return
	}
	h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, to-1, b.size))
	a.WriteHeader(http.StatusPartialContent)
}

// body sends the bytes from..to of the blob, with what the faults do to them.
func (a *answer) body(b blob, from, to int64) {
	rate, _ := a.faults.find(Slow)
	chunk := int64(256 << 10)
	if rate.At > 0 {
		chunk = max(1, min(chunk, rate.At/50))
	}
	buf := make([]byte, chunk)
	start := time.Now()
	for at := from; at < a.end(from, to); {
		n := min(chunk, a.end(from, to)-at)
		if stop, ok := a.stopAt(); ok {
			if at-from >= stop {
				break
			}
			n = min(n, stop-(at-from))
		}
		a.fill(b, buf[:n], at, from)
		a.send(buf[:n])
		at += n
		if rate.At > 0 {
			a.pause(start, time.Duration(at-from)*time.Second/time.Duration(rate.At))
		}
	}
	a.stop()
}

// end is where the body ends: at to, but for the faults that add or withhold.
func (a *answer) end(from, to int64) int64 {
	if f, ok := a.faults.find(Extra); ok {
		return to + f.At
	}
	if f, ok := a.faults.find(Short); ok {
		return max(from, to-f.At)
	}
	return to
}

// stopAt is after how many bytes of the body the connection fails.
func (a *answer) stopAt() (int64, bool) {
	if f, ok := a.faults.find(Stall); ok {
		return f.At, true
	}
	f, ok := a.faults.find(Cut)
	return f.At, ok
}

// stop lets the connection fail.
func (a *answer) stop() {
	if a.faults.hasFault(Stall) {
		a.flush()
		<-a.r.Context().Done()
		panic(http.ErrAbortHandler)
	}
	if a.faults.hasFault(Cut) {
		a.flush()
		panic(http.ErrAbortHandler)
	}
}

func (a *answer) flush() { a.ResponseWriter.(http.Flusher).Flush() }

// pause waits until d after start, and lets what was sent go out.
func (a *answer) pause(start time.Time, d time.Duration) {
	a.flush()
	select {
	case <-time.After(time.Until(start.Add(d))):
	case <-a.r.Context().Done():
		panic(http.ErrAbortHandler)
	}
}

// fill reads the blob's bytes at at into p; beyond its end they are zero.
func (a *answer) fill(b blob, p []byte, at, from int64) {
	src := at
	if a.faults.hasFault(WrongBytes) {
		src = at - from
	}
	n, err := b.content.ReadAt(p, src)
	if err != nil && err != io.EOF {
		panic(err)
	}
	clear(p[n:])
	if f, ok := a.faults.find(Flip); ok && f.At >= at && f.At < at+int64(len(p)) {
		p[f.At-at] ^= 1
	}
}

// parseRange reads "bytes=A-B" and "bytes=A-"; what else there is counts as none.
func parseRange(h string, size int64) (from, to int64, partial, ok bool) {
	spec, found := strings.CutPrefix(h, "bytes=")
	a, b, dash := strings.Cut(spec, "-")
	from, err := strconv.ParseInt(a, 10, 64)
	if !found || !dash || err != nil {
		return 0, size, false, true
	}
	to = size
	if last, err := strconv.ParseInt(b, 10, 64); err == nil {
		to = min(last+1, size)
	}
	return from, to, true, from < to
}
