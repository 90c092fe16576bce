package profile

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"time"

	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/toc"
)

// resolve turns the events into Reads.
func (r *Recording) resolve() (Result, error) {
	slices.SortStableFunc(r.events, func(a, b event) int { return cmp.Compare(a.at, b.at) })
	m := &mapper{
		begin: r.begin,
		page:  int64(os.Getpagesize()),
		seen:  map[pageKey]struct{}{},
		files: map[inodeKey]*recorded{},
	}
	layers := map[uint32]*mapped{}
	for dev, s := range r.layers {
		x, err := erofs.OpenIndex(s.index)
		if err != nil {
			return Result{}, fmt.Errorf("layer %s: %w", s.id, err)
		}
		layers[dev] = &mapped{s, x}
	}
	for _, e := range r.events {
		l := layers[e.dev]
		if l == nil {
			continue
		}
		if err := m.event(l, e); err != nil {
			return Result{}, fmt.Errorf("layer %s: %w", l.id, err)
		}
	}
	if err := m.name(layers); err != nil {
		return Result{}, err
	}
	return m.Result, nil
}

type mapped struct {
	*source
	index *erofs.Index
}

type (
	inodeKey struct {
		dev uint32
		ino uint64
	}
	pageKey struct {
		inodeKey
		page int64
	}
)

// recorded is an inode that pages were read of; file is nil if it is not a
// regular file.
type recorded struct {
	file *erofs.File
	at   []int // which of the Reads are of it
}

// mapper collects the Reads.
type mapper struct {
	Result
	begin int64
	page  int64
	seen  map[pageKey]struct{}
	files map[inodeKey]*recorded
	last  inodeKey // of the last Read
}

func (m *mapper) event(l *mapped, e event) error {
	k := inodeKey{e.dev, e.ino}
	f := m.files[k]
	if f == nil {
		file, err := l.index.File(e.ino)
		if err != nil {
			return err
		}
		f = &recorded{file: file}
		m.files[k] = f
	}
	if f.file == nil {
		return nil
	}
	for p := e.page; p < e.page+1<<e.order && p*m.page < f.file.Size; p++ {
		if _, again := m.seen[pageKey{k, p}]; again {
			continue
		}
		m.seen[pageKey{k, p}] = struct{}{}
		ranges, err := f.file.Ranges(p*m.page, (p+1)*m.page)
		if err != nil {
			return err
		}
		if len(ranges) > 0 {
			m.Pages++
		}
		for _, g := range ranges {
			m.read(l, k, f, g, e.at)
		}
	}
	return nil
}

func (m *mapper) read(l *mapped, k inodeKey, f *recorded, g toc.Range, at int64) {
	if n := len(m.Reads); n > 0 && m.last == k {
		if last := &m.Reads[n-1]; last.Offset+last.Length == g.Data {
			last.Length += g.Length
			return
		}
	}
	f.at = append(f.at, len(m.Reads))
	m.last = k
	m.Reads = append(m.Reads, Read{
		Layer: l.id, Offset: g.Data, Length: g.Length,
		At: time.Duration(max(at-m.begin, 0)),
	})
}

// name sets the files' names.
func (m *mapper) name(layers map[uint32]*mapped) error {
	for dev, l := range layers {
		want := map[uint64]string{}
		for k, f := range m.files {
			if k.dev == dev && len(f.at) > 0 {
				want[k.ino] = ""
			}
		}
		if err := l.index.Names(want); err != nil {
			return fmt.Errorf("layer %s: %w", l.id, err)
		}
		for ino, name := range want {
			for _, i := range m.files[inodeKey{dev, ino}].at {
				m.Reads[i].File = name
			}
		}
	}
	return nil
}
