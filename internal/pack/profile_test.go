package pack_test

import (
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"dewpoint/internal/pack"

	"github.com/opencontainers/go-digest"
)

func profile(layers string, reads ...pack.Range) *pack.Profile {
	p := &pack.Profile{Version: 1, Image: digest.FromString("image"), Reads: reads}
	for _, c := range layers {
		p.Layers = append(p.Layers, digest.FromString(string(c)))
	}
	p.About = pack.About{Runs: 1, Node: "n" + layers, Created: time.Unix(int64(len(reads)), 0).UTC()}
	return p
}

const page = pack.Page

func TestMerge(t *testing.T) {
	a := profile("xy", pack.Range{0, 5, 10}, pack.Range{1, page * 3, page}, pack.Range{0, 100, page},
		pack.Range{1, 0, page * 10})
	b := profile("yz", pack.Range{1, 0, 1}, pack.Range{0, page * 20, 2 * page}, pack.Range{0, 0, page},
		pack.Range{1, page, 0})
	b.About.Exercised = true
	m, err := pack.Merge(a, b)
	check(t, err)
	want := []pack.Range{
		{0, 0, page},             // a reads it first,
		{2, 0, page},             // b this
		{1, page * 3, page},      // second in a, after one page
		{1, page * 20, page * 2}, // second in b, after one page
		{0, page, page},
		{1, 0, page * 3}, {1, page * 4, page * 6},
	}
	if !reflect.DeepEqual(m.Reads, want) {
		t.Errorf("%v", m.Reads)
	}
	if !slices.Equal(m.Layers, profile("xyz").Layers) || m.Image != a.Image {
		t.Errorf("%v", m)
	}
	if m.About.Runs != 2 || !m.About.Exercised || m.About.Node != "nxy" ||
		!m.About.Created.Equal(time.Unix(4, 0)) {
		t.Errorf("%+v", m.About)
	}
	again, err := pack.Merge(m)
	check(t, err)
	if !reflect.DeepEqual(again.Reads, m.Reads) {
		t.Errorf("%v", again.Reads)
	}
	text, err := json.Marshal(m)
	check(t, err)
	if read, err := pack.ParseProfile(text); err != nil || !reflect.DeepEqual(read, m) {
		t.Errorf("%v, %v", read, err)
	}
	other := profile("x")
	other.Image = digest.FromString("other")
	if _, err := pack.Merge(a, other); err == nil {
		t.Error("profiles of two images were merged")
	}
	if _, err := pack.Merge(); err == nil {
		t.Error("nothing was merged")
	}
}

func TestProfileBounds(t *testing.T) {
	good := profile("xy", pack.Range{1, 1 << 43, 5})
	text, _ := json.Marshal(good)
	if _, err := pack.ParseProfile(text); err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(p *pack.Profile){
		"version":  func(p *pack.Profile) { p.Version = 2 },
		"image":    func(p *pack.Profile) { p.Image = "x" },
		"layer":    func(p *pack.Profile) { p.Layers[0] = "md5:1" },
		"index":    func(p *pack.Profile) { p.Reads[0].Layer = 2 },
		"negative": func(p *pack.Profile) { p.Reads[0].Offset = -1 },
		"length":   func(p *pack.Profile) { p.Reads[0].Length = -1 },
		"offset":   func(p *pack.Profile) { p.Reads[0].Offset = 1 << 50 },
		"total":    func(p *pack.Profile) { p.Reads = []pack.Range{{0, 0, 33 << 30}, {1, 0, 33 << 30}} },
		"node":     func(p *pack.Profile) { p.About.Node = "\x00" },
	} {
		p := profile("xy", pack.Range{1, 1 << 43, 5})
		change(p)
		text, _ := json.Marshal(p)
		if _, err := pack.ParseProfile(text); !errors.Is(err, pack.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := pack.Merge(p, p); what != "version" && !errors.Is(err, pack.ErrInvalid) {
			t.Errorf("%s: merged: %v", what, err)
		}
	}
	if _, err := pack.ParseProfile([]byte("{")); !errors.Is(err, pack.ErrInvalid) {
		t.Error(err)
	}
}

func FuzzProfile(f *testing.F) {
	b, err := json.Marshal(profile("xy", pack.Range{0, 5, 10}, pack.Range{1, page * 3, page}))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"version":1,"layers":[],"reads":[{"layer":-1,"offset":9223372036854775807,"length":1}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := pack.ParseProfile(b)
		if err != nil {
			if !errors.Is(err, pack.ErrInvalid) {
				t.Fatal(err)
			}
			return
		}
		for _, r := range p.Reads {
			if r.Layer < 0 || r.Layer >= len(p.Layers) || r.Offset < 0 || r.Length < 0 || r.Offset+r.Length < 0 {
				t.Fatalf("%+v", r)
			}
		}
		text, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := pack.ParseProfile(text); err != nil || len(again.Reads) != len(p.Reads) {
			t.Fatal(err)
		}
	})
}
