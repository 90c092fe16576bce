package main

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	"dewpoint/api/openapi"
	"dewpoint/internal/api"
)

// description is made of one protobuf file.
type description struct {
	file    protoreflect.FileDescriptor
	schemas map[protoreflect.FullName]yaml.MapSlice // nil while it is being made
}

const introduction = `What a node of Dewpoint can be asked. dewd serves it on its Unix socket, to whoever may open that, and where its configuration says so over
TCP to callers with a token or a client's certificate; x-role says which role a call needs there (read, deploy, admin).

The calls are those of the Connect protocol: a POST with JSON (or protobuf) and an answer of the same kind. Calls without side effects may be
a GET. Fields and calls are only ever added: of answers, ignore what you do not know. A request in JSON with a field that the node does not
know fails as bad_request, with the field's name, and nothing is done. In JSON 64-bit integers are strings, and what has its zero value
(0, false, "", []) is left out of answers.

Calls whose answers are a stream take a JSON object like others, and answer with a line for each message (application/x-ndjson). A call that fails
before the first is answered by its status and the error alone; later the last line is {"error": …}. Or both sides speak Connect's envelopes
(application/connect+json): a byte of flags, and the length of the JSON in four bytes, the most significant first. The last envelope of an answer has
the flag 2 and says how the call ended: {"error": …} as below, or {}; the HTTP status is then 200 in either case. The header
Connect-Timeout-Ms limits any call. Exec and Attach, streams in both directions, need HTTP/2 and envelopes.

A call that fails has an error with a code, and among its details one of the type dewpoint.v1.Error, with the code that programs test and with what to do.
A path that is no call has the status 404 and the code unsupported; a method that the call does not take 405, and content that is neither JSON nor
protobuf 415, with the code bad_request. The codes:

`

const (
	envelopes = "application/connect+json" // the content type of Connect's streams
	jsonLines = "application/x-ndjson"     // of an object on each line
)

// document is the whole description.
func (d *description) document(s protoreflect.ServiceDescriptor) (yaml.MapSlice, error) {
	table, list, err := codes()
	if err != nil {
		return nil, err
	}
	var paths yaml.MapSlice
	for i := range s.Methods().Len() {
		m := s.Methods().Get(i)
		path := "/" + string(s.FullName()) + "/" + string(m.Name())
		p, err := d.path(path, m)
		if err != nil {
			return nil, err
		}
		paths = append(paths, yaml.MapItem{Key: path, Value: p})
	}
	paths = append(paths, yaml.MapItem{Key: openapi.Path, Value: self()})
	if err := d.message(d.file.Messages().ByName("Error")); err != nil {
		return nil, err
	}
	schemas := yaml.MapSlice{{Key: "connect.error", Value: failure()}, {Key: "connect.end", Value: end()}}
	for _, name := range slices.Sorted(maps.Keys(d.schemas)) {
		schemas = append(schemas, yaml.MapItem{Key: string(name), Value: d.schemas[name]})
	}
	return yaml.MapSlice{
		{Key: "openapi", Value: "3.0.3"},
		{Key: "info", Value: yaml.MapSlice{
			{Key: "title", Value: "Dewpoint node"}, {Key: "version", Value: "v1"},
			{Key: "description", Value: introduction + table},
		}},
		{Key: "servers", Value: []yaml.MapSlice{{{Key: "url", Value: "/"},
			{Key: "description", Value: "this node"}}}},
		{Key: "security", Value: []yaml.MapSlice{{}, {{Key: "token", Value: []string{}}}}},
		{Key: "paths", Value: paths},
		{Key: "components", Value: yaml.MapSlice{
			{Key: "securitySchemes", Value: yaml.MapSlice{{Key: "token", Value: yaml.MapSlice{
				{Key: "type", Value: "http"}, {Key: "scheme", Value: "bearer"},
				{Key: "description",
					Value: "Over TCP, unless the caller shows a client's certificate. \"dew token\" makes one."},
			}}}},
			{Key: "responses", Value: yaml.MapSlice{{Key: "Failed", Value: yaml.MapSlice{
				{Key: "description", Value: "The call failed."},
				{Key: "content", Value: content(yaml.MapSlice{{Key: "$ref", Value: "#/components/schemas/connect.error"}},
					"application/json")},
			}}}},
			{Key: "schemas", Value: schemas},
		}},
		{Key: "x-error-codes", Value: list},
	}, nil
}

func content(schema yaml.MapSlice, kinds ...string) (all yaml.MapSlice) {
	for _, kind := range kinds {
		all = append(all, yaml.MapItem{Key: kind, Value: yaml.MapSlice{{Key: "schema", Value: schema}}})
	}
	return all
}

