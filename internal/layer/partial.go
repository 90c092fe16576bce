package layer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/image"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/layer/presence"
	"dewpoint/internal/layer/toc"

	"github.com/opencontainers/go-digest"
)

// Server shows the data of partial layers to the kernel (datafs). Its methods
// are safe for concurrent use. Adding what is there replaces its files.
type Server interface {
	// Add shows data, of which the presence file says what is there, as one
	// file and returns its path. The files stay the caller's.
	Add(id digest.Digest, data, present *os.File) (path string, err error)
	// Tree shows a layer that was added as a directory, by its index.
	Tree(id digest.Digest, index *os.File) (path string, err error)
	// Present says that [from, to) is there now.
	Present(id digest.Digest, from, to int64)
	// Warm says that [from, to), which is there, is about to be read.
	Warm(id digest.Digest, from, to int64)
	// Fail ends the reads that wait for absent bytes in [from, to) with an error.
	Fail(id digest.Digest, from, to int64)
	// Mounting calls mount, which mounts an index over a file that Add gave at
	// target, and arranges for what such a mount needs.
	Mounting(id digest.Digest, target string, mount func() error) error
	// Remove lets nothing new use the layer. When nothing does any more, the
	// server says so: Store.Release is to be called then.
	Remove(id digest.Digest)
}

// ErrBusy says that a layer cannot be begun as a partial one: it is readable,
// or being filled whole.
var ErrBusy = errors.New("layer is not to be had as a partial one")

// Partial is a layer that may be mounted though not all of it is here: its
// index was built from its table, its data has holes, and a Server shows them
// to the kernel. Bytes come in two ways. Put takes those whose digest was
// checked, from anywhere. The layer's Fill takes the whole stream, writes what
// is absent, and compares what is not; what came early and differs is a mismatch (ErrEarlyMismatch).
//
// What the stream has written is shown when the stream as a whole has
// verified; until then Vouch shows a stretch of it against a digest.
//
// A Partial lasts until Release, also when the layer has become complete:
// mounts made before go on with it. It is safe for concurrent use.
type Partial struct {
	Layer  image.Layer
	Size   int64  // of data, bytes
	Origin Origin // what Begin was told

	store   *Store
	begun   time.Time // by this process
	dir     string
	data    *os.File
	present *presence.Map
	files   mount.Files

	mu      sync.Mutex // held while bytes are compared, written and shown
	passed  int64      // the stream has written or compared everything before
	differs []Span     // where early bytes and the stream's differ
	early   atomic.Int64
	retired bool // nothing new is to use it; guarded by the store's mu
	lost    bool // a sync of data has failed: what the stream brings goes into another file
	gone    bool // released: its files are closed
}

// Origin is where a layer comes from. The store remembers it for who goes on
// with the layer.
type Origin struct {
	Ref      string        `json:"ref,omitempty"`      // of the image
	Manifest digest.Digest `json:"manifest,omitempty"` // of the image, for its platform
	Trust    string        `json:"trust,omitempty"`    // why its pack was believed
}

// Span is the bytes [From, To) of a layer's data.
type Span struct{ From, To int64 }

const (
	partialFile = "partial.json"
	presentFile = "present"
	earlyFile   = "early" // bytes may have been put into data beside the stream
)

// partialRecord is what partial.json says.
type partialRecord struct {
	Layer   image.Layer `json:"layer"`
	Implied names       `json:"implied,omitempty"`
	Origin  Origin      `json:"origin"`
}

