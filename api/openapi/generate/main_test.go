package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"go.uber.org/goleak"

	"dewpoint/api/openapi"
	"dewpoint/internal/api"
	"dewpoint/internal/api/gen/dewpoint/v1/dewpointv1connect"
	"dewpoint/internal/spec"
	"dewpoint/testkit/apitest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// load reads the description strictly: objects have no properties but those that it names.
func load(t *testing.T) *openapi3.T {
	t.Helper()
	b, err := os.ReadFile("../openapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := openapi3.NewLoader().LoadFromData(b)
	if err != nil {
		t.Fatal(err)
	}
	if err := doc.Validate(t.Context()); err != nil {
		t.Fatal(err)
	}
	no := false
	for _, s := range doc.Components.Schemas {
		s.Value.AdditionalProperties = openapi3.BoolSchema{Has: &no}
	}
	return doc
}

// The description that is served says what the protobuf file says now.
func TestCurrent(t *testing.T) {
	want, err := generate("../..")
	if err != nil {
		t.Fatal(err)
	}
	have, err := os.ReadFile("../openapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, want) {
		t.Error("api/openapi/openapi.yaml is not what node.proto says: run \"make generate\" and commit it")
	}
}

// Every error code is in the table that people read and in the list for programs.
func TestCodes(t *testing.T) {
	doc := load(t)
	b, err := json.Marshal(doc.Extensions["x-error-codes"])
	if err != nil {
		t.Fatal(err)
	}
	var list []struct{ Code, When string }
	if err := json.Unmarshal(b, &list); err != nil {
		t.Fatal(err)
	}
	told := map[string]bool{}
	for _, c := range list {
		told[c.Code] = c.When != "" && strings.Contains(doc.Info.Description, "| `"+c.Code+"` |")
	}
	if len(api.Codes()) < 20 {
		t.Fatalf("%d codes", len(api.Codes()))
	}
	for _, c := range api.Codes() {
		if !told[string(c.Code)] {
			t.Errorf("%s is not described", c.Code)
		}
	}
}

// caller asks a server as a program does that knows the description alone.
type caller struct {
	t   *testing.T
	doc *openapi3.T
	*http.Client
}

func newCaller(t *testing.T, host string) *caller {
	var d net.Dialer
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return d.DialContext(ctx, "unix", strings.TrimPrefix(host, "unix://"))
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return &caller{t: t, doc: load(t), Client: &http.Client{Transport: tr}}
}

// check compares an answer with what is described.
func (c *caller) check(op *openapi3.Operation, r *http.Response, want int) map[string]any {
	c.t.Helper()
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		c.t.Fatal(err)
	}
	if r.StatusCode != want {
		c.t.Fatalf("%s: status %d, want %d: %s", op.OperationID, r.StatusCode, want, b)
	}
	described := op.Responses.Status(r.StatusCode)
	if described == nil {
		described = op.Responses.Default()
	}
	media := described.Value.Content.Get(r.Header.Get("Content-Type"))
	if media == nil {
		c.t.Fatalf("%s: content type %q is not described", op.OperationID, r.Header.Get("Content-Type"))
	}
	var v map[string]any
	if err := json.Unmarshal(b, &v); err != nil {
		c.t.Fatal(err)
	}
	if err := media.Schema.Value.VisitJSON(v); err != nil {
		c.t.Errorf("%s: %s is not as described: %v", op.OperationID, b, err)
	}
	return v
}

func (c *caller) post(call, body string, want int) map[string]any {
	c.t.Helper()
	path := "/" + dewpointv1connect.NodeName + "/" + call
	r, err := c.Post("http://dewd"+path, "application/json", strings.NewReader(body))
	if err != nil {
		c.t.Fatal(err)
	}
	return c.check(c.doc.Paths.Value(path).Post, r, want)
}

// What a node answers is as described: containers, images, versions and failures.
func TestAnswers(t *testing.T) {
	n := &apitest.Node{}
	digit := func(d string) string { return "sha256:" + strings.Repeat(d, 64) }
	n.Add(spec.Image{Name: "nginx:1", Digest: digit("a"), Size: 5 << 40,
		Layers: []spec.Layer{{Digest: digit("1"), DiffID: digit("2"), Size: 1, State: spec.StateComplete}}})
	s, err := apitest.Start(filepath.Join(t.TempDir(), "s"), n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close(); s.Stop() })
	if _, err := n.Deploy(t.Context(),
		spec.Request{Image: "nginx:1", Name: "web", Ports: []spec.Port{{Host: 80, Container: 80, Protocol: "tcp"}}},
		spec.Watch{}); err != nil {
		t.Fatal(err)
	}
	c := newCaller(t, s.Host)
	list := c.post("List", `{"all":true}`, 200)["containers"].([]any)
	if len(list) != 1 || list[0].(map[string]any)["name"] != "web" {
		t.Errorf("%v", list)
	}
	images := c.post("Images", `{}`, 200)["images"].([]any)
	if got := images[0].(map[string]any)["size"]; got != "5497558138880" {
		t.Errorf("size %v", got)
	}
	c.post("Version", `{}`, 200)
	c.post("Doctor", `{}`, 200)
	detail := func(v map[string]any) any {
		return v["details"].([]any)[0].(map[string]any)["debug"].(map[string]any)["code"]
	}
	for _, info := range []api.Code{api.NotFound, api.DiskFull, api.InUse, api.PortInUse, api.Stopping,
		api.Mismatch, api.Deadline} {
		n.Fail("Stop", api.New(info, "no"))
		var want int
		for _, i := range api.Codes() {
			if i.Code == info {
				want = statuses[i.RPC]
			}
		}
		if got := detail(c.post("Stop", `{"name":"x"}`, want)); got != string(info) {
			t.Errorf("code %v, want %v", got, info)
		}
	}

	path := "/" + dewpointv1connect.NodeName + "/List"
	r, err := c.Get("http://dewd" + path + "?encoding=json&message=%7B%22all%22%3Atrue%7D")
	if err != nil {
		t.Fatal(err)
	}
	if got := c.check(c.doc.Paths.Value(path).Get, r, 200); len(got["containers"].([]any)) != 1 {
		t.Errorf("by GET: %v", got)
	}
}

// A node serves its description.
func TestServed(t *testing.T) {
	s := apitest.Serve(t, &apitest.Node{})
	c := newCaller(t, s.Host)
	r, err := c.Get("http://dewd" + openapi.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	got, err := io.ReadAll(r.Body)
	want, ferr := os.ReadFile("../openapi.yaml")
	if err != nil || ferr != nil || !bytes.Equal(got, want) ||
		r.Header.Get("Content-Type") != "application/yaml" {
		t.Errorf("%v %v: %d bytes of %s, want %d", err, ferr, len(got), r.Header.Get("Content-Type"), len(want))
	}
}
