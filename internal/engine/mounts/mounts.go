// Package mounts says what is mounted in a container beside what it was asked for by path: what every one has
// of the kernel, file systems in memory, an init; and in which order.
package mounts

import (
	"debug/elf"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/spec"
)

// System are those that every container has of the kernel.
func System() []specs.Mount {
	return []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs",
			Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts",
			Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
		{Destination: "/dev/shm", Type: "tmpfs", Source: "shm",
			Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue",
			Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup",
			Options: []string{"nosuid", "noexec", "nodev", "relatime", "ro"}},
	}
}

// Of are the mounts that a container with the options has of the kernel.
func Of(o *spec.Options) []specs.Mount {
	system := System()
	for i, m := range system {
		switch {
		case m.Destination == "/dev/shm" && o.ShmSize > 0:
			system[i].Options = append(slices.DeleteFunc(m.Options, func(had string) bool {
				return strings.HasPrefix(had, "size=")
			}), fmt.Sprintf("size=%d", o.ShmSize))
		case strings.HasPrefix(m.Destination, "/sys") && o.Privileged:
			system[i].Options = slices.DeleteFunc(m.Options, func(had string) bool { return had == "ro" })
		}
	}
	return system
}

// Tmpfs are the file systems in memory that the options name.
func Tmpfs(o *spec.Options) (m []specs.Mount) {
	for _, t := range o.Tmpfs {
		options := []string{"noexec", "nosuid", "nodev"}
		for _, o := range t.Options {
			opposite, no := strings.CutPrefix(o, "no")
			if !no {
				opposite = "no" + o
			}
			options = slices.DeleteFunc(options, func(have string) bool { return have == o || have == opposite })
			options = append(options, o)
		}
		m = append(m, specs.Mount{Destination: path.Clean(t.Target), Type: "tmpfs", Source: "tmpfs",
			Options: options})
	}
	return m
}

// Over replaces those mounts that have the same destination.
func Over(m []specs.Mount, more ...specs.Mount) []specs.Mount {
	for _, n := range more {
		m = slices.DeleteFunc(m, func(o specs.Mount) bool { return o.Destination == n.Destination })
		m = append(m, n)
	}
	return m
}

// ByDepth has what is mounted below another come behind it.
func ByDepth(m []specs.Mount) []specs.Mount {
	slices.SortStableFunc(m, func(a, b specs.Mount) int {
		return strings.Count(a.Destination, "/") - strings.Count(b.Destination, "/")
	})
	return m
}

// inits are the programs that serve as a container's first process, as packages of Docker, tini, catatonit
// and Podman have them. initTarget is where a container has it.
var inits = []string{"/usr/bin/docker-init", "/usr/libexec/docker/docker-init", "/usr/bin/tini-static",
	"/usr/bin/catatonit", "/usr/libexec/podman/catatonit"}

const initTarget = "/sbin/docker-init"

// UnderInit has the node's init run args.
func UnderInit(mounts []specs.Mount, args []string) ([]specs.Mount, []string, error) {
	i := slices.IndexFunc(inits, static)
	if i < 0 {
		return nil, nil, fmt.Errorf("--init: this node has no init program (none of %s, linked statically): install tini or catatonit, or leave --init out",
			strings.Join(inits, " "))
	}
	mounts = ByDepth(Over(mounts, specs.Mount{Destination: initTarget, Type: "bind", Source: inits[i],
		Options: []string{"rbind", "rprivate", "ro"}}))
	return mounts, slices.Concat([]string{initTarget, "--"}, args), nil
}

// static reports whether a program runs in any container, without files of the node.
func static(program string) bool {
	if _, err := os.Stat(program); err != nil {
		return false
	}
	f, err := elf.Open(program)
	if err != nil {
		return false
	}
	defer f.Close()
	return !slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP })
}
