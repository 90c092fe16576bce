package layer

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"

	"dewpoint/internal/durable"
	"dewpoint/internal/erofs"
	"dewpoint/internal/toc"
	"dewpoint/internal/tree"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// index is what a layer's entries come to, gathered while the layer is being
// filled; the EROFS index is built from it. Where the kernel has no EROFS the
// layer is unpacked meanwhile instead, and tree knows names and types alone.
type index struct {
	tree     *toc.Tree
	unpacked bool
	data     *os.File
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
	x := &index{tree: toc.NewTree(), unpacked: p.f.store.cfg.Tree, data: p.data}
	data := arriving{ctx, p}
	if x.unpacked {
		return x, p.unpack(data, x.tree)
	}
	return x, each(data, x.tree.Add)
}

// each calls do for every entry of the tar in data, in order.
func each(data io.ReaderAt, do func(*toc.Entry) error) error {
	scan := toc.NewScanner(data)
	for {
		e, err := scan.Next()
		if err == io.EOF {
			return nil
		}
		if err == nil {
			err = do(e)
		}
		if err != nil {
			return err
		}
	}
}

// unpack writes the tree anew; what an earlier fill unpacked is not trusted.
// Layer.sync makes it durable.
func (p *pipeline) unpack(data io.ReaderAt, names *toc.Tree) error {
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
	err = each(data, func(e *toc.Entry) error {
		if err := x.Add(e); err != nil {
			return err
		}
		return names.Add(&toc.Entry{Name: e.Name, Type: e.Type, Link: e.Link})
	})
	if err != nil {
		return err
	}
	return x.Seal()
}

// implied lists the directories that the layer does not describe, without the
// root, parents first.
func (x *index) implied() names {
	all := names(x.tree.Implied())
	if len(all) > 0 && all[0] == "" {
		all = all[1:]
	}
	return all
}

// build writes the index beside the verified data, or shows the verified
// tree, and returns the index's size. None of it is durable yet.
func (x *index) build(dir string, id digest.Digest, size int64) (int64, error) {
	if x.unpacked {
		if err := os.RemoveAll(filepath.Join(dir, "tree")); err != nil {
			return 0, err
		}
		return 0, os.Rename(filepath.Join(dir, "tree.tmp"), filepath.Join(dir, "tree"))
	}
	tmp := filepath.Join(dir, "index.tmp")
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if err := erofs.Write(f, x.tree, erofs.Options{UUID: erofs.UUID(id.String()), DataSize: size, Data: x.data}); err != nil {
		return 0, errors.Join(err, os.Remove(tmp))
	}
	fi, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return fi.Size(), os.Rename(tmp, filepath.Join(dir, "index"))
}

// sync makes the layer's files durable.
func (l *Layer) sync() error {
	if l.Tree {
		d, err := os.Open(l.dir)
		if err != nil {
			return err
		}
		defer d.Close()
		return unix.Syncfs(int(d.Fd()))
	}
	for _, name := range []string{"data", "index"} {
		f, err := os.Open(filepath.Join(l.dir, name))
		if err != nil {
			return err
		}
		err = durable.Sync(f)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return durable.SyncDir(l.dir)
}

// record declares the layer complete.
func (l *Layer) record() error {
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	if err := durable.WriteFile(filepath.Join(l.dir, layerFile), b, 0o600); err != nil {
		return err
	}
	return durable.SyncDir(filepath.Dir(l.dir))
}
