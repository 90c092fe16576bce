// Package layer keeps image layers, each as one file.
//
// A layer is the uncompressed tar of an image layer, byte for byte ("data"),
// beside a small EROFS image that points into it ("index"). Its name is the
// sha256 of data, the diffID of the OCI image configuration, so two images, or
// two compressions of one tar, share it.
//
//	DIR/<sha256 of data>/data           the tar
//	                     index          EROFS metadata, data is its external device
//	                     layer.json     written last: the layer is complete
//	                     layer.boot     the layer is readable, for this boot only
//	                     progress       how far the fill has come, durable
//	                     progress.boot  the same, newer, for this boot only
//	                     points         where the compressed stream can be entered
//	                     present, partial.json, early    of a layer mounted before it was whole (Partial)
//	                     blob           compressed bytes, kept where the stream has no restart points
//	DIR/<sha256 of data>-tree/tree/     the unpacked layer instead, where the kernel has no EROFS
//
// A layer is filled once, whoever wants it (see Fill). It passes three
// states: filling; readable, when every byte is there, both digests are right
// and the index is built, so that it may be mounted; complete, when all of
// that has reached the disk. A readable layer may be mounted for the rest of
// the boot, so nothing writes to its files any more, also when the process is
// killed before it is complete: layer.boot tells the next one, which completes
// it. After a power cut only a complete layer is one; the others go on where
// their progress says. A layer whose sync has failed is lost (Layer.settle).
//
// A tree layer gives up its data when the tree is complete, so that nothing is
// stored twice.
package layer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/layer/mount"

	"github.com/opencontainers/go-digest"
)

var (
	// ErrUnknown says that the store does not have the layer, or not yet.
	ErrUnknown = errors.New("layer is not in the store")
	// ErrMismatch says that bytes do not hash to the digest that names them.
	ErrMismatch = errors.New("digest mismatch")
	// ErrTooLarge says that a layer inflates past the configured bound.
	ErrTooLarge = errors.New("layer is larger than the node allows")
	// ErrLocked says that another process has the store open.
	ErrLocked = errors.New("the store is in use by another dewd")
)

// Config says where and how layers are kept. Dir is required.
type Config struct {
	Dir      string       // on the file system that is to hold the layers
	Tree     bool         // unpack layers into directories: the kernel has no EROFS
	MaxBytes int64        // a layer may inflate to so many bytes; 0 is 64 GiB
	Interval int64        // compressed bytes between progress records; 0 is 4 MiB
	Log      *slog.Logger // nil discards
	Points   bool         // keep the restart points of layers, for packs
	// Server shows partial layers. Without one there are none.
	Server   Server
	LazyTree bool // partial layers are mounted as trees that the server shows
	// Mismatched is told of partial layers whose early bytes turned out wrong. The
	// layer is filled anew; mounts of the partial one go on. May be nil.
	Mismatched func(p *Partial, why error)
}

// Store is the layers of one node. It is safe for concurrent use.
type Store struct {
	disk layout
	cfg  Config
	lock *os.File

	life context.Context // of all fills
	end  context.CancelFunc
	work sync.WaitGroup // fills and completions

	mu     sync.Mutex
	layers map[digest.Digest]*Layer
	fills  map[digest.Digest]*Fill // by diffID, or by blob digest for imports
	// partials are the layers that may be mounted through the server, whole
	// ones included as long as such mounts may exist.
	partials map[digest.Digest]*Partial
	// expelled are the partial layers with a mismatch, until their mounts have what
	// they lack, or nothing uses them.
	expelled map[digest.Digest][]*Partial

	beginning sync.Mutex    // held by Begin
	begins    digest.Digest // the layer that Begin makes, or ""; guarded by mu
	begun     *sync.Cond    // on mu: begins has changed
}

