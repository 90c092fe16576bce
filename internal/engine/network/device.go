package network

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// aliasPrefix begins the alias of each bridge device; Config.Dir follows.
const aliasPrefix = "dewpoint "

// deviceLock keeps two daemons from choosing the same subnet: who has it makes
// the device before it lets go.
const deviceLock = "/run/dewpoint-bridge.lock"

// make chooses the subnet and makes the device and its rules, and removes the
// devices of daemons whose directories are gone.
func (b *Bridge) make() error {
	unlock, err := lockFile(deviceLock)
	if err != nil {
		return err
	}
	defer unlock()
	if err := os.MkdirAll(b.cfg.Dir, 0o700); err != nil { // or another daemon takes the bridge for an orphan
		return err
	}
	if err := removeOrphans(); err != nil {
		b.cfg.Log.Warn("a bridge that no daemon uses stays", "err", err)
	}
	if err := b.chooseSubnet(); err != nil {
		return err
	}
	if b.exists() {
		return errors.Join(b.keepAddress(), b.addRules())
	}
	gateway := netip.PrefixFrom(b.subnet.Addr().Next(), b.subnet.Bits()).String()
	for _, args := range [][]string{
		{"link", "add", b.cfg.Bridge, "type", "bridge"},
		{"link", "set", b.cfg.Bridge, "address", newAddress().String()},
		{"link", "set", b.cfg.Bridge, "alias", aliasPrefix + b.cfg.Dir},
		{"addr", "add", gateway, "dev", b.cfg.Bridge},
		{"link", "set", b.cfg.Bridge, "up"},
	} {
		if _, err := ip(args...); err != nil {
			return errors.Join(err, b.destroy())
		}
	}
	return b.addRules()
}

// newAddress is a MAC address of the bridge's own: unicast and locally administered (IEEE 802). Without one a
// bridge takes the lowest of its containers' (br_stp_recalculate_bridge_id), and with each that comes or goes
// it may be another: what the others send to their gateway is lost until they ask for its address again,
// which takes seconds.
func newAddress() net.HardwareAddr {
	mac := make(net.HardwareAddr, 6)
	_, _ = rand.Read(mac) // never fails
	mac[0] = mac[0]&^1 | 2
	return mac
}

// keepAddress has a bridge keep the address that it has now: one that an earlier version has made does not
// else.
func (b *Bridge) keepAddress() error {
	d, err := net.InterfaceByName(b.cfg.Bridge)
	if err != nil {
		return err
	}
	mac := d.HardwareAddr
	if !slices.ContainsFunc(mac, func(b byte) bool { return b != 0 }) { // no container is there
		mac = newAddress()
	}
	_, err = ip("link", "set", b.cfg.Bridge, "address", mac.String())
	return err
}

func lockFile(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return func() { f.Close() }, nil
}

func ip(args ...string) ([]byte, error) {
	var stderr bytes.Buffer
	cmd := exec.Command("ip", args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if errors.Is(err, exec.ErrNotFound) {
		return nil, fmt.Errorf("%w: ip; install the package iproute2, or use --net host", ErrMissing)
	}
	if err != nil {
		return nil, fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}

func (b *Bridge) exists() bool {
	_, err := net.InterfaceByName(b.cfg.Bridge)
	return err == nil
}

// Release removes the bridge and its rules unless a container has an address
// on it. The next container makes it anew.
func (b *Bridge) Release() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, known := b.keptSubnet(); !known && !b.exists() || len(b.allocations()) > 0 {
		return nil
	}
	return b.destroy()
}

// Destroy removes the bridge and its rules. No container may be connected.
func (b *Bridge) Destroy() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.destroy()
}

// destroy is called with mu held.
func (b *Bridge) destroy() error {
	if !b.subnet.IsValid() {
		b.subnet = b.cfg.Subnet
		if kept, ok := b.keptSubnet(); ok && !b.subnet.IsValid() {
			b.subnet = kept
		}
	}
	var errs []error
	if b.subnet.IsValid() {
		for _, r := range b.rules() {
			if iptables(r, "-C") == nil {
				errs = append(errs, iptables(r, "-D"))
			}
		}
	}
	errs = append(errs, removePublished(b.cfg.Bridge))
	if b.exists() {
		_, err := ip("link", "delete", b.cfg.Bridge)
		errs = append(errs, err)
	}
	if err := os.Remove(b.subnetFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, err)
	}
	b.subnet, b.cni, b.ruled = netip.Prefix{}, nil, false
	return errors.Join(errs...)
}

// link is what ip tells of a device.
type link struct {
	Name   string `json:"ifname"`
	Alias  string `json:"ifalias"`
	Master string `json:"master"`
}

// removeOrphans removes bridges on which nobody is and whose daemon's
// directory is gone, as that of one that was killed and then cleaned away.
func removeOrphans() error {
	out, err := ip("-json", "link", "show")
	if err != nil {
		return err
	}
	var links []link
	if err := json.Unmarshal(out, &links); err != nil {
		return fmt.Errorf("ip -json link show: %w", err)
	}
	used := map[string]bool{}
	for _, l := range links {
		used[l.Master] = true
	}
	var errs []error
	for _, l := range links {
		dir, ours := strings.CutPrefix(l.Alias, aliasPrefix)
		if _, err := os.Stat(dir); !ours || used[l.Name] || !errors.Is(err, os.ErrNotExist) {
			continue
		}
		orphan := NewBridge(Config{Dir: dir, Bridge: l.Name, Subnet: subnetOf(l.Name)})
		errs = append(errs, orphan.Destroy())
	}
	return errors.Join(errs...)
}

// published matches what portmap's entry chain has of a network's container, and
// finds the chain of that container.
var published = regexp.MustCompile(`^-A (CNI-HOSTPORT-DNAT .*dnat name: \\?"([^"\\]+)\\?" id: .* -j (CNI-DN-[0-9a-f]+))$`)

// removePublished removes the published ports of a network that has no containers: a
// daemon that was killed, and its directory with it, leaves them to whoever comes
// to listen there next.
func removePublished(network string) error {
	rules, err := exec.Command("iptables-save", "-t", "nat").Output()
	if err != nil {
		return fmt.Errorf("iptables-save: %w", err)
	}
	var entries, chains strings.Builder
	for line := range strings.Lines(string(rules)) {
		if m := published.FindStringSubmatch(strings.TrimSuffix(line, "\n")); m != nil && m[2] == network {
			fmt.Fprintf(&entries, "-D %s\n", m[1])
			// one for TCP and UDP
			if remove := fmt.Sprintf("-F %s\n-X %[1]s\n", m[3]); !strings.Contains(chains.String(), remove) {
				chains.WriteString(remove)
			}
		}
	}
	if entries.Len() == 0 {
		return nil
	}
	cmd := exec.Command("iptables-restore", "-w", "5", "--noflush")
	cmd.Stdin = strings.NewReader("*nat\n" + entries.String() + chains.String() + "COMMIT\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("iptables-restore: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

func subnetOf(device string) netip.Prefix {
	d, err := net.InterfaceByName(device)
	if err != nil {
		return netip.Prefix{}
	}
	addrs, _ := d.Addrs()
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() {
			return p.Masked()
		}
	}
	return netip.Prefix{}
}
