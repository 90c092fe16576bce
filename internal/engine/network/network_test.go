package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/testkit"
)

func TestClaim(t *testing.T) {
	var ports Ports
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	busy := uint16(l.Addr().(*net.TCPAddr).Port)
	one := []Port{{Host: 40001, Container: 1, Protocol: "tcp"}}
	if err := ports.Claim("a", one, false); err != nil {
		t.Fatal(err)
	}
	if err := ports.Claim("a", one, false); err != nil {
		t.Errorf("again by its owner: %v", err)
	}
	local := []Port{{HostIP: netip.MustParseAddr("127.0.0.1"), Host: 40001, Container: 1, Protocol: "tcp"}}
	if err := ports.Claim("b", local, false); err == nil {
		t.Error("an address of a port that is published on all")
	}
	if err := ports.Claim("b", []Port{{Host: 40001, Container: 1, Protocol: "udp"}}, false); err != nil {
		t.Errorf("another protocol: %v", err)
	}
	if err := ports.Claim("c", []Port{{Host: busy, Container: 1, Protocol: "tcp"}}, true); err == nil {
		t.Error("a port that the host listens on")
	}
	ports.Release("a")
	if err := ports.Claim("c", one, false); err != nil {
		t.Errorf("after release: %v", err)
	}
}

func TestNS(t *testing.T) {
	testkit.NeedRoot(t, "it makes network namespaces")
	path := filepath.Join(t.TempDir(), "ns")
	if err := NewNS(path); err != nil {
		t.Fatal(err)
	}
	if !IsNS(path) || IsNS(t.TempDir()) {
		t.Error("IsNS is wrong")
	}
	if err := NewNS(path); err == nil {
		t.Error("a namespace over another")
	}
	before, _ := os.Readlink("/proc/thread-self/ns/net")
	err := Do(path, func() error {
		inside, err := os.Readlink("/proc/thread-self/ns/net")
		if inside == before {
			t.Error("not inside")
		}
		l, lerr := net.Listen("tcp4", "127.0.0.1:1") // lo is up and nobody else is there
		if lerr == nil {
			l.Close()
		}
		return errors.Join(err, lerr)
	})
	if err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := RemoveNS(path); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("the file stays")
	}
}

// TestBridge runs in a namespace of its own, in the place of a host.
func TestBridge(t *testing.T) {
	testkit.NeedRoot(t, "it makes network namespaces")
	if os.Getenv("NETWORK_TEST_INSIDE") == "" {
		host := filepath.Join(t.TempDir(), "host")
		if err := NewNS(host); err != nil {
			t.Fatal(err)
		}
		defer RemoveNS(host)
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("nsenter", "--net="+host, self, "-test.run=^TestBridge$", "-test.v")
		cmd.Env = append(os.Environ(), "NETWORK_TEST_INSIDE=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	dir := t.TempDir()
	b := NewBridge(Config{Dir: dir + "/cni", Bridge: "dew-test"})
	ns := dir + "/ns"
	if err := NewNS(ns); err != nil {
		t.Fatal(err)
	}
	defer RemoveNS(ns)
	addr, err := b.Add(t.Context(), "c", ns, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !netip.MustParsePrefix("10.88.240.0/20").Contains(addr) {
		t.Errorf("address %s", addr)
	}
	var l net.Listener
	if err := Do(ns, func() (err error) { l, err = net.Listen("tcp4", ":5000"); return err }); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", netip.AddrPortFrom(addr, 5000).String())
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if !b.allocated("c") {
		t.Error("the allocation is not found")
	}
	for range 2 {
		if err := b.Remove(t.Context(), "c", ns, nil); err != nil {
			t.Error(err)
		}
	}
	if b.allocated("c") {
		t.Error("the allocation stays")
	}
	testRelease(t, b, ns)
	testAddress(t, b, ns)
	testOrphans(t)
}

// What no container uses goes, and comes back with the next one.
func testRelease(t *testing.T, b *Bridge, ns string) {
	if _, err := b.Add(t.Context(), "d", ns, nil); err != nil {
		t.Fatal(err)
	}
	if err := b.Release(); err != nil || !b.exists() {
		t.Errorf("released under a container: %v", err)
	}
	if err := b.Remove(t.Context(), "d", ns, nil); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := b.Release(); err != nil || b.exists() || ruled(b.cfg.Bridge) {
			t.Errorf("%s stays: %v", b.cfg.Bridge, err)
		}
	}
}

// Whichever containers come and go, their gateway has one MAC address: also a bridge that had none of its
// own.
func testAddress(t *testing.T, b *Bridge, ns string) {
	mac := func() string {
		d, err := net.InterfaceByName(b.cfg.Bridge)
		if err != nil {
			t.Fatal(err)
		}
		return d.HardwareAddr.String()
	}
	for _, old := range []bool{false, true} {
		if _, _, err := b.prepare(false, true); err != nil {
			t.Fatal(err)
		}
		if old {
			if _, err := ip("link", "delete", b.cfg.Bridge); err != nil {
				t.Fatal(err)
			}
			if _, err := ip("link", "add", b.cfg.Bridge, "type", "bridge"); err != nil {
				t.Fatal(err)
			}
			b.ruled = false // as of another daemon
			if _, _, err := b.prepare(false, true); err != nil {
				t.Fatal(err)
			}
		}
		before := mac()
		if _, err := b.Add(t.Context(), "e", ns, nil); err != nil {
			t.Fatal(err)
		}
		with := mac()
		if err := b.Remove(t.Context(), "e", ns, nil); err != nil {
			t.Error(err)
		}
		if after := mac(); before != with || with != after {
			t.Errorf("the gateway has %s, with a container %s, after it %s", before, with, after)
		}
		if err := b.Release(); err != nil {
			t.Error(err)
		}
	}
}

// A bridge of which the directory is gone is removed by whoever makes one; others stay.
func testOrphans(t *testing.T) {
	dead := NewBridge(Config{Dir: filepath.Join(t.TempDir(), "cni"), Bridge: "dew-dead"})
	idle := NewBridge(Config{Dir: filepath.Join(t.TempDir(), "cni"), Bridge: "dew-idle"})
	ns := filepath.Join(t.TempDir(), "ns")
	if err := NewNS(ns); err != nil {
		t.Fatal(err)
	}
	idle.cfg.Subnet = netip.MustParsePrefix("10.99.0.0/24")
	for i, b := range []*Bridge{dead, idle} {
		ports := []Port{{Host: uint16(40100 + i), Container: 80, Protocol: "tcp"},
			{Host: uint16(40200 + i), Container: 80, Protocol: "udp"}}
		if _, err := b.Add(t.Context(), "web", ns, ports); err != nil {
			t.Fatal(err)
		}
		if err := Do(ns, func() error { _, err := ip("link", "delete", "eth0"); return err }); err != nil {
			t.Fatal(err)
		}
	}
	if err := RemoveNS(ns); err != nil {
		t.Fatal(err)
	}
	if dead.subnet == idle.subnet {
		t.Errorf("both have %s", idle.subnet)
	}
	if err := os.RemoveAll(dead.cfg.Dir); err != nil {
		t.Fatal(err)
	}
	if _, _, err := NewBridge(Config{Dir: filepath.Join(t.TempDir(), "cni"), Bridge: "dew-new"}).prepare(false,
		true); err != nil {
		t.Fatal(err)
	}
	if dead.exists() || ruled("dew-dead") || ruled("40100") || !ruled("40101") {
		t.Error("the bridge of a daemon that is gone stays")
	}
	if !idle.exists() || !ruled("dew-idle") {
		t.Error("the bridge of a daemon that lives was removed")
	}
	if err := idle.Destroy(); err != nil || ruled("dew-idle") || ruled("CNI-DN-") {
		t.Errorf("ports stay published: %v", err)
	}
}

func ruled(bridge string) bool {
	out, err := exec.Command("iptables-save").Output()
	return err != nil || strings.Contains(string(out), bridge)
}

func TestFreeSubnet(t *testing.T) {
	used := []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("10.88.0.0/16"),
		netip.MustParsePrefix("10.89.255.0/24")}
	p, err := freeSubnet(used)
	if err != nil || p.String() != "10.90.240.0/20" {
		t.Errorf("got %s, %v", p, err)
	}
	for second := range 40 {
		used = append(used, netip.MustParsePrefix(fmt.Sprintf("10.%d.240.0/20", 88+second)))
	}
	if p, err := freeSubnet(used); err != nil || p.String() != "10.89.224.0/20" {
		t.Errorf("got %s, %v", p, err)
	}
	if p, err := freeSubnet([]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}); err == nil {
		t.Errorf("got %s", p)
	}
	if p, ok := parseRoute("eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0"); !ok ||
		p.String() != "192.0.2.0/24" {
		t.Errorf("route %s, %v", p, ok)
	}
}

