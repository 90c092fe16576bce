package layer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/toc"
	"dewpoint/internal/layer/tree"
)

// index reads a layer's table of contents while the layer is being filled and
// then builds the EROFS index from it. Where the kernel has no EROFS it
// unpacks the layer instead.
type index struct {
	table *toc.TOC
	data  *os.File
	dirs  directories // of an unpacked layer

	partial *Partial // the same layer, mounted already, or nil
}

// arriving reads data, waiting for bytes that have not been written yet.
type arriving struct {
	ctx context.Context
	p   *pipeline
}

func (a arriving) ReadAt(b []byte, off int64) (int, error) {
	n, err := a.p.has.wait(a.ctx, off, int64(len(b)))
	if err != nil {
		return 0, err
	}
	m, err := a.p.data.ReadAt(b[:n], off)
	if err == nil && m < len(b) {
		err = io.EOF
	}
	return m, err
}

// index follows the fill to the end of the tar.
func (p *pipeline) index(ctx context.Context) (*index, error) {
	data := arriving{ctx, p}
	if p.f.store.cfg.Tree {
		x := &index{dirs: directories{}, partial: p.partial}
		return x, p.unpack(data, x.dirs)
	}
	t, err := toc.Read(data)
	if err != nil {
		return nil, err
	}
	return &index{table: t, data: p.data, partial: p.partial}, nil
}

// unpack writes the tree anew; what an earlier fill unpacked is not trusted.
// Layer.sync makes it durable.
func (p *pipeline) unpack(data io.ReaderAt, dirs directories) error {
	tmp := filepath.Join(p.f.dir, "tree.tmp")
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	if err := os.Mkdir(tmp, 0o755); err != nil {
		return err
	}
	x, err := tree.New(tmp, data)
	if err != nil {
		return err
	}
	defer x.Close()
	scan := toc.NewScanner(data)
	for {
		e, err := scan.Next()
		if err == io.EOF {
			return x.Seal()
		}
		if err == nil {
			err = x.Add(e)
		}
		if err != nil {
			return err
		}
		dirs.add(e)
	}
}

// build writes the index beside the verified data, or shows the verified
// tree, and notes in l the index's size and what the layer implies. None of it
// is durable yet.
func (x *index) build(l *Layer) error {
	if x.table == nil {
		l.Implied = x.dirs.implied()
		if err := os.RemoveAll(filepath.Join(l.dir, "tree")); err != nil {
			return err
		}
		return os.Rename(filepath.Join(l.dir, "tree.tmp"), filepath.Join(l.dir, "tree"))
	}
	names, err := x.table.Tree()
	if err != nil {
		return err
	}
	l.Implied = withoutRoot(names.Implied())
	tmp := filepath.Join(l.dir, "index.tmp")
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := erofs.Write(f, names,
		erofs.Options{UUID: erofs.UUID(l.DiffID.String()), DataSize: l.Size, Data: x.data}); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	l.Index = fi.Size()
	return x.show(tmp, filepath.Join(l.dir, "index"))
}

// show gives the index its name. One that is mounted already stays; it has to
// be the same.
func (x *index) show(tmp, path string) error {
	if x.partial == nil {
		return os.Rename(tmp, path)
	}
	same, err := sameFile(tmp, path)
	if err == nil && !same {
		err = fmt.Errorf("the table gives another index: %w", ErrEarlyMismatch)
	}
	return errors.Join(err, os.Remove(tmp))
}

// sync makes the layer's files durable.
func (l *Layer) sync() error {
	if l.Tree {
		return l.syncFile(".", durable.SyncFS)
	}
	if l.At == "" {
		if err := l.syncFile("data", durable.Sync); err != nil {
			return err
		}
	}
	if err := l.syncFile("index", durable.Sync); err != nil {
		return err
	}
	return durable.SyncDir(l.dir)
}

// syncFile syncs one of the layer's files; the first by what was open while it was written, if that is.
func (l *Layer) syncFile(name string, sync func(*os.File) error) error {
	f := l.written
	l.written = nil
	if f == nil {
		var err error
		if f, err = os.Open(filepath.Join(l.dir, name)); err != nil {
			return err
		}
	}
	return errors.Join(sync(f), f.Close())
}

// declare says on disk that the layer is readable, for the rest of this boot.
// From here on its files are not touched any more.
func (l *Layer) declare() error {
	if l.Complete() {
		return nil
	}
	l.Boot = durable.BootID()
	b, err := json.Marshal(l)
	l.Boot = ""
	if err != nil {
		return err
	}
	path := filepath.Join(l.dir, readyFile)
	if err := os.WriteFile(path+".tmp", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// settle makes a readable layer complete: durable, and then said to be so on
// disk. It may be called by many, and again after an error.
//
// The kernel says once that a write did not reach the disk. So a layer whose sync has failed is lost: settle
// returns the error, which wraps durable.ErrLost, for good, and neither this process nor the next goes on
// from anything of the layer. Its fill brings it once more, into other files; until then, who mounts it
// gets the lost ones. Mounts of these go on.
func (l *Layer) settle() error {
	l.settling.Lock()
	defer l.settling.Unlock()
	if l.Complete() || l.lost != nil {
		return l.lost
	}
	err := l.makeComplete()
	if errors.Is(err, durable.ErrLost) {
		l.disown(err)
	}
	return err
}

// lose is settle for what is known to be lost.
func (l *Layer) lose(why error) {
	l.settling.Lock()
	defer l.settling.Unlock()
	l.disown(why)
}

// disown removes what says on disk that anything of the layer is there. After a power cut nothing does: what
// has failed to sync is in no record that outlives the boot. It is called with settling held.
func (l *Layer) disown(why error) {
	l.lost = why
	if l.written != nil {
		l.written.Close()
		l.written = nil
	}
	for _, name := range []string{layerFile, readyFile, progressFile, bootFile} {
		err := os.Remove(filepath.Join(l.dir, name))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			l.lost = errors.Join(l.lost, err)
		}
	}
	removePartialFiles(l.dir)
}

// makeComplete is called with settling held.
func (l *Layer) makeComplete() error {
	if err := l.sync(); err != nil {
		return err
	}
	if f := l.Files(); f.Tree != "" {
		n := diskUse(f.Tree, "")
		l.mu.Lock()
		l.TreeDisk = n
		l.mu.Unlock()
	}
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	if err := durable.WriteFile(filepath.Join(l.dir, layerFile), b, 0o600); err != nil {
		return err
	}
	if err := durable.SyncDir(filepath.Dir(l.dir)); err != nil {
		return err
	}
	l.mu.Lock()
	l.complete, l.noted = true, time.Now()
	l.mu.Unlock()
	l.store.disk.removeLeftovers(l.dir, l.store.Partial(l.DiffID) == nil)
	return nil
}
