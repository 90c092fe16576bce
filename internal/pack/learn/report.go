package learn

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"sort"

	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/layer/toc"
	"dewpoint/internal/pack"
	"dewpoint/internal/pack/profile"
	"dewpoint/internal/spec"

	"github.com/opencontainers/go-digest"
)

// largest is how many files a report names.
const largest = 20

// End ends the recording that BeginAsked began for the container, and stores
// its profile unless e says otherwise.
func (l *Learner) End(e spec.ProfileEnd) (spec.Profile, error) {
	r := l.find(e.Name)
	if r == nil {
		return spec.Profile{},
			problem(notFound, fmt.Sprintf("no recording of a container %q goes on", e.Name),
				"record one with \"dew profile IMAGE\"")
	}
	res, ok, err := r.finish()
	if !ok {
		err = errors.Join(errors.New("the recording has ended already"), err)
	}
	if err != nil {
		return spec.Profile{}, err
	}
	out := r.report(res)
	if e.Discard {
		return out, nil
	}
	return out, l.store(r.profile(res, e.Exercised), e.Merge)
}

func (l *Learner) find(name string) *Recording {
	l.mu.Lock()
	defer l.mu.Unlock()
	for r := range l.running {
		if r.asked && r.name == name {
			return r
		}
	}
	return nil
}

func (r *Recording) report(res profile.Result) spec.Profile {
	out := spec.Profile{Name: r.name, Image: r.img.Ref.String(), Digest: r.img.Desc.Digest.String(),
		Lost: res.Lost, Total: r.l.total(r.img)}
	f := files{}
	for _, read := range res.Reads {
		f.add(read.Layer, read.File, read.Length, 0)
		out.Read += read.Length
	}
	out.Files, out.Largest = len(f), f.largest()
	return out
}

// total is the size of an image's layers, uncompressed, as far as they are here.
func (l *Learner) total(img *image.Image) (n int64) {
	seen := map[digest.Digest]bool{}
	for _, want := range img.Layers {
		have, err := l.cfg.Layers.Peek(want.DiffID)
		if err == nil && !seen[want.DiffID] {
			n += have.Size
		}
		seen[want.DiffID] = true
	}
	return n
}

// files counts what was read of each file.
type files map[file]*spec.FileRead

type file struct {
	layer digest.Digest
	path  string
}

func (f files) add(layer digest.Digest, path string, n, size int64) {
	at := file{layer, path}
	if f[at] == nil {
		f[at] = &spec.FileRead{Path: path, Layer: layer.String(), Size: size}
	}
	f[at].Read += n
}

func (f files) largest() []spec.FileRead {
	out := make([]spec.FileRead, 0, len(f))
	for _, r := range f {
		out = append(out, *r)
	}
	slices.SortFunc(out, func(a, b spec.FileRead) int {
		return cmp.Or(cmp.Compare(b.Read, a.Read), cmp.Compare(a.Path, b.Path), cmp.Compare(a.Layer, b.Layer))
	})
	return out[:min(len(out), largest)]
}

// Inspect reads the pack of an image: the one that was made here or, without
// that, the one that the image's repository has.
func (l *Learner) Inspect(ctx context.Context, img *image.Image) (spec.Pack, error) {
	f, err := l.open(img)
	var none *Error
	if errors.As(err, &none) && l.cfg.Published != nil {
		return l.inspectPublished(ctx, img, *none)
	}
	if err != nil {
		return spec.Pack{}, err
	}
	defer f.Close()
	h, _, err := pack.ReadHeader(f)
	if err != nil {
		return spec.Pack{}, fmt.Errorf("%s: %w", f.Name(), err)
	}
	out, err := inspect(ctx, img, h, f)
	if err != nil {
		return spec.Pack{}, fmt.Errorf("%s: %w", f.Name(), err)
	}
	out.From, out.Trust = spec.FromNode, fetch.TrustPoP
	out.Pack, err = hashOf(f)
	return out, err
}

// inspectPublished reads the beginning of the pack that an image's repository
// has. If there is none it returns the error about what is here, and why.
func (l *Learner) inspectPublished(ctx context.Context, img *image.Image, none Error) (spec.Pack, error) {
	p, err := l.cfg.Published.Published(ctx, img)
	if err != nil {
		none.text, none.err = none.text+"; nor is one to be had of its registry", err
		return spec.Pack{}, &none
	}
	r, err := p.Open(ctx)
	if err != nil {
		return spec.Pack{}, err
	}
	defer r.Close()
	var b bytes.Buffer
	h, header, err := pack.ReadHeader(io.TeeReader(r, &b))
	if err == nil {
		err = readTables(&b, r, h)
	}
	var out spec.Pack
	if err == nil {
		out, err = inspect(ctx, img, h, bytes.NewReader(b.Bytes()))
	}
	if err != nil {
		return spec.Pack{}, fmt.Errorf("the pack of %s in its registry: %w", img.Ref, err)
	}
	out.From, out.Pack = spec.FromRepository, p.Digest.String()
	if out.Trust, err = p.Trust(header); err != nil {
		out.Trust = "no: " + err.Error()
	}
	return out, nil
}

