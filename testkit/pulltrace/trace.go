package pulltrace

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/gzip"
)

// maxRecord bounds what one record of a trace may take in memory. Those of the IBM traces have about 500
// bytes.
const maxRecord = 1 << 20

// Request is a successful read of a whole manifest or blob.
type Request struct {
	Time      time.Time
	Client    string // who asked
	Image     string // name and repository
	ID        string // a blob's digest, a manifest's tag or digest
	Blob      bool
	Size      int64 // bytes that were sent
	Synthetic bool  // made by Generate
}

// record is what is read of an element of a trace.
type record struct {
	Host      string `json:"host"`
	Method    string `json:"http.request.method"`
	Client    string `json:"http.request.remoteaddr"`
	URI       string `json:"http.request.uri"`
	UserAgent string `json:"http.request.useragent"`
	Status    int    `json:"http.response.status"`
	Written   int64  `json:"http.response.written"`
	Timestamp string `json:"timestamp"`
}

// request says what the record asks for, or why it does not count.
func (r *record) request() (q Request, skip string) {
	at := max(strings.LastIndex(r.URI, "/blobs/"), strings.LastIndex(r.URI, "/manifests/"))
	switch {
	case r.Method != "GET":
		return q, "not a GET"
	case r.Status == 206:
		return q, "part of a blob"
	case r.Status < 200 || r.Status > 299:
		return q, "not successful"
	case at < 0 || strings.Contains(r.URI[at:], "/uploads/"):
		return q, "neither blob nor manifest"
	case r.Written <= 0:
		return q, "no bytes"
	}
	t, err := time.Parse(time.RFC3339Nano, r.Timestamp)
	if err != nil {
		return q, "no time"
	}
	kind, id, _ := strings.Cut(r.URI[at+1:], "/")
	image := strings.TrimPrefix(strings.TrimPrefix(r.URI[:at], "/"), "v2/")
	return Request{
		Time: t, Client: r.Client, Image: image, ID: id, Blob: kind == "blobs", Size: r.Written,
		Synthetic: strings.HasPrefix(r.Host, syntheticHost) || strings.HasPrefix(r.UserAgent, syntheticAgent),
	}, ""
}

// file is one file of a trace, open.
type file struct {
	name    string
	order   int // among the files as they were given
	f       io.Closer
	gz      *gzip.Reader
	bounded *bounded
	d       *json.Decoder
	begun   bool
	next    Request
}

// bounded is the file's bytes up to limit; what asks for more is told so.
type bounded struct {
	r     io.Reader
	n     int64
	limit int64
}

var errRecord = fmt.Errorf("a record of more than %d bytes", maxRecord)

func (b *bounded) Read(p []byte) (int, error) {
	if b.n >= b.limit {
		return 0, errRecord
	}
	n, err := b.r.Read(p)
	b.n += int64(n)
	return n, err
}