// Layer is a readable or complete layer.
type Layer struct {
	DiffID digest.Digest `json:"diff_id"`
	Size   int64         `json:"size"`       // of data, bytes
	Index  int64         `json:"index_size"` // bytes
	Tree   bool          `json:"tree,omitempty"`
	// TreeDisk is the bytes that the tree takes on disk, once the layer is complete; 0 is
	// not known. Guarded by mu.
	TreeDisk int64         `json:"tree_disk,omitempty"`
	Blob     digest.Digest `json:"blob"`      // the compressed form it came from
	BlobSz   int64         `json:"blob_size"` // bytes
	// At is the path of data that lies elsewhere (Elsewhere); "" is here.
	At string `json:"at,omitempty"`
	// Implied is mount.Files.Implied. Usually there are none, at most as many
	// as the layer has names.
	Implied names `json:"implied,omitempty"`

	// Boot names the boot in which the layer became readable; in layer.boot only.
	Boot string `json:"boot,omitempty"`

	store    *Store
	dir      string
	settling sync.Mutex // held while the layer is made complete
	// written is open since before its file was written, which is data or, of a tree, the directory: its sync
	// tells of each write that failed. Nil if this process has not written the layer; guarded by settling.
	written *os.File
	lost    error // why the layer will never be complete; guarded by settling

	mu       sync.Mutex // guards what follows
	used     time.Time
	noted    time.Time // the time of use that is on disk
	complete bool
}

const (
	layerFile = "layer.json"
	readyFile = "layer.boot"
)

// Open opens the store in cfg.Dir, making it if need be, and takes its lock.
// Leftovers that no fill can go on from are removed. It returns an error that
// wraps ErrLocked while another process has the store open.
func Open(cfg Config) (*Store, error) {
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = 64 << 30
	}
	if cfg.Interval == 0 {
		cfg.Interval = 4 << 20
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, err
	}
	lock, err := lockFile(filepath.Join(cfg.Dir, "lock"))
	if err != nil {
		return nil, err
	}
	s := &Store{cfg: cfg, disk: layout{root: cfg.Dir, tree: cfg.Tree}, lock: lock,
		layers: map[digest.Digest]*Layer{}, fills: map[digest.Digest]*Fill{},
		partials: map[digest.Digest]*Partial{},
		expelled: map[digest.Digest][]*Partial{}}
	s.begun = sync.NewCond(&s.mu)
	s.life, s.end = context.WithCancel(context.Background())
	if err := s.scan(); err != nil {
		lock.Close()
		return nil, err
	}
	for _, l := range s.layers {
		if !l.complete {
			s.completeLater(l)
		}
	}
	return s, nil
}

// completeLater takes up what an earlier process could not end.
func (s *Store) completeLater(l *Layer) {
	s.work.Go(func() {
		if err := l.settleOrLeave(); err != nil {
			s.cfg.Log.Error("layer can be read but not made durable", "layer", l.DiffID, "err", err)
		}
	})
}

// settleOrLeave is settle of a layer that no fill works on: one that is lost leaves the store.
func (l *Layer) settleOrLeave() error {
	err := l.settle()
	if errors.Is(err, durable.ErrLost) {
		err = errors.Join(err, l.leave())
	}
	return err
}

// leave lets nobody have a layer any more that is lost.
func (l *Layer) leave() error {
	s := l.store
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.layers[l.DiffID] != l {
		return nil
	}
	delete(s.layers, l.DiffID)
	return s.vacate(l.DiffID, l.dir)
}

// vacate removes a layer's directory, whatever it holds. Mounts of it go on, also those of the partial layer.
// It is called with mu held.
func (s *Store) vacate(id digest.Digest, dir string) error {
	if p := s.partials[id]; p != nil {
		delete(s.partials, id)
		s.expelled[id] = append(s.expelled[id], p)
		p.mu.Lock()
		p.dir, p.passed = "", 0
		p.mu.Unlock()
	}
	return s.disk.retire(dir)
}

func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("%s: %w", filepath.Dir(path), ErrLocked)
	}
	return f, nil
}

// Close ends the fills, which keep their progress, waits for them and gives
// up the lock. No fill may be started after it.
func (s *Store) Close() error {
	s.end()
	s.work.Wait()
	return s.lock.Close()
}

