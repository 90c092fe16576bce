package snapshottest

import (
	"errors"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/mount"
)

// Backend is a real mount.Backend whose Unmount fails on command.
type Backend struct {
	mount.Backend

	mu   sync.Mutex
	fail error
	wait func(target string)
}

// NewBackend returns the backend of that name.
func NewBackend(name string) (*Backend, error) {
	b, err := mount.New(name)
	return &Backend{Backend: b}, err
}

// FailUnmount makes Unmount return err from now on; nil makes it work again.
func (b *Backend) FailUnmount(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fail = err
}

// BeforeUnmount has wait called by each Unmount, which goes on when it returns.
func (b *Backend) BeforeUnmount(wait func(target string)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.wait = wait
}

// Unmount implements mount.Backend.
func (b *Backend) Unmount(target string) error {
	b.mu.Lock()
	err, wait := b.fail, b.wait
	b.mu.Unlock()
	if wait != nil {
		wait(target)
	}
	if err != nil {
		return err
	}
	return b.Backend.Unmount(target)
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
