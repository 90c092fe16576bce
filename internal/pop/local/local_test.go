package local

import (
	"testing"

	"go.uber.org/goleak"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/poptest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type bed struct{ hub *Hub }

func (b bed) Join(t *testing.T, node string) pop.Coordinator {
	c, err := b.hub.Join(pop.Config{Node: node, TTL: poptest.TTL})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func (b bed) Cut(_ *testing.T, node string, cut bool) { b.hub.Cut(node, cut) }
func (b bed) Disconnect(*testing.T)                   { b.hub.Disconnect() }
func (b bed) Forget(*testing.T)                       { b.hub.Forget() }

func (b bed) Restart(*testing.T) {
	b.hub.Forget()
	b.hub.Disconnect()
}

func (b bed) Pause(_ *testing.T, pause bool) {
	for _, node := range []string{"a", "b", "c"} {
		b.hub.Cut(node, pause)
	}
}

func TestContract(t *testing.T) {
	poptest.Run(t, func(*testing.T) poptest.Bed { return bed{NewHub()} })
}

func TestConfig(t *testing.T) {
	if _, err := New(pop.Config{}); err == nil {
		t.Error("a node without a name")
	}
	if _, err := New(pop.Config{Node: "a", TTL: 1}); err == nil {
		t.Error("a lease period of a nanosecond")
	}
}
