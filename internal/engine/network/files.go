package network

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
)

// Files are the paths of what a container sees as /etc/hostname, /etc/hosts
// and /etc/resolv.conf, and of the names that they are made of.
type Files struct{ Hostname, Hosts, Resolv, names string }

// FilesIn names the files in a container's directory.
func FilesIn(dir string) Files {
	return Files{filepath.Join(dir, "hostname"), filepath.Join(dir, "hosts"), filepath.Join(dir, "resolv.conf"),
		filepath.Join(dir, "names.json")}
}

// Names are what a container was to be told in place of what it would be, or beside it.
type Names struct {
	Hostname string   `json:"hostname,omitempty"`
	DNS      []string `json:"dns,omitempty"` // addresses of name servers
	Search   []string `json:"search,omitempty"`
	Options  []string `json:"options,omitempty"`
	Hosts    []string `json:"hosts,omitempty"` // NAME:ADDRESS
}

// Keep has each Write tell these names, also after a reboot.
func (f Files) Keep(n Names) error {
	b, err := json.Marshal(n)
	if err != nil || string(b) == "{}" {
		return err
	}
	return os.WriteFile(f.names, b, 0o644)
}

// Write makes the files. On the host's network they copy the host's; else
// name is in hosts, with the address if it has one, and name servers that
// listen on the host's loopback are left out. Names that were kept come first.
func (f Files) Write(name string, host bool, addr netip.Addr) error {
	var n Names
	kept, err := readIfThere(f.names)
	if err == nil && kept != nil {
		err = json.Unmarshal(kept, &n)
	}
	if err != nil {
		return err
	}
	name = cmp.Or(n.Hostname, name)
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
		resolv = withoutLoopback(resolv)
		if !bytes.Contains(resolv, []byte("nameserver")) && len(n.DNS) == 0 {
			resolv = upstreamResolv(resolv)
		}
	}
	return errors.Join(
		os.WriteFile(f.Hostname, []byte(name+"\n"), 0o644),
		os.WriteFile(f.Hosts, n.hosts(hosts), 0o644),
		os.WriteFile(f.Resolv, n.resolv(resolv), 0o644))
}

// hosts are the lines of /etc/hosts with those that were asked for.
func (n *Names) hosts(lines []byte) []byte {
	if len(lines) > 0 && lines[len(lines)-1] != '\n' {
		lines = append(lines, '\n')
	}
	for _, h := range n.Hosts {
		name, addr, _ := strings.Cut(h, ":")
		lines = append(lines, addr+"\t"+name+"\n"...)
	}
	return lines
}

// resolv is /etc/resolv.conf with what was asked for in place of lines of the same kind.
func (n *Names) resolv(lines []byte) []byte {
	var servers []string
	for _, d := range n.DNS {
		servers = append(servers, "nameserver "+d)
	}
	for _, own := range [][]string{servers, line("search", n.Search), line("options", n.Options)} {
		if len(own) > 0 {
			kind, _, _ := strings.Cut(own[0], " ")
			lines = append(without(lines, kind), strings.Join(own, "\n")+"\n"...)
		}
	}
	return lines
}

// line is one of a kind with words; none without them.
func line(kind string, words []string) []string {
	if len(words) == 0 {
		return nil
	}
	return []string{kind + " " + strings.Join(words, " ")}
}

// without are the lines that do not begin with a word.
func without(lines []byte, kind string) (rest []byte) {
	for l := range bytes.Lines(lines) {
		if f := bytes.Fields(l); len(f) == 0 || string(f[0]) != kind {
			rest = append(rest, l...)
		}
	}
	if len(rest) > 0 && rest[len(rest)-1] != '\n' {
		rest = append(rest, '\n')
	}
	return rest
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
