package engine

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/anypb"

	"dewpoint/internal/durable"
	"dewpoint/internal/engine/cgroup"
	"dewpoint/internal/trace"
)

// Restore starts a container from dumped processes instead of its command. The
// container must have the mounts, by their targets, and the kind of network
// that the dumped one had; the files that the processes have open must be in
// its root. Name, host name, network, address, limits, and the sources of
// volumes are its own. Processes keep their environment.
//
// Create makes all but the processes, and asks for CRIU's images last. Start makes those: its error means
// that there are none, and that restore.log in the engine's WorkDir may tell more. A container that has ended
// is started anew by its command.
type Restore struct {
	// Images returns the directory of CRIU's images once they are there, which is read only and may be shared by
	// many: all else of the container is made meanwhile. nil: the command makes the processes.
	Images func(ctx context.Context) (dir string, err error)
	Upper  digest.Digest // diff ID of one more layer on top of the image's, registered; "" is none
	Config []string      // lines for CRIU's configuration
}

// ImagesIn is Restore.Images of a directory that is there.
func ImagesIn(dir string) func(context.Context) (string, error) {
	return func(context.Context) (string, error) { return dir, nil }
}

// WorkDir is where CRIU works when it restores the container: its log, and the
// socket lazy-pages.socket that it connects to with lazy-pages in its
// configuration. It is there from Create on until Remove, and is short enough
// for a socket's address with usual names.
func (e *core) WorkDir(name string) string { return filepath.Join(e.cfg.restoreDir(), name) }

func (c *Config) imagesDir(name string) string { return filepath.Join(c.dir(name), "images") }

// parent is the snapshot below the container's.
func (s *Spec) parent() string {
	if s.Restore == nil || s.Restore.Upper == "" {
		return ChainID(s.Image)
	}
	ids := s.Image.Spec.RootFS.DiffIDs
	return identity.ChainID(append(ids[:len(ids):len(ids)], s.Restore.Upper)).String()
}

// prepareRestore makes the directories that the processes are restored from and in; from here on the
// container is one that starts so. It returns the runtime's options for the task, which take the place
// of the record's.
func (e *restores) prepareRestore(s *Spec) (*anypb.Any, error) {
	if err := e.removeRestored(s.Name); err != nil {
		return nil, err
	}
	for _, d := range []string{e.WorkDir(s.Name), e.cfg.imagesDir(s.Name)} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	if err := e.writeCRIUConfig(s.Name, s.Restore.Config); err != nil {
		return nil, err
	}
	o := e.runcOptions()
	o.CriuImagePath, o.CriuWorkPath = e.cfg.imagesDir(s.Name), e.WorkDir(s.Name)
	return plainAny(o)
}

// bringImages waits for the dumped images and links them to the container's directory of them. The host name
// is its own.
func (e *restores) bringImages(ctx context.Context, s *Spec) error {
	ctx, step := trace.Start(ctx, "images")
	defer step.End()
	from, err := s.Restore.Images(ctx)
	if err != nil {
		return err
	}
	hostname, err := s.hostname()
	if err == nil {
		err = e.linkImages(s.Name, hostname, from)
	}
	return wrap(err, "checkpoint")
}

