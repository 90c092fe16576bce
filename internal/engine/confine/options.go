package confine

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/pkg/cap"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"dewpoint/internal/spec"
)

// Allowed are the capabilities that the options leave to a container: Docker's set, or all that dewd has of a
// privileged one, with what is added and without what is dropped. ALL goes first, whatever the order.
func Allowed(o *spec.Options) ([]string, error) {
	if !o.Privileged && len(o.CapAdd) == 0 && len(o.CapDrop) == 0 {
		return Capabilities, nil
	}
	add, drop := capabilities(o.CapAdd), capabilities(o.CapDrop)
	allowed := slices.Clone(Capabilities)
	if o.Privileged || slices.Contains(add, all) {
		own, err := cap.Current()
		if err != nil {
			return nil, fmt.Errorf("capabilities: %w", err)
		}
		allowed = own
	} else if slices.Contains(drop, all) {
		allowed = nil
	}
	known := cap.Known()
	for _, c := range slices.Concat(add, drop) {
		if c != all && !slices.Contains(known, c) {
			return nil, fmt.Errorf("there is no capability %s", c)
		}
	}
	for _, c := range add {
		if c != all && !slices.Contains(allowed, c) {
			allowed = append(allowed, c)
		}
	}
	return slices.DeleteFunc(allowed, func(c string) bool { return slices.Contains(drop, c) }), nil
}

const all = "CAP_ALL"

// capabilities gives names their full form.
func capabilities(names []string) []string {
	var full []string
	for _, n := range names {
		full = append(full, "CAP_"+strings.TrimPrefix(strings.ToUpper(n), "CAP_"))
	}
	return full
}

// Rlimits are the options' limits as the runtime has them.
func Rlimits(o *spec.Options) []specs.POSIXRlimit {
	var limits []specs.POSIXRlimit
	for _, u := range o.Ulimits {
		limits = append(limits, specs.POSIXRlimit{Type: "RLIMIT_" + strings.ToUpper(u.Name),
			Soft: uint64(u.Soft), Hard: uint64(u.Hard)}) // -1 is RLIM_INFINITY
	}
	return limits
}

// Devices are the device nodes that the options give a container, as the host has them now, and the access to
// them. A privileged one has all nodes of the host, and access to every device.
func Devices(o *spec.Options) (nodes []specs.LinuxDevice, access []specs.LinuxDeviceCgroup, err error) {
	if o.Privileged {
		if nodes, err = hostDevices("/dev"); err != nil {
			return nil, nil, err
		}
		access = []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}
	}
	for _, d := range o.Devices {
		n, err := device(d.Source)
		if err != nil {
			return nil, nil, fmt.Errorf("--device %s: %w", d.Source, err)
		}
		if d.Target != "" {
			n.Path = filepath.Clean(d.Target)
		}
		if d.Permissions == "" {
			d.Permissions = "rwm"
		}
		nodes = slices.DeleteFunc(nodes, func(o specs.LinuxDevice) bool { return o.Path == n.Path })
		nodes = append(nodes, n)
		access = append(access, specs.LinuxDeviceCgroup{Allow: true, Type: n.Type, Major: &n.Major,
			Minor: &n.Minor, Access: d.Permissions})
	}
	return nodes, access, nil
}

// device is what the container gets for a node of the host, which may be a link to it.
func device(path string) (specs.LinuxDevice, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return specs.LinuxDevice{}, err
	}
	d := specs.LinuxDevice{Path: filepath.Clean(path), Major: int64(unix.Major(st.Rdev)),
		Minor: int64(unix.Minor(st.Rdev)), UID: &st.Uid, GID: &st.Gid}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		d.Type = "b"
	case unix.S_IFCHR:
		d.Type = "c"
	default:
		return d, fmt.Errorf("it is no device: name each device of a directory by itself")
	}
	mode := os.FileMode(st.Mode & 0o777)
	d.FileMode = &mode
	return d, nil
}

// privates are what each container has of its own below /dev.
var privates = []string{"pts", "shm", "fd", "mqueue", "console"}

func hostDevices(root string) (nodes []specs.LinuxDevice, err error) {
	return nodes, filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil && path != root:
			return nil // it has gone meanwhile
		case err != nil:
			return err
		case filepath.Dir(path) == root && slices.Contains(privates, e.Name()):
			if e.IsDir() {
				return fs.SkipDir
			}
			return nil
		case e.Type()&fs.ModeDevice == 0:
			return nil
		}
		if d, err := device(path); err == nil {
			nodes = append(nodes, d)
		}
		return nil
	})
}