// Begin makes a partial layer from its table, or returns the one there is.
// It returns ErrBusy, wrapped, if the layer is readable or being filled whole, and
// an error of package toc or erofs if the table is not a layer's.
func (s *Store) Begin(l image.Layer, table []byte, from Origin) (*Partial, error) {
	if s.cfg.Server == nil {
		return nil, fmt.Errorf("%w: nothing serves it here", ErrBusy)
	}
	release := s.reserve(l.DiffID)
	defer release()
	s.mu.Lock()
	have, whole, fill := s.partials[l.DiffID], s.layers[l.DiffID], s.fills[l.DiffID]
	s.mu.Unlock()
	switch {
	case whole != nil || have == nil && fill != nil:
		return nil, fmt.Errorf("%s: %w", l.DiffID, ErrBusy)
	case have != nil:
		return have, s.again(have)
	}
	p := &Partial{Layer: l, Origin: from, store: s, begun: time.Now(), dir: s.disk.dir(l.DiffID)}
	if err := p.make(table); err != nil {
		p.close()
		return nil, fmt.Errorf("begin layer %s: %w", l.DiffID, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.partials[l.DiffID] = p
	return p, nil
}

// reserve lets no fill of a layer start until release, and one such thing be
// made at a time.
func (s *Store) reserve(id digest.Digest) (release func()) {
	s.beginning.Lock()
	s.mu.Lock()
	s.begins = id
	s.mu.Unlock()
	return func() {
		s.mu.Lock()
		s.begins = ""
		s.begun.Broadcast()
		s.mu.Unlock()
		s.beginning.Unlock()
	}
}

// make writes the files of a new partial layer. What an earlier fill left of
// its data is taken over.
func (p *Partial) make(table []byte) error {
	t, err := toc.ParseTable(table)
	if err != nil {
		return err
	}
	p.Size = t.Size()
	if p.Size > p.store.cfg.MaxBytes {
		return fmt.Errorf("%d bytes, more than a layer may have: %w", p.Size, ErrTooLarge)
	}
	if err := os.MkdirAll(p.dir, 0o755); err != nil {
		return err
	}
	os.Remove(filepath.Join(p.dir, partialFile))
	if err := durable.WriteFile(filepath.Join(p.dir, earlyFile), nil, 0o600); err != nil {
		return err
	}
	if p.data, err = os.OpenFile(filepath.Join(p.dir, "data"), os.O_RDWR|os.O_CREATE, 0o644); err != nil {
		return err
	}
	if err := p.data.Truncate(p.Size); err != nil {
		return err
	}
	if p.present, err = presence.Create(filepath.Join(p.dir, presentFile), p.Size); err != nil {
		return err
	}
	if p.files.Implied, err = p.buildIndex(t); err != nil {
		return err
	}
	b, err := json.Marshal(partialRecord{Layer: p.Layer, Implied: p.files.Implied, Origin: p.Origin})
	if err == nil {
		err = writeBoot(filepath.Join(p.dir, partialFile), b)
	}
	if err != nil {
		return err
	}
	return p.serve()
}

// again serves a partial layer that was retired.
func (s *Store) again(p *Partial) error {
	s.mu.Lock()
	was := p.retired
	p.retired = false
	s.mu.Unlock()
	if !was {
		return nil
	}
	return p.serve()
}

// buildIndex writes the index, and returns what the layer implies.
func (p *Partial) buildIndex(t io.ReaderAt) (names, error) {
	implied, _, err := writeIndex(p.dir, p.Layer.DiffID, p.Size, t)
	return implied, err
}

// writeBoot writes a file that has to be whole but need not survive a power cut.
func writeBoot(path string, b []byte) error {
	if err := os.WriteFile(path+".tmp", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// serve hands the layer to the server.
func (p *Partial) serve() error {
	path, err := p.store.cfg.Server.Add(p.Layer.DiffID, p.data, p.present.File())
	if err != nil {
		return err
	}
	p.files.Index, p.files.Data = filepath.Join(p.dir, "index"), path
	if !p.store.cfg.LazyTree {
		p.files.Around = func(target string, mount func() error) error {
			return p.store.cfg.Server.Mounting(p.Layer.DiffID, target, mount)
		}
		return nil
	}
	index, err := os.Open(p.files.Index)
	if err != nil {
		return err
	}
	defer index.Close()
	p.files.Served, err = p.store.cfg.Server.Tree(p.Layer.DiffID, index)
	return err
}

// revive takes up the partial layer that an earlier process of this boot has
// left in dir. It returns nil if there is none.
func (s *Store) revive(dir string) *Partial {
	b, err := os.ReadFile(filepath.Join(dir, partialFile))
	if err != nil {
		return nil
	}
	var rec partialRecord
	p := &Partial{store: s, begun: time.Now(), dir: dir}
	if err := json.Unmarshal(b, &rec); err == nil && s.cfg.Server != nil {
		p.Layer, p.files.Implied, p.Origin = rec.Layer, rec.Implied, rec.Origin
		if p.present, err = presence.Open(filepath.Join(dir, presentFile)); err == nil {
			p.Size = p.present.Size()
			if p.data, err = os.OpenFile(filepath.Join(dir, "data"), os.O_RDWR, 0); err == nil {
				err = p.serve()
			}
		}
		if err == nil {
			return p
		}
		if !errors.Is(err, presence.ErrStale) {
			s.cfg.Log.Warn("a partial layer cannot be served any more", "dir", dir, "err", err)
		}
	}
	p.close()
	removePartialFiles(dir)
	return nil
}

func removePartialFiles(dir string) {
	for _, name := range []string{partialFile, presentFile} {
		os.Remove(filepath.Join(dir, name))
	}
}

func (p *Partial) close() {
	if p.present != nil {
		p.present.Close()
	}
	if p.data != nil {
		p.data.Close()
	}
}

// Partial returns the partial layer id, or nil. It may have become whole.
func (s *Store) Partial(id digest.Digest) *Partial {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.partials[id]
}

// Partials returns all partial layers, in no order.
func (s *Store) Partials() []*Partial {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]*Partial, 0, len(s.partials))
	for _, p := range s.partials {
		all = append(all, p)
	}
	return all
}

// Retire lets nothing new use the partial layer id: it is whole, or unwanted.
// What uses it goes on until Release.
func (s *Store) Retire(id digest.Digest) {
	s.mu.Lock()
	p := s.partials[id]
	if p != nil {
		p.retired = true
	}
	s.mu.Unlock()
	if s.cfg.Server != nil {
		s.cfg.Server.Remove(id)
	}
}

// Release forgets the partial layer id, unless somebody wanted it again since
// it was retired: no mount uses it any more. Of a layer that is not whole the
// data stay, for the next fill.
func (s *Store) Release(id digest.Digest) {
	s.mu.Lock()
	p := s.partials[id]
	if p == nil {
		liars := s.expelled[id]
		delete(s.expelled, id)
		s.mu.Unlock()
		for _, l := range liars {
			l.leave()
		}
		return
	}
	if !p.retired {
		s.mu.Unlock()
		return
	}
	delete(s.partials, id)
	whole := s.layers[id] != nil
	s.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	removePartialFiles(p.dir)
	if whole && s.cfg.Tree {
		os.Remove(filepath.Join(p.dir, "data"))
	}
	p.gone = true
	p.close()
}

// Files says how the layer is mounted while it is partial.
func (p *Partial) Files() mount.Files { return p.files }

// Absent returns the first absent pages that [from, to) touches; see presence.Map.
func (p *Partial) Absent(from, to int64) (int64, int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return to, to
	}
	return p.present.Absent(from, to)
}

// Whole reports whether every byte is there.
func (p *Partial) Whole() bool {
	at, _ := p.Absent(0, p.Size)
	return at >= p.Size
}

// Age is how long this process has had the layer.
func (p *Partial) Age() time.Duration { return time.Since(p.begun) }

// Early is the number of bytes that Put has written.
func (p *Partial) Early() int64 { return p.early.Load() }

// Put writes b at off, as far as it is absent, and shows it. off is a multiple
// of presence.Page, and so is the length unless b reaches the data's end. The
// caller has verified b. Put does not wait for the disk.
func (p *Partial) Put(off int64, b []byte) error {
	end := off + int64(len(b))
	if off < 0 || end > p.Size || off%presence.Page != 0 || end%presence.Page != 0 && end != p.Size {
		return fmt.Errorf("put %d bytes at %d of layer %s, which has %d: %w", len(b), off, p.Layer.DiffID, p.Size,
			ErrMismatch)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return nil
	}
	for at := off; at < end; {
		from, to := p.present.Absent(at, end)
		if from >= end {
			break
		}
		to = min(to, end)
		if err := p.putAbsent(from, b[from-off:to-off]); err != nil {
			return explain(err)
		}
		at = to
	}
	p.store.cfg.Server.Present(p.Layer.DiffID, off, end)
	return nil
}

// Warm says that bytes which were put are about to be read.
func (p *Partial) Warm(off int64, n int) {
	p.store.cfg.Server.Warm(p.Layer.DiffID, off, off+int64(n))
}

// putAbsent writes absent pages and shows them. Where the stream has been already
// it compares instead, and shows what is the same; who is right about the rest
// the stream's end decides. It is called with mu held.
func (p *Partial) putAbsent(off int64, b []byte) error {
	end := off + int64(len(b))
	edge := min(max(p.passed, off), end)
	known := len(p.differs)
	if err := p.compare(off, b[:edge-off]); err != nil || len(p.differs) > known {
		return err
	}
	if _, err := p.data.WriteAt(b[edge-off:], edge); err != nil {
		return err
	}
	p.early.Add(end - edge)
	p.present.Add(off, end)
	return nil
}

// pass takes the stream's bytes b at off, which follow those that it took
// before: it writes the absent ones, not shown yet, and compares the others.
func (p *Partial) pass(off int64, b []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return errUnwanted
	}
	end := off + int64(len(b))
	if end > p.Size { // the table said less; verified decides who is right
		p.differs = append(p.differs, Span{max(off, p.Size), end})
		end = max(off, p.Size)
	}
	for at := off; at < end; {
		from, to := p.present.Absent(at, end)
		from, to = min(max(from, at), end), min(to, end)
		if from > at {
			if err := p.compare(at, b[at-off:from-off]); err != nil {
				return err
			}
		}
		if to > from {
			if _, err := p.data.WriteAt(b[from-off:to-off], from); err != nil {
				return err
			}
		}
		at = max(from, to)
	}
	p.passed = end
	return nil
}

