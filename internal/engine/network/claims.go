package network

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
)

// Port publishes a container's port on the host. Protocol is tcp or udp.
type Port struct {
	HostIP    netip.Addr `json:"hostIP,omitzero"` // zero: all addresses
	Host      uint16     `json:"host"`
	Container uint16     `json:"container"`
	Protocol  string     `json:"protocol"`
}

func (p Port) String() string {
	s := fmt.Sprintf("%d:%d/%s", p.Host, p.Container, p.Protocol)
	if p.HostIP.IsValid() {
		s = p.HostIP.String() + ":" + s
	}
	return s
}

// Ports knows who has published what. It is safe for concurrent use, and its
// zero value is ready.
type Ports struct {
	mu sync.Mutex
	m  map[string][]Port // by owner; guarded by mu
}

// Claim reserves ports for owner, all or none. A port is refused when another
// owner has it or, with probe, when a process of the host listens there.
func (t *Ports) Claim(owner string, ports []Port, probe bool) error {
	if len(ports) == 0 {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, p := range ports {
		for other, have := range t.m {
			if other != owner && anyClash(have, p) {
				return fmt.Errorf("%s: published by container %s", p, other)
			}
		}
		if anyClash(ports[:i], p) {
			return fmt.Errorf("%s: published twice", p)
		}
		if probe {
			if err := bindable(p); err != nil {
				return fmt.Errorf("%s: %w", p, err)
			}
		}
	}
	if t.m == nil {
		t.m = make(map[string][]Port)
	}
	t.m[owner] = ports
	return nil
}

// Release gives up what owner has.
func (t *Ports) Release(owner string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.m, owner)
}

func anyClash(have []Port, p Port) bool {
	for _, h := range have {
		if h.Host == p.Host && h.Protocol == p.Protocol &&
			(all(h.HostIP) || all(p.HostIP) || h.HostIP == p.HostIP) {
			return true
		}
	}
	return false
}

func all(a netip.Addr) bool { return !a.IsValid() || a.IsUnspecified() }

// bindable tries the port on the host.
func bindable(p Port) error {
	ip := p.HostIP
	if !ip.IsValid() {
		ip = netip.IPv4Unspecified()
	}
	addr := netip.AddrPortFrom(ip, p.Host).String()
	if p.Protocol == "udp" {
		c, err := net.ListenPacket("udp4", addr)
		if err != nil {
			return err
		}
		return c.Close()
	}
	l, err := net.Listen("tcp4", addr)
	if err != nil {
		return err
	}
	return l.Close()
}
