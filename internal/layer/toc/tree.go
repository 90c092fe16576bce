package toc

import (
	"fmt"
	"maps"
	"strings"
)

// Tree is what a layer's entries come to: one inode per file, one name per
// place. It is built by Add, in the order of the archive, and then read; it is
// not safe for concurrent use while it is built.
//
// The rules are containerd's applier's, except where that depends on the layers
// below or on the order of whiteouts:
//
//   - A later entry replaces an earlier one of its name, with all that is below
//     it; a directory that meets a directory only takes its attributes.
//   - A missing parent is made with mode 0755, owner 0:0 and the time 0.
//   - A hard link needs a target in this layer, before it. Owner, mode, time and
//     attributes of the link's entry become the inode's.
//   - A whiteout hides a name of the layers below and nothing of its own layer,
//     before or after it: a directory of the same name becomes opaque.
//   - A path that goes through a symbolic link is refused.
type Tree struct {
	Names []Name // Names[0] is the root; not all are still reachable from it
	Nodes []Node // Nodes[0] is the root's
	index map[string]int32

	lastDir  string // path that was last found to be a directory
	lastName int32
}

// Name is a name in a directory. Indexes are into Names, or Nodes for Node; -1
// is none.
type Name struct {
	Path   string
	Parent int32
	First  int32 // of a directory's names, which are linked by Next in no order
	Next   int32
	Node   int32 // -1 if the name is only hidden
	Hides  bool  // the layers below have nothing here
}

// Node is an inode.
type Node struct {
	Type         Type // neither Hardlink, Whiteout nor Opaque
	Implied      bool // a directory that no entry describes
	Mode         uint32
	UID, GID     uint32
	Nlink        uint32 // names of a node that is no directory
	Major, Minor uint32
	Nsec         uint32
	Sec          int64 // modification time since 1970, never negative
	Size         int64
	Link         string
	Xattrs       map[string]string // not to be written: may be the Entry's
	ownXattrs    bool              // they are the tree's
	Ranges       []Range
}

// newTree returns a tree of an empty root directory, with room for n entries and some implied directories.
func newTree(n int) *Tree {
	n += n/16 + 1
	t := &Tree{Names: make([]Name, 0, n), Nodes: make([]Node, 0, n), index: make(map[string]int32, n)}
	t.Names = append(t.Names, Name{Parent: 0, First: -1, Next: -1, Node: 0})
	t.Nodes = append(t.Nodes, Node{Type: Directory, Implied: true, Mode: 0o755})
	return t
}

// Tree makes the tree of all entries.
func (t *TOC) Tree() (*Tree, error) {
	tree := newTree(len(t.Entries))
	for _, e := range t.Entries {
		if err := tree.Add(e); err != nil {
			return nil, err
		}
	}
	return tree, nil
}

// Base returns the last component of a name's path.
func (t *Tree) Base(i int32) string {
	n := &t.Names[i]
	if n.Parent == 0 {
		return n.Path
	}
	return n.Path[len(t.Names[n.Parent].Path)+1:]
}

// Implied returns the paths of the directories that no entry of the layer
// describes. Where a layer below has such a directory, containerd gives it that
// one's attributes.
func (t *Tree) Implied() []string {
	var out []string
	for i := range t.Names {
		n := &t.Names[i]
		if n.Node >= 0 && t.Nodes[n.Node].Implied && (i == 0 || t.index[n.Path] == int32(i)) {
			out = append(out, n.Path)
		}
	}
	return out
}

// Add applies the next entry. It keeps the entry's strings, attributes and
// ranges. Its error is an *Error.
func (t *Tree) Add(e *Entry) error {
	if e.Type == Opaque {
		i, err := t.dir(e.Name, e)
		if err == nil {
			t.Names[i].Hides = true
		}
		return err
	}
	i, err := t.name(e.Name, e)
	if err != nil {
		return err
	}
	switch n := &t.Names[i]; {
	case e.Type == Whiteout:
		n.Hides = true
		return nil
	case e.Type == Directory && n.Node >= 0 && t.Nodes[n.Node].Type == Directory:
		node := &t.Nodes[n.Node]
		describe(node, e)
		node.Implied = false
		node.addXattrs(e.Xattrs)
		return nil
	case i == 0:
		return refuse(e, ErrCorrupt, "the root is no "+e.Type.String())
	}
	t.clear(i)
	if e.Type == Hardlink {
		return t.link(i, e)
	}
	t.Names[i].Node = int32(len(t.Nodes))
	t.Nodes = append(t.Nodes, Node{
		Type: e.Type, Nlink: 1, Major: e.Major, Minor: e.Minor,
		Size: e.Size, Link: e.Link, Xattrs: e.Xattrs, Ranges: e.Ranges,
	})
	node := &t.Nodes[len(t.Nodes)-1]
	if describe(node, e); e.Type == Symlink {
		node.Mode = 0o777
	}
	return nil
}