// scan reads what is on disk. It is called before the store is shared.
func (s *Store) scan() error {
	ents, err := os.ReadDir(s.cfg.Dir)
	if err != nil {
		return err
	}
	for _, e := range ents {
		dir := filepath.Join(s.cfg.Dir, e.Name())
		switch {
		case !e.IsDir():
		case strings.HasPrefix(e.Name(), s.disk.retired()): // a container may stand on it
		case strings.HasPrefix(e.Name(), importPrefix), strings.HasPrefix(e.Name(), trashPrefix),
			strings.HasPrefix(e.Name(), retiredPrefix):
			if err := os.RemoveAll(dir); err != nil {
				return err
			}
		default:
			s.load(dir)
		}
	}
	s.settleTimes()
	return nil
}

// load makes known the layer in dir, if it is complete, or was readable
// already in this boot.
func (s *Store) load(dir string) {
	id, ok := s.disk.idOf(filepath.Base(dir))
	if !ok {
		return // of the other form, or nobody's: RemovePartial knows what to do
	}
	if p := s.revive(dir); p != nil {
		s.partials[id] = p
	}
	l, err := readLayer(dir, layerFile)
	complete := err == nil
	if errors.Is(err, os.ErrNotExist) {
		if l, err = readLayer(dir, readyFile); err == nil && (l.Boot == "" || l.Boot != durable.BootID()) {
			return // a power cut lies between: the progress says what there is
		}
	}
	if err == nil && l.DiffID != id {
		err = fmt.Errorf("it names %s", l.DiffID)
	}
	switch {
	case errors.Is(err, os.ErrNotExist): // being filled
		return
	case err != nil:
		s.cfg.Log.Warn("layer record is unreadable; the layer will be fetched again", "dir", dir, "err", err)
		os.Remove(filepath.Join(dir, layerFile))
		return
	}
	l.store, l.complete = s, complete
	if p := s.partials[id]; p != nil {
		p.become()
	}
	if fi, err := os.Stat(filepath.Join(dir, layerFile)); err == nil {
		l.used, l.noted = fi.ModTime(), fi.ModTime()
	}
	if complete {
		s.disk.removeLeftovers(dir, s.Partial(id) == nil)
	}
	s.layers[l.DiffID] = l
}

func readLayer(dir, name string) (*Layer, error) {
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return nil, err
	}
	l := &Layer{dir: dir}
	return l, json.Unmarshal(b, l)
}

// Get returns the layer id if it is readable, else an error that wraps ErrUnknown.
func (s *Store) Get(id digest.Digest) (*Layer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.layers[id]
	if l == nil {
		return nil, fmt.Errorf("%s: %w", id, ErrUnknown)
	}
	l.touch()
	return l, nil
}

// Peek is Get for who only looks: the layer does not count as used.
func (s *Store) Peek(id digest.Digest) (*Layer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.layers[id]; l != nil {
		return l, nil
	}
	return nil, fmt.Errorf("%s: %w", id, ErrUnknown)
}

// Layers returns all readable layers, in no order.
func (s *Store) Layers() []*Layer {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]*Layer, 0, len(s.layers))
	for _, l := range s.layers {
		all = append(all, l)
	}
	return all
}

// Remove deletes a complete layer if unused says so, and reports whether it
// did. unused is asked while no Get can answer, so a layer that somebody was
// given a moment ago is seen as such; it must not call the store.
func (s *Store) Remove(id digest.Digest, unused func(*Layer) bool) (bool, error) {
	s.mu.Lock()
	l := s.layers[id]
	if l == nil || s.fills[id] != nil || !l.Complete() || !unused(l) {
		s.mu.Unlock()
		return false, nil
	}
	delete(s.layers, id)
	trash, err := s.disk.hide(l.dir)
	s.mu.Unlock()
	if err != nil {
		return false, err
	}
	return true, os.RemoveAll(trash)
}

