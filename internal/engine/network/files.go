package network

import (
	"bufio"
	"bytes"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
)

// Files are the paths of what a container sees as /etc/hostname, /etc/hosts
// and /etc/resolv.conf.
type Files struct{ Hostname, Hosts, Resolv string }

// FilesIn names the files in a container's directory.
func FilesIn(dir string) Files {
	return Files{filepath.Join(dir, "hostname"), filepath.Join(dir, "hosts"), filepath.Join(dir, "resolv.conf")}
}

// Write makes the files. On the host's network they copy the host's; else
// name is in hosts, with the address if it has one, and name servers that
// listen on the host's loopback are left out.
func (f Files) Write(name string, host bool, addr netip.Addr) error {
	hosts, err := readIfThere("/etc/hosts")
	if err != nil {
		return err
	}
	resolv, err := readIfThere("/etc/resolv.conf")
	if err != nil {
		return err
	}
	if !host {
		hosts = hostsFor(name, addr)
		if resolv = withoutLoopback(resolv); !bytes.Contains(resolv, []byte("nameserver")) {
			resolv = upstreamResolv(resolv)
		}
	}
	return errors.Join(
		os.WriteFile(f.Hostname, []byte(name+"\n"), 0o644),
		os.WriteFile(f.Hosts, hosts, 0o644),
		os.WriteFile(f.Resolv, resolv, 0o644))
}

func readIfThere(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

func hostsFor(name string, addr netip.Addr) []byte {
	var b bytes.Buffer
	b.WriteString("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nfe00::\tip6-localnet\nff00::\tip6-mcastprefix\nff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n")
	if addr.IsValid() {
		b.WriteString(addr.String() + "\t" + name + "\n")
	}
	return b.Bytes()
}

// withoutLoopback drops the name servers that a namespace cannot reach.
func withoutLoopback(resolv []byte) []byte {
	var b bytes.Buffer
	for sc := bufio.NewScanner(bytes.NewReader(resolv)); sc.Scan(); {
		f := strings.Fields(sc.Text())
		if len(f) >= 2 && f[0] == "nameserver" {
			if a, err := netip.ParseAddr(f[1]); err == nil && a.IsLoopback() {
				continue
			}
		}
		b.WriteString(sc.Text() + "\n")
	}
	return b.Bytes()
}

// upstreamResolv is for hosts whose only name server is a local stub:
// systemd-resolved's own list, else public servers, as Docker does.
func upstreamResolv(rest []byte) []byte {
	if b, err := os.ReadFile("/run/systemd/resolve/resolv.conf"); err == nil {
		if b = withoutLoopback(b); bytes.Contains(b, []byte("nameserver")) {
			return b
		}
	}
	return append(rest, "nameserver 8.8.8.8\nnameserver 8.8.4.4\n"...)
}
