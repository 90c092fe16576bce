package test

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"
)

// raw sends bytes to an address and reads the answer to them, as far as there is one.
func raw(t *testing.T, addr string, request []byte) string {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Error(err)
		return ""
	}
	defer c.Close()
	if _, err := c.Write(request); err != nil {
		return ""
	}
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return ""
	}
	defer r.Body.Close()
	b, _ := io.ReadAll(r.Body)
	return string(b)
}

// Who sends the same bytes again gets what was got before or an error: with a key there is one container,
// with a name one. What was changed or cut on its way makes nothing.
func TestReplay(t *testing.T) {
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg)
	as := m.overTCP()
	m.start()
	c := as("ci")
	secret, err := os.ReadFile(filepath.Join(filepath.Dir(m.root), "ci"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(m.config, "listen = \"")
	addr, _, _ := strings.Cut(rest, "\"")
	request := func(key, name string) []byte {
		body := fmt.Sprintf(`{"spec":{"image":%q,"name":%q,"net":"none","cmd":["sleep","1h"]},"key":%q}`, img.Ref,
			name, key)
		env := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body)))
		return fmt.Appendf(nil,
			"POST /dewpoint.v1.Node/Deploy HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\nConnect-Protocol-Version: 1\r\n"+
				"Authorization: Bearer %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s%s",
			strings.TrimSpace(string(secret)), len(env)+len(body), env, body)
	}
	keyed, named := request("k", "keyed"), request("", "named")
	said := map[string][]string{}
	var mu sync.Mutex
	var work sync.WaitGroup
	for range 8 {
		for name, b := range map[string][]byte{"keyed": keyed, "named": named} {
			work.Go(func() {
				s := raw(t, addr, b)
				mu.Lock()
				defer mu.Unlock()
				said[name] = append(said[name], s)
			})
		}
	}
	work.Wait()
	for name, want := range map[string]int{"keyed": 8, "named": 1} {
		n := 0
		for _, s := range said[name] {
			if strings.HasSuffix(s, "{}") { // the end of a stream that has not failed
				n++
			} else if name == "keyed" || !strings.Contains(s, "name_in_use") {
				t.Errorf("%s is answered %q", name, s)
			}
		}
		if n != want {
			t.Errorf("%d of 8 are told that %s runs, want %d", n, name, want)
		}
	}
	// A byte that is another one: another request under the same key, or none at all.
	for i := range 46 {
		spoilt := append([]byte(nil), keyed...)
		spoilt[len(spoilt)-1-i] ^= 1
		if s := raw(t, addr, spoilt); strings.HasSuffix(s, "{}") {
			t.Errorf("%q is answered %q", spoilt[len(spoilt)-46:], s)
		}
	}
	for _, n := range []int{1, 9, 100} { // who goes before he has said all
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write(keyed[:len(keyed)-n]); err != nil {
			t.Error(err)
		}
		conn.Close()
	}
	m.idle(t)
	list, err := c.ListDeployments(t.Context(), spec.DeploymentQuery{All: true, Limit: 1000})
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]int{}
	for _, d := range list {
		if d.State == spec.StateDone {
			by[d.Name]++
		}
	}
	if by["keyed"] != 1 || by["named"] != 1 || len(by) != 2 {
		t.Errorf("done: %v", by)
	}
	m.must("rm", "-f", "keyed", "named")
}

// A token lets its owner do over TCP what its role says, until its line is removed.
func TestTCP(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg)
	address := testkit.FreeAddress(t)
	dir := filepath.Dir(m.root)
	tokens := filepath.Join(dir, "tokens")
	m.config += fmt.Sprintf("[api]\nlisten = %q\ntokens = %q\n", address, tokens)
	m.start()
	as := func(role string) func(args ...string) result {
		file := filepath.Join(dir, role)
		if err := os.WriteFile(file, []byte(m.must("token", "--file", tokens, "--name", role, role)),
			0o600); err != nil {
			t.Fatal(err)
		}
		return func(args ...string) result {
			return m.dew(append([]string{"-H", "http://" + address, "--token-file", file}, args...)...)
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
		"read removes": read("rm", "-f", "one"),
		"deploy mounts the host": deploy("run", "--rm", "--net", "none", "-v", "/:/host", img.Ref, "cat",
			"/host/etc/shadow"),
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
