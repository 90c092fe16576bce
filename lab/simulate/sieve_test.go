package simulate

import (
	"slices"
	"testing"

	"dewpoint/internal/evict"
)

func TestSieveHandGoesOn(t *testing.T) {
	p := newSieve()
	for _, k := range []string{"a", "b", "c"} {
		p.Add(evict.Object{Key: k, Size: 1, Images: 1})
	}
	p.Add(evict.Object{Key: "d", Size: 1, Images: 2})
	p.Hit("a")
	p.Hit("c")
	p.Hit("d")
	// b has not been used; then the hand stands at c, whose use it takes, then d's two, and a's was taken
	// before.
	var got []string
	for key, ok := p.Victim(nil); ok; key, ok = p.Victim(nil) {
		if again, _ := p.Victim(nil); again != key {
			t.Fatalf("named %q and, when asked again, %q", key, again)
		}
		p.Remove(key)
		got = append(got, key)
	}
	if !slices.Equal(got, []string{"b", "a", "c", "d"}) {
		t.Fatal(got)
	}
}

func TestSieveKeepsWhatIsInUse(t *testing.T) {
	p := newSieve()
	for _, k := range []string{"a", "b"} {
		p.Add(evict.Object{Key: k, Size: 1, Images: 1})
	}
	if key, ok := p.Victim(func(key string) bool { return key != "a" }); key != "b" || !ok {
		t.Errorf("with a in use, %q goes", key)
	}
	if key, ok := p.Victim(func(string) bool { return false }); ok {
		t.Errorf("all are in use, and %q goes", key)
	}
}
