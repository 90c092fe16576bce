package mount

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// The steps of a trial, as they stand in a Finding's reason.
const (
	stepNamespace = "make a mount namespace"
	stepLayer     = "mount the layer"
	stepOverlay   = "stack overlayfs on it"
	stepRead      = "read through overlayfs"
	stepWait      = "wait for the trial"
)

// trialError says at which step a trial failed.
type trialError struct {
	step string
	err  error
}

func (e *trialError) Error() string { return e.step + ": " + e.err.Error() }
func (e *trialError) Unwrap() error { return e.err }

// meaning is what an error of a step means for the node's owner.
type meaning struct {
	backend string // "" is any
	step    string // "" is any
	errno   unix.Errno
	means   string
	remedy  string
}

const (
	asRoot     = "run dewd as root with CAP_SYS_ADMIN"
	newKernel  = "Linux 6.12 or newer with CONFIG_EROFS_FS and CONFIG_EROFS_FS_BACKED_BY_FILE"
	plainStore = "keep dewd's root on ext4, xfs or btrfs"
)

// meanings are looked through in order; the first that fits counts.
var meanings = []meaning{
	{"", "", unix.EPERM, "mounting is not permitted", asRoot},
	{Loop, stepLayer, unix.EACCES, "the loop devices may not be opened",
		"allow dewd the block devices 7:* and /dev/loop-control"},
	{"", "", unix.EACCES, "mounting is not permitted", asRoot},
	{EROFS, stepLayer, unix.ENODEV, "the kernel has no EROFS", "modprobe erofs; else " + newKernel},
	{EROFS, stepLayer, unix.ENOTBLK,
		"the kernel mounts EROFS from block devices only, or not from files of this file system",
		newKernel + "; " + plainStore},
	{EROFS, stepLayer, unix.EINVAL,
		"the kernel's EROFS does not take blocks of 512 bytes, or no files of this file system",
		newKernel + "; " + plainStore},
	{Loop, stepLayer, unix.ENODEV, "the kernel has no EROFS or no loop devices",
		"modprobe -a erofs loop; else a kernel with CONFIG_EROFS_FS and CONFIG_BLK_DEV_LOOP"},
	{Loop, stepLayer, unix.ENOENT, "the kernel has no loop devices",
		"modprobe loop; else a kernel with CONFIG_BLK_DEV_LOOP"},
	{Loop, stepLayer, unix.ENXIO, "the kernel has no loop devices",
		"modprobe loop; else a kernel with CONFIG_BLK_DEV_LOOP"},
	{Loop, stepLayer, unix.EBUSY, "no loop device was to be had",
		"see losetup -a for devices that nobody needs"},
	{Loop, stepLayer, unix.EINVAL, "the kernel's EROFS does not take blocks of 512 bytes", "Linux 6.4 or newer"},
	{"", stepOverlay, unix.ENODEV, "the kernel has no overlayfs",
		"modprobe overlay; else a kernel with CONFIG_OVERLAY_FS"},
	{"", stepOverlay, unix.EINVAL, "overlayfs does not take this mount as a layer", plainStore},
	{"", "", unix.ENOSPC, "the disk is full", "make room in dewd's root"},
}

// diagnose puts a trial's error in words: what it means, and what helps.
func diagnose(backend string, err error) (reason, remedy string) {
	step := ""
	if t := (*trialError)(nil); errors.As(err, &t) {
		step = t.step
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return "it hangs (" + step + ")", "see the kernel's log (dmesg)"
	}
	var errno unix.Errno
	if !errors.As(err, &errno) {
		return err.Error(), ""
	}
	for _, m := range meanings {
		if m.errno == errno && (m.backend == "" || m.backend == backend) && (m.step == "" || m.step == step) {
			return fmt.Sprintf("%s (%s: %s)", m.means, step, errnoName(errno)), m.remedy
		}
	}
	return fmt.Sprintf("%v (%s)", err, errnoName(errno)), "see the kernel's log (dmesg)"
}

func errnoName(e unix.Errno) string {
	if n := unix.ErrnoName(e); n != "" {
		return n
	}
	return fmt.Sprintf("errno %d", int(e))
}
