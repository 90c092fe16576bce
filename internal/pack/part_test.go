package pack

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"dewpoint/testkit"
)

// Frames of every size are decoded within the bounds that they are made with.
func TestPartSizes(t *testing.T) {
	testkit.Long(t)
	enc, err := newEncoder()
	if err != nil {
		t.Fatal(err)
	}
	rnd := rand.New(rand.NewPCG(1, 1))
	random := make([]byte, 1<<20)
	for i := range random {
		random[i] = byte(rnd.Uint32())
	}
	for _, n := range []int{1, 100, 4096, 200_000, 1 << 20, MaxChunk, MaxWindow, MaxWindow + 1, 20 << 20} {
		raw := bytes.Repeat(random, n>>20+1)[:n]
		p, stored := enc.part(raw)
		if err := p.check("part", maxDecoded); err != nil {
			t.Errorf("%d bytes: %v", n, err)
		}
		got, err := p.decode(stored, nil)
		if err != nil || !bytes.Equal(got, raw) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	for _, n := range []int{1, 1000, deflateReach} {
		stored := enc.window(random[:n])
		got, err := DecodeWindow(stored)
		if err != nil || !bytes.Equal(got, random[:n]) || int64(len(stored)) > mostStored(deflateReach) {
			t.Errorf("window of %d bytes: %d, %v", n, len(stored), err)
		}
	}
}
