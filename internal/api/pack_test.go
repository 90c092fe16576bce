package api_test

import (
	"errors"
	"testing"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit/apitest"
)

// A recorded run becomes a profile, a pack and an artifact, over the wire.
func TestPacks(t *testing.T) {
	n := &apitest.Node{}
	t.Cleanup(n.Close)
	n.Add(spec.Image{Name: "nginx:1", Digest: "sha256:aa", Size: 1_000_000, Disk: 3_000_000})
	c := apitest.Serve(t, n).Dial(t)
	ctx := t.Context()
	deploy := func() {
		t.Helper()
		if _, err := c.Deploy(ctx,
			spec.Request{Image: "nginx:1", Name: "web", Cmd: []string{"sleep"}, Record: true},
			spec.Watch{}); err != nil {
			t.Fatal(err)
		}
		if !n.Recorded("web") {
			t.Fatal("the wish to record was lost")
		}
	}
	deploy()
	p, err := c.ProfileEnd(ctx, spec.ProfileEnd{Name: "web", Exercised: true})
	if err != nil || p.Name != "web" || p.Read != 8192 || p.Files != 2 || len(p.Largest) != 2 ||
		p.Largest[0].Path != "bin/app" {
		t.Errorf("%+v, %v", p, err)
	}
	var e *api.Error
	if _, err := c.ProfileEnd(ctx, spec.ProfileEnd{Name: "web"}); !errors.As(err, &e) || e.Code != api.NotFound {
		t.Errorf("%v", err)
	}
	if _, err := c.PackInspect(ctx, "nginx:1"); !errors.As(err, &e) || e.Code != api.NotFound {
		t.Errorf("%v", err)
	}
	built, err := c.PackBuild(ctx, "nginx:1")
	if err != nil || built.Runs != 1 || !built.Exercised || built.Parts.Windows != 20_000 ||
		built.Needed != 8192 {
		t.Errorf("%+v, %v", built, err)
	}
	seen, err := c.PackInspect(ctx, "nginx:1")
	if err != nil || seen.Pack != built.Pack || seen.Created != built.Created {
		t.Errorf("%+v, %v", seen, err)
	}
	pushed, err := c.PackPush(ctx, spec.PackPush{Image: "nginx:1", Key: []byte("key")})
	if err != nil || !pushed.Signed || pushed.Size != 60_000 {
		t.Errorf("%+v, %v", pushed, err)
	}
	n.Fail("PackBuild", api.New(api.DiskFull, "no space"))
	if _, err := c.PackBuild(ctx, "nginx:1"); !errors.As(err, &e) || e.Code != api.DiskFull {
		t.Errorf("%v", err)
	}
}
