package pop

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
)

// references are what this node uses of the store, and who else uses it.
//
// A reference is an empty file, refs/NODE/LAYERS.NONCE, of up to perReference layers: making one costs as
// much as looking a layer up. Each has a name of its own: a removal that was given up and happens late takes
// no newer one. A reference of several layers holds each of them for as long as it is there: a node that
// ceases to use some of them references the others anew before it removes it. The coordinator is told the
// same, for as long as this node's session lasts.
//
// A node references a layer first and then looks whether it is there. One that evicts takes the record out of
// sight first and then looks for references. Nothing stands on a layer before its reference survives a power
// cut of the servers: the node syncs the directory while it looks whether the layer is there.
type references struct {
	*layout
	records *records
	nodes   *nodes

	mu   sync.Mutex
	used map[digest.Digest]*nameSet      // what this node references, or may
	held map[digest.Digest]int           // of these, what Unuse leaves referenced
	turn map[digest.Digest]chan struct{} // held by the caller that references an object or ceases to

	settled map[string]bool // references that survive a power cut
}

// perReference is how many layers one reference names: a file's name has up to 255 bytes.
const perReference = 5

// nameSet is the names below refs/NODE of the references of one layer; references.mu guards it.
type nameSet struct {
	now  string   // the one that counts; "" if none does
	late []string // others that may be there
}

func (m *nameSet) all() []string {
	if m.now == "" {
		return slices.Clone(m.late)
	}
	return append(slices.Clone(m.late), m.now)
}

// retire has a reference count no more; it may still be there.
func (m *nameSet) retire(name string) {
	if m.now == name && name != "" {
		m.late, m.now = append(m.late, name), ""
	}
}

func (m *nameSet) forget(name string) {
	m.late = slices.DeleteFunc(m.late, func(n string) bool { return n == name })
}

// idLength is that of a sha256 in a reference's name.
var idLength = base64.RawURLEncoding.EncodedLen(sha256.Size)

// referenceName is a name that nobody has used for a reference of these layers.
func referenceName(ids []digest.Digest) (string, error) {
	var b strings.Builder
	for _, id := range ids {
		sum, err := hex.DecodeString(id.Encoded())
		if err != nil || len(sum) != sha256.Size {
			return "", fmt.Errorf("reference %q: %w", id, ErrUnknown)
		}
		b.WriteString(base64.RawURLEncoding.EncodeToString(sum))
	}
	return b.String() + "." + rand.Text()[:8], nil
}

// referencedBy are the layers that the reference of that name is of; none if it is no reference's.
func referencedBy(name string) (ids []digest.Digest) {
	all, _, _ := strings.Cut(name, ".")
	for ; len(all) >= idLength; all = all[idLength:] {
		sum, err := base64.RawURLEncoding.DecodeString(all[:idLength])
		if err != nil {
			return nil
		}
		ids = append(ids, digest.NewDigestFromBytes(digest.SHA256, sum))
	}
	if len(all) > 0 {
		return nil
	}
	return ids
}

func (refs *references) dir() string { return path.Join(refsDir, refs.cfg.Node) }

// makeDir makes this node's directory, so that a power cut leaves it.
func (refs *references) makeDir(ctx context.Context) error {
	if err := refs.cfg.FS.Mkdir(ctx, refs.dir()); err != nil {
		return err
	}
	return refs.cfg.FS.SyncDir(ctx, refsDir)
}

// adopt takes up the references that an earlier process of this node has left:
// what it used may still be mounted. Unuse takes them back.
func (refs *references) adopt(ctx context.Context) error {
	if err := refs.makeDir(ctx); err != nil {
		return err
	}
	names, err := refs.cfg.FS.Names(ctx, refs.dir())
	if err != nil {
		return err
	}
	for _, name := range names {
		for _, id := range referencedBy(name) {
			m := refs.namesOf(id)
			m.late = append(m.late, name)
		}
	}
	return nil
}

// namesOf is made if need be.
func (refs *references) namesOf(id digest.Digest) *nameSet {
	refs.mu.Lock()
	defer refs.mu.Unlock()
	if refs.used[id] == nil {
		refs.used[id] = new(nameSet)
	}
	return refs.used[id]
}

// turns has one caller at a time reference these layers or take their references away.
func (refs *references) turns(ctx context.Context, ids []digest.Digest) (end func(), err error) {
	ids = slices.Compact(slices.Sorted(slices.Values(ids))) // in one order, so that nobody waits in a circle
	var mine []chan struct{}
	end = func() {
		for _, t := range mine {
			<-t
		}
	}
	for _, id := range ids {
		refs.mu.Lock()
		t := refs.turn[id]
		if t == nil {
			t = make(chan struct{}, 1)
			refs.turn[id] = t
		}
		refs.mu.Unlock()
		select {
		case t <- struct{}{}:
			mine = append(mine, t)
		case <-ctx.Done():
			end()
			return nil, context.Cause(ctx)
		}
	}
	return end, nil
}