// resume says where the stream goes on; what it finds is compared anew.
func (p *Partial) resume(at int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.passed, p.differs = at, nil
}

// compare notes where the data differs from b. It is called with mu held.
func (p *Partial) compare(off int64, b []byte) error {
	have := piecePool.Get().(*[]byte)
	defer piecePool.Put(have)
	for len(b) > 0 {
		n := min(len(b), presence.Page)
		got := (*have)[:n]
		if _, err := p.data.ReadAt(got, off); err != nil {
			return err
		}
		if !bytes.Equal(got, b[:n]) {
			p.differs = append(p.differs, Span{off, off + int64(n)})
		}
		off, b = off+int64(n), b[n:]
	}
	return nil
}

// Sum is a stretch of data and what it hashes to.
type Sum struct {
	Span
	SHA256 digest.Digest
}

// Vouch shows the pages of parts, which follow each other, if the stream has
// written them already and they hash as they are to. It reports whether it did.
func (p *Partial) Vouch(parts []Sum) (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone || len(parts) == 0 || parts[len(parts)-1].To > p.passed {
		return false, nil
	}
	for _, s := range parts {
		h := s.SHA256.Verifier()
		if _, err := io.Copy(h, io.NewSectionReader(p.data, s.From, s.To-s.From)); err != nil {
			return false, err
		}
		if !h.Verified() {
			return false, nil
		}
	}
	from, to := parts[0].From, parts[len(parts)-1].To
	p.present.Add(from, to)
	p.store.cfg.Server.Present(p.Layer.DiffID, from, to)
	return true, nil
}

