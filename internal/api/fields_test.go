package api

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
)

// setters are the fields that a caller below Admin can set, with the least role that reaches each.
func setters() map[protoreflect.FieldDescriptor]Role {
	found := map[protoreflect.FieldDescriptor]Role{}
	var walk func(m protoreflect.MessageDescriptor, role Role)
	walk = func(m protoreflect.MessageDescriptor, role Role) {
		for i := range m.Fields().Len() {
			f := m.Fields().Get(i)
			if had, seen := found[f]; seen && had <= role {
				continue
			}
			found[f] = role
			if ours(f) {
				walk(f.Message(), role)
			}
		}
	}
	methods := pb.File_dewpoint_v1_node_proto.Services().Get(0).Methods()
	for i := range methods.Len() {
		if role := leastRole(methods.Get(i), pb.E_MayCall); role < Admin {
			walk(methods.Get(i).Input(), role)
		}
	}
	return found
}

// Who adds a field to a request decides which role it needs, and the documents say so where it is more than
// its call needs.
func TestEveryFieldNeedsARole(t *testing.T) {
	b, err := os.ReadFile("../../docs/operate/api.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(b), "## What each field reaches")
	table, _, _ = strings.Cut(table, "\n## ")
	reach := setters()
	if len(reach) < 100 {
		t.Errorf("%d fields are found", len(reach))
	}
	for f, least := range reach {
		role := leastRole(f, pb.E_MaySet)
		if !proto.HasExtension(f.Options(), pb.E_MaySet) {
			t.Errorf("%s names no role: say in node.proto which it needs", f.FullName())
		} else if role < least {
			t.Errorf("%s needs %s, and no caller below %s can set it", f.FullName(), role, least)
		}
		parent, name := f.Parent().Name(), string(f.Name())
		if parent != "Spec" && parent != "PullRequest" {
			continue
		}
		if !strings.Contains(table, "`"+name+"`") {
			t.Errorf("docs/operate/api.md does not say what %s reaches", name)
		}
		if role == Admin && !hasRow(table, name, "admin") {
			t.Errorf("docs/operate/api.md does not say that %s needs the role admin", name)
		}
	}
}

// hasRow reports whether a row of the table has the field and ends with the role.
func hasRow(table, field, role string) bool {
	return slices.ContainsFunc(strings.Split(table, "\n"), func(row string) bool {
		return strings.Contains(row, "`"+field+"`") && strings.HasSuffix(strings.TrimSpace(row), "`"+role+"` |")
	})
}

// A field is refused wherever it lies in a request, and what the caller may set is not.
func TestFieldsAreEnforced(t *testing.T) {
	as := func(r Role) context.Context {
		return context.WithValue(context.Background(), callerKey{}, caller{"x", r})
	}
	volume := &pb.Spec{Volumes: []*pb.Volume{{Source: "/", Target: "/host"}}}
	for name, msg := range map[string]any{
		"Spec.volumes":          &pb.DeployRequest{Spec: volume},
		"Spec.mount":            &pb.DeployManyRequest{Specs: []*pb.Spec{{}, {Mount: "loop"}}},
		"Spec.record":           &pb.DeployRequest{Spec: &pb.Spec{Record: true}},
		"Spec.inflaters":        &pb.DeployRequest{Spec: &pb.Spec{Inflaters: 1000}},
		"PullRequest.inflaters": &pb.PullRequest{Inflaters: 1000},
	} {
		err := may(as(Deploy), msg)
		if err == nil || !strings.Contains(err.Error(), name+" ") {
			t.Errorf("%s: %v", name, err)
		}
		var ce *connect.Error
		if !errors.As(err, &ce) || unwire(ce).Code != Permission {
			t.Errorf("%s: %v", name, err)
		}
		if err := may(as(Admin), msg); err != nil {
			t.Errorf("%s, by an administrator: %v", name, err)
		}
	}
	plain := &pb.Spec{Image: "x", Net: "bridge", Ports: []*pb.Port{{Host: 80, Container: 80}}, PlainHttp: true,
		Labels: map[string]string{"a": "b"}}
	if err := may(as(Deploy), &pb.DeployRequest{Spec: plain}); err != nil {
		t.Error(err)
	}
	if may(as(Read), &pb.DeployRequest{Spec: plain}) == nil {
		t.Error("a reader deploys")
	}
}
