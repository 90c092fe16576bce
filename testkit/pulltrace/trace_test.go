package pulltrace

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// element is one of a trace, as the IBM traces have it.
func element(second int, method, client, uri string, status, written int) string {
	return fmt.Sprintf(`{"host":"2ee1","http.request.duration":0.5,"http.request.method":"%s","http.request.remoteaddr":"%s","http.request.uri":"%s",`+
		`"http.request.useragent":"docker/1.12.6","http.response.status":%d,"http.response.written":%d,"id":"x%d","timestamp":"2017-06-20T00:00:%02d.5Z"}`,
		method, client, uri, status, written, second, second)
}

func blobGet(second int, client, image, id string, size int) string {
	return element(second, "GET", client, "v2/"+image+"/blobs/"+id, 200, size)
}

func manifestGet(second int, client, image string) string {
	return element(second, "GET", client, "v2/"+image+"/manifests/latest", 200, 1000)
}

func array(elements ...string) string { return "[" + strings.Join(elements, ",\n") + "]" }

func put(t testing.TB, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := writeFile(path, func(w io.Writer) error {
		_, err := io.WriteString(w, text)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return path
}

func readAll(t testing.TB, paths ...string) ([]Request, *Reader) {
	t.Helper()
	r, err := NewReader(paths...)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var out []Request
	for {
		q, err := r.Read()
		if errors.Is(err, io.EOF) {
			return out, r
		}
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, q)
	}
}

func ids(qs []Request) (out []string) {
	for _, q := range qs {
		out = append(out, q.ID)
	}
	return out
}

func TestReaderTakesSuccessfulReadsAndCountsTheRest(t *testing.T) {
	name := put(t, "a.json", array(
		manifestGet(1, "c1", "name/repo"),
		blobGet(2, "c1", "name/repo", "b1", 77),
		element(3, "HEAD", "c1", "v2/name/repo/blobs/b1", 200, 0),
		element(3, "PUT", "c1", "v2/name/repo/manifests/latest", 201, 0),
		element(4, "GET", "c1", "v2/name/repo/blobs/b2", 404, 30),
		element(5, "GET", "c1", "v2/name/repo/blobs/b2", 206, 30),
		element(5, "GET", "c1", "v2/name/repo/blobs/b2", 200, 0),
		element(6, "GET", "c1", "v2/name/repo/blobs/uploads/u", 204, 5),
		element(7, "GET", "c1", "v2/", 200, 2),
		strings.Replace(blobGet(8, "c1", "n/r", "b", 5), "2017-06-20T", "yesterday", 1),
		`{"http.request.method":17}`, `"a string"`, `{}`, `null`,
		blobGet(9, "c2", "a/b/c", "b3", 5),
	))
	got, r := readAll(t, name)
	if !slices.Equal(ids(got), []string{"latest", "b1", "b3"}) {
		t.Fatal(ids(got))
	}
	if q := got[1]; !q.Blob || q.Image != "name/repo" || q.Client != "c1" || q.Size != 77 ||
		q.Time.Second() != 2 || q.Synthetic {
		t.Errorf("%+v", q)
	}
	if got[0].Blob || got[2].Image != "a/b/c" {
		t.Errorf("%+v", got)
	}
	want := map[string]int64{"not a GET": 4, "not successful": 1, "part of a blob": 1, "no bytes": 1,
		"neither blob nor manifest": 2, "no time": 1, "not a request's record": 2}
	if r.Records != 15 || fmt.Sprint(r.Reasons) != fmt.Sprint(want) {
		t.Errorf("of %d records, skipped %v, want %v", r.Records, r.Reasons, want)
	}
}

func TestReaderMergesByTime(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, elements ...string) {
		path := filepath.Join(dir, name)
		os.MkdirAll(filepath.Dir(path), 0o755)
		if err := writeFile(path, func(w io.Writer) error {
			_, err := io.WriteString(w, array(elements...))
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	b := func(second int, id string) string { return blobGet(second, "c", "n/r", id, 1) }
	write("a.json", b(20, "20"), b(30, "30"))
	write("deep/b.json.gz", b(1, "1"), b(25, "25"), b(40, "40"))
	write("c.json", b(2, "2"), b(3, "3"), b(25, "25 too"))
	write("empty.json")
	write("notes.txt", "no JSON")
	got, _ := readAll(t, dir)
	if want := []string{"1", "2", "3", "20", "25 too", "25", "30", "40"}; !slices.Equal(ids(got), want) {
		t.Fatal(ids(got))
	}
	given, _ := readAll(t, filepath.Join(dir, "deep"), filepath.Join(dir, "c.json"))
	if want := []string{"1", "2", "3", "25", "25 too", "40"}; !slices.Equal(ids(given), want) {
		t.Fatal(ids(given))
	}
}

func TestReaderHasFewFilesOpen(t *testing.T) {
	dir := t.TempDir()
	for i := range 50 {
		name := filepath.Join(dir, fmt.Sprintf("%03d.json", 99-i))
		if err := os.WriteFile(name, []byte(array(blobGet(i, "c", "n/r", fmt.Sprint(i), 1))), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r, err := NewReader(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for i := range 50 {
		q, err := r.Read()
		if err != nil || q.ID != fmt.Sprint(i) {
			t.Fatalf("%d: %+v %v", i, q, err)
		}
		if len(r.open) > 1 {
			t.Fatalf("%d files are open", len(r.open))
		}
	}
}

func TestReaderErrorsSayWhere(t *testing.T) {
	good := blobGet(1, "c", "n/r", "b", 1)
	for text, want := range map[string]string{
		`[` + good:                   "unexpected EOF",
		`[` + good + `, {"host": }]`: "invalid character",
		`{"host":"x"}`:               "not the beginning of an array",
		``:                           "unexpected EOF",
		array(good) + "[]":           "more after the array",
		`[{"host":"` + strings.Repeat("x", 2*maxRecord) + `"}]`: "a record of more than",
	} {
		name := put(t, "bad.json", text)
		r, err := NewReader(name)
		for err == nil {
			_, err = r.Read()
		}
		if !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "bad.json: at byte ") {
			t.Errorf("%.40q: %v", text, err)
		}
	}
	if _, err := NewReader(t.TempDir()); err == nil {
		t.Error("a directory without a trace is no error")
	}
	if _, err := NewReader(put(t, "bad.json.gz.x", ""), filepath.Join(t.TempDir(), "none")); !errors.Is(err,
		os.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
	plain := filepath.Join(t.TempDir(), "x.json.gz")
	if err := os.WriteFile(plain, []byte(array(good)), 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := NewReader(plain)
	if err == nil {
		_, err = r.Read()
	}
	if !errors.Is(err, gzip.ErrHeader) {
		t.Errorf("a file that is not compressed: %v", err)
	}
}

func FuzzReader(f *testing.F) {
	f.Add([]byte(array(manifestGet(1, "c", "n/r"), blobGet(2, "c", "n/r", "b", 5))))
	f.Add([]byte(`[{"timestamp":"2017-06-20T00:00:01Z","http.request.method":"GET","http.response.status":200,"http.response.written":9223372036854775807,"http.request.uri":"/blobs/"}]`))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text []byte) {
		name := filepath.Join(dir, "fuzz.json")
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := NewReader(name)
		if err != nil {
			return
		}
		defer r.Close()
		for q, err := r.Read(); err == nil; q, err = r.Read() {
			if q.Size < 0 {
				t.Fatalf("a negative size: %+v", q)
			}
		}
	})
}

// writeFile makes a file of what write gives, compressed if its name ends with .gz.
func writeFile(name string, write func(io.Writer) error) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	if !strings.HasSuffix(name, ".gz") {
		return errors.Join(write(f), f.Close())
	}
	z := gzip.NewWriter(f)
	return errors.Join(write(z), z.Close(), f.Close())
}