func refuse(e *Entry, err error, why string) error {
	return &Error{Name: e.Name, Offset: -1, Err: err, Why: why}
}

func describe(n *Node, e *Entry) {
	n.Mode, n.UID, n.GID = e.Mode, e.UID, e.GID
	n.Sec, n.Nsec = e.ModTime.Unix(), uint32(e.ModTime.Nanosecond())
}

// own makes the attributes the node's, so that they may be changed.
func (n *Node) own() {
	if !n.ownXattrs {
		n.Xattrs, n.ownXattrs = maps.Clone(n.Xattrs), true
	}
	if n.Xattrs == nil {
		n.Xattrs = make(map[string]string)
	}
}

// addXattrs sets those attributes that an inode of the node's type can have.
func (n *Node) addXattrs(add map[string]string) {
	for k, v := range add {
		if keep, _ := xattrKept(k, n.Type); keep {
			n.own()
			n.Xattrs[k] = v
		}
	}
}

// link makes name i one more of the target's node.
func (t *Tree) link(i int32, e *Entry) error {
	target, ok := t.index[e.Link]
	if !ok || t.Names[target].Node < 0 {
		return t.noTarget(e)
	}
	id := t.Names[target].Node
	node := &t.Nodes[id]
	if node.Type == Directory {
		return refuse(e, ErrCorrupt, fmt.Sprintf("hard link to the directory %q", e.Link))
	}
	t.Names[i].Node = id
	node.Nlink++
	if describe(node, e); node.Type == Symlink {
		node.Mode = 0o777
	}
	const caps = "security.capability" // lost with the change of owner
	if _, has := node.Xattrs[caps]; has {
		node.own()
		delete(node.Xattrs, caps)
	}
	node.addXattrs(e.Xattrs)
	return nil
}

func (t *Tree) noTarget(e *Entry) error {
	for i := strings.IndexByte(e.Link, '/'); i >= 0; {
		if at, ok := t.index[e.Link[:i]]; ok && t.Names[at].Node >= 0 && t.Nodes[t.Names[at].Node].Type == Symlink {
			return refuse(e, ErrUnsafe,
				fmt.Sprintf("hard link to %q goes through the symbolic link %q", e.Link, e.Link[:i]))
		}
		j := strings.IndexByte(e.Link[i+1:], '/')
		if j < 0 {
			break
		}
		i += j + 1
	}
	return refuse(e, ErrCorrupt, fmt.Sprintf("hard link to %q, which the layer does not have before it", e.Link))
}

// clear takes a name's node away, and all names below it.
func (t *Tree) clear(i int32) {
	n := &t.Names[i]
	if n.Node < 0 {
		return
	}
	if node := &t.Nodes[n.Node]; node.Type != Directory {
		node.Nlink--
	} else {
		t.lastDir = ""
		for c := n.First; c >= 0; c = t.Names[c].Next {
			t.clear(c)
			delete(t.index, t.Names[c].Path)
		}
		n.First = -1
	}
	n.Node = -1
}

// name returns the Name of a path, made with its parents if there is none.
func (t *Tree) name(path string, e *Entry) (int32, error) {
	if path == "" {
		return 0, nil
	}
	dir, _ := splitName(path)
	parent, err := t.dir(dir, e)
	if err != nil {
		return 0, err
	}
	if i, ok := t.index[path]; ok {
		return i, nil
	}
	if len(t.Names) > MaxEntries {
		return 0, refuse(e, ErrLimit, "too many names")
	}
	i := int32(len(t.Names))
	t.Names = append(t.Names, Name{Path: path, Parent: parent, First: -1, Next: t.Names[parent].First, Node: -1})
	t.Names[parent].First = i
	t.index[path] = i
	return i, nil
}

// dir returns the Name of a directory, made if there is none.
func (t *Tree) dir(path string, e *Entry) (int32, error) {
	if path == "" {
		return 0, nil
	}
	if path == t.lastDir {
		return t.lastName, nil
	}
	i, ok := t.index[path]
	if !ok {
		var err error
		if i, err = t.name(path, e); err != nil {
			return 0, err
		}
	}
	if n := &t.Names[i]; n.Node < 0 {
		n.Node = int32(len(t.Nodes))
		t.Nodes = append(t.Nodes, Node{Type: Directory, Implied: true, Mode: 0o755})
	} else if k := t.Nodes[n.Node].Type; k == Symlink {
		return 0, refuse(e, ErrUnsafe, fmt.Sprintf("its path goes through the symbolic link %q", path))
	} else if k != Directory {
		return 0, refuse(e, ErrCorrupt, fmt.Sprintf("its parent %q is a %s", path, k))
	}
	t.lastDir, t.lastName = path, i
	return i, nil
}
