package pop

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

var (
	// ErrUnknown says that the store does not have what was asked for.
	ErrUnknown = errors.New("not in the PoP's store")
	// ErrDamaged says that the store gives other bytes than were put into it.
	ErrDamaged = errors.New("damaged in the PoP's store")
	// ErrMissing says that a file of a layer is not there though its record is: it was removed, or the part of
	// the file system that has it is away.
	ErrMissing = errors.New("a file of it is missing in the PoP's store: the part of the file system that has it may be away")
	// ErrNotMounted says that the directory does not have the store that it had, or that the other nodes have.
	ErrNotMounted = errors.New("the PoP's store is not there")
	// ErrNotStore says that a directory is no store, or one of another version.
	ErrNotStore = errors.New("not a PoP's store of this version")
)

// StoreConfig says what a Store works with. FS, Coord and Node are required.
type StoreConfig struct {
	FS    FS
	Coord Coordinator
	Node  string // this node's name, unique in the PoP
	// ID, unless "", is the store that this node has used before: another one, or an
	// empty directory, is refused. It is likely that nothing is mounted there.
	ID string
	// Grace is how long what was evicted can come back: longer than any lease, and more than
	// twice the time after which all nodes see what one has written. 0 is a minute.
	Grace time.Duration
	// Forget is how long a node must have been silent until what it said it uses
	// counts no more. It is long: the node may live, and only be cut off. 0 is a day.
	Forget time.Duration
	// Capacity is how many bytes of layers the store is to hold; 0 is all of its
	// file system. It is let grow to High and then brought down to Low.
	Capacity  int64
	High, Low float64 // shares of Capacity; 0 is 0.95 and 0.90
	// Quota bounds what the layers of images whose repository begins so may take.
	Quota map[string]int64
	// Policy names what is evicted first (package evict); "" is DefaultPolicy.
	Policy string
	Log    *slog.Logger // nil discards
}

// Store is what the nodes of a PoP share: complete layers and checkpoints, each as a few
// immutable files, and what is known of images. It is safe for concurrent use,
// by any number of nodes, of which each has one Store.
//
// A layer is its record, layers/HEX.json: what no record names is not there. A
// record is renamed into place when everything that it names is durable, so it
// names whole and right data or is not there. Evicting takes the record away; the data
// stay until nobody who may have seen it can have begun to use them.
//
// The record is the only title to the files that it names: it is made, empty, before they
// are, and from then on moved, never copied. Where it lies says what may become of the
// files: in fill they are being written, in layers they are a layer, in trash as .json they
// were evicted and may come back, in trash as .dead they are deleted. Whoever wants to
// change that renames it, and of several one can; so nobody shows a layer whose files another
// has begun to delete, whatever either believed, and however late a step of his happens.
//
// A Store is made of parts, each with a lock of its own, if any; none calls another one while it holds it.
type Store struct {
	*layout
	*records
	*references
	*nodes
	*drafts
	*trash
	*room
	*evictor
	*collector
	*verifier
	*notes
	*images
	*packs
	id string

	mu   sync.Mutex
	file fs.FileInfo // that says which store this is; nil before it was read again
}

// newStore puts the parts together. None may be used before the store's directory is known to be one.
func newStore(cfg StoreConfig) *Store {
	s := &Store{layout: &layout{cfg: cfg, boot: rand.Text()}}
	s.records = &records{layout: s.layout, read: map[string]seenRecord{}, denied: map[string]bool{}}
	s.nodes = &nodes{layout: s.layout, seen: map[string]*silence{}}
	s.references = &references{layout: s.layout, records: s.records, nodes: s.nodes,
		used: map[digest.Digest]*nameSet{}, held: map[digest.Digest]int{}, turn: map[digest.Digest]chan struct{}{},
		settled: map[string]bool{}}
	s.notes = &notes{layout: s.layout, records: s.records}
	s.images = &images{layout: s.layout}
	s.packs = &packs{layout: s.layout}
	s.trash = &trash{layout: s.layout, records: s.records, references: s.references, notes: s.notes}
	s.drafts = &drafts{layout: s.layout, records: s.records, trash: s.trash, fills: map[digest.Digest]bool{}}
	s.room = &room{layout: s.layout, records: s.records, trash: s.trash, packs: s.packs}
	s.evictor = &evictor{layout: s.layout, records: s.records, trash: s.trash, room: s.room, images: s.images,
		packs: s.packs}
	s.collector = &collector{layout: s.layout, records: s.records, references: s.references, nodes: s.nodes,
		drafts: s.drafts, trash: s.trash, images: s.images}
	s.verifier = &verifier{layout: s.layout, records: s.records, lacks: map[string]absence{}}
	return s
}

const storeFile = "dewpoint.json"

