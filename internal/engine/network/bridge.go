// Package network gives containers their network: a namespace kept by a path,
// an address on a bridge, published ports, and the files under /etc that
// resolvers read.
//
// The host's network needs nothing of this, "none" is a namespace with only
// the loopback device, and "bridge" is such a namespace connected by the CNI
// plugins bridge and host-local, and portmap where ports are published. Rules
// that are the same for all containers (masquerading, forwarding) are made
// once, not by a plugin for each.
package network

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
)

// Config describes the bridge. The zero value of a field is its default.
type Config struct {
	Bin    []string     // directories of the CNI plugins; default /opt/cni/bin, /usr/lib/cni, /usr/libexec/cni
	Dir    string       // allocations and results; must not outlive a reboot
	Bridge string       // device name, at most 15 bytes
	Subnet netip.Prefix // IPv4; default the first of 10.88.240.0/20 … that nothing here uses
	Log    *slog.Logger
}

// ErrMissing says that a program which bridge networks need is not installed.
var ErrMissing = errors.New("program for bridge networks is missing")

var pluginDirs = []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"}

const ifName = "eth0"

// Bridge connects containers. It is safe for concurrent use.
type Bridge struct {
	cfg Config

	mu     sync.Mutex
	cni    *libcni.CNIConfig // guarded by mu; nil until prepared
	subnet netip.Prefix      // guarded by mu
	ruled  bool              // guarded by mu: the rules are in place
}

// NewBridge does nothing yet: the first container makes the bridge.
func NewBridge(cfg Config) *Bridge {
	if len(cfg.Bin) == 0 {
		cfg.Bin = pluginDirs
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Bridge{cfg: cfg}
}

// Add connects the namespace at ns for the container id and returns its
// address. If it fails nothing is left behind.
func (b *Bridge) Add(ctx context.Context, id, ns string, ports []Port) (netip.Addr, error) {
	cni, list, err := b.prepare(len(ports) > 0, true)
	if err != nil {
		return netip.Addr{}, err
	}
	rt := runtimeConf(id, ns, ports)
	res, err := cni.AddNetworkList(ctx, list, rt)
	if err == nil {
		var addr netip.Addr
		if addr, err = address(res); err == nil {
			return addr, nil
		}
	}
	undo := cni.DelNetworkList(context.WithoutCancel(ctx), list, rt)
	return netip.Addr{}, errors.Join(fmt.Errorf("connect %s to the bridge: %w", id, err), undo)
}

// Remove undoes Add; it is not an error if nothing was added. The namespace
// may be gone already.
func (b *Bridge) Remove(ctx context.Context, id, ns string, ports []Port) error {
	if _, err := os.Stat(filepath.Join(b.cfg.Dir, "results", networkName+"-"+id+"-"+ifName)); err != nil {
		// libcni keeps results for Add; without one only a crash between an
		// allocation and its result can have left something.
		if !b.allocated(id) {
			return nil
		}
	}
	cni, list, err := b.prepare(len(ports) > 0, false)
	if err != nil {
		return err
	}
	if !IsNS(ns) {
		ns = ""
	}
	if err := cni.DelNetworkList(ctx, list, runtimeConf(id, ns, ports)); err != nil {
		return fmt.Errorf("disconnect %s from the bridge: %w", id, err)
	}
	return nil
}

// allocated looks for the container's ID in the files of host-local.
func (b *Bridge) allocated(id string) bool {
	files, _ := filepath.Glob(filepath.Join(b.ipamDir(), networkName, "*.*.*.*"))
	for _, f := range files {
		if c, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(c), id+"\r\n") {
			return true
		}
	}
	return false
}

func (b *Bridge) ipamDir() string { return filepath.Join(b.cfg.Dir, "ipam") }

