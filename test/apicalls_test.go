package test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/testkit/registrytest"
)

const service = "/dewpoint.v1.Node/"

// caller asks a node as a program does that has read its OpenAPI description.
type caller struct {
	t    *testing.T
	doc  *openapi3.T // strict: no property but those that it names
	http *http.Client
	base string
}

func newCaller(t *testing.T, m *machine) *caller {
	t.Helper()
	b, err := os.ReadFile("../api/openapi/openapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := openapi3.NewLoader().LoadFromData(b)
	if err != nil {
		t.Fatal(err)
	}
	no := false
	for _, s := range doc.Components.Schemas {
		s.Value.AdditionalProperties = openapi3.BoolSchema{Has: &no}
	}
	var d net.Dialer
	tr := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		if strings.HasPrefix(addr, "dewd:") {
			return d.DialContext(ctx, "unix", filepath.Join(m.state, "dewd.sock"))
		}
		return d.DialContext(ctx, network, addr)
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return &caller{t: t, doc: doc, http: &http.Client{Transport: tr, Timeout: time.Minute}, base: "http://dewd"}
}

// do sends one request; header is of pairs.
func (c *caller) do(method, path, body string, header ...string) *http.Response {
	c.t.Helper()
	r, err := http.NewRequestWithContext(c.t.Context(), method, c.base+path, strings.NewReader(body))
	if err != nil {
		c.t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	for p := range slices.Chunk(header, 2) {
		r.Header.Set(p[0], p[1])
	}
	a, err := c.http.Do(r)
	if err != nil {
		c.t.Fatal(err)
	}
	return a
}

// failure is what a call that failed answers.
type failure struct {
	Code, Message string
	Details       []struct {
		Type  string
		Debug struct {
			Code, Message, Remedy string
			Exit                  int
		}
	}
}

// fails wants a call to fail with a code, in the form that is described, and with a remedy.
func (c *caller) fails(what string, a *http.Response, code string) (f failure) {
	c.t.Helper()
	defer a.Body.Close()
	b, err := io.ReadAll(a.Body)
	if err != nil {
		c.t.Fatal(err)
	}
	kind := a.Header.Get("Content-Type")
	// it had begun: the last line says how it ended
	if a.StatusCode == http.StatusOK && kind == "application/x-ndjson" {
		var end struct{ Error json.RawMessage }
		if err := json.Unmarshal(b[1+bytes.LastIndexByte(bytes.TrimSpace(b), '\n'):], &end); err == nil &&
			end.Error != nil {
			b, kind, a.StatusCode = end.Error, "application/json", http.StatusBadRequest
		}
	}
	if a.StatusCode < 400 || kind != "application/json" {
		c.t.Errorf("%s: %s, %s: %s", what, a.Status, a.Header.Get("Content-Type"), b)
		return f
	}
	c.described(what, c.doc.Components.Schemas["connect.error"], b)
	if err := json.Unmarshal(b, &f); err != nil || len(f.Details) != 1 {
		c.t.Errorf("%s: %v: %s", what, err, b)
		return f
	}
	d := f.Details[0].Debug
	if d.Code != code || d.Remedy == "" || d.Message == "" || d.Message != f.Message || d.Exit == 0 {
		c.t.Errorf("%s: want %s with a remedy: %s", what, code, b)
	}
	return f
}

// described compares JSON with a schema.
func (c *caller) described(what string, s *openapi3.SchemaRef, b []byte) {
	c.t.Helper()
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		c.t.Errorf("%s: %q: %v", what, b, err)
		return
	}
	if err := s.Value.VisitJSON(v); err != nil {
		c.t.Errorf("%s: %s is not as described: %v", what, b, err)
	}
}

// answers wants a call to succeed as described, and returns what it says: a line for each message of a
// stream.
func (c *caller) answers(call, body string, header ...string) (all []map[string]any) {
	c.t.Helper()
	a := c.do(http.MethodPost, service+call, body, header...)
	defer a.Body.Close()
	media := c.doc.Paths.Value(service +
		call).Post.Responses.Status(http.StatusOK).Value.Content.Get(a.Header.Get("Content-Type"))
	if a.StatusCode != http.StatusOK || media == nil {
		b, _ := io.ReadAll(a.Body)
		c.t.Fatalf("%s: %s, %s: %s", call, a.Status, a.Header.Get("Content-Type"), b)
	}
	in := bufio.NewScanner(a.Body)
	in.Buffer(nil, 4<<20)
	for in.Scan() {
		c.described(call, media.Schema, in.Bytes())
		var v map[string]any
		if err := json.Unmarshal(in.Bytes(), &v); err != nil {
			c.t.Fatal(err)
		}
		all = append(all, v)
		if call == "Events" && len(all) == 3 { // it has no end
			return all
		}
	}
	if in.Err() != nil || len(all) == 0 {
		c.t.Fatalf("%s: %d messages, %v", call, len(all), in.Err())
	}
	return all
}

// What a node is asked by programs that are not its own: over plain HTTP and JSON, as the OpenAPI description
// has it, and over gRPC. Whatever fails has a code, a remedy and the form that is described.
func TestAPI(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg)
	m.overTCP()
	m.start()
	m.must("run", "-d", "--name", "one", "--net", "none", "--ready", "log:serving", img.Ref, "serve", "80")
	m.must("run", "-d", "--name", "over", "--net", "none", "--ready", "none", img.Ref, "exit", "3")
	t.Run("fails", func(t *testing.T) { apiFails(t, m, newCaller(t, m), reg.Host()) })
	t.Run("refuses strangers", func(t *testing.T) { apiRefuses(t, m, newCaller(t, m)) })
	t.Run("answers", func(t *testing.T) { apiAnswers(t, newCaller(t, m), img.Ref) })
	t.Run("speaks gRPC", func(t *testing.T) { apiGRPC(t, m, img.Ref) })
	m.must("rm", "-f", "one", "over")
}

