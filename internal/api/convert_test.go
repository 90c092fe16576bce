package api

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/spec"
)

// filled is a T in which every field has a value of its own, so that a field
// that a conversion forgets is seen.
func filled[T any]() T {
	var v T
	n := 0
	fill(reflect.ValueOf(&v).Elem(), &n)
	return v
}

func fill(v reflect.Value, n *int) {
	*n++
	if v.Type() == reflect.TypeFor[time.Time]() {
		v.Set(reflect.ValueOf(time.Unix(int64(1_700_000_000+*n), 7).UTC()))
		return
	}
	switch v.Kind() {
	case reflect.Uint8:
		v.SetUint(uint64(*n % 256))
	case reflect.String:
		v.SetString(fmt.Sprint("s", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(*n))
	case reflect.Uint16, reflect.Uint64:
		v.SetUint(uint64(*n))
	case reflect.Float64:
		v.SetFloat(float64(*n) + 0.5)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			fill(v.Index(i), n)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		k, e := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(k, n)
		fill(e, n)
		v.SetMapIndex(k, e)
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), n)
		}
	default:
		panic("no value for " + v.Type().String())
	}
}

// roundTrip sends a T over the wire.
func roundTrip[T any, P proto.Message](t *testing.T, to func(T) P, from func(P) T) {
	t.Helper()
	for _, want := range []T{filled[T](), *new(T)} {
		b, err := proto.Marshal(to(want))
		if err != nil {
			t.Fatal(err)
		}
		m := to(want).ProtoReflect().New().Interface().(P)
		if err := proto.Unmarshal(b, m); err != nil {
			t.Fatal(err)
		}
		if got := from(m); fmt.Sprintf("%+v", deref(got)) != fmt.Sprintf("%+v", deref(want)) {
			t.Errorf("%T:\n got %+v\nwant %+v", want, got, want)
		}
	}
}

// deref shows what the pointers of an Event or a Deployment point to.
func deref(v any) any {
	if d, ok := v.(spec.Deployment); ok && d.Record != nil {
		r, f := *d.Record, *d.Failure
		d.Record, d.Failure = nil, nil
		return []any{d, r, f}
	}
	if r, ok := v.(spec.Request); ok && r.Health != nil {
		h := *r.Health
		r.Health = nil
		return []any{r, h}
	}
	e, ok := v.(spec.Event)
	if !ok || e.ExitCode == nil {
		return v
	}
	code, record := *e.ExitCode, *e.Record
	e.ExitCode, e.Record = nil, nil
	return []any{e, code, record}
}

func TestNothingIsForgotten(t *testing.T) {
	roundTrip(t, func(r spec.Request) *pb.DeployRequest {
		return &pb.DeployRequest{Spec: specOf(r), Key: r.Terms.Key, Deadline: durationOf(r.Terms.Deadline)}
	}, func(p *pb.DeployRequest) spec.Request {
		r := requestFrom(p.Spec)
		r.Terms = spec.Terms{Key: p.Key, Deadline: p.Deadline.AsDuration()}
		if r.Terms.Key != "" { // the call's, and the caller's
			f := filled[spec.Request]().Terms
			r.Terms.Detach, r.Terms.Caller, r.Terms.Admin = f.Detach, f.Caller, f.Admin
		}
		return r
	})
	roundTrip(t, deploymentOf, deploymentFrom)
	roundTrip(t, pullOf, pullFrom)
	roundTrip(t, recordOf, recordFrom)
	roundTrip(t, layerOf, layerFrom)
	roundTrip(t, containerOf, func(p *pb.Container) spec.Container {
		c := containerFrom(p)
		if c.Name != "" { // the node's alone
			c.ID = filled[spec.Container]().ID
		}
		return c
	})
	roundTrip(t, volumeInfoOf, volumeInfoFrom)
	roundTrip(t, imageOf, imageFrom)
	roundTrip(t, findingOf, findingFrom)
	roundTrip(t, versionOf, versionFrom)
	roundTrip(t, eventOf, eventFrom)
	roundTrip(t, sizeOf, sizeFrom)
	roundTrip(t, profileEndOf, profileEndFrom)
	roundTrip(t, profileOf, profileFrom)
	roundTrip(t, packOf, packFrom)
	roundTrip(t, packPushOf, packPushFrom)
	roundTrip(t, packPushedOf, packPushedFrom)
	roundTrip(t, checkpointOf, checkpointFrom)
	roundTrip(t, popOf, popFrom)
	roundTrip(t, popVerifiedOf, popVerifiedFrom)
	roundTrip(t, pruneOf, pruneFrom)
	roundTrip(t, prunedOf, prunedFrom)
	exec := func(r spec.ExecRequest) *pb.ExecRequest_Start { return execOf("web", r, true) }
	roundTrip(t, exec, execFrom)
}

func FuzzDeployRequest(f *testing.F) {
	b, err := proto.Marshal(&pb.DeployRequest{Spec: specOf(filled[spec.Request]())})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		m := new(pb.DeployRequest)
		if proto.Unmarshal(b, m) != nil {
			return
		}
		r := requestFrom(m.GetSpec())
		if r.Validate() != nil {
			return
		}
		again := requestFrom(specOf(r))
		if fmt.Sprintf("%+v", again) != fmt.Sprintf("%+v", r) {
			t.Errorf("%+v became %+v", r, again)
		}
	})
}