func runtimeConf(id, ns string, ports []Port) *libcni.RuntimeConf {
	rt := &libcni.RuntimeConf{ContainerID: id, NetNS: ns, IfName: ifName}
	if len(ports) > 0 {
		m := make([]map[string]any, len(ports))
		for i, p := range ports {
			m[i] = map[string]any{"hostPort": p.Host, "containerPort": p.Container, "protocol": p.Protocol}
			if p.HostIP.IsValid() && !p.HostIP.IsUnspecified() {
				m[i]["hostIP"] = p.HostIP.String()
			}
		}
		rt.CapabilityArgs = map[string]any{"portMappings": m}
	}
	return rt
}

// prepare finds the plugins and the subnet, and makes the rules for add.
func (b *Bridge) prepare(publish, add bool) (*libcni.CNIConfig, *libcni.NetworkConfigList, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.cni == nil {
		if err := b.require("bridge", "host-local"); err != nil {
			return nil, nil, err
		}
		if err := b.chooseSubnet(); err != nil {
			return nil, nil, err
		}
		b.cni = libcni.NewCNIConfigWithCacheDir(b.cfg.Bin, b.cfg.Dir, nil)
	}
	if publish {
		if err := b.require("portmap"); err != nil {
			return nil, nil, err
		}
	}
	if add && !b.ruled {
		if err := b.addRules(); err != nil {
			return nil, nil, err
		}
		b.ruled = true
	}
	list, err := libcni.ConfListFromBytes(conflist(b.cfg, b.subnet, b.ipamDir(), publish))
	return b.cni, list, err
}

func (b *Bridge) require(plugins ...string) error {
	for _, p := range plugins {
		found := false
		for _, d := range b.cfg.Bin {
			if st, err := os.Stat(filepath.Join(d, p)); err == nil && st.Mode().IsRegular() {
				found = true
			}
		}
		if !found {
			return fmt.Errorf("%w: CNI plugin %s is in none of %s; install the package containernetworking-plugins, or use --net host",
				ErrMissing, p, strings.Join(b.cfg.Bin, ", "))
		}
	}
	return nil
}

const networkName = "dewpoint"

func conflist(cfg Config, subnet netip.Prefix, ipamDir string, publish bool) []byte {
	plugins := []map[string]any{{
		"type": "bridge", "bridge": cfg.Bridge, "isGateway": true, "hairpinMode": true,
		"ipam": map[string]any{
			"type":    "host-local",
			"dataDir": ipamDir,
			"ranges":  [][]map[string]string{{{"subnet": subnet.String()}}},
			"routes":  []map[string]string{{"dst": "0.0.0.0/0"}},
		},
	}}
	if publish {
		plugins = append(plugins, map[string]any{
			"type": "portmap", "snat": true, "capabilities": map[string]bool{"portMappings": true},
		})
	}
	b, err := json.Marshal(map[string]any{"cniVersion": "1.0.0", "name": networkName, "plugins": plugins})
	if err != nil {
		panic(err) // maps of strings
	}
	return b
}

func address(res any) (netip.Addr, error) {
	r, ok := res.(*types100.Result)
	if !ok {
		return netip.Addr{}, fmt.Errorf("CNI result of type %T", res)
	}
	for _, ip := range r.IPs {
		if a, ok := netip.AddrFromSlice(ip.Address.IP); ok {
			return a.Unmap(), nil
		}
	}
	return netip.Addr{}, errors.New("CNI plugins gave no address")
}

// chooseSubnet takes the configured subnet, else the one in use, else a free one.
func (b *Bridge) chooseSubnet() error {
	b.subnet = b.cfg.Subnet
	if b.subnet.IsValid() {
		if !b.subnet.Addr().Is4() || b.subnet.Bits() > 30 {
			return fmt.Errorf("bridge subnet %s: want IPv4, /30 or larger", b.subnet)
		}
		b.subnet = b.subnet.Masked()
		return nil
	}
	kept := filepath.Join(b.cfg.Dir, "subnet")
	if t, err := os.ReadFile(kept); err == nil {
		if b.subnet, err = netip.ParsePrefix(strings.TrimSpace(string(t))); err == nil {
			return nil
		}
	}
	used, err := usedPrefixes()
	if err != nil {
		return err
	}
	if b.subnet, err = freeSubnet(used); err != nil {
		return err
	}
	if err := os.MkdirAll(b.cfg.Dir, 0o700); err != nil {
		return err
	}
	return os.WriteFile(kept, []byte(b.subnet.String()+"\n"), 0o600)
}