func apiFails(t *testing.T, m *machine, c *caller, host string) {
	app := fmt.Sprintf(`"image":"%s/app:1"`, host)
	sleeps := `{"spec":{` + app + `,"name":"x","net":"none","cmd":["sleep","1h"]`
	long := strings.Repeat("k", 200)
	for _, f := range []struct{ call, body, code string }{
		{"Logs", `{}`, "bad_request"},
		{"Logs", `{"name":"a b"}`, "bad_request"},
		{"Logs", `{"name":"nobody"}`, "not_found"},
		{"Inspect", `{}`, "bad_request"},
		{"Inspect", `{"name":"nobody"}`, "not_found"},
		{"Stop", `{}`, "bad_request"},
		{"Stop", `{"name":"nobody"}`, "not_found"},
		{"Stop", `{"name":"one","timeout":"soon"}`, "bad_request"},
		{"Start", `{}`, "bad_request"},
		{"Start", `{"name":"nobody"}`, "not_found"},
		{"Restart", `{"name":"nobody"}`, "not_found"},
		{"Kill", `{"name":"nobody"}`, "not_found"},
		{"Top", `{"name":"nobody"}`, "not_found"},
		{"Top", `{"name":"over"}`, "not_running"},
		{"Kill", `{"name":"one","signal":"HANGUP"}`, "bad_request"},
		{"Kill", `{"name":"over"}`, "not_running"},
		{"Remove", `{}`, "bad_request"},
		{"Remove", `{"name":"../one"}`, "bad_request"},
		{"Remove", `{"name":"nobody"}`, "not_found"},
		{"Remove", `{"name":"one"}`, "running"},
		{"MakeVolume", `{"name":"a/b"}`, "bad_request"},
		{"RemoveVolume", `{}`, "bad_request"},
		{"RemoveVolume", `{"name":"none"}`, "not_found"},
		{"Wait", `{}`, "bad_request"},
		{"Wait", `{"name":"nobody"}`, "not_found"},
		{"RemoveImage", `{}`, "bad_request"},
		{"RemoveImage", `{"name":"A::B"}`, "bad_request"},
		{"RemoveImage", `{"name":"` + host + `/none:1"}`, "not_found"},
		{"RemoveImage", `{"name":"` + host + `/app:1"}`, "in_use"},
		{"Pull", `{}`, "bad_request"},
		{"Pull", `{"image":"A::B"}`, "bad_request"},
		{"Pull", `{"image":"` + host + `/none:1"}`, "not_found"},
		{"Deploy", `{}`, "bad_request"},
		{"Deploy", `{"spec":{}}`, "bad_request"},
		{"Deploy", `{"spec":{"image":"A::B"}}`, "bad_request"},
		{"Deploy", `{"spec":{"image":"` + host + `/none:1","net":"none"}}`, "not_found"},
		{"Deploy", `{"spec":{` + app + `,"name":"a b"}}`, "bad_request"},
		{"Deploy", `{"spec":{` + app + `,"net":"moon"}}`, "bad_request"},
		{"Deploy", `{"spec":{` + app + `,"memory":"1"}}`, "bad_request"},
		{"Deploy", `{"spec":{` + app + `,"cpus":-1}}`, "bad_request"},
		{"Deploy", `{"spec":{` + app + `,"ready":"soon"}}`, "bad_request"},
		{"Deploy", `{"spec":{` + app + `,"ports":[{"host":70000,"container":80}]}}`, "bad_request"},
		{"Deploy", `{"spec":{` + app + `,"env":["=X"]}}`, "bad_request"},
		{"Deploy", `{"spec":{` + app + `,"devices":[{"source":"/dev/none"}]}}`, "bad_request"},
		{"Deploy", `{"spec":{` + app + `,"user":"nobody","net":"none"}}`, "bad_request"},
		{"Deploy", `{"spec":{` + app + `,"volumes":[{"source":"here","target":"there"}]}}`, "bad_request"},
		{"Deploy", `{"spec":{` + app + `,"name":"one","net":"none"}}`, "name_in_use"},
		{"Deploy", sleeps + `},"key":"` + long + `"}`, "bad_request"},
		{"Deploy", sleeps + `},"key":"k","attach":true}`, "bad_request"},
		{"Deploy", sleeps + `},"deadline":"-1s"}`, "bad_request"},
		{"Deploy", sleeps + `,"memroy":"1000"}}`, "bad_request"},
		{"DeployMany", `{}`, "bad_request"},
		{"DeployMany", `{"specs":[{}]}`, "bad_request"},
		{"DeployMany", `{"specs":[{` + app + `}],"count":-1}`, "bad_request"},
		{"DeployMany", `{"specs":[{` + app + `}],"count":1000000}`, "bad_request"},
		{"WatchDeployment", `{}`, "bad_request"},
		{"WatchDeployment", `{"id":"none"}`, "not_found"},
		{"CancelDeployment", `{}`, "bad_request"},
		{"CancelDeployment", `{"key":"none"}`, "not_found"},
		{"ProfileEnd", `{}`, "bad_request"},
		{"ProfileEnd", `{"name":"nobody"}`, "not_found"},
		{"PackBuild", `{}`, "bad_request"},
		{"PackBuild", `{"image":"none:1"}`, "not_found"},
		{"PackPush", `{}`, "bad_request"},
		{"PackPush", `{"image":"none:1"}`, "not_found"},
		{"PackInspect", `{}`, "bad_request"},
		{"PackInspect", `{"image":"none:1"}`, "not_found"},
		{"Checkpoint", `{}`, "bad_request"},
		{"ListCheckpoints", `{"image":"A::B"}`, "bad_request"},
		{"RemoveCheckpoint", `{}`, "bad_request"},
		{"RemoveCheckpoint", `{"id":"none"}`, "not_found"},
		{"Adopt", `{"images":["none:1"]}`, "not_found"},
		{"PoPStatus", `{}`, "unsupported"},
		{"PoPVerify", `{"layers":["x"]}`, "bad_request"},
		{"PoPForget", `{}`, "bad_request"},
		{"PoPForget", `{"node":"n2"}`, "unsupported"},
	} {
		c.fails(f.call+" "+f.body, c.do(http.MethodPost, service+f.call, f.body), f.code)
	}
	for path, item := range c.doc.Paths.Map() {
		if item.Post == nil || strings.HasSuffix(path, "/Exec") || strings.HasSuffix(path, "/Attach") {
			continue
		}
		f := c.fails(path+" of nonsense", c.do(http.MethodPost, path, `{"nonsense":1}`), "bad_request")
		if !strings.Contains(f.Message, `"nonsense"`) {
			t.Errorf("%s does not say which field it does not know: %s", path, f.Message)
		}
	}
	for _, f := range []struct {
		method, path, body, kind string
		status                   int
		code                     string
	}{
		{"POST", service + "Exec", `{}`, "", 415, "bad_request"},
		{"POST", service + "List", `{}`, "text/plain", 415, "bad_request"},
		{"POST", service + "List", ``, "", 400, "bad_request"},
		{"POST", service + "List", `{{`, "", 400, "bad_request"},
		{"POST", service + "Deploy", `[]`, "", 400, "bad_request"},
		{"POST", service + "Lisp", `{}`, "", 404, "unsupported"},
		{"POST", "/v1.40/containers/json", `{}`, "", 404, "unsupported"},
		{"GET", "/", ``, "", 404, "unsupported"},
		{"GET", service + "Deploy", ``, "", 405, "bad_request"},
		{"PUT", service + "List", `{}`, "", 405, "bad_request"},
		{"GET", service + "List", ``, "", 415, "bad_request"},
		{"POST", "/openapi.yaml", `{}`, "", 405, "bad_request"},
	} {
		a := c.do(f.method, f.path, f.body, "Content-Type", cmp.Or(f.kind, "application/json"))
		if a.StatusCode != f.status {
			t.Errorf("%s %s: %s, want %d", f.method, f.path, a.Status, f.status)
		}
		c.fails(f.method+" "+f.path, a, f.code)
	}
	for call, body := range map[string]string{"Wait": `{"name":"one"}`,
		"Deploy": `{"spec":{` + app + `,"name":"late","net":"none","cmd":["sleep","1h"],"ready":"log:never"}}`} {
		a := c.do(http.MethodPost, service+call, body, "Connect-Timeout-Ms", "700")
		if f := c.fails(call+" that is late", a, "deadline"); !strings.Contains(f.Message, "Connect-Timeout-Ms") {
			t.Errorf("%s: %s", call, f.Message)
		}
	}
	m.idle(t)
	if out := m.must("ps", "-a"); strings.Contains(out, "late") || strings.Contains(out, " x ") {
		t.Errorf("what was refused, or late, is here: %s", out)
	}
}

