package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/durable"
)

// A container whose memory is on its way has a mark: a file of its name, which this daemon and the
// guard of the memory hold locked. Where a daemon finds one that nobody holds, the daemon before it
// was killed, and the guard has ended the container, unless all was there in time.

// guardWait is how long a guard may take to end what it guards.
const guardWait = 20 * time.Second

// marks are the files of the containers whose memory is on its way.
type marks struct {
	dir string
	log *slog.Logger
}

// put marks a container. The file is to be held as long as its memory is served.
func (k marks) put(name string) (*os.File, error) {
	if err := os.MkdirAll(k.dir, 0o700); err != nil {
		return nil, err
	}
	path := filepath.Join(k.dir, name)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	_, err = f.WriteString(durable.BootID())
	if err == nil {
		err = os.NewSyscallError("flock", unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB))
	}
	if err != nil {
		return nil, errors.Join(err, f.Close(), os.Remove(path))
	}
	return f, nil
}

// remove takes a mark away, unless it is a later one's of that name.
func (k marks) remove(f *os.File) {
	defer f.Close()
	mine, err := f.Stat()
	if err != nil {
		return
	}
	if there, err := os.Lstat(f.Name()); err == nil && os.SameFile(mine, there) {
		if err := os.Remove(f.Name()); err != nil {
			k.log.Warn("a mark stays", "file", f.Name(), "err", err)
		}
	}
}

// Abandoned calls revive for each container that an earlier daemon was killed in the middle
// of giving memory to, once the memory's guard has ended it. All of it may have been there by then, and
// the container runs, or it has been removed since. What revive fails at is tried again by the next call.
// It is to be called before containers are restored.
func (m *Manager) Abandoned(ctx context.Context, revive func(ctx context.Context, name string) error) error {
	ents, err := os.ReadDir(m.late.dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range ents {
		if aerr := m.late.revive(ctx, e.Name(), revive); aerr != nil {
			err = errors.Join(err, fmt.Errorf("container %s, whose memory was coming: %w", e.Name(), aerr))
		}
	}
	return err
}

// revive is Abandoned for one container.
func (k marks) revive(ctx context.Context, name string,
	revive func(ctx context.Context, name string) error) error {
	f, err := os.Open(filepath.Join(k.dir, name))
	if err != nil {
		return err
	}
	defer f.Close()
	if err := guardEnds(ctx, f); err != nil {
		return err
	}
	boot, err := os.ReadFile(f.Name())
	if err != nil {
		return err
	}
	if string(boot) == durable.BootID() { // else the machine has ended it
		if err := revive(ctx, name); err != nil {
			return err
		}
	}
	return os.Remove(f.Name())
}

// guardEnds returns when nobody holds the mark any more.
func guardEnds(ctx context.Context, f *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, guardWait)
	defer cancel()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return os.NewSyscallError("flock", err)
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("its guard does not end: %w", context.Cause(ctx))
		}
	}
}
