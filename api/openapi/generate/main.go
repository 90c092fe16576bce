// Generate describes the API of node.proto in OpenAPI 3.0.
//
//	go run ./api/openapi/generate      (from the module's root; "make generate" does)
//
// What it says of calls, messages and fields are the comments of the protobuf file; the
// names and types are those of protobuf's JSON mapping; the errors are those of package
// api. The module protoc-gen-connect-openapi would do most of this, but cannot be had from
// the module proxy that builds this project.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"github.com/bufbuild/protocompile"
	"github.com/goccy/go-yaml"
	"google.golang.org/protobuf/reflect/protoreflect"
)

const (
	source = "dewpoint/v1/node.proto"
	output = "openapi/openapi.yaml"
)

func main() {
	if err := run("api"); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

// run writes the description of what is below the directory api.
func run(api string) error {
	b, err := generate(api)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(api, output), b, 0o644)
}

// generate is the description of what is below the directory api.
func generate(api string) ([]byte, error) {
	file, err := parse(api)
	if err != nil {
		return nil, err
	}
	if file.Services().Len() != 1 {
		return nil, fmt.Errorf("%s has %d services, want one", source, file.Services().Len())
	}
	d := &description{file: file, schemas: map[protoreflect.FullName]yaml.MapSlice{}}
	doc, err := d.document(file.Services().Get(0))
	if err != nil {
		return nil, err
	}
	b, err := yaml.MarshalWithOptions(doc, yaml.UseLiteralStyleIfMultiline(true))
	if err != nil {
		return nil, err
	}
	b = blank.ReplaceAll(b, nil)
	return append([]byte("# Made from "+source+" by \"make generate\".\n"), b...), nil
}

var blank = regexp.MustCompile(`(?m)[ ]+$`) // what an empty line is indented by

// parse reads the protobuf file with its comments.
func parse(dir string) (protoreflect.FileDescriptor, error) {
	c := protocompile.Compiler{
		Resolver:       protocompile.WithStandardImports(&protocompile.SourceResolver{ImportPaths: []string{dir}}),
		SourceInfoMode: protocompile.SourceInfoStandard,
	}
	files, err := c.Compile(context.Background(), source)
	if err != nil {
		return nil, err
	}
	if len(files) != 1 {
		return nil, errors.New("the compiler gave no file")
	}
	return files[0], nil
}
