package snapshot

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
)

// rootOwner is who owns the root directory of a new snapshot, as seen by the
// host: root of the user namespace that the labels map, else the owner of the
// directory that it covers.
func (r *roots) rootOwner(snap storage.Snapshot, labels map[string]string) (uid, gid int, err error) {
	uids, mapU := labels[snapshots.LabelSnapshotUIDMapping]
	gids, mapG := labels[snapshots.LabelSnapshotGIDMapping]
	if mapU || mapG {
		if uid, err = mappedRoot(uids); err == nil {
			gid, err = mappedRoot(gids)
		}
		return uid, gid, err
	}
	if len(snap.ParentIDs) == 0 {
		return 0, 0, nil
	}
	fi, err := os.Lstat(r.top(snap.ParentIDs[0]))
	if err != nil {
		return 0, 0, err
	}
	st := fi.Sys().(*syscall.Stat_t)
	return int(st.Uid), int(st.Gid), nil
}

// idmapOptions are those by which containerd maps ids for a snapshot whose
// labels say so.
func (r *roots) idmapOptions(snap storage.Snapshot, labels map[string]string) (options []string) {
	uids, mapU := labels[snapshots.LabelSnapshotUIDMapping]
	gids, mapG := labels[snapshots.LabelSnapshotGIDMapping]
	if !r.remap || !mapU && !mapG || r.remapped(snap, labels) {
		return nil
	}
	if mapU {
		options = append(options, "uidmap="+uids)
	}
	if mapG {
		options = append(options, "gidmap="+gids)
	}
	return options
}

// remapped says whether everything below a snapshot belongs to the ids that its
// labels map to already. A containerd that was not told that the snapshotter
// remaps ids makes such a copy of the image first, and passes the labels still.
func (r *roots) remapped(snap storage.Snapshot, labels map[string]string) bool {
	if len(snap.ParentIDs) == 0 || r.layerOf(snap.ParentIDs[0]) != nil {
		return false
	}
	uid, gid, err := r.rootOwner(snap, labels)
	if err != nil || uid == 0 && gid == 0 {
		return false
	}
	var st syscall.Stat_t
	err = syscall.Lstat(r.upper(snap.ParentIDs[0]), &st)
	return err == nil && int(st.Uid) == uid && int(st.Gid) == gid
}

// mappedRoot returns the host id of id 0 in mappings of the form
// CONTAINER:HOST:SIZE, separated by commas; without mappings it is 0.
func mappedRoot(mappings string) (int, error) {
	if mappings == "" {
		return 0, nil
	}
	for _, m := range strings.Split(mappings, ",") {
		inner, host, size, err := parseMapping(m)
		if err != nil {
			return 0, err
		}
		if inner == 0 && size > 0 {
			return int(host), nil
		}
	}
	return 0, fmt.Errorf("id mapping %q does not map 0", mappings)
}

func parseMapping(m string) (inner, host, size uint64, err error) {
	part := strings.Split(m, ":")
	if len(part) != 3 {
		return 0, 0, 0, fmt.Errorf("id mapping %q is not CONTAINER:HOST:SIZE", m)
	}
	for i, to := range []*uint64{&inner, &host, &size} {
		if *to, err = strconv.ParseUint(part[i], 10, 32); err != nil {
			return 0, 0, 0, fmt.Errorf("id mapping %q: %w", m, err)
		}
	}
	return inner, host, size, nil
}
