package store

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/opencontainers/go-digest"
)

// FuzzOffers takes what another node says of its checkpoints, a list of records.
func FuzzOffers(f *testing.F) {
	r := Record{Format: format, Manifest: "m", Key: "k"}
	r.Data.Digest, r.Data.Size = digest.FromString("data"), 4
	r.ID = r.identity()
	b, err := json.Marshal([]Record{r})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`[null,{}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		o := offers{all: map[string]*offer{}}
		if err := o.add("m", "node", b); err != nil && !errors.Is(err, ErrDamaged) {
			t.Fatal(err)
		}
		for id, offer := range o.all {
			if offer.ID != id || id != offer.identity() || offer.Manifest != "m" || offer.Data.Size <= 0 {
				t.Fatalf("%s: %+v", id, offer.Record)
			}
		}
	})
}

// FuzzRecord takes a checkpoint's record from a disk or a neighbour.
func FuzzRecord(f *testing.F) {
	r := Record{Format: format, Manifest: "m", Key: "k", Fit: []byte(`{}`), Upper: &Layer{DiffID: digest.FromString("u")}}
	r.Data.Digest, r.Data.Size = digest.FromString("data"), 4
	r.ID = r.identity()
	b, err := json.Marshal(r)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := parse(b)
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Fatal(err)
			}
			return
		}
		if digestOf(r.ID).Validate() != nil || r.Data.Size <= 0 || r.Data.Pages < 0 {
			t.Fatalf("%+v", r)
		}
		out, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		again, err := parse(out)
		if len(out) <= maxRecord && (err != nil || again.ID != r.ID) {
			t.Fatalf("%s, then %v, %v", b, again, err)
		}
	})
}
