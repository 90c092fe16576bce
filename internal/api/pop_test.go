package api_test

import (
	"errors"
	"slices"
	"testing"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit/apitest"
)

// What a PoP is asked and answers goes over the wire.
func TestPoP(t *testing.T) {
	n := &apitest.Node{}
	t.Cleanup(n.Close)
	c := apitest.Serve(t, n).Dial(t)
	ctx := t.Context()
	p, err := c.PoPStatus(ctx)
	if err != nil || p.Name != "harbour" || len(p.Nodes) != 2 || p.Nodes[1].Fetching[0].Done != 500_000 ||
		len(p.Layers[0].Users) != 2 ||
		!slices.Equal(p.Store.Quotas, []spec.PoPQuota{{Prefix: "team/", Bytes: 1_000_000, Most: 2_000_000_000}}) {
		t.Errorf("%+v, %v", p, err)
	}
	var seen []spec.PoPVerified
	see := func(v spec.PoPVerified) error { seen = append(seen, v); return nil }
	n.FailAfter("PoPVerify", errors.New("at 0"))
	if err := c.PoPVerify(ctx, nil, see); err != nil || len(seen) != 2 || seen[0].State != spec.PoPWhole ||
		seen[1].State != spec.PoPReplaced || seen[1].Error != "at 0" {
		t.Errorf("%+v, %v", seen, err)
	}
	wantCode(t, c.PoPVerify(ctx, []string{"sha256:9"}, see), api.NotFound, api.ExitNotFound)
	enough := errors.New("enough")
	if err := c.PoPVerify(ctx, nil, func(spec.PoPVerified) error { return enough }); !errors.Is(err, enough) {
		t.Errorf("the reader's error became %v", err)
	}
	if err := c.PoPForget(ctx, "n3"); err != nil {
		t.Error(err)
	}
	wantCode(t, c.PoPForget(ctx, "n2"), api.InUse, api.ExitConflict)
	if r, err := c.Prune(ctx, spec.PruneOptions{PoP: true}); err != nil || len(r.PoPLayers) != 1 ||
		r.PoPBytes != 8_000_000 {
		t.Errorf("%+v, %v", r, err)
	}
}