// Used returns the layers that this node references, or may: those of one reference
// together, each once.
func (refs *references) Used() [][]digest.Digest {
	refs.mu.Lock()
	defer refs.mu.Unlock()
	var all [][]digest.Digest
	said := map[digest.Digest]bool{}
	for _, id := range slices.Sorted(maps.Keys(refs.used)) {
		if said[id] {
			continue
		}
		together := []digest.Digest{id}
		said[id] = true
		for _, name := range refs.used[id].all() {
			for _, other := range referencedBy(name) {
				if !said[other] && refs.used[other] != nil {
					together, said[other] = append(together, other), true
				}
			}
		}
		all = append(all, together)
	}
	return all
}

// Use references the layer as used by this node and returns its record. From then on
// its files stay until Unuse, whatever becomes of the record. An error wraps ErrUnknown
// if the store does not have it, or ErrStoreAway; a reference that was there before stays.
func (refs *references) Use(ctx context.Context, id digest.Digest) (*Layer, error) {
	if _, err := refs.records.record(ctx, id); err != nil {
		return nil, err // nothing to reference
	}
	have, err := refs.secure(ctx, []digest.Digest{id}, nil)
	return have[id], err
}

// UseAll is Use of several layers that are likely to be there, at the cost of one or
// little more. It returns the records of those that are; the error is of the others.
func (refs *references) UseAll(ctx context.Context,
	layers map[digest.Digest]*Lookup) (map[digest.Digest]*Layer, error) {
	return refs.secure(ctx, slices.Sorted(maps.Keys(layers)), layers)
}

// secure references layers and then looks whether they are there. lookups has what was seen of them
// before, if anything was.
func (refs *references) secure(ctx context.Context, ids []digest.Digest,
	lookups map[digest.Digest]*Lookup) (map[digest.Digest]*Layer, error) {
	end, err := refs.turns(ctx, ids)
	if err != nil {
		return nil, err
	}
	defer end()
	before := map[digest.Digest]bool{}
	for _, id := range ids {
		before[id] = refs.has(id)
	}
	names, err := refs.make(ctx, ids)
	if err != nil {
		return nil, fmt.Errorf("reference layers %v: %w", ids, err)
	}
	settled := make(chan error, 1)
	go func() { settled <- refs.settle(ctx, names) }()
	// A node that evicts looks for references after the record is out of sight. So if the
	// record is there now, the reference is seen in time.
	have, err := refs.records.wholes(ctx, ids, lookups)
	if serr := <-settled; serr != nil { // a power cut might take what the caller is to stand on
		have, err = nil, errors.Join(err, fmt.Errorf("reference layers %v: %w", ids, serr))
	}
	var vain []digest.Digest
	for _, id := range ids {
		if have[id] == nil && !before[id] {
			vain = append(vain, id)
		}
	}
	if len(vain) > 0 {
		err = errors.Join(err, refs.cease(context.WithoutCancel(ctx), vain))
	}
	return have, err
}

// has reports whether a reference may be there that something stands on.
func (refs *references) has(id digest.Digest) bool {
	refs.mu.Lock()
	defer refs.mu.Unlock()
	return refs.used[id] != nil
}

// make makes references that count of those layers that have none, and makes sure of those there are. It
// returns their names; nothing may stand on them before they are settled.
func (refs *references) make(ctx context.Context, ids []digest.Digest) (names []string, err error) {
	if len(ids) == 0 {
		return nil, nil
	}
	if names, err = refs.namesFor(ids); err != nil {
		return nil, err
	}
	keys := make([]string, len(ids))
	for i, id := range ids {
		keys[i] = id.String()
	}
	var making errgroup.Group
	making.Go(func() error { // what is told in vain goes with the references
		err := refs.cfg.Coord.Use(ctx, keys...)
		if errors.Is(err, ErrAway) {
			return nil
		}
		return err
	})
	for _, name := range names {
		making.Go(func() error { return refs.cfg.FS.Make(ctx, path.Join(refs.dir(), name)) })
	}
	return names, making.Wait()
}

// makeSettled is make and settle.
func (refs *references) makeSettled(ctx context.Context, ids []digest.Digest) error {
	names, err := refs.make(ctx, ids)
	if err != nil {
		return err
	}
	return refs.settle(ctx, names)
}

