package snapshottest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"dewpoint/internal/mount"
)

// Backend is a mount.Backend for Linux 6.12 and newer that counts.
type Backend struct {
	Trees              bool // bind the unpacked layer instead of mounting the index
	Mounted, Unmounted atomic.Int64
}

var _ mount.Backend = (*Backend)(nil)

// Name implements mount.Backend.
func (b *Backend) Name() string {
	if b.Trees {
		return "tree"
	}
	return "erofs"
}

// Mount implements mount.Backend.
func (b *Backend) Mount(_ context.Context, f mount.Files, target string) error {
	if there, err := IsMounted(target); err != nil || there {
		return err
	}
	b.Mounted.Add(1)
	if !b.Trees {
		return unix.Mount(f.Index, target, "erofs", unix.MS_RDONLY, "device="+f.Data)
	}
	if err := unix.Mount(f.Tree, target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", f.Tree, err)
	}
	return unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
}

// Unmount implements mount.Backend.
func (b *Backend) Unmount(target string) error {
	err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err == nil {
		b.Unmounted.Add(1)
	}
	return err
}

// IsMounted says whether something is mounted at exactly this path.
func IsMounted(path string) (bool, error) {
	all, err := MountsUnder(path)
	for _, m := range all {
		if m == path {
			return true, err
		}
	}
	return false, err
}

// MountsUnder lists the mount points at and below a directory whose name needs
// no escapes.
func MountsUnder(dir string) ([]string, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var under []string
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 4 && (f[4] == dir || strings.HasPrefix(f[4], dir+"/")) {
			under = append(under, f[4])
		}
	}
	return under, nil
}

// UnmountAll unmounts everything at and below a directory, as a reboot does.
func UnmountAll(dir string) error {
	all, err := MountsUnder(dir)
	if err != nil {
		return err
	}
	for i := len(all) - 1; i >= 0; i-- {
		err = errors.Join(err, unix.Unmount(all[i], unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW))
	}
	return err
}
