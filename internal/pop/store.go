package pop

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"path"
	"slices"
	"strconv"
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
	// ErrForeign says that a directory is no store, or one of another version.
	ErrForeign = errors.New("not a PoP's store of this version")
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
type Store struct {
	cfg  StoreConfig
	id   string
	boot string // of this Store, as its node's file says

	mu    sync.Mutex
	used  map[digest.Digest]*marks        // what this node has marked, or may have
	held  map[digest.Digest]int           // of these, what Unuse leaves marked
	turn  map[digest.Digest]chan struct{} // held by who marks an object or takes its marks away
	beat  uint64
	file  fs.FileInfo            // that says which store this is; nil before it was read again
	look  bool                   // whether this node's marks are there: it may have been forgotten
	seen  map[string]*silence    // of other nodes
	fills map[digest.Digest]bool // layers of which checkpoints were made or seen here

	lacks map[string]absence // layers, by the names of their files, of which some are missing
	// names of files that were found damaged: this node may still see their record for a while
	shunned map[string]bool
	read    map[string]seenRecord // of Objects and Sweep, by name
	sharing map[digest.Digest]int // in how many image records a layer is, as the last sweep saw them

	sweeping sync.Mutex
	since    map[string]sighting  // guarded by sweeping
	images   map[string]imageSeen // guarded by sweeping, by file
}

// silence is how long a node's counter has stood still, by this node's clock.
type silence struct {
	beat  nodeRecord
	since time.Time
}

// Layer is the record of a complete layer, or of a checkpoint.
type Layer struct {
	Version  int           `json:"version"`
	DiffID   digest.Digest `json:"diff_id"`
	Size     int64         `json:"size"` // of the tar, bytes
	Blob     digest.Digest `json:"blob"` // the compressed form that it came from
	BlobSize int64         `json:"blob_size"`
	Name     string        `json:"name"`  // of its files in layers/, without what ends them: HEX.TOKEN.NONCE
	Table    digest.Digest `json:"table"` // sha256 of the layer's table
	// Index is the sha256 of what describes the layer to who mounts it (Draft.Describe); "" if nothing does.
	Index digest.Digest `json:"index,omitempty"`
	Sums  []byte        `json:"sums"` // sha256 of each SumBytes of the tar, one after the other
	Node  string        `json:"node"` // who published it
	// Cost is what fetching it took, seconds.
	Cost float64 `json:"cost,omitempty"`
	// Image is the reference that it was fetched for first.
	Image string `json:"image,omitempty"`
	// Checkpoint, unless empty, says that this is no layer but a checkpoint, and which:
	// for who makes and uses it. Upper is the layer that it stands on, "" for none.
	Checkpoint json.RawMessage `json:"checkpoint,omitempty"`
	Upper      digest.Digest   `json:"upper,omitempty"`
}

// SumBytes is how much of a layer's tar one of its sums covers.
const SumBytes = 4 << 20

const formatVersion = 1

type storeRecord struct {
	Version int    `json:"version"`
	ID      string `json:"id"`
}

type nodeRecord struct {
	Boot string `json:"boot"` // of this Store; random
	Beat uint64 `json:"beat"`
}

const storeFile = "dewpoint.json"

