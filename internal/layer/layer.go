// Package layer keeps image layers, each as one file.
//
// A layer is the uncompressed tar of an image layer, byte for byte ("data"),
// beside a small EROFS image that points into it ("index"). Its name is the
// sha256 of data, the diffID of the OCI image configuration, so two images, or
// two compressions of one tar, share it.
//
//	DIR/<sha256 of data>/data           the tar
//	                     index          EROFS metadata, data is its external device
//	                     tree/          the unpacked layer instead, where the kernel has no EROFS
//	                     layer.json     written last: the layer is complete
//	                     progress       how far the fill has come, durable
//	                     progress.boot  the same, newer, for this boot only
//	                     blob           compressed bytes, kept where the stream has no restart points
//
// A layer is filled once, whoever wants it (see Fill). It passes three
// states: filling; readable, when every byte is there, both digests are right
// and the index is built, so that it may be mounted; complete, when all of
// that has reached the disk. Only a complete layer survives a restart as such;
// the others go on where their progress says.
//
// A tree layer gives up its data when the tree is complete, so that nothing is
// stored twice.
package layer

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/mount"

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
}

// Store is the layers of one node. It is safe for concurrent use.
type Store struct {
	cfg  Config
	lock *os.File

	mu     sync.Mutex
	layers map[digest.Digest]*Layer
	fills  map[digest.Digest]*Fill // by diffID, or by blob digest for imports
}

// Layer is a readable or complete layer.
type Layer struct {
	DiffID digest.Digest `json:"diff_id"`
	Size   int64         `json:"size"`       // of data, bytes
	Index  int64         `json:"index_size"` // bytes
	Tree   bool          `json:"tree,omitempty"`
	Blob   digest.Digest `json:"blob"`      // the compressed form it came from
	BlobSz int64         `json:"blob_size"` // bytes
	// Implied is mount.Files.Implied. Usually there are none, at most as many
	// as the layer has names.
	Implied names `json:"implied,omitempty"`

	dir      string
	mu       sync.Mutex
	used     time.Time
	complete bool
}

const layerFile = "layer.json"

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
	s := &Store{cfg: cfg, lock: lock, layers: map[digest.Digest]*Layer{}, fills: map[digest.Digest]*Fill{}}
	if err := s.scan(); err != nil {
		lock.Close()
		return nil, err
	}
	return s, nil
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

// Close gives up the lock. Fills must have ended.
func (s *Store) Close() error { return s.lock.Close() }

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
		case strings.HasPrefix(e.Name(), importPrefix), strings.HasPrefix(e.Name(), trashPrefix):
			if err := os.RemoveAll(dir); err != nil {
				return err
			}
		default:
			s.load(dir)
		}
	}
	return nil
}

func (s *Store) load(dir string) {
	l := &Layer{dir: dir, complete: true}
	b, err := os.ReadFile(filepath.Join(dir, layerFile))
	if err == nil {
		err = json.Unmarshal(b, l)
	}
	if err == nil && l.DiffID.Encoded() != filepath.Base(dir) {
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
	if fi, err := os.Stat(filepath.Join(dir, layerFile)); err == nil {
		l.used = fi.ModTime()
	}
	removeLeftovers(dir)
	s.layers[l.DiffID] = l
}

// removeLeftovers deletes what only a fill needs.
func removeLeftovers(dir string) {
	for _, name := range []string{progressFile, bootFile, "blob"} {
		os.Remove(filepath.Join(dir, name))
	}
	tmps, _ := filepath.Glob(filepath.Join(dir, "*.tmp"))
	for _, t := range tmps {
		os.RemoveAll(t)
	}
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
	trash, err := s.hide(l.dir)
	s.mu.Unlock()
	if err != nil {
		return false, err
	}
	return true, os.RemoveAll(trash)
}

// RemovePartial deletes what is left of fills that are not running, and
// returns how many bytes of disk that gave back.
func (s *Store) RemovePartial() (int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ents, err := os.ReadDir(s.cfg.Dir)
	if err != nil {
		return 0, err
	}
	var freed int64
	for _, e := range ents {
		id := digest.NewDigestFromEncoded(digest.SHA256, e.Name())
		if !e.IsDir() || s.layers[id] != nil || s.fills[id] != nil || strings.HasPrefix(e.Name(), importPrefix) {
			continue
		}
		dir := filepath.Join(s.cfg.Dir, e.Name())
		freed += diskUse(dir)
		err = errors.Join(err, s.discard(dir))
	}
	return freed, err
}

const (
	importPrefix = "import-"
	trashPrefix  = "trash-"
)

// discard takes dir out of sight in one step and deletes it.
func (s *Store) discard(dir string) error {
	trash, err := s.hide(dir)
	if err != nil {
		return err
	}
	return os.RemoveAll(trash)
}

// hide renames dir, if it is there, to where the next Open would delete it.
func (s *Store) hide(dir string) (string, error) {
	trash := filepath.Join(s.cfg.Dir, trashPrefix+filepath.Base(dir))
	if err := os.RemoveAll(trash); err != nil {
		return "", err
	}
	if err := durable.Rename(dir, trash); err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	return trash, nil
}

func (s *Store) dir(id digest.Digest) string {
	return filepath.Join(s.cfg.Dir, id.Encoded())
}

// Files says where the layer lies.
func (l *Layer) Files() mount.Files {
	f := mount.Files{Index: filepath.Join(l.dir, "index"), Data: filepath.Join(l.dir, "data"), Implied: l.Implied}
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

func (l *Layer) touch() {
	l.mu.Lock()
	l.used = time.Now()
	l.mu.Unlock()
}

// DiskUse is the bytes that the layer takes on disk.
func (l *Layer) DiskUse() int64 { return diskUse(l.dir) }

func diskUse(dir string) int64 {
	var n int64
	filepath.WalkDir(dir, func(_ string, d os.DirEntry, err error) error {
		if err != nil {
			return nil
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
