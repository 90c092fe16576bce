package engine

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"

	"dewpoint/internal/engine/containerd"
)

// reconcile learns the published ports, ends pauses, and removes what belongs to no
// record: snapshots, leases, namespaces, allocations and directories of creations
// and removals that a crash has cut short.
func (e *Engine) reconcile(ctx context.Context) error {
	recs, err := e.state.Records(ctx)
	if err != nil {
		return err
	}
	known := make(map[string]bool, len(recs))
	for _, r := range recs {
		known[r.Name] = true
		if err := e.ports.Claim(r.Name, r.Ports, false); err != nil {
			e.log.Warn("published port", "container", r.Name, "err", err)
		}
	}
	if err := e.adoptShims(ctx); err != nil {
		return err
	}
	e.thawAll(e.life, recs)
	if err := e.removeStandIns(ctx); err != nil {
		e.log.Warn("remove what was made for a dump", "err", err)
	}
	names, err := e.remains(ctx)
	if err != nil {
		return err
	}
	for name := range names {
		if known[name] {
			continue
		}
		e.log.Info("removing what a crash has left", "container", name)
		if err := e.removeRemains(ctx, name); err != nil {
			e.log.Warn("remove remains", "container", name, "err", err)
		}
	}
	if err := e.endLeases(ctx); err != nil {
		e.log.Warn("end the leases of an earlier process", "err", err)
	}
	return emptyDir(e.cfg.execDir())
}

// remains are the names under which anything is kept.
func (e *Engine) remains(ctx context.Context) (map[string]bool, error) {
	names := make(map[string]bool)
	for _, d := range []string{e.cfg.containersDir(), e.cfg.netnsDir(), e.cfg.restoreDir()} {
		entries, err := os.ReadDir(d)
		if err != nil {
			return nil, err
		}
		for _, n := range entries {
			names[n.Name()] = true
		}
	}
	return names, e.strandedSnapshots(ctx, names)
}

// strandedSnapshots adds the keys of container snapshots: ours alone are
// roots of the garbage collector and active.
func (e *roots) strandedSnapshots(ctx context.Context, names map[string]bool) error {
	s, err := e.c.Snapshots.List(ctx, &snapshotsapi.ListSnapshotsRequest{
		Snapshotter: e.cfg.Snapshotter, Filters: []string{`kind==active,labels."` + labelGCRoot + `"`},
	})
	if err != nil {
		return err
	}
	for {
		r, err := s.Recv()
		if err != nil {
			return containerd.EndOfStream(err)
		}
		for _, i := range r.Info {
			if ValidName(i.Name) == nil {
				names[i.Name] = true
			}
		}
	}
}

func emptyDir(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, n := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, n.Name())))
	}
	return err
}