// become shows everything: the stream has verified.
func (p *Partial) become() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return
	}
	p.present.Add(0, p.Size)
	p.store.cfg.Server.Present(p.Layer.DiffID, 0, p.Size)
}

// Passed is up to where the stream has written or compared.
func (p *Partial) Passed() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.passed
}

// FailReads ends the reads that wait for absent bytes of [from, to) of a layer
// with an error, whether the store knows the layer or not.
func (s *Store) FailReads(id digest.Digest, from, to int64) {
	if s.cfg.Server != nil {
		s.cfg.Server.Fail(id, from, to)
	}
}

// ErrEarlyMismatch says that bytes of a partial layer that came early, its table or its
// index are not what the layer, as a whole, has: the pack does not match it.
var ErrEarlyMismatch = errors.New("what came early is not the layer's")

// check compares a partial layer with what its stream, which has verified,
// turned out to be: its size, and the index that was built from it. build puts
// that beside the mounted one, which stays.
func (p *Partial) check(size int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if size != p.Size {
		return fmt.Errorf("the table says %d bytes, the layer has %d: %w", p.Size, size, ErrEarlyMismatch)
	}
	if len(p.differs) > 0 {
		return fmt.Errorf("%d ranges differ, the first at %d: %w", len(p.differs), p.differs[0].From, ErrEarlyMismatch)
	}
	return nil
}

