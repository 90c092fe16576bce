package pop

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
)

// ErrLives says that a node is not to be forgotten: it lives, or has not been
// silent for long enough.
var ErrLives = errors.New("the node may live")

// forgetAfter is how long a node must have been seen to be silent before an
// operator can have it forgotten: several signs of life.
const forgetAfter = time.Minute

// forgotten reports whether a node's counter has stood still for so long, as this
// node has seen it, that what it says counts no more.
func (s *Store) forgotten(ctx context.Context, node string) bool {
	if node == s.cfg.Node {
		return false
	}
	since, err := s.silence(ctx, node)
	return err == nil && since >= s.cfg.Forget
}

// silence is for how long a node's counter has stood still, as this node has
// seen it. The first look begins to measure.
func (s *Store) silence(ctx context.Context, node string) (time.Duration, error) {
	var rec nodeRecord
	b, err := s.cfg.FS.ReadFile(ctx, path.Join(nodesDir, node+".json"))
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	have := s.seen[node]
	if have == nil || have.beat != rec {
		s.seen[node] = &silence{beat: rec, since: time.Now()}
		return 0, nil
	}
	return time.Since(have.since), nil
}

// Listen looks once how far the counters of the other nodes have come. It is to be called now and
// then: who decides what silent nodes are worth measures from the first call on.
func (s *Store) Listen(ctx context.Context) error {
	nodes, err := s.cfg.FS.Names(ctx, refsDir)
	for _, n := range nodes {
		if n == s.cfg.Node || strings.HasPrefix(n, ".") {
			continue
		}
		if _, serr := s.silence(ctx, n); serr != nil {
			return serr
		}
	}
	return err
}

// Silent is a node that has marks in the store and gives no sign of life.
type Silent struct {
	Node  string
	For   time.Duration // as this Store has seen it
	Marks int           // layers that it says it uses
}

// Silent are the other nodes that have marks, with how long each has been
// silent since Listen, or this, was called first.
func (s *Store) Silent(ctx context.Context) ([]Silent, error) {
	nodes, err := s.cfg.FS.ReadDir(ctx, refsDir)
	if err != nil {
		return nil, err
	}
	var all []Silent
	for _, n := range nodes {
		if n.Name() == s.cfg.Node || strings.HasPrefix(n.Name(), ".") {
			continue
		}
		since, err := s.silence(ctx, n.Name())
		if err != nil {
			return all, err
		}
		names, err := s.cfg.FS.Names(ctx, path.Join(refsDir, n.Name()))
		if unlessGone(err) != nil {
			return all, err
		}
		marked := map[digest.Digest]bool{}
		for _, name := range names {
			for _, id := range markedBy(name) {
				marked[id] = true
			}
		}
		if len(marked) > 0 {
			all = append(all, Silent{Node: n.Name(), For: since, Marks: len(marked)})
		}
	}
	return all, nil
}

// Forget removes what a node says it uses: its operator says that it is gone for
// good. It returns an error that wraps ErrLives if the node is this one, is known to the coordinator,
// or has not been silent for a minute since it was looked at first; ErrUnknown if
// the store knows no such node. A node that comes back marks anew what it uses,
// and may find it gone. Another machine can have the name then (Claim).
func (s *Store) Forget(ctx context.Context, node string) error {
	if node == "" || strings.HasPrefix(node, ".") || strings.ContainsAny(node, "/\\\x00") {
		return fmt.Errorf("node %q: %w", node, ErrUnknown)
	}
	if err := s.mayForget(ctx, node); err != nil {
		return err
	}
	marks, err := s.cfg.FS.ReadDir(ctx, path.Join(refsDir, node))
	if unlessGone(err) != nil {
		return err
	}
	var errs error
	for _, m := range marks {
		errs = errors.Join(errs, s.remove(ctx, path.Join(refsDir, node, m.Name())))
	}
	return errors.Join(errs, s.remove(ctx, path.Join(refsDir, node)),
		s.remove(ctx, path.Join(nodesDir, node+".json")),
		s.remove(ctx, ownerOf(node)))
}

func (s *Store) mayForget(ctx context.Context, node string) error {
	if node == s.cfg.Node {
		return fmt.Errorf("node %s is this one: %w", node, ErrLives)
	}
	if _, err := s.cfg.FS.Stat(ctx, path.Join(refsDir, node)); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("node %s has no marks: %w", node, ErrUnknown)
	} else if err != nil {
		return err
	}
	members, err := s.cfg.Coord.Members(ctx)
	if err != nil {
		return fmt.Errorf("forget %s: nobody can say whether it lives: %w", node, err)
	}
	for _, m := range members {
		if m.Node == node {
			return fmt.Errorf("the coordinator hears of node %s: %w", node, ErrLives)
		}
	}
	since, err := s.silence(ctx, node)
	if err != nil {
		return err
	}
	if since < forgetAfter {
		return fmt.Errorf("node %s was seen to be silent for %v only, ask again in %v: %w", node,
			since.Round(time.Second), (forgetAfter - since).Round(time.Second), ErrLives)
	}
	return nil
}

// remark marks again what this node uses, if an operator had it forgotten.
func (s *Store) remark(ctx context.Context) error {
	dir := path.Join(refsDir, s.cfg.Node)
	if _, err := s.cfg.FS.Stat(ctx, dir); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	s.cfg.Log.Warn("this node was forgotten by the PoP: it marks again what it uses")
	if err := s.cfg.FS.Mkdir(ctx, dir); err != nil {
		return err
	}
	var errs error
	for _, ids := range s.Used() {
		errs = errors.Join(errs, s.markAgain(ctx, ids))
	}
	return errs
}

func (s *Store) markAgain(ctx context.Context, ids []digest.Digest) error {
	end, err := s.turns(ctx, ids)
	if err != nil {
		return err
	}
	defer end()
	ids = slices.DeleteFunc(ids, func(id digest.Digest) bool { return !s.marked(id) })
	return s.mark(ctx, ids)
}
