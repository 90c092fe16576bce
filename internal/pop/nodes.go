package pop

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

// nodes are the nodes of the PoP as the store shows them: each has a file with a counter that shows that it
// lives, and one that says which machine has its name. How long a counter stands still is measured by this
// node's clock.
type nodes struct {
	*layout

	mu    sync.Mutex
	beats uint64              // this node's counter
	look  bool                // whether this node's references are there: it may have been forgotten
	seen  map[string]*silence // of other nodes
}

type nodeRecord struct {
	Boot string `json:"boot"` // of this Store; random
	Beat uint64 `json:"beat"`
}

// ErrLives says that a node is not to be forgotten: it lives, or has not been
// silent for long enough.
var ErrLives = errors.New("the node may live")

// forgetAfter is how long a node must have been seen to be silent before an
// operator can have it forgotten: several signs of life.
const forgetAfter = time.Minute

// forgotten reports whether a node's counter has stood still for so long, as this
// node has seen it, that what it says counts no more.
func (ns *nodes) forgotten(ctx context.Context, node string) bool {
	if node == ns.cfg.Node {
		return false
	}
	since, err := ns.silence(ctx, node)
	return err == nil && since >= ns.cfg.Forget
}

// silence is for how long a node's counter has stood still, as this node has
// seen it. The first look begins to measure.
func (ns *nodes) silence(ctx context.Context, node string) (time.Duration, error) {
	var rec nodeRecord
	b, err := ns.cfg.FS.ReadFile(ctx, path.Join(nodesDir, node+".json"))
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	ns.mu.Lock()
	defer ns.mu.Unlock()
	have := ns.seen[node]
	if have == nil || have.beat != rec {
		ns.seen[node] = &silence{beat: rec, since: time.Now()}
		return 0, nil
	}
	return time.Since(have.since), nil
}

// Listen looks once how far the counters of the other nodes have come. It is to be called now and
// then: who decides what silent nodes are worth measures from the first call on.
func (ns *nodes) Listen(ctx context.Context) error {
	nodes, err := ns.cfg.FS.Names(ctx, refsDir)
	for _, n := range nodes {
		if n == ns.cfg.Node || strings.HasPrefix(n, ".") {
			continue
		}
		if _, serr := ns.silence(ctx, n); serr != nil {
			return serr
		}
	}
	return err
}

// Silent is a node that has references in the store and gives no sign of life.
type Silent struct {
	Node       string
	For        time.Duration // as this Store has seen it
	References int           // layers that it says it uses
}

// Silent are the other nodes that have references, with how long each has been
// silent since Listen, or this, was called first.
func (ns *nodes) Silent(ctx context.Context) ([]Silent, error) {
	nodes, err := ns.cfg.FS.ReadDir(ctx, refsDir)
	if err != nil {
		return nil, err
	}
	var all []Silent
	for _, n := range nodes {
		if n.Name() == ns.cfg.Node || strings.HasPrefix(n.Name(), ".") {
			continue
		}
		since, err := ns.silence(ctx, n.Name())
		if err != nil {
			return all, err
		}
		names, err := ns.cfg.FS.Names(ctx, path.Join(refsDir, n.Name()))
		if unlessGone(err) != nil {
			return all, err
		}
		used := map[digest.Digest]bool{}
		for _, name := range names {
			for _, id := range referencedBy(name) {
				used[id] = true
			}
		}
		if len(used) > 0 {
			all = append(all, Silent{Node: n.Name(), For: since, References: len(used)})
		}
	}
	return all, nil
}

// Forget removes what a node says it uses: its operator says that it is gone for
// good. It returns an error that wraps ErrLives if the node is this one, is known to the coordinator,
// or has not been silent for a minute since it was looked at first; ErrUnknown if
// the store knows no such node. A node that comes back references anew what it uses,
// and may find it gone. Another machine can have the name then (Claim).
func (ns *nodes) Forget(ctx context.Context, node string) error {
	if node == "" || strings.HasPrefix(node, ".") || strings.ContainsAny(node, "/\\\x00") {
		return fmt.Errorf("node %q: %w", node, ErrUnknown)
	}
	if err := ns.mayForget(ctx, node); err != nil {
		return err
	}
	refs, err := ns.cfg.FS.ReadDir(ctx, path.Join(refsDir, node))
	if unlessGone(err) != nil {
		return err
	}
	var errs error
	for _, m := range refs {
		errs = errors.Join(errs, ns.remove(ctx, path.Join(refsDir, node, m.Name())))
	}
	return errors.Join(errs, ns.remove(ctx, path.Join(refsDir, node)),
		ns.remove(ctx, path.Join(nodesDir, node+".json")),
		ns.remove(ctx, ownerOf(node)))
}