func (e *restores) linkImages(name, hostname, from string) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, f := range entries {
		to := filepath.Join(e.cfg.imagesDir(name), f.Name())
		if strings.HasPrefix(f.Name(), "utsns-") {
			err = os.WriteFile(to, utsImage(hostname), 0o600)
		} else {
			err = linkOrCopy(filepath.Join(from, f.Name()), to)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// linkOrCopy makes no symbolic link: CRIU follows those in the container's root.
func linkOrCopy(from, to string) error {
	if err := os.Link(from, to); !errors.Is(err, unix.EXDEV) {
		return err
	}
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return errors.Join(err, w.Close())
}

// restoreTimeout bounds one restore, whatever the caller's context says.
const restoreTimeout = time.Minute

// isRestore says whether the container is still to be made of dumped processes.
func (e *restores) isRestore(name string) bool {
	_, err := os.Stat(e.cfg.imagesDir(name))
	return err == nil
}

// startRestored has CRIU make the processes. If that fails, or takes too long,
// nothing of them is left, nor of CRIU: the call's end ends runc alone.
func (e *restores) startRestored(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, restoreTimeout)
	defer cancel()
	sctx, end := context.WithCancelCause(ctx)
	var watch sync.WaitGroup
	watch.Go(func() { e.watchLocks(sctx, name, end) })
	r, err := e.c.Tasks.Start(sctx, &tasksapi.StartRequest{ContainerID: name})
	end(nil)
	watch.Wait()
	if err != nil {
		if why := context.Cause(sctx); ctx.Err() == nil && !errors.Is(why, context.Canceled) {
			err = why
		}
		e.state.Unsure(name)
		return errors.Join(err, e.killCgroup(ctx, name), unmountBelow(e.WorkDir(name)),
			unmountBelow(e.cfg.runcDir(name)))
	}
	e.state.Begun(name, r.Pid)
	if err := e.alone(ctx, name, r.Pid); err != nil {
		e.log.Warn("a container's end may not be seen", "container", name, "err", err)
	}
	return os.RemoveAll(e.cfg.imagesDir(name)) // links; a next start boots
}

// runcDir is runc's own directory for the container, where a runc that was
// killed leaves the container's root mounted.
func (c *Config) runcDir(name string) string {
	return filepath.Join(c.runcRoot(), c.Namespace, name)
}

// removeRestored removes what a restore, also one that was cut short, has left.
// Nothing is removed through a mount.
func (e *restores) removeRestored(name string) error {
	var err error
	for _, d := range []string{e.WorkDir(name), e.cfg.runcDir(name)} {
		if _, serr := os.Lstat(d); errors.Is(serr, os.ErrNotExist) {
			continue
		}
		if uerr := unmountBelow(d); uerr != nil {
			err = errors.Join(err, uerr)
			continue
		}
		err = errors.Join(err, os.RemoveAll(d))
		cgroup.Remove(e.cfg.places().Cgroup(name)) // a runc that was killed left it
	}
	return err
}

// unmountBelow unmounts everything in a directory, the last mount first.
func unmountBelow(dir string) error {
	below, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(m.Mountpoint, dir+"/"), false
	})
	for _, m := range slices.Backward(below) {
		if uerr := unix.Unmount(m.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); uerr != nil &&
			!errors.Is(uerr, unix.EINVAL) {
			err = errors.Join(err, fmt.Errorf("unmount %s: %w", m.Mountpoint, uerr))
		}
	}
	return err
}

// killCgroup kills whatever is in the container's cgroup.
func (e *restores) killCgroup(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return cgroup.End(ctx, e.cfg.places().Cgroup(name))
}

// utsImage is CRIU's image of a UTS namespace: two magic numbers, and one
// message with its size, of host name and domain name.
func utsImage(hostname string) []byte {
	const common, utsns = 0x54564319, 0x54473203
	m := protowire.AppendTag(nil, 1, protowire.BytesType)
	m = protowire.AppendString(m, hostname)
	m = protowire.AppendTag(m, 2, protowire.BytesType)
	m = protowire.AppendString(m, "(none)")
	b := binary.LittleEndian.AppendUint32(nil, common)
	b = binary.LittleEndian.AppendUint32(b, utsns)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m)))
	return append(b, m...)
}

// wrapRunc makes runc find the configured CRIU, by its name in PATH and no
// otherwise. It returns the program that shims are to run.
func (c *Config) wrapRunc() (string, error) {
	if c.CRIU == "" {
		return c.Runc, nil
	}
	dir := filepath.Join(c.Root, "bin")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if err := replaceLink(c.CRIU, filepath.Join(dir, "criu")); err != nil {
		return "", err
	}
	script := fmt.Sprintf("#!/bin/sh\nPATH='%s':$PATH exec '%s' \"$@\"\n", dir, cmp.Or(c.Runc, "runc"))
	wrapper := filepath.Join(dir, "runc-criu")
	if old, err := os.ReadFile(wrapper); err == nil && string(old) == script {
		return wrapper, nil
	}
	return wrapper, durable.WriteFile(wrapper, []byte(script), 0o755)
}

func replaceLink(target, link string) error {
	if old, err := os.Readlink(link); err == nil && old == target {
		return nil
	}
	if err := os.Remove(link); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.Symlink(target, link)
}
