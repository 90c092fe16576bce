package api

import (
	"fmt"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

// RequestOf is what a Spec asks for. It is not validated, but for what a Request cannot hold.
func RequestOf(s *pb.Spec) (spec.Request, error) {
	for _, p := range s.GetPorts() {
		if p.GetHost() > 65535 || p.GetContainer() > 65535 {
			return spec.Request{}, fmt.Errorf("a port is at most 65535")
		}
	}
	return requestFrom(s), nil
}

// SpecOf is the Spec that asks for a request.
func SpecOf(r spec.Request) *pb.Spec { return specOf(r) }
