package layer

import (
	"bytes"
	"slices"
	"testing"

	"dewpoint/internal/layer/toc"
	"dewpoint/testkit/treetest"
)

// TestDirectories compares with the tree on all the archives that the tree
// is tested with.
func TestDirectories(t *testing.T) {
	for _, c := range treetest.Cases() {
		table, err := toc.Read(bytes.NewReader(c.Tar))
		if err != nil {
			t.Fatalf("%s: %v", c.Name, err)
		}
		tree, err := table.Tree()
		if err != nil {
			t.Fatalf("%s: %v", c.Name, err)
		}
		dirs := directories{}
		for _, e := range table.Entries {
			dirs.add(e)
		}
		want := withoutRoot(tree.Implied())
		slices.Sort(want)
		if got := dirs.implied(); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", c.Name, got, want)
		}
	}
}
