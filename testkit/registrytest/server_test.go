package registrytest

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.uber.org/goleak"

	"dewpoint/internal/image"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func get(t *testing.T, url string, header ...string) (*http.Response, []byte) {
	t.Helper()
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for n := 0; n+1 < len(header); n += 2 {
		req.Header.Set(header[n], header[n+1])
	}
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}}
	res, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		b = append(b, "…"...)
	}
	return res, b
}

func TestImageRoundTrip(t *testing.T) {
	reg := New(t)
	tar := RandomTar(1, 10, 200_000)
	for _, docker := range []bool{false, true} {
		p := reg.PushImage("a/b:1", []Layer{
			{Tar: tar},
			{Tar: tar, MemberSize: 50_000},
			{Tar: tar, Compression: image.Zstd, MemberSize: 50_000},
			{Tar: tar, Compression: image.Plain},
		}, Options{Docker: docker})
		res, manifest := get(t, reg.URL()+"/v2/a/b/manifests/1")
		if res.StatusCode != 200 || res.Header.Get("Docker-Content-Digest") != p.Digest.String() {
			t.Fatal(res.Status, res.Header)
		}
		var m ocispec.Manifest
		if err := json.Unmarshal(manifest, &m); err != nil {
			t.Fatal(err)
		}
		_, config := get(t, reg.URL()+"/v2/a/b/blobs/"+m.Config.Digest.String())
		ref, err := image.ParseReference(p.Ref)
		if err != nil {
			t.Fatal(err)
		}
		img, err := image.New(ref, p.Desc, nil, p.Desc, manifest, config)
		if err != nil {
			t.Fatal(err)
		}
		for n, l := range img.Layers {
			if l != p.Layers[n] {
				t.Fatalf("layer %d: got %+v, want %+v", n, l, p.Layers[n])
			}
			_, b := get(t, reg.URL()+"/v2/a/b/blobs/"+l.Digest.String())
			if got := unpack(t, l.Compression(), b); !bytes.Equal(got, tar) {
				t.Fatalf("layer %d does not unpack to its tar", n)
			}
			if image.Sniff(b) != l.Compression() {
				t.Fatalf("layer %d is not what it is called", n)
			}
		}
	}
}

func unpack(t *testing.T, c image.Compression, b []byte) []byte {
	t.Helper()
	r := io.Reader(bytes.NewReader(b))
	switch c {
	case image.Gzip:
		z, err := gzip.NewReader(r)
		if err != nil {
			t.Fatal(err)
		}
		r = z
	case image.Zstd:
		z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1))
		if err != nil {
			t.Fatal(err)
		}
		defer z.Close()
		r = z
	}
	out, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestFaults(t *testing.T) {
	reg := New(t)
	blob := bytes.Repeat([]byte("0123456789"), 1000)
	d := reg.PushBlob(blob)
	url := fmt.Sprintf("%s/v2/x/blobs/%s", reg.URL(), d)

	res, b := get(t, url, "Range", "bytes=100-199")
	if res.StatusCode != 206 || res.Header.Get("Content-Range") != "bytes 100-199/10000" ||
		!bytes.Equal(b, blob[100:200]) {
		t.Fatal(res.Status, res.Header, len(b))
	}
	reg.Fail(Fault{Do: Status, Status: 503, RetryAfter: "1", Skip: 1, Times: 1})
	for n, want := range []int{200, 503, 200} {
		if res, _ := get(t, url); res.StatusCode != want {
			t.Fatalf("request %d: %s", n, res.Status)
		}
	}
	reg.Heal()
	reg.Fail(Fault{Do: Cut, At: 10, Times: 1})
	if _, b := get(t, url); string(b) != "0123456789…" {
		t.Fatalf("cut: %q", b)
	}
	reg.Fail(Fault{Do: Flip, At: 3, Times: 1})
	if _, b := get(t, url, "Range", "bytes=2-4"); string(b) != "224" {
		t.Fatalf("flip: %q", b)
	}
	if got := reg.Served(d); got != 100+2*10000+10+3 {
		t.Fatalf("served %d bytes", got)
	}
	if got := reg.Ranges(d); len(got) != 6 || got[5] != "bytes=2-4" {
		t.Fatalf("ranges %q", got)
	}
}

