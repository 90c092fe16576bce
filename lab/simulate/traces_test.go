package simulate

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"dewpoint/testkit/pulltrace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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

func readAll(t testing.TB, paths ...string) ([]pulltrace.Request, *pulltrace.Reader) {
	t.Helper()
	r, err := pulltrace.NewReader(paths...)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var out []pulltrace.Request
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

type repeated struct {
	element []byte
	left    int
	rest    []byte
}

func (r *repeated) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		if r.left == 0 {
			return 0, io.EOF
		}
		r.left--
		if r.rest = r.element; r.left == 0 {
			r.rest = []byte("{}]")
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func longTrace(t testing.TB, n int) string {
	t.Helper()
	var b bytes.Buffer
	for i := range 100 {
		b.WriteString(manifestGet(i%60, fmt.Sprint("c", i%7), fmt.Sprint("n/r", i%10)) + ",\n")
		for l := range 9 {
			b.WriteString(blobGet(i%60, fmt.Sprint("c", i%7), fmt.Sprint("n/r", i%10), fmt.Sprint("b", i%10, l),
				1000*(l+1)) + ",\n")
		}
	}
	name := filepath.Join(t.TempDir(), "long.json")
	err := writeFile(name, func(w io.Writer) error {
		if _, err := io.WriteString(w, "["); err != nil {
			return err
		}
		_, err := io.Copy(w, &repeated{element: b.Bytes(), left: n / 1000})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return name
}

func peak(f func(look func())) uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	before, most, n := m.HeapAlloc, uint64(0), 0
	f(func() {
		if n++; n%1000 == 0 {
			runtime.ReadMemStats(&m)
			most = max(most, m.HeapAlloc)
		}
	})
	return most - min(most, before)
}

type looking struct {
	*pulltrace.Reader
	look func()
}

func (l looking) Read() (pulltrace.Request, error) { l.look(); return l.Reader.Read() }

func TestMemoryDoesNotGrowWithTheTrace(t *testing.T) {
	use := func(records int) uint64 {
		name := longTrace(t, records)
		return peak(func(look func()) {
			r, err := pulltrace.NewReader(name)
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			res, err := Replay(looking{r, look},
				Config{Setups: sweep([]string{"lru", "overdue"}, []capacity{{bytes: 100_000}}, 0, 3)})
			if err != nil {
				t.Fatal(err)
			}
			if res.Blobs < int64(records)*8/10 {
				t.Fatalf("only %d of %d records were played", res.Blobs, records)
			}
		})
	}
	short, long := use(20_000), use(200_000)
	if long > 2*short+4<<20 {
		t.Errorf("ten times the trace takes %d bytes of heap, not %d", long, short)
	}
}

func BenchmarkReader(b *testing.B) {
	name := longTrace(b, 50_000)
	info, err := os.Stat(name)
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(info.Size())
	b.ReportAllocs()
	var most uint64
	for b.Loop() {
		most = max(most, peak(func(look func()) {
			r, err := pulltrace.NewReader(name)
			if err != nil {
				b.Fatal(err)
			}
			defer r.Close()
			for _, err = r.Read(); err == nil; _, err = r.Read() {
				look()
			}
			if !errors.Is(err, io.EOF) {
				b.Fatal(err)
			}
		}))
	}
	b.ReportMetric(float64(most)/(1<<20), "peak-MiB")
}

func FuzzReplay(f *testing.F) {
	f.Add([]byte(array(manifestGet(1, "c", "n/r"), blobGet(2, "c", "n/r", "b", 5))))
	f.Add([]byte(`[{"timestamp":"2017-06-20T00:00:01Z","http.request.method":"GET","http.response.status":200,"http.response.written":9223372036854775807,"http.request.uri":"/blobs/"}]`))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text []byte) {
		name := filepath.Join(dir, "fuzz.json")
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := pulltrace.NewReader(name)
		if err != nil {
			return
		}
		defer r.Close()
		res, err := Replay(r, Config{Setups: []Setup{{Policy: "overdue", Size: 100}}})
		if err == nil && res.Setups[0].Hits > res.Blobs {
			t.Fatal("more hits than reads")
		}
	})
}
