package registry

import (
	"io"
	"net/http"
	"testing"

	"dewpoint/internal/image"
	"dewpoint/testkit/registrytest"
)

const benchSize = 64 << 20

func benchBed(b *testing.B) (*registrytest.Server, Blob) {
	reg := registrytest.New(b)
	b.SetBytes(benchSize)
	b.ReportAllocs()
	return reg, Blob{reg.PushBlob(make([]byte, benchSize)), benchSize}
}

// BenchmarkStream reads a blob over loopback as package layer does.
func BenchmarkStream(b *testing.B) {
	reg, blob := benchBed(b)
	c, err := New(Config{DockerConfig: "/none", Hosts: map[string]Host{reg.Host(): {PlainHTTP: true}}})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	ref := image.Reference{Host: reg.Host(), Path: "a", Tag: "1"}
	buf := make([]byte, 256<<10)
	for b.Loop() {
		s, err := c.Open(b.Context(), ref, blob, 0, -1, OpenOptions{})
		if err != nil {
			b.Fatal(err)
		}
		for err == nil {
			_, err = s.Read(buf)
		}
		if err != io.EOF {
			b.Fatal(err)
		}
		s.Close()
	}
}

// BenchmarkHTTP is the same with nothing but net/http, to compare.
func BenchmarkHTTP(b *testing.B) {
	reg, blob := benchBed(b)
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	buf := make([]byte, 256<<10)
	for b.Loop() {
		res, err := (&http.Client{Transport: tr}).Get(reg.URL() + "/v2/a/blobs/" + blob.Digest.String())
		if err != nil {
			b.Fatal(err)
		}
		for err == nil {
			_, err = res.Body.Read(buf)
		}
		res.Body.Close()
	}
}

// BenchmarkResolve resolves an image over loopback: two requests.
func BenchmarkResolve(b *testing.B) {
	reg := registrytest.New(b)
	p := reg.PushImage("a:1", someLayers, registrytest.Options{})
	c, err := New(Config{DockerConfig: "/none", Hosts: map[string]Host{reg.Host(): {PlainHTTP: true}}})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	ref := image.Reference{Host: reg.Host(), Path: "a", Tag: "1"}
	b.ReportAllocs()
	for b.Loop() {
		img, err := c.Resolve(b.Context(), ref, ResolveOptions{})
		if err != nil || img.Desc.Digest != p.Digest {
			b.Fatal(err)
		}
	}
}
