package tree

import (
	"errors"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/toc"
)

// Parents makes what keeps a layer from changing directories that it only
// passes through. A layer may have entries in directories that it does not
// describe; overlayfs shows the attributes of the uppermost layer that has a
// directory, which would be made-up ones, while containerd copies those of the
// layers below.
//
// implied names the directories that the layer mounted at layer does not
// describe (toc.Tree.Implied, parents first); below are the mounts of the
// layers under it, the uppermost first. In the empty directory dir Parents makes
// those of implied that a layer below has, with its attributes. Stacked between
// layer and what is above it, dir puts things right. Parents returns how many it
// made: with 0, dir is not needed. Nothing is synced to disk.
func Parents(dir, layer string, implied, below []string) (int, error) {
	found, err := lookAll(implied, below)
	if err != nil || len(found) == 0 {
		return 0, err
	}
	own, err := openWalk(layer)
	if err != nil {
		return 0, err
	}
	defer own.release()
	x, err := New(dir, strings.NewReader(""))
	if err != nil {
		return 0, err
	}
	defer x.Close()
	x.Parent = func(name string) (*toc.Entry, bool) {
		e, err := own.look(name)
		return e, err == nil && e != nil
	}
	root, err := own.look("")
	if err != nil {
		return 0, err
	}
	for _, e := range append(found, root) {
		if err := x.Add(e); err != nil {
			return 0, err
		}
	}
	return len(found), x.Seal()
}

// lookAll gives the directories among names that the layers below have. A
// layer that has something else by a name ends the search for it.
func lookAll(names, below []string) ([]*toc.Entry, error) {
	var found []*toc.Entry
	missing := names
	for _, mount := range below {
		w, err := openWalk(mount)
		if err != nil {
			return nil, err
		}
		var next []string
		for _, name := range missing {
			if name == "" {
				continue
			}
			switch e, err := w.look(name); {
			case err == nil:
				found = append(found, e)
			case errors.Is(err, unix.ENOENT):
				next = append(next, name)
			case !errors.As(err, new(*toc.Error)):
				w.release()
				return nil, err
			}
		}
		w.release()
		missing = next
	}
	return found, nil
}

func openWalk(path string) (*walk, error) {
	root, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return &walk{root: root}, nil
}

func (w *walk) release() {
	w.close()
	unix.Close(w.root)
}

// look describes the directory name as a layer's entry would. Its error is a
// *toc.Error if there is something else by that name.
func (w *walk) look(name string) (*toc.Entry, error) {
	fd, err := w.dir(name)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	e := &toc.Entry{Name: name, Type: toc.Directory, Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid,
		ModTime: time.Unix(st.Mtim.Unix())}
	e.Xattrs, err = xattrsOf(procPath(fd, "."))
	return e, err
}

// xattrsOf reads the extended attributes that a layer can have.
func xattrsOf(path string) (map[string]string, error) {
	buf := make([]byte, 64<<10) // what Linux allows for all names, and for a value
	n, err := unix.Listxattr(path, buf)
	if err != nil || n == 0 {
		if err == unix.ENOTSUP {
			err = nil
		}
		return nil, err
	}
	all := map[string]string{}
	for _, key := range strings.Split(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00") {
		if strings.HasPrefix(key, "trusted.") {
			continue
		}
		n, err := unix.Getxattr(path, key, buf)
		if err != nil {
			return nil, err
		}
		all[key] = string(buf[:n])
	}
	return all, nil
}
