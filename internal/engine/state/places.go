package state

import (
	"crypto/sha256"
	"encoding/hex"
	"net/netip"
	"os"
	"path"
	"path/filepath"

	"github.com/opencontainers/go-digest"
)

// Default is the directory whose dewd has names without a suffix for what it makes.
const Default = "/run/dewpoint"

// Suffix tells apart what is made by daemons of several directories; "" is that of Default.
func Suffix(dir string) string {
	if dir = filepath.Clean(dir); dir == Default {
		return ""
	}
	h := sha256.Sum256([]byte(dir))
	return hex.EncodeToString(h[:4])
}

// CgroupParent is the cgroup that those of all containers are in.
func CgroupParent(dir string) string {
	if suffix := Suffix(dir); suffix != "" {
		return "/dewpoint-" + suffix
	}
	return "/dewpoint"
}

// Places says where the files of containers are. It holds nothing.
type Places struct {
	Root         string // kept over a reboot
	State        string // gone after a reboot
	CgroupParent string
}

// Dir is a container's directory.
func (p Places) Dir(name string) string { return filepath.Join(p.Root, "containers", name) }

// NetNS is a container's network namespace.
func (p Places) NetNS(name string) string { return filepath.Join(p.State, "netns", name) }

// Cgroup is a container's cgroup.
func (p Places) Cgroup(name string) string { return path.Join(p.CgroupParent, name) }

// Address is the file of a container's address.
func (p Places) Address(name string) string { return filepath.Join(p.Dir(name), "address") }

// Output are plain paths, not file: URIs, with which the shims of 1.6 and
// 2.x alike write standard output and standard error to one file.
func (p Places) Output(name string) (stdout, stderr string) {
	return filepath.Join(p.Dir(name), "stdout.log"), filepath.Join(p.Dir(name), "stderr.log")
}

// Stdin is the FIFO of standard input, of a container that has one.
func (p Places) Stdin(name string) string { return filepath.Join(p.Dir(name), "stdin") }

// Describe is what the record says; the task is not looked at.
func (p Places) Describe(r Record) *Info {
	i := &Info{
		Name: r.Name, Image: r.Image, Labels: r.Labels, Created: r.Made, Status: Stopped,
		Digest: digest.Digest(r.Labels[LabelDigest]), Net: r.Net, Ports: r.Ports, Cgroup: p.Cgroup(r.Name),
	}
	i.Stdout, i.Stderr = p.Output(r.Name)
	if r.Net != NetHost {
		i.NetNS = p.NetNS(r.Name)
	}
	if r.Net == NetBridge {
		if b, err := os.ReadFile(p.Address(r.Name)); err == nil {
			i.Addr, _ = netip.ParseAddr(string(b))
		}
	}
	return i
}
