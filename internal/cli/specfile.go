package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"

	"dewpoint/internal/api"
	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

const maxSpecs = 16 << 20 // bytes of a file of instructions

// readSpecs reads a file of instructions, "-" for standard input.
func (c *call) readSpecs(path string) ([]spec.Request, error) {
	in := c.cfg.Stdin
	if path == "-" {
		path = "standard input"
	} else {
		f, err := os.Open(path)
		if err != nil {
			return nil, misuse(c, "%v", err)
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, maxSpecs+1))
	if err != nil {
		return nil, misuse(c, "%s: %v", path, err)
	}
	if len(b) > maxSpecs {
		return nil, misuse(c, "%s: more than %d bytes", path, maxSpecs)
	}
	reqs, err := parseSpecs(path, b)
	if err != nil {
		return nil, misuse(c, "%v", err)
	}
	return reqs, nil
}

// parseSpecs reads instructions from YAML, of which JSON is a part: a list of Specs as the API has
// them, one alone, or several documents of these. Fields have the names of the API in either
// spelling. Errors begin with path and the line.
func parseSpecs(path string, b []byte) ([]spec.Request, error) {
	file, err := parser.ParseBytes(b, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %s", path, oneError(err))
	}
	var all []spec.Request
	for _, d := range file.Docs {
		for _, n := range items(d.Body) {
			r, err := parseSpec(path, n)
			if err != nil {
				return nil, err
			}
			all = append(all, r)
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: there is nothing to deploy in it", path)
	}
	return all, nil
}

var position = regexp.MustCompile(`(?s)^\[(\d+):\d+\] ([^\n]*).*`)

// oneError is a parser's error on a line: what it quotes of the file is left out.
func oneError(err error) string {
	if m := position.FindStringSubmatch(err.Error()); m != nil {
		return "line " + m[1] + ": " + m[2]
	}
	s, _, _ := strings.Cut(err.Error(), "\n")
	return s
}

// items are the elements of a list, or the one value that is none.
func items(n ast.Node) []ast.Node {
	switch n := n.(type) {
	case nil, *ast.NullNode, *ast.CommentGroupNode:
		return nil
	case *ast.SequenceNode:
		return n.Values
	}
	return []ast.Node{n}
}

func parseSpec(path string, n ast.Node) (spec.Request, error) {
	out := &pb.Spec{}
	wrong := func(n ast.Node, format string, a ...any) error {
		return fmt.Errorf("%s:%d: %s", path, n.GetToken().Position.Line, fmt.Sprintf(format, a...))
	}
	pairs, err := fields(n)
	if err != nil {
		return spec.Request{}, wrong(n, "%v", err)
	}
	for _, p := range pairs {
		name := p.Key.String()
		f := field(out.ProtoReflect().Descriptor(), name)
		if f == nil {
			return spec.Request{},
				wrong(p.Key, "%q is not a field of a Spec; there are %s", name,
					fieldNames(out.ProtoReflect().Descriptor()))
		}
		if out.ProtoReflect().Has(f) {
			return spec.Request{}, wrong(p.Key, "%s is given twice", name)
		}
		if at, err := merge(out, f, p.Value); err != nil {
			return spec.Request{}, wrong(at, "%s: %v", name, err)
		}
	}
	r, err := api.RequestOf(out)
	if err == nil {
		err = r.Validate()
	}
	if err != nil {
		return r, wrong(n, "%v", err)
	}
	return r, nil
}

// fields are the pairs of a mapping.
func fields(n ast.Node) ([]*ast.MappingValueNode, error) {
	switch n := n.(type) {
	case *ast.MappingNode:
		return n.Values, nil
	case *ast.MappingValueNode:
		return []*ast.MappingValueNode{n}, nil
	}
	return nil, fmt.Errorf("want the fields of a Spec, such as \"image: nginx:1\"")
}

func field(d protoreflect.MessageDescriptor, name string) protoreflect.FieldDescriptor {
	name = strings.Trim(name, `"'`)
	if f := d.Fields().ByJSONName(name); f != nil {
		return f
	}
	return d.Fields().ByName(protoreflect.Name(name))
}

func fieldNames(d protoreflect.MessageDescriptor) string {
	var names []string
	for i := range d.Fields().Len() {
		names = append(names, string(d.Fields().Get(i).Name()))
	}
	return strings.Join(names, ", ")
}

// merge sets a field. With an error it says which part of the value is wrong.
func merge(spec *pb.Spec, f protoreflect.FieldDescriptor, value ast.Node) (ast.Node, error) {
	elements := items(value)
	if !f.IsList() || len(elements) == 1 && elements[0] == value { // no list: protojson says so
		return value, mergeOne(spec, f, value, false)
	}
	for _, e := range elements {
		if err := mergeOne(spec, f, e, true); err != nil {
			return e, err
		}
	}
	return value, nil
}

func mergeOne(spec *pb.Spec, f protoreflect.FieldDescriptor, value ast.Node, element bool) error {
	var v any
	if err := yaml.NodeToValue(value, &v); err != nil {
		return fmt.Errorf("%s", oneError(err))
	}
	if element {
		v = []any{v}
	}
	b, err := json.Marshal(map[string]any{f.JSONName(): v})
	if err != nil {
		return err
	}
	one := &pb.Spec{}
	if err := protojson.Unmarshal(b, one); err != nil {
		return fmt.Errorf("%s", plain(err))
	}
	if element {
		list, more := spec.ProtoReflect().Mutable(f).List(), one.ProtoReflect().Get(f).List()
		for i := range more.Len() {
			list.Append(more.Get(i))
		}
		return nil
	}
	spec.ProtoReflect().Set(f, one.ProtoReflect().Get(f))
	return nil
}

var prefix = regexp.MustCompile(`^proto:\s*(\(line \d+:\d+\):\s*)?`)

// plain is protojson's error without the place in what it was given.
func plain(err error) string {
	s := prefix.ReplaceAllString(strings.ReplaceAll(err.Error(), "\u00a0", " "), "")
	if strings.Contains(s, "for string") {
		s += "; put it in quotes"
	}
	return s
}
