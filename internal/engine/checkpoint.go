package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"dewpoint/internal/image"
)

// dumpTimeout bounds one dump, whatever the caller's context says: CRIU is not
// to be ended while it works inside the container's processes.
const dumpTimeout = 10 * time.Minute

// criuConfig is the annotation by which runc names a file of CRIU's options.
const criuConfig = "org.criu.config"

// DumpSpec says where a dump goes.
type DumpSpec struct {
	Dir    string   // of the images; made if missing
	Work   string   // of dump.log and stats-dump; made if missing
	Config []string // lines for CRIU's configuration
}

// Dump writes the processes of a running container to d.Dir by CRIU, and leaves
// them running, or paused if they were. It goes on to its end when ctx is done.
// On an error d.Work/dump.log tells more, and the container is as before.
func (e *dumps) Dump(ctx context.Context, name string, d DumpSpec) error {
	defer e.names.lock(name)()
	if err := e.writeCRIUConfig(name, d.Config); err != nil {
		return fmt.Errorf("dump container %s: %w", name, err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dumpTimeout)
	defer cancel()
	forget, err := e.introduce(ctx, name)
	if err != nil {
		return fmt.Errorf("dump container %s: %w", name, err)
	}
	defer forget()
	opts, err := plainAny(&options.CheckpointOptions{ImagePath: d.Dir, WorkPath: d.Work, FileLocks: true})
	if err != nil {
		return err
	}
	_, err = e.c.Tasks.Checkpoint(ctx, &tasksapi.CheckpointTaskRequest{ContainerID: name, Options: opts})
	return wrap(notFound(err), "dump container %s", name)
}

// Upper is the directory that holds what a container has written and removed,
// overlayfs's upper layer. It changes while the container runs.
func (e *roots) Upper(ctx context.Context, name string) (string, error) {
	dir, err := e.overlay(ctx, name, "upperdir=")
	return dir, wrap(err, "writable layer of %s", name)
}

// overlay is an option of the overlay that is a container's root.
func (e *roots) overlay(ctx context.Context, name, option string) (string, error) {
	r, err := e.c.Snapshots.Mounts(ctx, &snapshotsapi.MountsRequest{Snapshotter: e.cfg.Snapshotter, Key: name})
	if err != nil {
		return "", notFound(err)
	}
	for _, m := range r.Mounts {
		for _, o := range m.Options {
			if value, ok := strings.CutPrefix(o, option); ok {
				return value, nil
			}
		}
	}
	return "", errors.New("its root is no overlay")
}

// criuFile is a file of the container's directory, so that it goes with it.
func (c *Config) criuFile(name string) string { return filepath.Join(c.dir(name), "criu.conf") }

// writeCRIUConfig sets what CRIU reads when it next works on the container.
func (e *core) writeCRIUConfig(name string, lines []string) error {
	text := strings.Join(append([]string{"# written anew for each dump and restore"}, lines...), "\n")
	return os.WriteFile(e.cfg.criuFile(name), []byte(text+"\n"), 0o600)
}

// plainAny packs options as containerd's older versions know them too.
func plainAny(m proto.Message) (*anypb.Any, error) {
	a, err := anypb.New(m)
	if err != nil {
		return nil, err
	}
	a.TypeUrl = strings.TrimPrefix(a.TypeUrl, "type.googleapis.com/")
	return a, nil
}

// Below is the directory of the layer that a restored container stands on besides its
// image's (Restore.Upper), as overlayfs has it; "" if there is none. It stays while the container does.
func (e *roots) Below(ctx context.Context, name string, img *image.Image) (string, error) {
	parent, err := e.parentOf(ctx, name)
	if err != nil || parent == ChainID(img) {
		return "", err
	}
	if under, err := e.parentOf(ctx, parent); err != nil || under != ChainID(img) {
		return "", errors.Join(fmt.Errorf("container %s stands on other layers than its image has now: pull the image again", name), err)
	}
	dirs, err := e.overlay(ctx, name, "lowerdir=")
	top, _, _ := strings.Cut(dirs, ":")
	return top, wrap(err, "layers of %s", name)
}

// parentOf is what a snapshot stands on.
func (e *roots) parentOf(ctx context.Context, key string) (string, error) {
	r, err := e.c.Snapshots.Stat(ctx,
		&snapshotsapi.StatSnapshotRequest{Snapshotter: e.cfg.Snapshotter, Key: key})
	if err != nil {
		return "", fmt.Errorf("snapshot %s: %w", key, notFound(err))
	}
	return r.Info.Parent, nil
}