// settle makes references survive a power cut of the servers. It looks for them last: a cut between their
// making and the fsync has taken them, and they are made again.
func (refs *references) settle(ctx context.Context, names []string) error {
	for range settleTries {
		if names = refs.unsettled(names); len(names) == 0 {
			return nil
		}
		if err := refs.cfg.FS.SyncDir(ctx, refs.dir()); err != nil {
			return err
		}
		var looks errgroup.Group
		for _, name := range names {
			looks.Go(func() error { return refs.settleOne(ctx, name) })
		}
		if err := looks.Wait(); err != nil {
			return err
		}
	}
	return fmt.Errorf("%w: it loses references that it has made durable", ErrStoreAway)
}

const settleTries = 3

// settleOne notes that a reference is there after an fsync, or makes it again.
func (refs *references) settleOne(ctx context.Context, name string) error {
	file := path.Join(refs.dir(), name)
	_, err := refs.cfg.FS.Stat(ctx, file)
	if errors.Is(err, fs.ErrNotExist) {
		return refs.cfg.FS.Make(ctx, file)
	}
	if err == nil {
		refs.mu.Lock()
		defer refs.mu.Unlock()
		refs.settled[name] = true
	}
	return err
}

// unsettled are those among names that a power cut may take.
func (refs *references) unsettled(names []string) []string {
	refs.mu.Lock()
	defer refs.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return refs.settled[name] })
}

// namesFor are the references that count of these layers. Those of layers that have none are to be made.
func (refs *references) namesFor(ids []digest.Digest) (names []string, err error) {
	refs.mu.Lock()
	defer refs.mu.Unlock()
	var bare []digest.Digest
	for _, id := range slices.Compact(slices.Sorted(slices.Values(ids))) {
		if m := refs.used[id]; m == nil || m.now == "" {
			bare = append(bare, id)
		} else if !slices.Contains(names, m.now) {
			names = append(names, m.now)
		}
	}
	for some := range slices.Chunk(bare, perReference) {
		name, err := referenceName(some)
		if err != nil {
			return nil, err
		}
		for _, id := range some {
			if refs.used[id] == nil {
				refs.used[id] = new(nameSet)
			}
			refs.used[id].now = name
		}
		names = append(names, name)
	}
	return names, nil
}

// Hold is Use for a time: until release is called the reference stays, even after Unuse.
// When the last of several has called it, the reference is taken away.
func (refs *references) Hold(ctx context.Context, id digest.Digest) (l *Layer, release func(), err error) {
	refs.mu.Lock()
	refs.held[id]++
	refs.mu.Unlock()
	l, err = refs.Use(ctx, id)
	if err != nil {
		refs.unhold(id)
		return nil, nil, err
	}
	return l, func() {
		if refs.unhold(id) > 0 {
			return
		}
		if err := refs.Unuse(context.WithoutCancel(ctx), id); err != nil {
			refs.cfg.Log.Debug("reference stays", "object", id, "err", err)
		}
	}, nil
}

func (refs *references) unhold(id digest.Digest) int {
	refs.mu.Lock()
	defer refs.mu.Unlock()
	refs.held[id]--
	n := refs.held[id]
	if n == 0 {
		delete(refs.held, id)
	}
	return n
}

func (refs *references) isHeld(id digest.Digest) bool {
	refs.mu.Lock()
	defer refs.mu.Unlock()
	return refs.held[id] > 0
}

// Unuse takes this node's references of these layers away, which must not be mounted here
// any more. After an error the references may be there or not, and Used has the layers. What is held (see
// Hold) keeps its reference.
func (refs *references) Unuse(ctx context.Context, ids ...digest.Digest) error {
	for {
		all := refs.together(ids)
		end, err := refs.turns(ctx, all)
		if err != nil {
			return err
		}
		more := func(id digest.Digest) bool { return !slices.Contains(all, id) }
		if slices.ContainsFunc(refs.together(ids), more) {
			end() // referenced with others meanwhile
			continue
		}
		defer end()
		return refs.cease(ctx, slices.DeleteFunc(slices.Clone(ids), refs.isHeld))
	}
}