func TestFiles(t *testing.T) {
	f := FilesIn(t.TempDir())
	if err := f.Write("web", false, netip.MustParseAddr("10.88.240.2")); err != nil {
		t.Fatal(err)
	}
	hosts, _ := os.ReadFile(f.Hosts)
	if !strings.HasSuffix(string(hosts), "10.88.240.2\tweb\n") {
		t.Errorf("hosts: %s", hosts)
	}
	if r, _ := os.ReadFile(f.Resolv); !strings.Contains(string(r), "nameserver") {
		t.Errorf("resolv.conf: %s", r)
	}
	got := string(withoutLoopback([]byte("search a\nnameserver 127.0.0.53\nnameserver 192.0.2.1\noptions x\n")))
	if got != "search a\nnameserver 192.0.2.1\noptions x\n" {
		t.Errorf("got %q", got)
	}
}

// Names that a container was given are in its files each time that these are written.
func TestNames(t *testing.T) {
	dir := t.TempDir()
	names := Names{Hostname: "box", DNS: []string{"10.1.2.3", "fd00::1"}, Search: []string{"example", "test"},
		Options: []string{"ndots:2"}, Hosts: []string{"db:10.0.0.2", "six:fd00::2"}}
	if err := FilesIn(dir).Keep(names); err != nil {
		t.Fatal(err)
	}
	read := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	for _, host := range []bool{false, true, false} {
		f := FilesIn(dir)
		if err := f.Write("web", host, netip.MustParseAddr("10.88.240.2")); err != nil {
			t.Fatal(err)
		}
		if hosts := read(f.Hosts); !strings.HasSuffix(hosts, "10.0.0.2\tdb\nfd00::2\tsix\n") ||
			!host && !strings.Contains(hosts, "10.88.240.2\tbox\n") || read(f.Hostname) != "box\n" {
			t.Errorf("host name %s, hosts: %s", read(f.Hostname), hosts)
		}
		if r := read(f.Resolv); !strings.HasSuffix(r,
			"nameserver 10.1.2.3\nnameserver fd00::1\nsearch example test\noptions ndots:2\n") ||
			strings.Count(r, "nameserver") != 2 || strings.Count(r, "search") != 1 {
			t.Errorf("resolv.conf: %s", r)
		}
	}
	plain := t.TempDir()
	if err := FilesIn(plain).Keep(Names{}); err != nil {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(plain); len(left) > 0 {
		t.Errorf("without names there is %v", left)
	}
}
