package redis

import "testing"

// A Redis that answers with half a pair is refused, and ends nobody.
func TestHalfPair(t *testing.T) {
	if got, err := inTwos([]string{"a", "b", "c"}); err == nil {
		t.Errorf("%q", got)
	}
	if got, err := inTwos([]string{"a", "b"}); err != nil || len(got) != 1 || got[0] != [2]string{"a", "b"} {
		t.Errorf("%q, %v", got, err)
	}
}

// FuzzAnswers reads what claims to be Redis' answers and events.
func FuzzAnswers(f *testing.F) {
	f.Add("5", `{"node":"a","address":"b"}`)
	f.Add("-1", `null`)
	f.Add("1-0", `{"key":"a","size":-1,"cost":1e308}`)
	f.Fuzz(func(t *testing.T, first, second string) {
		for _, reply := range [][]string{{first, second}, {first}, {}} {
			if h, err := holding(reply); err == nil && (h == nil || len(reply) != 2) {
				t.Fatalf("%q: %+v", reply, h)
			}
		}
		_, _ = decodeEvent(second)
		all, err := members([]string{first, second})
		if err == nil && (len(all) == 0 || len(all) > 2 || len(all) == 2 && all[0].Node >= all[1].Node) {
			t.Fatalf("%q, %q: %+v", first, second, all)
		}
		got, position, err := touches([][2]string{{first, second}}, "e", "")
		if err == nil && (len(got) != 1 || idIn("e", position) != first) {
			t.Fatalf("%q, %q: %+v, %q", first, second, got, position)
		}
		_, _ = texts([]any{first, second})
		_ = idIn(first, second)
	})
}
