package network

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
)

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
	used, err := usedPrefixes()
	if err != nil {
		return err
	}
	if kept, ok := b.keptSubnet(); ok && (b.exists() || !overlaps(used, kept)) {
		b.subnet = kept
		return nil
	}
	if b.subnet, err = freeSubnet(used); err != nil {
		return err
	}
	if err := os.MkdirAll(b.cfg.Dir, 0o700); err != nil {
		return err
	}
	return os.WriteFile(b.subnetFile(), []byte(b.subnet.String()+"\n"), 0o600)
}

func (b *Bridge) subnetFile() string { return filepath.Join(b.cfg.Dir, "subnet") }

// keptSubnet is the one that was chosen before.
func (b *Bridge) keptSubnet() (netip.Prefix, bool) {
	t, err := os.ReadFile(b.subnetFile())
	if err != nil {
		return netip.Prefix{}, false
	}
	p, err := netip.ParsePrefix(strings.TrimSpace(string(t)))
	return p, err == nil
}

// freeSubnet is the first /20 of 10.88 … 10.127, from each one's end to its
// beginning, that overlaps none.
func freeSubnet(used []netip.Prefix) (netip.Prefix, error) {
	for third := 240; third >= 0; third -= 16 {
		for second := byte(88); second < 128; second++ {
			p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, second, byte(third), 0}), 20)
			if !overlaps(used, p) {
				return p, nil
			}
		}
	}
	return netip.Prefix{},
		errors.New("no free subnet for the bridge in 10.88.0.0 to 10.127.255.255: configure one ([engine] subnet)")
}

// overlaps overlooks default routes.
func overlaps(used []netip.Prefix, p netip.Prefix) bool {
	for _, u := range used {
		if u.Bits() > 0 && u.Overlaps(p) {
			return true
		}
	}
	return false
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
