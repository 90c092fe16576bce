package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// layerFlags are the flags of every layer's mount.
const layerFlags = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOATIME

// sector is the block size of our EROFS images.
const sector = 512

// backend is all that the three have in common: attach differs.
type backend struct {
	name   string
	attach func(f Files, target string) error

	mu      sync.Mutex
	targets map[string]*targetLock // guarded by mu; those that somebody works at
}

// targetLock is held at a target, since looking and mounting is not one step for the kernel. Each target has
// its own: an unmount may hang.
type targetLock struct {
	sync.Mutex
	users int // guarded by the backend's mu
}

func (b *backend) lock(target string) (unlock func()) {
	b.mu.Lock()
	l := b.targets[target]
	if l == nil {
		l = &targetLock{}
		if b.targets == nil {
			b.targets = make(map[string]*targetLock)
		}
		b.targets[target] = l
	}
	l.users++
	b.mu.Unlock()
	l.Lock()
	return func() {
		l.Unlock()
		b.mu.Lock()
		defer b.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(b.targets, target)
		}
	}
}

func (b *backend) Name() string { return b.name }

func (b *backend) Mount(ctx context.Context, f Files, target string) error {
	defer b.lock(target)()
	if err := ctx.Err(); err != nil {
		return err
	}
	there, err := Mounted(target)
	if err != nil {
		return err
	}
	if there {
		return b.recognize(f, target)
	}
	if err := b.show(f, target); err != nil {
		return fmt.Errorf("mount layer at %s: %w", target, err)
	}
	return nil
}

// show mounts the layer in the way that it can be mounted now.
func (b *backend) show(f Files, target string) error {
	if f.Served != "" {
		return attachDir(f.Served, target)
	}
	if f.Around != nil {
		return f.Around(target, func() error { return b.attach(f, target) })
	}
	return b.attach(f, target)
}

// Replace puts the new mount beneath the old one and takes that away (Linux
// 6.5, MOVE_MOUNT_BENEATH), so that the path shows the layer at every moment.
// Where the kernel cannot, the new mount covers the old one, which then stays
// until Unmount.
func (b *backend) Replace(ctx context.Context, f Files, target string) error {
	defer b.lock(target)()
	if err := ctx.Err(); err != nil {
		return err
	}
	aside, err := os.MkdirTemp(filepath.Dir(target), AsidePrefix)
	if err != nil {
		return err
	}
	defer os.Remove(aside)
	if err := b.show(f, aside); err != nil {
		return fmt.Errorf("mount layer anew for %s: %w", target, err)
	}
	err = slipBeneath(aside, target)
	if uerr := Unmount(aside); err == nil {
		err = uerr
	}
	if err == nil {
		return nil
	}
	if err := b.show(f, target); err != nil {
		return fmt.Errorf("mount layer over %s: %w", target, err)
	}
	return nil
}

// AsidePrefix begins the names of mount points, beside their targets, that
// Replace makes and takes away.
const AsidePrefix = "aside-"

// moveMountBeneath is MOVE_MOUNT_BENEATH of linux/mount.h.
const moveMountBeneath = 0x200

// slipBeneath moves a copy of the mount at from beneath the one at target, and
// takes that one away.
func slipBeneath(from, target string) error {
	fd, err := unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("open_tree", err)
	}
	defer unix.Close(fd)
	err = unix.MoveMount(fd, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH|moveMountBeneath)
	if err != nil {
		return os.NewSyscallError("move_mount", err)
	}
	return os.NewSyscallError("umount2", unix.Unmount(target, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH))
}

// recognize returns nil if what is mounted at target is f.
func (b *backend) recognize(f Files, target string) error {
	in, err := lookup(target)
	if err != nil {
		return err
	}
	same := false
	switch {
	case f.Served != "":
		same = sameFile(f.Served, target)
	case b.name == Tree:
		same = sameFile(f.Tree, target)
	case in.Type == "erofs":
		same = sameFile(f.Index, in.Backing())
	}
	if !same {
		return fmt.Errorf("mount layer at %s: %w (%s from %s)", target, ErrOccupied, in.Type, in.Source)
	}
	return nil
}

func sameFile(a, b string) bool {
	x, err1 := os.Stat(a)
	y, err2 := os.Stat(b)
	return err1 == nil && err2 == nil && os.SameFile(x, y)
}

func (b *backend) Unmount(target string) error {
	defer b.lock(target)()
	return Unmount(target)
}

// Unmount takes away every mount at target, whichever backend made it. What is
// in use goes from the tree at once and from the kernel when its last user does.
func Unmount(target string) error {
	for {
		err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW)
		if err == unix.EBUSY {
			err = unix.Unmount(target, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		}
		switch {
		case err == nil:
			continue // there may be another below
		case err == unix.ENOENT:
			return nil
		case err == unix.EINVAL:
			if there, merr := Mounted(target); merr != nil || !there {
				return merr
			}
		}
		return &os.PathError{Op: "unmount", Path: target, Err: err}
	}
}

// attachFile mounts the index file directly. The kernel opens the tar by the
// name in device=.
func attachFile(f Files, target string) error {
	return withPath(f.Data, func(data string) error {
		return mountErofs(f.Index, data, target)
	})
}

func mountErofs(index, data, target string) error {
	if err := unix.Mount(index, target, "erofs", layerFlags, "device="+data); err != nil {
		return &os.SyscallError{Syscall: "mount erofs", Err: err}
	}
	return nil
}

// withPath calls use with a name of path that can stand in mount options,
// where a comma ends a value.
func withPath(path string, use func(string) error) error {
	if !strings.Contains(path, ",") {
		return use(path)
	}
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	return use("/proc/self/fd/" + strconv.Itoa(fd))
}

// attachTree binds the unpacked directory.
func attachTree(f Files, target string) error { return attachDir(f.Tree, target) }

// attachDir binds a directory. A bind mount takes its flags only when it is
// remounted.
func attachDir(dir, target string) error {
	if err := unix.Mount(dir, target, "", unix.MS_BIND, ""); err != nil {
		return &os.SyscallError{Syscall: "mount bind", Err: err}
	}
	if err := unix.Mount("", target, "", unix.MS_REMOUNT|unix.MS_BIND|layerFlags, ""); err != nil {
		return errors.Join(&os.SyscallError{Syscall: "mount remount", Err: err}, Unmount(target))
	}
	return nil
}
