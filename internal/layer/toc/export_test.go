package toc

// NewTree returns a tree of an empty root directory.
func NewTree() *Tree { return newTree(0) }
