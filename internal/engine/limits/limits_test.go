package limits

import (
	"encoding/json"
	"reflect"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

func TestLimits(t *testing.T) {
	const full = `{"memory":{"limit":1048576},"cpu":{"quota":50000,"period":100000},"pids":{"limit":7}}`
	all := Limits{1 << 20, 0.5, 7}
	for _, c := range []struct {
		before, after Limits
		set, update   string
	}{
		{Limits{}, all, full, full},
		{all, all, full, `{}`},
		{all, Limits{}, `{}`, `{"memory":{"limit":-1},"cpu":{"quota":-1,"period":100000},"pids":{"limit":-1}}`},
		{all, Limits{1 << 20, 0.5, 8}, `{"memory":{"limit":1048576},"cpu":{"quota":50000,"period":100000},"pids":{"limit":8}}`,
			`{"pids":{"limit":8}}`},
		{Limits{}, Limits{CPUs: 1e-9}, `{"cpu":{"quota":1000,"period":100000}}`,
			`{"cpu":{"quota":1000,"period":100000}}`},
	} {
		var r specs.LinuxResources
		c.before.Set(&r)
		if got := Of(&r); got != c.before {
			t.Errorf("of %+v: %+v", c.before, got)
		}
		update, back := Change(&r, func(l *Limits) {
			if *l != c.before {
				t.Errorf("they are %+v, not %+v", *l, c.before)
			}
			*l = c.after
		})
		if undo := c.before.update(c.after); !reflect.DeepEqual(back, undo) {
			t.Errorf("back: %+v, want %+v", back, undo)
		}
		for n, got := range []*specs.LinuxResources{&r, update} {
			want := []string{c.set, c.update}[n]
			if b, err := json.Marshal(got); err != nil || string(b) != want {
				t.Errorf("%+v to %+v: %s, %v; want %s", c.before, c.after, b, err, want)
			}
		}
	}
}
