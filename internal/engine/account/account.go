// Package account finds who a container's process runs as, by the container's own passwd and group.
//
// Both are files of an image that anybody may have written. They are read as a process in the container would
// read them: links lead nowhere outside, and what is no regular file counts as empty.
package account

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/api/types"
	mobyuser "github.com/moby/sys/user"
	"golang.org/x/sys/unix"
)

// User is who a process runs as.
type User struct {
	UID, GID uint32
	Groups   []uint32
}

// Lookup resolves USER[:GROUP] with the container's own passwd and group,
// which read gives; a file that is not there counts as empty.
func Lookup(spec string, read func(name string) ([]byte, error)) (User, error) {
	passwd, err := read("etc/passwd")
	if err != nil {
		return User{}, fmt.Errorf("user %q: %w", spec, err)
	}
	group, err := read("etc/group")
	if err != nil {
		return User{}, fmt.Errorf("user %q: %w", spec, err)
	}
	x, err := mobyuser.GetExecUser(spec, &mobyuser.ExecUser{Home: "/"}, bytes.NewReader(passwd),
		bytes.NewReader(group))
	if err != nil {
		return User{}, fmt.Errorf("user %q: %w", spec, err)
	}
	if x.Uid < 0 || x.Uid > math.MaxInt32 || x.Gid < 0 || x.Gid > math.MaxInt32 {
		return User{}, fmt.Errorf("user %q: the image's passwd has %d:%d, and an ID is at most %d", spec, x.Uid, x.Gid,
			math.MaxInt32)
	}
	u := User{UID: uint32(x.Uid), GID: uint32(x.Gid)}
	for _, g := range x.Sgids {
		if g >= 0 && g <= math.MaxInt32 {
			u.Groups = append(u.Groups, uint32(g))
		}
	}
	return u, nil
}

// maxAccounts bounds passwd and group.
const maxAccounts = 4 << 20

// Mounted reads files below root, which is mounted, as a process there would.
func Mounted(root string) func(name string) ([]byte, error) {
	return func(name string) ([]byte, error) { return readUnder(root, name, unix.RESOLVE_IN_ROOT) }
}

// readUnder reads a small file below root as a process there would, following
// its links inside. It returns nil if there is none.
func readUnder(root, name string, resolve uint64) ([]byte, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: root, Err: err}
	}
	defer unix.Close(dir)
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: resolve}
	fd, err := unix.Openat2(dir, name, how)
	for tries := 0; err == unix.EAGAIN && tries < 1000; tries++ { // a mount or rename anywhere beside a ".."
		fd, err = unix.Openat2(dir, name, how)
	}
	if err == unix.ENOENT || err == unix.ENOTDIR {
		return nil, nil
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path.Join(root, name), Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFLNK:
		return nil, unix.ELOOP
	default:
		return []byte{}, nil // a whiteout, or nothing to read names from
	}
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxAccounts))
	if b == nil {
		b = []byte{}
	}
	return b, err
}

// Unmounted reads files of a snapshot that is not mounted. It looks into the
// overlay's directories, topmost first; where that does not tell (a link on
// the way, an opaque directory) it mounts them for a moment.
func Unmounted(tmp string, mounts []*types.Mount) func(string) ([]byte, error) {
	dirs, err := layersOf(mounts)
	return func(name string) ([]byte, error) {
		if err != nil {
			return nil, err
		}
		if len(dirs) == 1 {
			return readUnder(dirs[0], name, unix.RESOLVE_IN_ROOT)
		}
		b, err := readLayers(dirs, name)
		if errors.Is(err, unix.ELOOP) {
			return readMounted(tmp, dirs, name)
		}
		return b, err
	}
}

// layersOf gives the directories of a snapshot, topmost first.
func layersOf(mounts []*types.Mount) ([]string, error) {
	if len(mounts) != 1 {
		return nil, fmt.Errorf("snapshot of %d mounts", len(mounts))
	}
	m := mounts[0]
	switch m.Type {
	case "bind":
		return []string{m.Source}, nil
	case "overlay":
		var upper, lower []string
		for _, o := range m.Options {
			if v, ok := strings.CutPrefix(o, "upperdir="); ok {
				upper = []string{v}
			}
			if v, ok := strings.CutPrefix(o, "lowerdir="); ok {
				lower = strings.Split(v, ":")
			}
		}
		return append(upper, lower...), nil
	}
	return nil, fmt.Errorf("snapshot of type %q", m.Type)
}

func readLayers(dirs []string, name string) ([]byte, error) {
	for _, d := range dirs {
		b, err := readUnder(d, name, unix.RESOLVE_IN_ROOT|unix.RESOLVE_NO_SYMLINKS)
		if err != nil || b != nil {
			return b, err
		}
		if hidesBelow(filepath.Join(d, path.Dir(name))) {
			return nil, nil
		}
	}
	return nil, nil
}

// hidesBelow says whether a directory of an overlay layer, or what stands in
// its place, hides the directories below it.
func hidesBelow(dir string) bool {
	var st unix.Stat_t
	if unix.Lstat(dir, &st) != nil {
		return false
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return true
	}
	v := make([]byte, 1)
	n, err := unix.Lgetxattr(dir, "trusted.overlay.opaque", v)
	return err == nil && n == 1 && v[0] == 'y'
}

func readMounted(tmp string, dirs []string, name string) (b []byte, err error) {
	err = mounted(tmp, dirs, func(root string) (err error) {
		b, err = readUnder(root, name, unix.RESOLVE_IN_ROOT)
		return err
	})
	return b, err
}

// Root calls f with the root directory of a snapshot that is not mounted. It is mounted read-only meanwhile.
func Root(tmp string, mounts []*types.Mount, f func(root string) error) error {
	dirs, err := layersOf(mounts)
	switch {
	case err != nil:
		return err
	case len(dirs) == 1:
		return f(dirs[0])
	}
	return mounted(tmp, dirs, f)
}

func mounted(tmp string, dirs []string, f func(root string) error) error {
	at, err := os.MkdirTemp(tmp, "root-")
	if err != nil {
		return err
	}
	defer os.Remove(at)
	if err := unix.Mount("overlay", at, "overlay", unix.MS_RDONLY,
		"lowerdir="+strings.Join(dirs, ":")); err != nil {
		return fmt.Errorf("mount snapshot: %w", err)
	}
	defer unix.Unmount(at, unix.MNT_DETACH)
	return f(at)
}