// OpenStore opens the store in cfg.FS, or makes one if the directory is empty.
// It returns an error that wraps ErrStoreAway if the file system does not answer;
// nothing that was opened has to be closed.
func OpenStore(ctx context.Context, cfg StoreConfig) (*Store, error) {
	cfg = cfg.withDefaults()
	s := &Store{cfg: cfg, boot: rand.Text(), used: map[digest.Digest]*marks{}, held: map[digest.Digest]int{},
		turn: map[digest.Digest]chan struct{}{}, fills: map[digest.Digest]bool{}, seen: map[string]*silence{},
		lacks: map[string]absence{}, shunned: map[string]bool{},
		read: map[string]seenRecord{}}
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
		return nil, fmt.Errorf("%w: %s says %.60q", ErrForeign, storeFile, b)
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
			return fmt.Errorf("%w: the directory has %q in it; give it an empty one", ErrForeign, e.Name())
		}
	}
	for _, d := range storeDirs {
		if err := s.cfg.FS.Mkdir(ctx, d); err != nil {
			return err
		}
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

const (
	layersDir = "layers"
	fillDir   = "fill"
	packsDir  = "packs"
	imagesDir = "images"
	refsDir   = "refs"
	nodesDir  = "nodes"
	trashDir  = "trash"
)

var storeDirs = []string{layersDir, fillDir, packsDir, imagesDir, refsDir, nodesDir, trashDir, verifiedDir,
	failedDir, ordersDir, lostDir}

// ID is the store's own name, by which a PoP's nodes know that they share it.
func (s *Store) ID() string { return s.id }

// Has reports whether the store has the layer, without marking it.
func (s *Store) Has(ctx context.Context, id digest.Digest) bool {
	_, err := s.record(ctx, id)
	return err == nil
}

// whole is the record of a layer whose data are seen to be there; g, unless nil, is an earlier look at it.
func (s *Store) whole(ctx context.Context, id digest.Digest, g *Glance) (*Layer, error) {
	l, err := s.recordNow(ctx, id, g)
	if err != nil {
		return nil, err
	}
	fi, err := s.cfg.FS.Stat(ctx, l.data())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%s: its data: %w", id, ErrUnknown)
	case err != nil:
		return nil, err
	case fi.Size() != l.Size:
		return nil, fmt.Errorf("%s: %d bytes of %d: %w", id, fi.Size(), l.Size, ErrUnknown)
	}
	return l, nil
}

// Record returns the record of a layer without marking it, or an error that
// wraps ErrUnknown.
func (s *Store) Record(ctx context.Context, id digest.Digest) (*Layer, error) {
	return s.record(ctx, id)
}

// record reads layers/HEX.json.
func (s *Store) record(ctx context.Context, id digest.Digest) (*Layer, error) {
	if id.Validate() != nil || id.Algorithm() != digest.SHA256 {
		return nil, fmt.Errorf("%q: %w", id, ErrUnknown)
	}
	l, err := s.readRecord(ctx, recordOf(id))
	if err == nil && l.DiffID != id {
		err = fmt.Errorf("the record of %s names %s: %w", id, l.DiffID, ErrDamaged)
	}
	if err == nil && s.Shuns(l.Name) {
		return nil, fmt.Errorf("%s: its files were damaged: %w", id, ErrUnknown)
	}
	return l, err
}

// Shun has the store not show files of that name any more, which another node has found damaged and taken
// out: what this node sees of the file system may be older than what it is told.
func (s *Store) Shun(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shunned[name] = true
}

// Shuns reports whether Shun was called with that name.
func (s *Store) Shuns(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.shunned[name]
}

func (s *Store) readRecord(ctx context.Context, name string) (*Layer, error) {
	b, err := s.cfg.FS.ReadFile(ctx, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", name, ErrUnknown)
	}
	if err != nil {
		return nil, err
	}
	l := new(Layer)
	if err := json.Unmarshal(b, l); err != nil || !l.valid() {
		return nil, fmt.Errorf("%s is no record of version %d: %w", name, formatVersion, ErrDamaged)
	}
	return l, nil
}

func (l *Layer) valid() bool {
	hex, _, ok := parseName(l.Name)
	return ok && l.Version == formatVersion && l.DiffID.Validate() == nil &&
		l.DiffID.Algorithm() == digest.SHA256 && hex == l.DiffID.Encoded() && l.Size >= 0 &&
		int64(len(l.Sums)) == (l.Size+SumBytes-1)/SumBytes*sha256.Size && l.Table.Validate() == nil &&
		(l.Index == "" || l.Index.Validate() == nil) && (l.Upper == "" || l.Upper.Validate() == nil)
}

func recordOf(id digest.Digest) string { return path.Join(layersDir, id.Encoded()+".json") }

func (l *Layer) data() string  { return path.Join(layersDir, l.Name+dataEnd) }
func (l *Layer) table() string { return path.Join(layersDir, l.Name+tableEnd) }
func (l *Layer) index() string { return path.Join(layersDir, l.Name+indexEnd) }

const (
	dataEnd  = ".data"
	tableEnd = ".table"
	indexEnd = ".index"
	blobEnd  = ".blob"
)

// nameOf is a name for a layer's files that nobody else uses.
func nameOf(id digest.Digest, token uint64) string {
	return fmt.Sprintf("%s.%d.%s", id.Encoded(), token, rand.Text()[:8])
}