// apiRefuses asks over TCP.
func apiRefuses(t *testing.T, m *machine, c *caller) {
	_, rest, _ := strings.Cut(m.config, "listen = \"")
	addr, _, _ := strings.Cut(rest, "\"")
	c.base = "http://" + addr
	tokens := filepath.Join(filepath.Dir(m.root), "tokens")
	as := func(role string) string {
		return "Bearer " + strings.TrimSpace(m.must("token", "--file", tokens, "--name", role, role))
	}
	read, deploy := as("read"), as("deploy")
	for _, f := range []struct{ who, call, body, code string }{
		{"", "List", `{}`, "unauthorized"},
		{"Bearer x", "Deploy", `{}`, "unauthorized"},
		{read, "Stop", `{"name":"one"}`, "permission"},
		{read, "Lisp", `{}`, "unsupported"},
		{deploy, "Stop", `{"name":"one"}`, "permission"},
		{deploy, "Start", `{"name":"over"}`, "permission"},
		{deploy, "Kill", `{"name":"one"}`, "permission"},
		{deploy, "Exec", `{}`, "permission"},
		{deploy, "ListVolumes", `{}`, "permission"},
		{deploy, "Deploy", `{"spec":{"image":"app:1","net":"none","privileged":true}}`, "permission"},
		{deploy, "Deploy", `{"spec":{"image":"app:1","net":"host"}}`, "permission"},
		{deploy, "Deploy", `{"spec":{"image":"app:1","net":"none","volumes":[{"source":"/","target":"/host"}]}}`,
			"permission"},
	} {
		c.fails(f.call+" over TCP", c.do(http.MethodPost, service+f.call, f.body, "Authorization", f.who), f.code)
	}
	c.fails("GET Deploy by a reader", c.do(http.MethodGet, service+"Deploy", "", "Authorization", read),
		"permission")
	c.fails("a page by a reader", c.do(http.MethodGet, "/", "", "Authorization", read), "unsupported")
}

