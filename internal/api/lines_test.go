package api_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/apitest"
)

// plainly is a client that speaks HTTP and JSON, and knows of nothing else.
func plainly(t *testing.T) (n *apitest.Node, post func(method, kind, body string) *http.Response) {
	t.Helper()
	n, s, _ := newNode(t)
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", s.Socket)
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return n, func(method, kind, body string) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://dewd/dewpoint.v1.Node/"+method,
			strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", kind)
		r, err := (&http.Client{Transport: tr}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { r.Body.Close() })
		return r
	}
}

// objects are the lines of an answer.
func objects(t *testing.T, r *http.Response) (all []map[string]any) {
	t.Helper()
	in := bufio.NewScanner(r.Body)
	for in.Scan() {
		var o map[string]any
		if err := json.Unmarshal(in.Bytes(), &o); err != nil {
			t.Fatalf("%q: %v", in.Text(), err)
		}
		all = append(all, o)
	}
	if in.Err() != nil {
		t.Fatal(in.Err())
	}
	return all
}

// Whoever can send JSON deploys, follows and learns why not: the answers of a stream are lines.
func TestStreamsAsLines(t *testing.T) {
	n, post := plainly(t)
	r := post("Deploy", "application/json; charset=utf-8",
		`{"spec":{"image":"nginx:1","name":"web","cmd":["sleep"]}}`)
	all := objects(t, r)
	if r.StatusCode != http.StatusOK || r.Header.Get("Content-Type") != "application/x-ndjson" || len(all) < 3 {
		t.Fatalf("%s, %v: %v", r.Status, r.Header, all)
	}
	if all[0]["deployment"] == nil || all[len(all)-1]["record"] == nil {
		t.Errorf("%v", all)
	}

	// What fails before anything was sent fails by its status, as a call that does not stream.
	r = post("Deploy", "application/json", `{"spec":{}}`)
	all = objects(t, r)
	if r.StatusCode != http.StatusBadRequest || r.Header.Get("Content-Type") != "application/json" ||
		len(all) != 1 || all[0]["code"] != "invalid_argument" || all[0]["details"] == nil {
		t.Errorf("%s: %v", r.Status, all)
	}
	if r := post("Deploy", "application/json", `{{{`); r.StatusCode != http.StatusBadRequest ||
		len(objects(t, r)) != 1 {
		t.Errorf("no JSON: %s", r.Status)
	}
	if r := post("Logs", "application/json", `{"name":"nobody"}`); r.StatusCode != http.StatusNotFound {
		t.Errorf("logs of nobody: %s", r.Status)
	}
	// What fails later says so at the end.
	n.FailAfter("Deploy", api.New(api.NotReady, "not in time"))
	all = objects(t, post("Deploy", "application/json",
		`{"spec":{"image":"nginx:1","name":"late","cmd":["sleep"]}}`))
	failed, _ := all[len(all)-1]["error"].(map[string]any)
	if failed == nil || failed["message"] != "not in time" ||
		!slices.ContainsFunc(all, func(o map[string]any) bool { return o["stage"] != nil }) {
		t.Errorf("%v", all)
	}

	// A stream that has nothing to say yet has begun all the same, and its lines come as they are made.
	r = post("Events", "application/json", `{}`)
	if r.StatusCode != http.StatusOK {
		t.Fatal(r.Status)
	}
	if _, err := n.Deploy(t.Context(), spec.Request{Image: "nginx:1", Name: "seen", Cmd: []string{"sleep"}},
		spec.Watch{}); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(r.Body).ReadString('\n')
	if err != nil || !strings.Contains(line, `"seen"`) {
		t.Errorf("%q, %v", line, err)
	}

	// Too much is refused, and what is not said to be JSON, with words.
	if r := post("Deploy", "application/json",
		`{"spec":{"image":"`+strings.Repeat("x", 2<<20)+`"}}`); r.StatusCode < 400 {
		t.Errorf("two mebibytes: %s", r.Status)
	}
	r = post("Exec", "application/json", `{}`)
	if said, err := io.ReadAll(r.Body); r.StatusCode != http.StatusUnsupportedMediaType || err != nil ||
		!strings.Contains(string(said), "both directions") {
		t.Errorf("%s, %q, %v", r.Status, said, err)
	}
	r = post("List", "application/x-www-form-urlencoded", `{}`)
	if said, err := io.ReadAll(r.Body); r.StatusCode != http.StatusUnsupportedMediaType || err != nil ||
		!strings.Contains(string(said), "Content-Type: application/json") {
		t.Errorf("%s, %q, %v", r.Status, said, err)
	}
}

// A client that goes away in the middle of such a stream takes its deployment with it.
func TestLinesEndWithTheClient(t *testing.T) {
	n, s, _ := newNode(t)
	c, err := net.Dial("unix", s.Socket)
	if err != nil {
		t.Fatal(err)
	}
	body := `{"spec":{"image":"nginx:1","name":"slow","cmd":["sleep"],"ready":"log:never"}}`
	if _, err := io.WriteString(c,
		"POST /dewpoint.v1.Node/Deploy HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "+
			strconv.Itoa(len(body))+"\r\n\r\n"+body); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(c)
	for line := ""; !strings.Contains(line, "started"); {
		if line, err = in.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	c.Close()
	ctx := t.Context()
	testkit.Eventually(t, "its deployment ends", func() bool {
		all, err := n.List(ctx, true)
		if err != nil {
			t.Fatal(err)
		}
		return len(all) == 0
	})
}