// parseName is the layer, in hexadecimals, and the token of a name.
func parseName(name string) (hex string, token uint64, ok bool) {
	hex, rest, _ := strings.Cut(name, ".")
	number, nonce, _ := strings.Cut(rest, ".")
	token, err := strconv.ParseUint(number, 10, 64)
	return hex, token, err == nil && nonce != "" && !strings.ContainsAny(nonce, "./")
}

// Data is the name of the file that has the layer's tar.
func (l *Layer) Data() string { return l.data() }

// Layers is Objects without checkpoints.
func (s *Store) Layers(ctx context.Context) ([]*Layer, error) {
	all, err := s.Objects(ctx)
	return slices.DeleteFunc(all, func(l *Layer) bool { return l.Checkpoint != nil }), err
}

// Objects returns the records of all layers and checkpoints in the store. Those that cannot be
// read are left out and reported together. A record whose file has not changed since
// it was read last is not read again, if it was read when all nodes must have seen the file so:
// earlier, the list may be newer than what is read, and times of files may be coarse.
func (s *Store) Objects(ctx context.Context) ([]*Layer, error) {
	names, err := s.cfg.FS.Names(ctx, layersDir)
	if err != nil {
		return nil, err
	}
	all, damaged, err := s.records(ctx, names)
	return all, errors.Join(append(slices.Collect(maps.Values(damaged)), err)...)
}

// records are those among the names of files in layers; damaged is why, by their
// names, some could not be understood. Of all other files nothing is asked.
func (s *Store) records(ctx context.Context, names []string) (all []*Layer, damaged map[string]error,
	err error) {
	s.mu.Lock()
	before := maps.Clone(s.read)
	s.mu.Unlock()
	now, damaged := map[string]seenRecord{}, map[string]error{}
	for _, name := range names {
		if !strings.HasSuffix(name, ".json") || strings.HasPrefix(name, ".") {
			continue
		}
		r, rerr := s.again(ctx, path.Join(layersDir, name), before[name])
		switch {
		case rerr == nil:
			now[name] = r
			all = append(all, r.layer)
		case errors.Is(rerr, ErrUnknown): // it went meanwhile
		case errors.Is(rerr, ErrDamaged):
			damaged[name] = rerr
		default:
			err = errors.Join(err, rerr)
		}
	}
	s.mu.Lock()
	s.read = now
	s.mu.Unlock()
	return all, damaged, err
}

// again reads a record that was r before, unless that still holds.
func (s *Store) again(ctx context.Context, file string, r seenRecord) (seenRecord, error) {
	fi, err := s.cfg.FS.Stat(ctx, file)
	if errors.Is(err, fs.ErrNotExist) {
		return r, fmt.Errorf("%s: %w", file, ErrUnknown)
	}
	if err != nil {
		return r, err
	}
	if r.layer == nil || fi.ModTime().IsZero() || !r.changed.Equal(fi.ModTime()) || r.size != fi.Size() {
		r = seenRecord{size: fi.Size(), changed: fi.ModTime(), since: time.Now()}
	}
	if r.sure {
		return r, nil
	}
	r.sure = time.Since(r.since) >= s.cfg.Grace
	r.layer, err = s.readRecord(ctx, file)
	return r, err
}

// seenRecord is a record and what its file was when it was read.
type seenRecord struct {
	layer   *Layer
	size    int64
	changed time.Time
	since   time.Time // when this node saw the file so first, by its clock
	sure    bool      // it was read long enough after that
}

// Table returns the layer's table, verified.
func (s *Store) Table(ctx context.Context, l *Layer) ([]byte, error) {
	b, err := s.cfg.FS.ReadFile(ctx, l.table())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("table of layer %s: %w", l.DiffID, ErrUnknown)
	}
	if err != nil {
		return nil, err
	}
	return unpackTable(b, l.Table)
}

// Index returns what describes the layer to who mounts it, verified. The error wraps
// ErrUnknown if nothing does: its table has as much.
func (s *Store) Index(ctx context.Context, l *Layer) ([]byte, error) {
	if l.Index == "" {
		return nil, fmt.Errorf("index of layer %s: %w", l.DiffID, ErrUnknown)
	}
	b, err := s.cfg.FS.ReadFile(ctx, l.index())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("index of layer %s: %w", l.DiffID, ErrUnknown)
	}
	if err != nil {
		return nil, err
	}
	return unpackTable(b, l.Index)
}

