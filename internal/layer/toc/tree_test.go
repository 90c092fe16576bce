package toc_test

import (
	"slices"
	"testing"

	"dewpoint/internal/layer/toc"
)

func TestImplied(t *testing.T) {
	tree := toc.NewTree()
	for _, e := range []toc.Entry{
		{Name: "a/b/c"}, {Name: "a", Type: toc.Directory}, {Name: "x/y/z"},
		{Name: "x", Type: toc.Symlink, Link: "a"},
		{Name: "gone", Type: toc.Whiteout}, {Name: "gone/back"}, {Name: "o", Type: toc.Opaque},
	} {
		if err := tree.Add(&e); err != nil {
			t.Fatal(err)
		}
	}
	if got := tree.Implied(); !slices.Equal(got, []string{"", "a/b", "gone", "o"}) {
		t.Errorf("%q", got)
	}
}

// A tree leaves the attributes of the entries alone.
func TestTreeKeepsEntries(t *testing.T) {
	tree := toc.NewTree()
	first := map[string]string{"user.a": "1", "security.capability": "c"}
	for _, e := range []toc.Entry{
		{Name: "f", Xattrs: first},
		{Name: "g", Type: toc.Hardlink, Link: "f", Xattrs: map[string]string{"user.b": "2"}},
	} {
		if err := tree.Add(&e); err != nil {
			t.Fatal(err)
		}
	}
	n := tree.Nodes[1]
	if len(first) != 2 || len(n.Xattrs) != 2 || n.Xattrs["user.b"] != "2" || n.Nlink != 2 {
		t.Errorf("%v, %v", first, n)
	}
}

func TestLastEntryWins(t *testing.T) {
	tree := toc.NewTree()
	for _, e := range []toc.Entry{
		{Name: "d/f", Size: 1}, {Name: "h", Type: toc.Hardlink, Link: "d/f"},
		{Name: "d", Type: toc.Symlink, Link: "x"},
		{Name: "d", Type: toc.Directory}, {Name: "d/g"},
	} {
		if err := tree.Add(&e); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for i := tree.Names[0].First; i >= 0; i = tree.Names[i].Next {
		got = append(got, tree.Base(i))
		if tree.Base(i) == "d" {
			d := tree.Names[i]
			if tree.Nodes[d.Node].Type != toc.Directory || tree.Base(d.First) != "g" || tree.Names[d.First].Next >= 0 {
				t.Errorf("%+v", d)
			}
		} else if n := tree.Nodes[tree.Names[i].Node]; n.Nlink != 1 || n.Size != 1 {
			t.Errorf("%+v", n)
		}
	}
	if !slices.Equal(got, []string{"h", "d"}) {
		t.Errorf("%q", got)
	}
}
