package registry

import (
	"testing"
	"time"

	"dewpoint/testkit/registrytest"
)

// The round trip is known once something was asked for, and no shorter than it is.
func TestRoundTrip(t *testing.T) {
	reg := registrytest.New(t)
	p := reg.PushImage("a/b:1", someLayers, registrytest.Options{})
	c := client(t, Config{}, reg)
	if d := c.RoundTrip(reg.Host()); d != 0 {
		t.Errorf("%v before any request", d)
	}
	const far = 60 * time.Millisecond
	reg.Be(registrytest.Quirks{Far: far})
	if _, err := c.Resolve(t.Context(), parse(t, p.Ref), ResolveOptions{}); err != nil {
		t.Fatal(err)
	}
	if d := c.RoundTrip(reg.Host()); d < far {
		t.Errorf("%v where each answer takes %v", d, far)
	}
	reg.Be(registrytest.Quirks{})
	if _, err := c.Resolve(t.Context(), parse(t, p.Ref), ResolveOptions{}); err != nil {
		t.Fatal(err)
	}
	if d := c.RoundTrip(reg.Host()); d <= 0 || d >= far {
		t.Errorf("%v: the shortest of the last ones counts", d)
	}
}

// What was measured is forgotten after the last ones.
func TestLatencyRing(t *testing.T) {
	var l latency
	l.add(time.Millisecond)
	for range 8 {
		l.add(time.Second)
	}
	if d := l.least(); d != time.Second {
		t.Errorf("%v", d)
	}
}