// Beat shows that this node lives. It is to be called more often than a lease lasts.
func (s *Store) Beat(ctx context.Context) error {
	s.mu.Lock()
	s.beat++
	n := s.beat
	s.mu.Unlock()
	b, err := json.Marshal(nodeRecord{Boot: s.boot, Beat: n})
	if err != nil {
		return err
	}
	had, err := s.overwrite(ctx, path.Join(nodesDir, s.cfg.Node+".json"),
		fmt.Appendf(nil, "%-*s\n", beatLen-1, b), false)
	s.mu.Lock()
	if had != beatLen || n%remarkBeats == 1 { // Forget takes the file, last
		s.look = true
	}
	look := s.look
	s.mu.Unlock()
	if !look {
		return err
	}
	rerr := s.remark(ctx)
	if rerr == nil {
		s.mu.Lock()
		s.look = false
		s.mu.Unlock()
	}
	return errors.Join(err, rerr)
}

// remarkBeats is after how many signs of life it is looked whether this node's marks are there, whatever
// its file says: a directory is asked of every server of a distributed file system.
const remarkBeats = 20

// beatLen is the length of a sign of life in bytes.
const beatLen = 96

// overwrite writes b where the same number of bytes is, or nothing. A file that is renamed
// over another while servers of a replicated file system are parted is another file on each, and
// read by nobody for good (GlusterFS: a split brain of the file's identity); one that is
// written in place is what the majority has. Unless it is to last, a power cut may take it. It returns how
// many bytes there were.
func (s *Store) overwrite(ctx context.Context, name string, b []byte, last bool) (had int64, err error) {
	f, err := s.cfg.FS.Append(ctx, name)
	if err != nil {
		return 0, err
	}
	if had, err = f.Size(); err == nil {
		_, err = f.WriteAt(b, 0)
	}
	if err == nil && last {
		err = f.Sync()
	}
	return had, errors.Join(err, f.Close())
}

// Open opens a layer's tar for reading.
func (s *Store) Open(ctx context.Context, l *Layer) (File, error) {
	return s.cfg.FS.Open(ctx, l.data())
}

// ErrFull says that the store has no room for something.
var ErrFull = errors.New("the PoP's store has no room for it")

// Room returns an error that wraps ErrFull if a layer of so many bytes does not fit into what is free now,
// or would be evicted at once.
func (s *Store) Room(ctx context.Context, size int64) error {
	total, free, err := s.cfg.FS.Space(ctx)
	if err != nil {
		return err
	}
	capacity := s.Capacity(total)
	// its table and records too
	if need := size + size/64 + 1<<20; free < need || float64(size) > s.cfg.High*float64(capacity) {
		return fmt.Errorf("%d bytes, %d are free: %w", size, free, ErrFull)
	}
	return nil
}

// Spare is how many bytes more fit into the store so that nothing has to go for them; it may be negative.
func (s *Store) Spare(ctx context.Context) (int64, error) {
	layers, err := s.Objects(ctx)
	if err != nil {
		return 0, err
	}
	packs, err := s.packs(ctx)
	if err != nil {
		return 0, err
	}
	used, capacity, err := s.filled(ctx, append(layers, slices.Collect(maps.Values(packs))...))
	return int64(s.cfg.High*float64(capacity)) - used, err
}

// Capacity is how many bytes of layers the store is to hold on a file system of total bytes.
func (s *Store) Capacity(total int64) int64 {
	if s.cfg.Capacity == 0 || s.cfg.Capacity > total {
		return total
	}
	return s.cfg.Capacity
}

// Space is the bytes of the store's file system, and those that are free.
func (s *Store) Space(ctx context.Context) (total, free int64, err error) {
	return s.cfg.FS.Space(ctx)
}

// Touch notes that an image's layers were used, for who evicts.
func (s *Store) Touch(ctx context.Context, image, namespace string, layers ...*Layer) error {
	touches := make([]Touch, len(layers))
	for i, l := range layers {
		touches[i] = Touch{Key: l.DiffID.String(), Size: l.Size, Cost: l.Cost, Image: image, Namespace: namespace}
	}
	return s.cfg.Coord.Touch(ctx, touches...)
}