// apiAnswers compares what a node answers with what is described, streams by their lines.
func apiAnswers(t *testing.T, c *caller, ref string) {
	for _, call := range []string{"List", "Images", "Version", "Doctor", "ListDeployments", "ListCheckpoints",
		"Events"} {
		body := `{}`
		switch call {
		case "List", "ListDeployments":
			body = `{"all":true}`
		case "Events":
			body = `{"after":"0"}`
		}
		c.answers(call, body)
	}
	if a := c.answers("Wait", `{"name":"over"}`); a[0]["status"] != float64(3) {
		t.Errorf("Wait: %v", a)
	}
	c.answers("Inspect", `{"name":"one"}`)
	c.answers("Pull", `{"image":"`+ref+`"}`)
	spec := `{"image":"` + ref + `","net":"none","name":"%s","cmd":["%s","1h"]%s}`
	steps := c.answers("Deploy", fmt.Sprintf(`{"spec":`+spec+`,"key":"k"}`, "two", "sleep", ""))
	if r, _ := steps[len(steps)-1]["record"].(map[string]any); r == nil || r["name"] != "two" {
		t.Errorf("Deploy ends with %v", steps[len(steps)-1])
	}
	watched := c.answers("WatchDeployment", `{"key":"k"}`)
	if watched[len(watched)-1]["record"] == nil {
		t.Errorf("WatchDeployment: %v", watched)
	}
	// One of many that fails does not fail the others, nor the call.
	many := c.answers("DeployMany",
		`{"specs":[`+fmt.Sprintf(spec, "three", "sleep", "")+`,`+
			fmt.Sprintf(spec, "four", "sleep", `,"entrypoint":["/none"]`)+`]}`)
	failed := slices.ContainsFunc(many, func(m map[string]any) bool {
		e, _ := m["error"].(map[string]any)
		return e["code"] == "command_missing" && e["remedy"] != "" && m["index"] == float64(1)
	})
	if !failed || !slices.ContainsFunc(many, func(m map[string]any) bool {
		return m["record"] != nil && m["index"] == nil
	}) {
		t.Errorf("DeployMany: %v", many)
	}
	// A stream that fails after its first line says so by its last.
	late := c.answers("Deploy",
		fmt.Sprintf(`{"spec":`+spec+`}`, "late", "sleep", `,"ready":"log:never","readyTimeout":"0.3s"`))
	end, _ := late[len(late)-1]["error"].(map[string]any)
	if details, _ := end["details"].([]any); len(details) != 1 || end["code"] != "deadline_exceeded" {
		t.Errorf("a container that is not ready: %v", late[len(late)-1])
	}
	c.answers("Remove", `{"name":"late","force":true}`) // it is left for whoever looks why
	c.answers("CancelDeployment", `{"key":"k"}`)
	for _, name := range []string{"two", "three"} {
		c.answers("Stop", `{"name":"`+name+`","timeout":"0s"}`)
		c.answers("Logs", `{"name":"one","follow":false}`)
		c.answers("Remove", `{"name":"`+name+`"}`)
	}
}

