package test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/internal/registry/registrytest"
)

// A token lets its owner do over TCP what its role says, until its line is removed.
func TestTCP(t *testing.T) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	dir := filepath.Dir(m.root)
	tokens := filepath.Join(dir, "tokens")
	m.config += fmt.Sprintf("[api]\nlisten = %q\ntokens = %q\n", l.Addr(), tokens)
	m.start()
	as := func(role string) func(args ...string) result {
		file := filepath.Join(dir, role)
		if err := os.WriteFile(file, []byte(m.must("token", "--file", tokens, "--name", role, role)), 0o600); err != nil {
			t.Fatal(err)
		}
		return func(args ...string) result {
			return m.dew(append([]string{"-H", "http://" + l.Addr().String(), "--token-file", file}, args...)...)
		}
	}
	read, deploy := as("read"), as("deploy")
	if r := deploy("run", "-d", "--net", "none", "--name", "one", img.Ref, "sleep", "1h"); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	if r := read("ps"); r.code != 0 || !strings.Contains(r.out, "one") {
		t.Errorf("%+v", r)
	}
	for what, r := range map[string]result{
		"read removes":               read("rm", "-f", "one"),
		"deploy mounts the host":     deploy("run", "--rm", "--net", "none", "-v", "/:/host", img.Ref, "cat", "/host/etc/shadow"),
		"deploy has its network":     deploy("run", "--rm", img.Ref, "cat", "/etc/motd"),
		"deploy runs in a container": deploy("exec", "one", "cat", "/etc/motd"),
	} {
		if r.code != 11 {
			t.Errorf("%s: %+v", what, r)
		}
	}
	if err := os.Truncate(tokens, 0); err != nil {
		t.Fatal(err)
	}
	if r := read("ps"); r.code != 5 {
		t.Errorf("a token that was taken back: %+v", r)
	}
	m.must("rm", "-f", "one")
}
