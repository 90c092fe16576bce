package mount

import (
	"fmt"
	"path/filepath"

	"github.com/moby/sys/mountinfo"
)

// List tells of every mount below the directory dir, in the order in which
// they were made; dir itself is left out.
func List(dir string) ([]Info, error) {
	path, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, err
	}
	path, err = filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	found, err := mountinfo.GetMounts(mountinfo.PrefixFilter(path))
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	var list []Info
	for _, m := range found {
		if m.Mountpoint != path {
			list = append(list, info(m))
		}
	}
	return list, nil
}