// RemovePartial deletes what is left of fills that are not running, and
// layers of the form that this store does not use, if nothing has happened to
// them for so long and inUse, which must not call the store, does not claim
// them. It returns how many bytes of disk that gave back.
func (s *Store) RemovePartial(inUse func(digest.Digest) bool, olderThan time.Duration) (int64, error) {
	ents, err := os.ReadDir(s.cfg.Dir)
	if err != nil {
		return 0, err
	}
	var freed int64
	for _, e := range ents {
		fi, serr := e.Info()
		if serr != nil || !e.IsDir() || strings.HasPrefix(e.Name(), importPrefix) ||
			strings.HasPrefix(e.Name(), retiredPrefix) || ageOf(fi) < olderThan {
			continue
		}
		n, rerr := s.removePartial(e.Name(), inUse)
		freed += n
		err = errors.Join(err, rerr)
	}
	return freed, err
}

func (s *Store) removePartial(name string, inUse func(digest.Digest) bool) (int64, error) {
	dir := filepath.Join(s.cfg.Dir, name)
	s.mu.Lock()
	hex, _ := strings.CutSuffix(name, treeForm)
	id := digest.NewDigestFromEncoded(digest.SHA256, hex)
	_, ours := s.disk.idOf(name)
	if s.fills[id] != nil || ours && s.layers[id] != nil || s.partials[id] != nil || inUse(id) {
		s.mu.Unlock()
		return 0, nil
	}
	n := diskUse(dir, "")
	trash, err := s.disk.hide(dir)
	s.mu.Unlock()
	if err != nil {
		return 0, err
	}
	return n, os.RemoveAll(trash)
}

// Files says where the layer lies.
func (l *Layer) Files() mount.Files {
	f := mount.Files{Index: filepath.Join(l.dir, "index"), Data: filepath.Join(l.dir, "data"),
		Implied: l.Implied}
	if l.At != "" {
		f.Data = l.At
	}
	if l.Tree {
		f.Tree = filepath.Join(l.dir, "tree")
	}
	return f
}

// Complete reports whether the layer would survive a power cut.
func (l *Layer) Complete() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.complete
}

// Used is when the layer was last asked for.
func (l *Layer) Used() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.used
}

// settleTimes has nothing used in the future: a clock that was set back since, as one without
// a battery is at each boot, says nothing about ages. The order in which layers were used stays.
func (s *Store) settleTimes() {
	var ahead time.Duration
	for _, l := range s.layers {
		ahead = max(ahead, time.Until(l.used))
	}
	for _, l := range s.layers {
		if ahead > 0 {
			l.used, l.noted = l.used.Add(-ahead), l.noted.Add(-ahead)
		}
	}
}

// ageOf is how long ago something has happened to a file; for ever, if that was by a clock that has been set
// back.
func ageOf(fi os.FileInfo) time.Duration {
	if age := time.Since(fi.ModTime()); age > -time.Hour {
		return age
	}
	return math.MaxInt64
}

// noteEvery is how exactly the time of use is known after a restart.
const noteEvery = time.Minute

func (l *Layer) touch() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.used = time.Now()
	if l.complete && l.used.Sub(l.noted) > noteEvery {
		l.noted = l.used
		_ = os.Chtimes(filepath.Join(l.dir, layerFile), l.used, l.used)
	}
}

// DiskUse is the bytes that the layer takes on disk. The tree of a complete layer is not
// walked more than once.
func (l *Layer) DiskUse() int64 {
	if !l.Tree {
		return diskUse(l.dir, "")
	}
	tree := filepath.Join(l.dir, "tree")
	return l.treeUse(tree) + diskUse(l.dir, tree)
}

func (l *Layer) treeUse(tree string) int64 {
	l.mu.Lock()
	n, complete := l.TreeDisk, l.complete
	l.mu.Unlock()
	if n != 0 {
		return n
	}
	n = diskUse(tree, "")
	if complete { // since before its size was written down
		l.mu.Lock()
		l.TreeDisk = n
		l.mu.Unlock()
	}
	return n
}

// diskUse is the bytes that a directory takes on disk, without what is below but.
func diskUse(dir, but string) int64 {
	var n int64
	filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		switch {
		case err != nil:
			return nil
		case path == but:
			return filepath.SkipDir
		}
		if fi, err := d.Info(); err == nil {
			if st, ok := fi.Sys().(*syscall.Stat_t); ok {
				n += st.Blocks * 512
			}
		}
		return nil
	})
	return n
}