func TestRestart(t *testing.T) {
	reg := New(t)
	host := reg.Host()
	reg.PushImage("x", nil, Options{})
	reg.Close()
	if err := reg.Up(); err != nil {
		t.Fatal(err)
	}
	if res, _ := get(t, "http://"+host+"/v2/x/manifests/latest"); res.StatusCode != 200 {
		t.Fatal(res.Status)
	}
}

func TestSlowAndWrong(t *testing.T) {
	reg := New(t)
	blob := bytes.Repeat([]byte("0123456789"), 2000)
	url := fmt.Sprintf("%s/v2/x/blobs/%s", reg.URL(), reg.PushBlob(blob))
	reg.Fail(Fault{Do: Slow, At: 100_000, Times: 1})
	start := time.Now()
	if _, b := get(t, url); !bytes.Equal(b, blob) || time.Since(start) < 150*time.Millisecond {
		t.Fatalf("20 kB at 100 kB/s took %s", time.Since(start))
	}
	reg.Fail(Fault{Do: WrongBytes, Times: 1})
	if res, b := get(t, url, "Range", "bytes=5-7"); res.Header.Get("Content-Range") != "bytes 5-7/20000" ||
		string(b) != "012" {
		t.Fatalf("%s %q", res.Header.Get("Content-Range"), b)
	}
	reg.Fail(Fault{Do: Extra, At: 3, Times: 1})
	if _, b := get(t, url); len(b) != 20003 {
		t.Fatal(len(b))
	}
	reg.Fail(Fault{Do: IgnoreRange, Times: 1})
	if res, b := get(t, url, "Range", "bytes=5-7"); res.StatusCode != 200 || len(b) != 20000 {
		t.Fatal(res.Status, len(b))
	}
	if res, _ := get(t, url, "Range",
		"bytes=20000-"); res.StatusCode != http.StatusRequestedRangeNotSatisfiable {
		t.Fatal(res.Status)
	}
}

func send(t *testing.T, method, url, contentType, body string) *http.Response {
	t.Helper()
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", contentType)
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	res, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	return res
}

// What is pushed must be whole, and is then there as if PushImage had put it.
func TestPushOverHTTP(t *testing.T) {
	reg := New(t)
	p := reg.PushImage("x:1", nil, Options{})
	blob := digest.FromString("blob")
	manifest := fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,"artifactType":"a/b","config":{"digest":%q,"size":4},"layers":[],"subject":{"digest":%q}}`,
		ocispec.MediaTypeImageManifest, blob, p.Digest)
	put := func(object string) *http.Response {
		return send(t, http.MethodPut, reg.URL()+"/v2/x/manifests/"+object, ocispec.MediaTypeImageManifest,
			manifest)
	}
	if res := put("t"); res.StatusCode != http.StatusBadRequest {
		t.Errorf("a manifest without its blobs: %s", res.Status)
	}
	if res := send(t, http.MethodPut, reg.URL()+"/v2/x/blobs/uploads/none?digest="+blob.String(), "",
		"blob"); res.StatusCode != http.StatusNotFound {
		t.Errorf("an upload that was not begun: %s", res.Status)
	}
	for body, want := range map[string]int{"bolb": http.StatusBadRequest, "blob": http.StatusCreated} {
		at := send(t, http.MethodPost, reg.URL()+"/v2/x/blobs/uploads/", "", "").Header.Get("Location")
		if res := send(t, http.MethodPut, reg.URL()+at+"&digest="+blob.String(), "", body); res.StatusCode != want {
			t.Errorf("%s: %s", body, res.Status)
		}
	}
	if res := put(p.Digest.String()); res.StatusCode != http.StatusBadRequest {
		t.Errorf("a manifest under another's digest: %s", res.Status)
	}
	if res := put("t"); res.StatusCode != http.StatusCreated ||
		res.Header.Get("OCI-Subject") != p.Digest.String() {
		t.Errorf("%s %v", res.Status, res.Header)
	}
	if _, b := get(t, reg.URL()+"/v2/x/manifests/t"); string(b) != manifest {
		t.Errorf("%s", b)
	}
	if got := reg.Artifacts("x", p.Digest); len(got) != 1 || got[0].ArtifactType != "a/b" {
		t.Errorf("%+v", got)
	}
	reg.Be(Quirks{ReadOnly: true})
	if res := put("t"); res.StatusCode != http.StatusMethodNotAllowed {
		t.Error(res.Status)
	}
}