// path describes one call.
func (d *description) path(path string, m protoreflect.MethodDescriptor) (yaml.MapSlice, error) {
	if err := cmp.Or(d.message(m.Input()), d.message(m.Output())); err != nil {
		return nil, err
	}
	asks, answers := []string{"application/json"}, []string{"application/json"}
	words := d.comment(m)
	switch {
	case m.IsStreamingClient():
		asks, answers = []string{envelopes}, []string{envelopes}
		words += "\n\nRequest and answer are streams of messages in envelopes."
	case m.IsStreamingServer():
		asks, answers = append(asks, envelopes), []string{jsonLines, envelopes}
		words += "\n\nThe request is a JSON object and the answer a line for each message, or both are in envelopes."
	}
	body := yaml.MapSlice{{Key: "required", Value: true},
		{Key: "content", Value: content(reference(m.Input().FullName()), asks...)}}
	post := d.operation(path, m, words, answers...)
	post = append(post, yaml.MapItem{Key: "requestBody", Value: body})
	p := yaml.MapSlice{{Key: "post", Value: post}}
	if o, ok := m.Options().(*descriptorpb.MethodOptions); ok &&
		o.GetIdempotencyLevel() == descriptorpb.MethodOptions_NO_SIDE_EFFECTS {
		get := d.operation(path, m, words, answers...)
		get[0].Value = string(m.Name()) + "ByGet"
		get = append(get, yaml.MapItem{Key: "parameters", Value: query(m.Input().FullName())})
		p = append(p, yaml.MapItem{Key: "get", Value: get})
	}
	return p, nil
}

// operation is what a POST and a GET of a call share.
func (d *description) operation(path string, m protoreflect.MethodDescriptor, words string,
	answers ...string) yaml.MapSlice {
	o := yaml.MapSlice{{Key: "operationId", Value: string(m.Name())}, {Key: "tags", Value: []string{tag(m)}}}
	if s := summary(d.comment(m)); s != "" {
		o = append(o, yaml.MapItem{Key: "summary", Value: s})
	}
	if words = strings.TrimSpace(words); words != "" {
		o = append(o, yaml.MapItem{Key: "description", Value: words})
	}
	return append(o,
		yaml.MapItem{Key: "x-role", Value: api.RoleOf(path).String()},
		yaml.MapItem{Key: "responses", Value: yaml.MapSlice{
			{Key: "200", Value: yaml.MapSlice{
				{Key: "description", Value: "The answer."}, {Key: "content", Value: answered(m, answers...)},
			}},
			{Key: "default", Value: yaml.MapSlice{{Key: "$ref", Value: "#/components/responses/Failed"}}},
		}})
}

// answered is what a call answers with, by content type. A line of a stream is a message or, the
// last, an error: anyOf, since a message may have a field "error", too.
func answered(m protoreflect.MethodDescriptor, kinds ...string) (all yaml.MapSlice) {
	for _, kind := range kinds {
		schema := reference(m.Output().FullName())
		if kind == jsonLines {
			schema = yaml.MapSlice{{Key: "anyOf", Value: []yaml.MapSlice{schema, reference("connect.end")}}}
		}
		all = append(all, content(schema, kind)...)
	}
	return all
}

// query is the parameters of a call by GET.
func query(message protoreflect.FullName) []yaml.MapSlice {
	return []yaml.MapSlice{
		{{Key: "name", Value: "encoding"}, {Key: "in", Value: "query"}, {Key: "required", Value: true},
			{Key: "schema", Value: yaml.MapSlice{{Key: "type", Value: "string"},
				{Key: "enum", Value: []string{"json"}}}}},
		{{Key: "name", Value: "message"}, {Key: "in", Value: "query"}, {Key: "required", Value: true},
			{Key: "content", Value: content(reference(message), "application/json")}},
	}
}

// groups are the tags of calls whose names do not say what they are about.
var groups = []struct{ part, tag string }{
	{"PoP", "PoP"}, {"Pack", "Packs"}, {"Profile", "Packs"}, {"Checkpoint", "Checkpoints"}, {"Image", "Images"},
	{"Pull", "Images"}, {"Prune", "Images"},
	{"Deploy", "Deployments"}, {"Doctor", "Node"}, {"Version", "Node"}, {"Events", "Node"},
}

func tag(m protoreflect.MethodDescriptor) string {
	for _, g := range groups {
		if strings.Contains(string(m.Name()), g.part) {
			return g.tag
		}
	}
	return "Containers"
}

// self describes how the description is read.
func self() yaml.MapSlice {
	return yaml.MapSlice{{Key: "get", Value: yaml.MapSlice{
		{Key: "operationId", Value: "OpenAPI"}, {Key: "tags", Value: []string{"Node"}},
		{Key: "summary", Value: "This description"},
		{Key: "x-role", Value: api.RoleOf(openapi.Path).String()},
		{Key: "responses", Value: yaml.MapSlice{{Key: "200", Value: yaml.MapSlice{
			{Key: "description", Value: "The description."},
			{Key: "content", Value: content(yaml.MapSlice{{Key: "type", Value: "string"}}, "application/yaml")},
		}}}},
	}}}
}
