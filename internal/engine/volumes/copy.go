package volumes

import (
	"fmt"
	"os"

	"github.com/containerd/continuity/fs"
	"golang.org/x/sys/unix"

	"dewpoint/internal/durable"
)

// FromImage copies what an image has at target, a directory, to dir: owner, mode and files. root is the root
// of the image, in which links are followed as a process there would. Where there is no directory, dir stays.
func FromImage(dir, root, target string) error {
	at, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", root, err)
	}
	defer unix.Close(at)
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT}
	from, err := unix.Openat2(at, target, how)
	for tries := 0; err == unix.EAGAIN && tries < 1000; tries++ { // a mount or rename anywhere beside a ".."
		from, err = unix.Openat2(at, target, how)
	}
	if err == unix.ENOENT || err == unix.ENOTDIR {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s of the image: %w", target, err)
	}
	defer unix.Close(from)
	to, err := os.Open(dir) // before the copy: its sync tells of writes that failed since
	if err != nil {
		return err
	}
	defer to.Close()
	// The dot has the directory itself looked at, not the link in /proc.
	if err := fs.CopyDir(dir, fmt.Sprintf("/proc/self/fd/%d/.", from)); err != nil {
		return fmt.Errorf("copy %s of the image: %w", target, err)
	}
	return durable.SyncFS(to) // what was copied is not copied again
}