// maxTables bounds what is read of a pack in a registry, in bytes.
const maxTables = 32 << 20

// readTables appends to b, which has the header, what r has up to the tables' end.
func readTables(b *bytes.Buffer, r io.Reader, h *pack.Header) error {
	var end int64
	for _, t := range h.Layout().Tables {
		end = max(end, t.Offset+t.Length)
	}
	n := max(end-int64(b.Len()), 0)
	if n > maxTables {
		return fmt.Errorf("tables of %d bytes: %w", n, pack.ErrInvalid)
	}
	_, err := io.CopyN(b, r, n)
	return err
}

// inspect says what is in a pack, whose header and tables are in r.
func inspect(ctx context.Context, img *image.Image, h *pack.Header, r io.ReaderAt) (spec.Pack, error) {
	if h.Image != img.Desc.Digest {
		return spec.Pack{}, fmt.Errorf("it is the pack of %s: %w", h.Image, pack.ErrInvalid)
	}
	out := describe(h)
	out.Image, out.ImageSize = img.Ref.String(), img.Size()
	if out.ImageSize > 0 {
		out.Share = float64(out.Start) / float64(out.ImageSize)
	}
	read, err := contents(ctx, h, r)
	if err != nil {
		return spec.Pack{}, err
	}
	out.Files, out.Largest = len(read), read.largest()
	return out, nil
}

// open opens the pack of an image.
func (l *Learner) open(img *image.Image) (*os.File, error) {
	path := l.cfg.Packs.PackPath(img.Desc.Digest)
	f, err := os.Open(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	if why, err := os.ReadFile(path + ".bad"); err == nil {
		return nil, problem(notFound, fmt.Sprintf("the pack of %s is quarantined: %s", img.Ref, why),
			"build it anew with \"dew pack build\"")
	}
	if exists(l.profilePath(img.Desc.Digest)) {
		return nil, problem(notFound, fmt.Sprintf("%s has no pack here, but a profile", img.Ref),
			"build it with \"dew pack build\"")
	}
	return nil, problem(notFound,
		fmt.Sprintf("%s has no pack here, and no start of it has been recorded", img.Ref),
		"record one with \"dew profile\"")
}

func hashOf(f *os.File) (string, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	d, err := digest.SHA256.FromReader(f)
	return d.String(), err
}

// describe says what a header says.
func describe(h *pack.Header) spec.Pack {
	at := h.Layout()
	sum := func(list []pack.Span) (n int64) {
		for _, s := range list {
			n += s.Length
		}
		return n
	}
	out := spec.Pack{Digest: h.Image.String(), Size: at.Size, Chunks: len(h.Chunks), Needed: h.Needed,
		Parts: spec.PackParts{Header: at.Header.Length, Tables: sum(at.Tables), Chunks: sum(at.Chunks),
			Points:  sum(at.Points),
			Windows: sum(at.Windows), Files: sum(at.Files)},
		Runs: h.Profile.Runs, Exercised: h.Profile.Exercised, Created: h.Profile.Created, Node: h.Profile.Node}
	out.Start = out.Parts.Header + out.Parts.Tables + out.Parts.Chunks
	for _, l := range h.Layers {
		if out.Total += l.Size; l.Table == nil {
			out.Unlazy = append(out.Unlazy, l.DiffID.String())
		}
	}
	return out
}

// contents finds out by the pack's tables which files its chunks are of.
func contents(ctx context.Context, h *pack.Header, r io.ReaderAt) (files, error) {
	ranges := make([][]pack.Range, len(h.Layers))
	for _, c := range h.Chunks {
		for _, r := range c.Ranges {
			ranges[r.Layer] = append(ranges[r.Layer], r)
		}
		for _, r := range c.Copies {
			ranges[r.Layer] = append(ranges[r.Layer], r.Range)
		}
	}
	out := files{}
	for i := range h.Layers {
		if len(ranges[i]) == 0 {
			continue
		}
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		at := h.TableSpan(i)
		stored := make([]byte, at.Length)
		if _, err := r.ReadAt(stored, at.Offset); err != nil {
			return nil, err
		}
		t, err := h.DecodeTable(i, stored)
		if err != nil {
			return nil, err
		}
		list, err := toc.Read(t)
		if err != nil {
			return nil, err
		}
		out.cover(h.Layers[i].DiffID, list, ranges[i])
	}
	return out, nil
}

// cover adds the files that the ranges lie in. Contents of entries follow each
// other in the tar.
func (f files) cover(layer digest.Digest, list *toc.TOC, ranges []pack.Range) {
	type place struct {
		toc.Range
		e *toc.Entry
	}
	var places []place
	for _, e := range list.Entries {
		for _, r := range e.Ranges {
			places = append(places, place{r, e})
		}
	}
	for _, r := range ranges {
		end := r.Offset + r.Length
		i := sort.Search(len(places), func(i int) bool { return places[i].Data+places[i].Length > r.Offset })
		for ; i < len(places) && places[i].Data < end; i++ {
			p := places[i]
			n := min(end, p.Data+p.Length) - max(r.Offset, p.Data)
			f.add(layer, p.e.Name, n, p.e.Size)
		}
	}
}