func (ns *nodes) mayForget(ctx context.Context, node string) error {
	if node == ns.cfg.Node {
		return fmt.Errorf("node %s is this one: %w", node, ErrLives)
	}
	if _, err := ns.cfg.FS.Stat(ctx, path.Join(refsDir, node)); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("node %s has no references: %w", node, ErrUnknown)
	} else if err != nil {
		return err
	}
	members, err := ns.cfg.Coord.Members(ctx)
	if err != nil {
		return fmt.Errorf("forget %s: nobody can say whether it lives: %w", node, err)
	}
	for _, m := range members {
		if m.Node == node {
			return fmt.Errorf("the coordinator hears of node %s: %w", node, ErrLives)
		}
	}
	since, err := ns.silence(ctx, node)
	if err != nil {
		return err
	}
	if since < forgetAfter {
		return fmt.Errorf("node %s was seen to be silent for %v only, ask again in %v: %w", node,
			since.Round(time.Second), (forgetAfter - since).Round(time.Second), ErrLives)
	}
	return nil
}

// ErrTaken says that a node's name belongs to another machine.
var ErrTaken = errors.New("another machine of the PoP has this node's name")

func ownerOf(node string) string { return path.Join(nodesDir, node+".owner") }

// Claim makes this node's name the machine's that has this identity: the same whenever it
// is started, and no other machine's. A node keeps and clears its references by its name, so
// two machines that share one would take from each other what protects their containers' layers. An
// error wraps ErrTaken if another machine has the name: nothing else of the Store is to be
// called then. The name is free again when the node is forgotten (Forget), or its owner's file is removed.
func (ns *nodes) Claim(ctx context.Context, machine string) error {
	has, err := ns.cfg.FS.ReadFile(ctx, ownerOf(ns.cfg.Node))
	if errors.Is(err, fs.ErrNotExist) {
		if err = ns.own(ctx, machine); err == nil {
			has, err = ns.cfg.FS.ReadFile(ctx, ownerOf(ns.cfg.Node))
		}
	}
	if err != nil {
		return fmt.Errorf("claim the name %s: %w", ns.cfg.Node, err)
	}
	if string(has) != machine {
		return fmt.Errorf("%s: %w", ns.cfg.Node, ErrTaken)
	}
	return nil
}

// own writes the owner's file, unless there is one.
func (ns *nodes) own(ctx context.Context, machine string) error {
	tmp := path.Join(nodesDir, "."+ns.cfg.Node+".owner."+ns.boot)
	if err := ns.cfg.FS.WriteFile(ctx, tmp, []byte(machine)); err != nil {
		return err
	}
	err := ns.cfg.FS.Link(ctx, tmp, ownerOf(ns.cfg.Node)) // of several machines, one
	if errors.Is(err, fs.ErrExist) {
		err = nil
	}
	return errors.Join(err, ns.remove(ctx, tmp))
}

// twin reports whether a node that the coordinator hears of has this one's name.
func (ns *nodes) twin(ctx context.Context) (bool, error) {
	members, err := ns.cfg.Coord.Members(ctx)
	for _, m := range members {
		if m.Node == ns.cfg.Node && m.Twin != "" {
			return true, nil
		}
	}
	return false, err
}

// silence is how long a node's counter has stood still, by this node's clock.
type silence struct {
	beat  nodeRecord
	since time.Time
}

// lookBeats is after how many signs of life it is looked whether this node's references are there, whatever
// its file says: a directory is asked of every server of a distributed file system.
const lookBeats = 20

// beatLen is the length of a sign of life in bytes.
const beatLen = 96

// show writes this node's sign of life, and reports whether it is to be looked if this node's references are
// there.
func (ns *nodes) show(ctx context.Context) (look bool, err error) {
	ns.mu.Lock()
	ns.beats++
	n := ns.beats
	ns.mu.Unlock()
	b, err := json.Marshal(nodeRecord{Boot: ns.boot, Beat: n})
	if err != nil {
		return false, err
	}
	had, err := ns.overwrite(ctx, path.Join(nodesDir, ns.cfg.Node+".json"),
		fmt.Appendf(nil, "%-*s\n", beatLen-1, b), false)
	ns.mu.Lock()
	defer ns.mu.Unlock()
	if had != beatLen || n%lookBeats == 1 { // Forget takes the file, last
		ns.look = true
	}
	return ns.look, err
}

// looked notes that this node's references are there.
func (ns *nodes) looked() {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	ns.look = false
}