// OpenStore opens the store in cfg.FS, or makes one if the directory is empty.
// It returns an error that wraps ErrStoreAway if the file system does not answer;
// nothing that was opened has to be closed.
func OpenStore(ctx context.Context, cfg StoreConfig) (*Store, error) {
	cfg = cfg.withDefaults()
	s := newStore(cfg)
	b, err := cfg.FS.ReadFile(ctx, storeFile)
	if errors.Is(err, fs.ErrNotExist) && cfg.ID != "" {
		return nil, fmt.Errorf("%w: %s is to be there, and nothing is", ErrNotMounted, cfg.ID)
	}
	if errors.Is(err, fs.ErrNotExist) {
		if err = s.create(ctx); err == nil {
			b, err = cfg.FS.ReadFile(ctx, storeFile)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open the PoP's store: %w", err)
	}
	var rec storeRecord
	if err := json.Unmarshal(b, &rec); err != nil || rec.Version != formatVersion {
		return nil, fmt.Errorf("%w: %s says %.60q", ErrNotStore, storeFile, b)
	}
	if s.id = rec.ID; cfg.ID != "" && cfg.ID != s.id {
		return nil, fmt.Errorf("%w: %s is to be there, and %s is", ErrNotMounted, cfg.ID, s.id)
	}
	return s, s.adopt(ctx)
}

func (c StoreConfig) withDefaults() StoreConfig {
	if c.Grace == 0 {
		c.Grace = time.Minute
	}
	if c.Forget == 0 {
		c.Forget = 24 * time.Hour
	}
	if c.High == 0 {
		c.High = 0.95
	}
	if c.Low == 0 {
		c.Low = c.High - 0.05
	}
	if c.Policy == "" {
		c.Policy = DefaultPolicy
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// create makes an empty directory a store. Whatever else is in it, it is not one.
func (s *Store) create(ctx context.Context) error {
	have, err := s.cfg.FS.ReadDir(ctx, ".")
	if err != nil {
		return err
	}
	for _, e := range have {
		if e.Name() == storeFile { // another node makes it one
			return nil
		}
		if !slices.Contains(storeDirs, e.Name()) && !strings.HasPrefix(e.Name(), ".") {
			return fmt.Errorf("%w: the directory has %q in it; give it an empty one", ErrNotStore, e.Name())
		}
	}
	for _, d := range storeDirs {
		if err := s.cfg.FS.Mkdir(ctx, d); err != nil {
			return err
		}
	}
	if err := s.cfg.FS.SyncDir(ctx, "."); err != nil {
		return err
	}
	b, err := json.Marshal(storeRecord{formatVersion, rand.Text()})
	if err != nil {
		return err
	}
	tmp := "." + storeFile + "." + s.boot
	if err := s.cfg.FS.WriteFile(ctx, tmp, b); err != nil {
		return err
	}
	err = s.cfg.FS.Link(ctx, tmp, storeFile) // of several nodes, one gives it its name
	if errors.Is(err, fs.ErrExist) {
		err = nil
	}
	return errors.Join(err, s.remove(ctx, tmp))
}

// ID is the store's own name, by which a PoP's nodes know that they share it.
func (s *Store) ID() string { return s.id }

// Beat shows that this node lives. It is to be called more often than a lease lasts.
func (s *Store) Beat(ctx context.Context) error {
	look, err := s.nodes.show(ctx)
	if !look {
		return err
	}
	rerr := s.references.renew(ctx)
	if rerr == nil {
		s.nodes.looked()
	}
	return errors.Join(err, rerr)
}

// Present returns an error that wraps ErrNotMounted if the directory does not have this store any
// more: its file system was unmounted, or another one was mounted over it.
func (s *Store) Present(ctx context.Context) error {
	fi, err := s.cfg.FS.Stat(ctx, storeFile)
	if err == nil && s.isFile(fi) {
		return nil
	}
	b, err := s.cfg.FS.ReadFile(ctx, storeFile)
	// perhaps a part of the file system is away that has this file: directories are on all
	if errors.Is(err, fs.ErrNotExist) {
		if _, err = s.cfg.FS.Stat(ctx, layersDir); errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: %s was there, and nothing is", ErrNotMounted, s.id)
		}
		return err
	}
	var rec storeRecord
	if err == nil && json.Unmarshal(b, &rec) == nil && rec.ID != s.id {
		err = fmt.Errorf("%w: %s was there, and %s is", ErrNotMounted, s.id, rec.ID)
	}
	if err == nil && rec.ID == s.id {
		s.mu.Lock()
		s.file = fi
		s.mu.Unlock()
	}
	return err
}

// isFile reports whether fi is the file in which this store's name was read.
func (s *Store) isFile(fi fs.FileInfo) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.file != nil && os.SameFile(s.file, fi) && s.file.Size() == fi.Size() &&
		s.file.ModTime().Equal(fi.ModTime())
}

// Seen is how long after a change of the store all nodes see it.
func (s *Store) Seen() time.Duration { return s.cfg.Grace / 2 }
