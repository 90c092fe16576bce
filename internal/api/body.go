package api

import (
	"errors"
	"io"
	"net/http"
	"time"
)

// bodyTime is how long a caller may take to send one request, once its head is here: the largest
// message in a minute is 140 kbit/s.
const bodyTime = time.Minute

// bounded ends the wait for a request of which a part does not come within limit. Calls that
// stream what the client sends are not bounded: there he sets the pace.
func bounded(h http.Handler, limit time.Duration) http.Handler {
	_, both := streams()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Body != nil && r.Body != http.NoBody && !both[r.URL.Path] {
			c := http.NewResponseController(w)
			if err := c.SetReadDeadline(time.Now().Add(limit)); err == nil {
				r.Body = &timely{r.Body, c}
			}
		}
		h.ServeHTTP(w, r)
	})
}

// timely is a body whose connection has a deadline until it is read: from then on
// the server reads to learn that the client has gone.
type timely struct {
	io.ReadCloser
	c *http.ResponseController
}

func (t *timely) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) {
		_ = t.c.SetReadDeadline(time.Time{})
	}
	return n, err
}
