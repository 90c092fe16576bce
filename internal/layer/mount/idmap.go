package mount

import (
	"fmt"

	"github.com/containerd/containerd/v2/core/mount"
)

// Idmap shows the directory source, a layer's mount, at the existing directory
// target with other owners: what belongs to container id C in source belongs to
// host id H in target. uidmap and gidmap are lists "C:H:SIZE[,C:H:SIZE…]", as
// containerd passes them; ids outside of them show as the overflow id. A
// container in a user namespace with these maps then owns its image's files and
// nothing is copied. The mount at target is unmounted by Unmount.
func Idmap(source, target, uidmap, gidmap string) error {
	ns, err := mount.GetUsernsFD(uidmap, gidmap)
	if err != nil {
		return fmt.Errorf("idmap %s: %w", source, err)
	}
	defer ns.Close()
	if err := mount.IDMapMount(source, target, int(ns.Fd())); err != nil {
		return fmt.Errorf("idmap %s at %s: %w", source, target, err)
	}
	return nil
}