// checkEarly hashes data that bytes have been put into beside the stream, in this
// process or an earlier one: the digest of the stream says nothing of them.
func (p *pipeline) checkEarly(want digest.Digest) error {
	if _, err := os.Stat(filepath.Join(p.f.dir, earlyFile)); errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	h := want.Algorithm().Hash()
	if _, err := io.Copy(h, io.NewSectionReader(p.data, 0, p.size)); err != nil {
		return err
	}
	switch got := digest.NewDigest(want.Algorithm(), h); {
	case got == want:
		return nil
	case p.partial != nil:
		return fmt.Errorf("with the bytes that came early it hashes to %s: %w", got, ErrEarlyMismatch)
	default:
		return fmt.Errorf("with bytes that came early once it hashes to %s, the image's configuration says %s: %w",
			got, want, ErrMismatch)
	}
}

// checkIndex compares the index that was built from the table with what data
// gives, for layers whose whole form has none.
func (p *Partial) checkIndex(data io.ReaderAt) error {
	whole := &Partial{Layer: p.Layer, Size: p.Size, dir: filepath.Join(p.dir, "check.tmp")}
	if err := os.MkdirAll(whole.dir, 0o755); err != nil {
		return err
	}
	defer os.RemoveAll(whole.dir)
	if _, err := whole.buildIndex(io.NewSectionReader(data, 0, p.Size)); err != nil {
		return err
	}
	same, err := sameFile(filepath.Join(whole.dir, "index"), p.files.Index)
	if err == nil && !same {
		err = fmt.Errorf("the table gives another index: %w", ErrEarlyMismatch)
	}
	return err
}

// sameFile reports whether two files hold the same bytes.
func sameFile(a, b string) (bool, error) {
	x, err := os.ReadFile(a)
	if err != nil {
		return false, err
	}
	y, err := os.ReadFile(b)
	return err == nil && bytes.Equal(x, y), err
}

// expel takes a partial layer with a mismatch out of the store, which fills the layer
// anew. Its mounts go on with its files, which are the server's too, and get what
// they lack when the layer is whole.
func (s *Store) expel(p *Partial, why error) error {
	s.mu.Lock()
	delete(s.partials, p.Layer.DiffID)
	s.expelled[p.Layer.DiffID] = append(s.expelled[p.Layer.DiffID], p)
	trash, err := s.disk.hide(p.dir)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.dir, p.passed = trash, 0
	p.mu.Unlock()
	if s.cfg.Mismatched != nil {
		s.cfg.Mismatched(p, why)
	}
	return nil
}

// repairExpelled gives the mounts of a layer, that had a mismatch before it was whole, what
// they lack, and lets go of their files.
func (s *Store) repairExpelled(whole *Layer) error {
	s.mu.Lock()
	liars := s.expelled[whole.DiffID]
	delete(s.expelled, whole.DiffID)
	s.mu.Unlock()
	var errs []error
	for _, p := range liars {
		errs = append(errs, p.repair(whole))
		p.leave()
	}
	return errors.Join(errs...)
}

// lose has the layer go on until its stream has brought it once more; the next process finds nothing of it.
func (p *Partial) lose() (err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lost = true
	removePartialFiles(p.dir)
	for _, name := range []string{bootFile, progressFile} {
		if rerr := os.Remove(filepath.Join(p.dir, name)); rerr != nil && !errors.Is(rerr, os.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}
	return err
}

func (p *Partial) isLost() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lost
}

// place is where its files lie.
func (p *Partial) place() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dir
}

// leave closes an expelled layer's files and deletes them: the server and the
// kernel have them open as long as they need them.
func (p *Partial) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gone = true
	p.close()
	if err := os.RemoveAll(p.dir); err != nil { // the next Open tries again
		p.store.cfg.Log.Warn("delete what is left of a layer with a mismatch", "err", err)
	}
}

// repair gives an expelled layer's mounts what they still lack.
func (p *Partial) repair(whole *Layer) error {
	f, err := os.Open(whole.Files().Data)
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, pieceBytes)
	for at, end := p.Absent(0, p.Size); at < p.Size; at, end = p.Absent(end, p.Size) {
		for at < end {
			n := min(int64(len(buf)), end-at)
			if m, err := f.ReadAt(buf[:n], at); int64(m) < n {
				clear(buf[m:n]) // the true layer is shorter
				if err != io.EOF {
					return err
				}
			}
			if err := p.Put(at, buf[:n]); err != nil {
				return err
			}
			at += n
		}
	}
	return nil
}
