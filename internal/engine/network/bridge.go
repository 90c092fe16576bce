// Package network gives containers their network: a namespace kept by a path,
// an address on a bridge, published ports, and the files under /etc that
// resolvers read.
//
// The host's network needs nothing of this, "none" is a namespace with only
// the loopback device, and "bridge" is such a namespace connected by the CNI
// plugins bridge and host-local, and portmap where ports are published. Rules
// that are the same for all containers (masquerading, forwarding) are made
// once, not by a plugin for each. A bridge goes when nobody needs it: with its
// daemon, unless containers have addresses on it, or with the next daemon.
package network

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
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
	ruled  bool              // guarded by mu: the device and the rules are in place
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
	if _, err := os.Stat(filepath.Join(b.cfg.Dir, "results", b.cfg.Bridge+"-"+id+"-"+ifName)); err != nil {
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
	for _, f := range b.allocations() {
		if c, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(c), id+"\r\n") {
			return true
		}
	}
	return false
}

// allocations are the files in which host-local keeps who has which address.
func (b *Bridge) allocations() []string {
	files, _ := filepath.Glob(filepath.Join(b.ipamDir(), b.cfg.Bridge, "*.*.*.*"))
	return files
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

// prepare finds the plugins and the subnet, and makes the device and the rules
// for add.
func (b *Bridge) prepare(publish, add bool) (*libcni.CNIConfig, *libcni.NetworkConfigList, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.cni == nil {
		if err := b.require("bridge", "host-local"); err != nil {
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
		if err := b.make(); err != nil {
			return nil, nil, err
		}
		b.ruled = true
	}
	if !b.subnet.IsValid() {
		if err := b.chooseSubnet(); err != nil {
			return nil, nil, err
		}
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

// conflist names the network by its bridge: portmap names its chains by network and
// container, and another daemon here may have a container of the same name.
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
	b, err := json.Marshal(map[string]any{"cniVersion": "1.0.0", "name": cfg.Bridge, "plugins": plugins})
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