// freeSubnet is the first /20 at the end of 10.88 … 10.127 that overlaps none.
func freeSubnet(used []netip.Prefix) (netip.Prefix, error) {
next:
	for i := byte(88); i < 128; i++ {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, i, 240, 0}), 20)
		for _, u := range used {
			if u.Bits() > 0 && u.Overlaps(p) {
				continue next
			}
		}
		return p, nil
	}
	return netip.Prefix{}, errors.New("no free subnet for the bridge: configure one")
}

// usedPrefixes are those of all devices and routes.
func usedPrefixes() ([]netip.Prefix, error) {
	var used []netip.Prefix
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			used = append(used, p.Masked())
		}
	}
	b, err := os.ReadFile("/proc/net/route")
	if err != nil {
		return nil, err
	}
	for sc := bufio.NewScanner(bytes.NewReader(b)); sc.Scan(); {
		if p, ok := parseRoute(sc.Text()); ok {
			used = append(used, p)
		}
	}
	return used, nil
}

// parseRoute reads a line of /proc/net/route: destination and mask are the
// second and eighth field, hexadecimal in the machine's byte order (little
// endian wherever this runs).
func parseRoute(line string) (netip.Prefix, bool) {
	f := strings.Fields(line)
	if len(f) < 8 {
		return netip.Prefix{}, false
	}
	dst, err1 := hex.DecodeString(f[1])
	mask, err2 := hex.DecodeString(f[7])
	if err := cmp.Or(err1, err2); err != nil || len(dst) != 4 || len(mask) != 4 {
		return netip.Prefix{}, false
	}
	ones, _ := net.IPv4Mask(mask[3], mask[2], mask[1], mask[0]).Size()
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{dst[3], dst[2], dst[1], dst[0]}), ones), true
}

// rules lets containers out with the host's address, and traffic of the
// bridge through, also where another engine made FORWARD drop.
func (b *Bridge) rules() [][]string {
	s, br := b.subnet.String(), b.cfg.Bridge
	return [][]string{
		{"-t", "nat", "POSTROUTING", "-s", s, "!", "-o", br, "-j", "MASQUERADE"},
		{"-t", "filter", "FORWARD", "-i", br, "-j", "ACCEPT"},
		{"-t", "filter", "FORWARD", "-o", br, "-j", "ACCEPT"},
	}
}

func (b *Bridge) addRules() error {
	for _, r := range b.rules() {
		if iptables(r, "-C") == nil {
			continue
		}
		if err := iptables(r, "-I"); err != nil {
			return err
		}
	}
	return nil
}

func iptables(rule []string, verb string) error {
	args := append([]string{"-w", "5", rule[0], rule[1], verb}, rule[2:]...)
	out, err := exec.Command("iptables", args...).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return fmt.Errorf("%w: iptables; install the package iptables, or use --net host", ErrMissing)
	}
	if err != nil {
		return fmt.Errorf("iptables %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// Destroy removes the bridge and its rules. No container may be connected.
func (b *Bridge) Destroy() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.subnet.IsValid() {
		if err := b.chooseSubnet(); err != nil {
			return err
		}
	}
	b.ruled = false
	var errs []error
	for _, r := range b.rules() {
		if iptables(r, "-C") == nil {
			errs = append(errs, iptables(r, "-D"))
		}
	}
	if _, err := net.InterfaceByName(b.cfg.Bridge); err == nil {
		if out, err := exec.Command("ip", "link", "delete", b.cfg.Bridge).CombinedOutput(); err != nil {
			errs = append(errs, fmt.Errorf("delete bridge: %w: %s", err, out))
		}
	}
	return errors.Join(errs...)
}