// together are these layers, and those that have a reference in common with one of them.
func (refs *references) together(ids []digest.Digest) []digest.Digest {
	refs.mu.Lock()
	defer refs.mu.Unlock()
	all := slices.Clone(ids)
	for _, id := range ids {
		if m := refs.used[id]; m != nil {
			for _, name := range m.all() {
				all = append(all, referencedBy(name)...)
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// cease takes away all references of these layers. It is called in the turns of all
// that they name.
func (refs *references) cease(ctx context.Context, ids []digest.Digest) error {
	if len(ids) == 0 {
		return nil
	}
	keys := make([]string, len(ids))
	for i, id := range ids {
		keys[i] = id.String()
	}
	err := refs.cfg.Coord.Drop(ctx, keys...)
	if errors.Is(err, ErrAway) {
		err = nil
	}
	for _, name := range refs.retire(ids) {
		err = errors.Join(err, refs.removeName(ctx, name, ids))
	}
	refs.mu.Lock()
	defer refs.mu.Unlock()
	for _, id := range ids {
		if m := refs.used[id]; m != nil && len(m.all()) == 0 {
			delete(refs.used, id)
		}
	}
	return err
}

// retire has no reference of these layers count from here on, and returns them all.
func (refs *references) retire(ids []digest.Digest) (names []string) {
	refs.mu.Lock()
	defer refs.mu.Unlock()
	for _, id := range ids {
		m := refs.used[id]
		if m == nil {
			continue
		}
		m.retire(m.now)
		for _, name := range m.late {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

// removeName removes a reference. Layers beside ids that it holds are referenced anew before.
func (refs *references) removeName(ctx context.Context, name string, ids []digest.Digest) error {
	var others []digest.Digest
	refs.mu.Lock()
	for _, id := range referencedBy(name) {
		m := refs.used[id]
		if slices.Contains(ids, id) || m == nil || !slices.Contains(m.all(), name) {
			continue
		}
		m.retire(name)
		others = append(others, id)
	}
	refs.mu.Unlock()
	if len(others) > 0 {
		if err := refs.makeSettled(ctx, others); err != nil {
			return fmt.Errorf("reference anew what stays in use: %w", err)
		}
	}
	if err := refs.remove(ctx, path.Join(refs.dir(), name)); err != nil {
		return err
	}
	refs.mu.Lock()
	defer refs.mu.Unlock()
	delete(refs.settled, name)
	for _, id := range referencedBy(name) {
		if m := refs.used[id]; m != nil {
			m.forget(name)
		}
	}
	return nil
}

// strays removes references of this node that it does not know of: their making was
// given up and happened late.
func (refs *references) strays(ctx context.Context) error {
	names, err := refs.cfg.FS.Names(ctx, refs.dir())
	if err != nil {
		return unlessGone(err)
	}
	var errs error
	for _, name := range names {
		if ids := referencedBy(name); len(ids) > 0 && !refs.knows(name, ids) {
			errs = errors.Join(errs, refs.remove(ctx, path.Join(refs.dir(), name)))
		}
	}
	return errs
}

// knows reports whether a reference is known, of any of the layers that it names.
func (refs *references) knows(name string, ids []digest.Digest) bool {
	refs.mu.Lock()
	defer refs.mu.Unlock()
	return slices.ContainsFunc(ids, func(id digest.Digest) bool {
		m := refs.used[id]
		return m != nil && slices.Contains(m.all(), name)
	})
}

// inUse reports whether any node says that it uses the layer: in the store or to
// the coordinator. The references of a node that has been silent for very long do not count.
func (refs *references) inUse(ctx context.Context, id digest.Digest) (bool, error) {
	users, err := refs.cfg.Coord.Users(ctx, id.String())
	if err != nil || len(users) > 0 {
		return true, err
	}
	nodes, err := refs.cfg.FS.Names(ctx, refsDir)
	if err != nil {
		return true, err
	}
	for _, n := range nodes {
		names, err := refs.cfg.FS.Names(ctx, path.Join(refsDir, n))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return true, err
		}
		refers := slices.ContainsFunc(names, func(name string) bool {
			return slices.Contains(referencedBy(name), id)
		})
		if refers && !refs.nodes.forgotten(ctx, n) {
			return true, nil
		}
	}
	return false, nil
}

// renew references again what this node uses, if an operator had it forgotten.
func (refs *references) renew(ctx context.Context) error {
	dir := path.Join(refsDir, refs.cfg.Node)
	if _, err := refs.cfg.FS.Stat(ctx, dir); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	refs.cfg.Log.Warn("this node was forgotten by the PoP: it references again what it uses")
	if err := refs.makeDir(ctx); err != nil {
		return err
	}
	refs.mu.Lock()
	clear(refs.settled)
	refs.mu.Unlock()
	var errs error
	for _, ids := range refs.Used() {
		errs = errors.Join(errs, refs.renewSome(ctx, ids))
	}
	return errs
}

func (refs *references) renewSome(ctx context.Context, ids []digest.Digest) error {
	end, err := refs.turns(ctx, ids)
	if err != nil {
		return err
	}
	defer end()
	ids = slices.DeleteFunc(ids, func(id digest.Digest) bool { return !refs.has(id) })
	return refs.makeSettled(ctx, ids)
}