func openFile(name string) (*file, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	t := &file{name: name, f: f}
	var r io.Reader = bufio.NewReaderSize(f, 64<<10)
	if strings.HasSuffix(name, ".gz") {
		if t.gz, err = gzip.NewReader(r); err != nil {
			f.Close()
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		r = t.gz
	}
	t.bounded = &bounded{r: r}
	t.d = json.NewDecoder(t.bounded)
	return t, nil
}

// read returns the file's next record that counts, or io.EOF. What does not count is counted.
func (t *file) read(s *Skipped) (Request, error) {
	for {
		var r record
		if err := t.decode(&r); err != nil {
			var mistyped *json.UnmarshalTypeError
			if errors.As(err, &mistyped) {
				s.add("not a request's record")
				continue
			}
			return Request{}, err
		}
		s.Records++
		q, skip := r.request()
		if skip == "" {
			return q, nil
		}
		s.Reasons[skip]++
	}
}

// decode reads one element, and the brackets around all.
func (t *file) decode(r *record) error {
	t.bounded.limit = t.d.InputOffset() + maxRecord
	if !t.begun {
		tok, err := t.d.Token()
		if err == nil && tok != json.Delim('[') {
			err = fmt.Errorf("%v is not the beginning of an array", tok)
		}
		if err != nil {
			return t.fail(err)
		}
		t.begun = true
	}
	if t.d.More() {
		return t.fail(t.d.Decode(r))
	}
	if _, err := t.d.Token(); err != nil {
		return t.fail(err)
	}
	if _, err := t.d.Token(); !errors.Is(err, io.EOF) {
		return t.fail(errors.New("more after the array"))
	}
	return io.EOF
}

// fail says where in the file err is; an end before the array's is a mistake.
func (t *file) fail(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%s: at byte %d: %w", t.name, t.d.InputOffset(), err)
}

func (t *file) close() {
	t.f.Close()
}

// Skipped is what of a trace did not count.
type Skipped struct {
	Records int64            `json:"records"` // all that were read
	Reasons map[string]int64 `json:"skipped"`
}

func (s *Skipped) add(reason string) {
	s.Records++
	s.Reasons[reason]++
}

// Reader reads the requests of several files in the order of their times. Each file is taken to be in order
// by itself; requests of the same time come in the order in which the files are given. A file is open from
// the time of its first request to that of its last, so that a trace cut into thousands of files takes no
// more memory than one file does.
type Reader struct {
	Skipped
	waiting []waiting // by the time of their first request
	open    []*file
}

type waiting struct {
	name  string
	order int
	from  time.Time
}

// NewReader reads the files at paths; of a directory, all below it whose names end in .json or .json.gz.
func NewReader(paths ...string) (*Reader, error) {
	r := &Reader{Skipped: Skipped{Reasons: make(map[string]int64)}}
	names, err := expand(paths)
	if err != nil {
		return nil, err
	}
	for i, name := range names {
		w := waiting{name: name, order: i}
		if len(names) > 1 {
			if w.from, err = begin(name); errors.Is(err, io.EOF) {
				w.from, err = time.Time{}, nil // its records are counted all the same
			}
		}
		if err != nil {
			return nil, err
		}
		r.waiting = append(r.waiting, w)
	}
	slices.SortStableFunc(r.waiting, func(a, b waiting) int { return a.from.Compare(b.from) })
	return r, nil
}

func expand(paths []string) ([]string, error) {
	var names []string
	for _, p := range paths {
		info, err := os.Stat(p)
		if err != nil {
			return nil, err
		}
		if !info.IsDir() {
			names = append(names, p)
			continue
		}
		err = filepath.WalkDir(p, func(name string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() &&
				(strings.HasSuffix(name, ".json") || strings.HasSuffix(name, ".json.gz")) {
				names = append(names, name)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("no trace in %q: files end in .json or .json.gz", paths)
	}
	return names, nil
}

// begin is the time of a file's first request.
func begin(name string) (time.Time, error) {
	f, err := openFile(name)
	if err != nil {
		return time.Time{}, err
	}
	defer f.close()
	q, err := f.read(&Skipped{Reasons: make(map[string]int64)})
	return q.Time, err
}

// Read returns the next request, or io.EOF after the last.
func (r *Reader) Read() (Request, error) {
	if err := r.openNext(); err != nil {
		return Request{}, err
	}
	if len(r.open) == 0 {
		return Request{}, io.EOF
	}
	first := slices.MinFunc(r.open, func(a, b *file) int {
		return cmp.Or(a.next.Time.Compare(b.next.Time), cmp.Compare(a.order, b.order))
	})
	q := first.next
	return q, r.advance(first)
}

// openNext opens the files whose time has come.
func (r *Reader) openNext() error {
	for len(r.waiting) > 0 &&
		(len(r.open) == 0 ||
			slices.ContainsFunc(r.open, func(f *file) bool { return !f.next.Time.Before(r.waiting[0].from) })) {
		f, err := openFile(r.waiting[0].name)
		if err != nil {
			return err
		}
		f.order = r.waiting[0].order
		r.waiting = r.waiting[1:]
		r.open = append(r.open, f)
		if err := r.advance(f); err != nil {
			return err
		}
	}
	return nil
}

// advance reads a file's next request, and closes the file if there is none.
func (r *Reader) advance(f *file) error {
	q, err := f.read(&r.Skipped)
	if errors.Is(err, io.EOF) {
		f.close()
		r.open = slices.DeleteFunc(r.open, func(o *file) bool { return o == f })
		return nil
	}
	f.next = q
	return err
}

// Close closes what Read has open.
func (r *Reader) Close() {
	for _, f := range r.open {
		f.close()
	}
	r.open, r.waiting = nil, nil
}

// List gives what was skipped, the most frequent first.
func (s *Skipped) List() []string {
	var keys []string
	for k := range s.Reasons {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b string) int {
		return cmp.Or(cmp.Compare(s.Reasons[b], s.Reasons[a]), cmp.Compare(a, b))
	})
	for i, k := range keys {
		keys[i] = fmt.Sprintf("%d %s", s.Reasons[k], k)
	}
	return keys
}
