package volumes

import (
	"fmt"

	"github.com/containerd/continuity/fs"
	"golang.org/x/sys/unix"
)

// FromImage copies what an image has at target, a directory, to dir: owner, mode and files. root is the root
// of the image, in which links are followed as a process there would. Where there is no directory, dir stays.
func FromImage(dir, root, target string) error {
	at, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", root, err)
	}
	defer unix.Close(at)
	from, err := unix.Openat2(at, target, &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT})
	if err == unix.ENOENT || err == unix.ENOTDIR {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s of the image: %w", target, err)
	}
	defer unix.Close(from)
	// The dot has the directory itself looked at, not the link in /proc.
	if err := fs.CopyDir(dir, fmt.Sprintf("/proc/self/fd/%d/.", from)); err != nil {
		return fmt.Errorf("copy %s of the image: %w", target, err)
	}
	return flush(dir)
}

// flush writes all of a file system to its disk: what was copied is not copied again.
func flush(dir string) error {
	fd, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Syncfs(fd)
}
