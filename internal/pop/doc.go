// Package pop is what the nodes of a point of presence have in common.
//
// # The model
//
// A Store is a directory on a file system that all nodes mount. It holds layers, startup packs and
// checkpoints as few large files. A record names the files of a layer and makes it visible: a node writes
// and syncs the files first, then renames the record into place. Nothing visible is ever changed. A node that
// wants to delete files moves their record first; the move fails if another node has moved it.
//
// A Coordinator is one node's view of what the nodes agree on: leases, references, uses, events, members.
// Package redis keeps it in Redis, package local in one process; testkit/poptest is the contract of both.
// Leases save work and protect nothing: two nodes that believe to hold one lease fetch a layer twice.
//
// A node references a layer in the coordinator and by a file in the store before it looks whether the layer
// is there. An evicting node takes the record out of sight before it looks for references, puts it back if
// there is one, and deletes the files after a time of grace and one more look. No clock of one node is
// compared with the clock of another.
//
// docs/operate/pop.md has the rules in full; testkit/simtest plays schedules of crashes, delays and power
// cuts against them.
package pop
