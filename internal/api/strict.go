package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// strict is protobuf's JSON as a node reads it: a field that it does not know is an error. Connect's
// own codec drops it, and what was asked for with a slip of the pen ("memroy") would be done without.
// What a node answers is read leniently by clients, which may be older.
//
// It implements connect.Codec, and what Connect looks for beside that.
type strict struct{ name string }

// Name is the codec's in content types.
func (s strict) Name() string { return s.name }

// IsBinary is false: it is text.
func (s strict) IsBinary() bool { return false }

// Marshal is protobuf's.
func (s strict) Marshal(m any) ([]byte, error) { return s.MarshalAppend(nil, m) }

// MarshalAppend is protobuf's.
func (s strict) MarshalAppend(to []byte, m any) ([]byte, error) {
	p, ok := m.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T is no protobuf message", m)
	}
	return protojson.MarshalOptions{}.MarshalAppend(to, p)
}

// MarshalStable is Marshal without protobuf's changing blanks.
func (s strict) MarshalStable(m any) ([]byte, error) {
	b, err := s.Marshal(m)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = json.Compact(&out, b)
	return out.Bytes(), err
}

var unknownField = regexp.MustCompile(`\(line (\d+:\d+)\): unknown field "(.*)"$`)

// Unmarshal reads a request.
func (s strict) Unmarshal(b []byte, m any) error {
	p, ok := m.(proto.Message)
	if !ok {
		return fmt.Errorf("%T is no protobuf message", m)
	}
	if len(b) == 0 {
		return errors.New("nothing was sent; the least is {}")
	}
	err := protojson.UnmarshalOptions{}.Unmarshal(b, p)
	if err == nil {
		return nil
	}
	// protobuf changes the blanks of its errors, lest somebody reads them
	text := strings.ReplaceAll(err.Error(), "\u00a0", " ")
	if f := unknownField.FindStringSubmatch(text); f != nil {
		return fmt.Errorf("%s has no field %q (at %s)", p.ProtoReflect().Descriptor().FullName(), f[2], f[1])
	}
	return errors.New(text)
}
