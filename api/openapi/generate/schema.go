package main

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/goccy/go-yaml"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// text is the schema of a string.
func text(what string) yaml.MapSlice {
	return yaml.MapSlice{{Key: "type", Value: "string"}, {Key: "description", Value: what}}
}

func reference(name protoreflect.FullName) yaml.MapSlice {
	return yaml.MapSlice{{Key: "$ref", Value: "#/components/schemas/" + string(name)}}
}

// comment is what the source says of d: before it, or behind it on its line.
func (d *description) comment(of protoreflect.Descriptor) string {
	at := d.file.SourceLocations().ByDescriptor(of)
	c := at.LeadingComments
	if strings.TrimSpace(c) == "" {
		c = at.TrailingComments
	}
	var lines []string
	for _, l := range strings.Split(strings.TrimSpace(c), "\n") {
		lines = append(lines, strings.TrimSpace(l))
	}
	return strings.Join(lines, "\n")
}

// simple are the schemas of scalar fields in protobuf's JSON mapping
// (protobuf.dev/programming-guides/json).
var simple = map[protoreflect.Kind]yaml.MapSlice{
	protoreflect.BoolKind:   {{Key: "type", Value: "boolean"}},
	protoreflect.StringKind: {{Key: "type", Value: "string"}},
	protoreflect.BytesKind:  {{Key: "type", Value: "string"}, {Key: "format", Value: "byte"}},
	protoreflect.DoubleKind: {{Key: "type", Value: "number"}, {Key: "format", Value: "double"}},
	protoreflect.FloatKind:  {{Key: "type", Value: "number"}, {Key: "format", Value: "float"}},
	protoreflect.Int32Kind:  {{Key: "type", Value: "integer"}, {Key: "format", Value: "int32"}},
	protoreflect.Uint32Kind: {{Key: "type", Value: "integer"}, {Key: "format", Value: "int64"},
		{Key: "minimum", Value: 0}},
	// Answers have strings, since numbers of JavaScript end at 2^53; requests may have either.
	protoreflect.Int64Kind:  {{Key: "type", Value: "string"}, {Key: "format", Value: "int64"}},
	protoreflect.Uint64Kind: {{Key: "type", Value: "string"}, {Key: "format", Value: "uint64"}},
}

// known are the messages of protobuf itself that are no objects in JSON.
var known = map[protoreflect.FullName]yaml.MapSlice{
	"google.protobuf.Timestamp": {{Key: "type", Value: "string"}, {Key: "format", Value: "date-time"}},
	"google.protobuf.Duration": {{Key: "type", Value: "string"},
		{Key: "pattern", Value: `^-?[0-9]+(\.[0-9]{1,9})?s$`}, {Key: "example", Value: "1.5s"}},
}

// field is the schema of a field.
func (d *description) field(f protoreflect.FieldDescriptor) (yaml.MapSlice, error) {
	if f.IsMap() {
		v, err := d.value(f.MapValue())
		return yaml.MapSlice{{Key: "type", Value: "object"}, {Key: "additionalProperties", Value: v}}, err
	}
	v, err := d.value(f)
	if f.IsList() {
		v = yaml.MapSlice{{Key: "type", Value: "array"}, {Key: "items", Value: v}}
	}
	return v, err
}

// value is the schema of one value of a field.
func (d *description) value(f protoreflect.FieldDescriptor) (yaml.MapSlice, error) {
	switch f.Kind() {
	case protoreflect.MessageKind:
		if s, ok := known[f.Message().FullName()]; ok {
			return s, nil
		}
		return reference(f.Message().FullName()), d.message(f.Message())
	case protoreflect.EnumKind:
		var names []string
		for i := range f.Enum().Values().Len() {
			names = append(names, string(f.Enum().Values().Get(i).Name()))
		}
		return yaml.MapSlice{{Key: "type", Value: "string"}, {Key: "enum", Value: names}}, nil
	}
	if s, ok := simple[f.Kind()]; ok {
		return s, nil
	}
	return nil, fmt.Errorf("%s: the kind %s is not described: add it to schema.go", f.FullName(), f.Kind())
}

// message adds the schema of a message, and of those that its fields have.
func (d *description) message(m protoreflect.MessageDescriptor) error {
	if _, ok := d.schemas[m.FullName()]; ok {
		return nil
	}
	d.schemas[m.FullName()] = nil
	var properties yaml.MapSlice
	for i := range m.Fields().Len() {
		f := m.Fields().Get(i)
		s, err := d.field(f)
		if err != nil {
			return err
		}
		properties = append(properties, yaml.MapItem{Key: f.JSONName(), Value: described(s, d.comment(f))})
	}
	s := yaml.MapSlice{{Key: "type", Value: "object"}}
	if c := strings.TrimSpace(d.comment(m) + oneOf(m)); c != "" {
		s = append(s, yaml.MapItem{Key: "description", Value: c})
	}
	if len(properties) > 0 {
		s = append(s, yaml.MapItem{Key: "properties", Value: properties})
	}
	d.schemas[m.FullName()] = s
	return nil
}

// described adds words to a schema. Beside a reference they would not count.
func described(s yaml.MapSlice, words string) yaml.MapSlice {
	if words == "" {
		return s
	}
	if s[0].Key == "$ref" {
		return yaml.MapSlice{{Key: "allOf", Value: []yaml.MapSlice{s}}, {Key: "description", Value: words}}
	}
	return append(append(yaml.MapSlice{}, s...), yaml.MapItem{Key: "description", Value: words})
}

// oneOf names the fields of which a message has one.
func oneOf(m protoreflect.MessageDescriptor) (words string) {
	for i := range m.Oneofs().Len() {
		o := m.Oneofs().Get(i)
		if o.IsSynthetic() {
			continue
		}
		var names []string
		for i := range o.Fields().Len() {
			names = append(names, o.Fields().Get(i).JSONName())
		}
		words += "\nIt has one of " + strings.Join(names, ", ") + "."
	}
	return words
}

var sentence = regexp.MustCompile(`(?s)^.*?\.(\s|$)`)

// summary is the first sentence of a comment.
func summary(c string) string {
	return strings.TrimSuffix(strings.Join(strings.Fields(sentence.FindString(c)), " "), ".")
}