// apiGRPC speaks gRPC with gRPC's own library.
func apiGRPC(t *testing.T, m *machine, ref string) {
	c, err := grpc.NewClient("unix://"+filepath.Join(m.state, "dewd.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var list pb.ListResponse
	if err := c.Invoke(t.Context(), service+"List", &pb.ListRequest{All: true}, &list); err != nil ||
		!slices.ContainsFunc(list.Containers, func(c *pb.Container) bool { return c.Name == "one" }) {
		t.Errorf("List: %v, %v", &list, err)
	}
	detail := func(err error) (codes.Code, *pb.Error) {
		s, _ := status.FromError(err)
		for _, d := range s.Details() {
			if e, ok := d.(*pb.Error); ok {
				return s.Code(), e
			}
		}
		return s.Code(), nil
	}
	err = c.Invoke(t.Context(), service+"Stop", &pb.StopRequest{Name: "nobody"}, &pb.StopResponse{})
	if code, e := detail(err); code != codes.NotFound || e.GetCode() != "not_found" || e.GetRemedy() == "" ||
		e.GetExit() != 4 {
		t.Errorf("Stop: %v, %v", err, e)
	}
	if err := c.Invoke(t.Context(), service+"Lisp", &pb.StopRequest{},
		&pb.StopResponse{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("Lisp: %v", err)
	}
	stream, err := c.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, service+"Deploy")
	if err != nil {
		t.Fatal(err)
	}
	spec := &pb.Spec{Image: ref, Name: "grpc", Net: "none", Cmd: []string{"sleep", "1h"}}
	if err := stream.SendMsg(&pb.DeployRequest{Spec: spec}); err != nil {
		t.Fatal(err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	var stages []string
	var record *pb.Record
	for {
		var r pb.DeployResponse
		if err = stream.RecvMsg(&r); err != nil {
			break
		}
		if s := r.GetStage(); s != nil {
			stages = append(stages, s.GetStage())
		}
		if r.GetRecord() != nil {
			record = r.GetRecord()
		}
	}
	if err != io.EOF || record.GetName() != "grpc" || !slices.Contains(stages, "ready") {
		t.Errorf("Deploy: %v, %v, %v", stages, record, err)
	}
	if err := c.Invoke(t.Context(), service+"Remove", &pb.RemoveRequest{Name: "grpc", Force: true},
		&pb.RemoveResponse{}); err != nil {
		t.Error(err)
	}
}
