package redis

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"go.uber.org/goleak"

	"dewpoint/internal/pop"
	"dewpoint/testkit"
	"dewpoint/testkit/poptest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testPoP = "test-pop"

// A bed is a Redis server of the test's own, and a proxy for each node.
type bed struct {
	dir, ca  string
	port     string
	args     []string
	cmd      *exec.Cmd
	admin    *redis.Client
	tls      bool
	password string

	proxies map[string]*proxy
}

// newBed starts a server that only TLS and the documented rights lead into, or a plain one.
func newBed(t testing.TB, secure bool) *bed {
	t.Helper()
	b := &bed{dir: t.TempDir(), proxies: map[string]*proxy{}, tls: secure, password: "p:w/d@%"}
	b.args = []string{"--save", "", "--appendonly", "no", "--dir", b.dir, "--unixsocket",
		filepath.Join(b.dir, "s"), "--bind", "127.0.0.1"}
	if secure {
		b.ca = certificatesIn(t, b.dir)
		b.args = append(b.args, "--port", "0", "--tls-auth-clients", "no", "--tls-ca-cert-file", b.ca,
			"--tls-cert-file", filepath.Join(b.dir, "server.pem"), "--tls-key-file",
			filepath.Join(b.dir, "server.key"))
	}
	b.admin = redis.NewClient(&redis.Options{Network: "unix", Addr: filepath.Join(b.dir, "s"), MaxRetries: -1,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}})
	t.Cleanup(func() { b.admin.Close() })
	b.start(t)
	t.Cleanup(func() { b.stop(t) })
	return b
}

// start runs the server on a port that it finds free, or on its earlier one.
func (b *bed) start(t testing.TB) {
	t.Helper()
	for range 20 {
		if b.port == "" || b.cmd == nil {
			b.port = strconv.Itoa(testkit.FreePort(t))
		}
		port := "--port"
		if b.tls {
			port = "--tls-port"
		}
		b.cmd = exec.Command("redis-server", append(b.args, port, b.port)...)
		b.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		out := &bytes.Buffer{}
		b.cmd.Stdout, b.cmd.Stderr = out, out
		must(t, b.cmd.Start())
		if b.up() {
			if b.tls {
				b.allow(t)
			}
			return
		}
		b.cmd.Process.Kill()
		b.cmd.Wait()
		b.cmd = nil
		if len(b.proxies) > 0 {
			t.Fatalf("redis-server does not start again:\n%s", out)
		}
	}
	t.Fatal("redis-server does not start")
}

func (b *bed) up() bool {
	for range 500 {
		if b.admin.Ping(context.Background()).Err() == nil {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

func (b *bed) stop(t testing.TB) {
	must(t, b.cmd.Process.Kill())
	b.cmd.Wait()
}

// allow gives the user exactly what the package's documentation says.
func (b *bed) allow(t testing.TB) {
	t.Helper()
	source, err := os.ReadFile("redis.go")
	must(t, err)
	rule := regexp.MustCompile(`(?s)//\tACL (SETUSER dewpoint.*?)\n//?\npackage|//\tACL (SETUSER dewpoint.*?)\npackage`).FindSubmatch(source)
	if rule == nil {
		t.Fatal("no ACL in the package's documentation")
	}
	text := strings.NewReplacer("//", "", "{P}", "{"+testPoP+"}", ">PASSWORD",
		">"+b.password).Replace(string(rule[1]) + string(rule[2]))
	args := []any{"ACL"}
	for _, word := range strings.Fields(text) {
		args = append(args, word)
	}
	must(t, b.admin.Do(t.Context(), args...).Err())
}

func (b *bed) url(node string) string {
	if b.tls {
		return "rediss://dewpoint:p%3Aw%2Fd%40%25@" + b.proxies[node].addr()
	}
	return "redis://" + b.proxies[node].addr() + "/0"
}

func (b *bed) Join(t testing.TB, node string) pop.Coordinator {
	t.Helper()
	if b.proxies[node] == nil {
		b.proxies[node] = newProxy(t, "127.0.0.1:"+b.port)
	}
	c, err := New(Config{Config: pop.Config{Node: node, TTL: poptest.TTL}, URL: b.url(node), CA: b.ca,
		PoP: testPoP})
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

func (b *bed) Cut(_ testing.TB, node string, cut bool) { b.proxies[node].set(cut) }

func (b *bed) Disconnect(t testing.TB) {
	t.Helper()
	for _, kind := range []string{"normal", "pubsub"} {
		must(t, b.admin.ClientKillByFilter(t.Context(), "TYPE", kind, "SKIPME", "yes").Err())
	}
}

func (b *bed) Forget(t testing.TB) {
	t.Helper()
	must(t, b.admin.FlushAll(t.Context()).Err())
}

func (b *bed) Restart(t testing.TB) {
	t.Helper()
	b.stop(t)
	b.start(t)
}

func (b *bed) Pause(t testing.TB, pause bool) {
	t.Helper()
	signal := syscall.SIGCONT
	if pause {
		signal = syscall.SIGSTOP
	}
	must(t, b.cmd.Process.Signal(signal))
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A proxy passes bytes on. Cut, it takes what comes and passes nothing on, like a
// network that loses everything; new connections hang, too.
type proxy struct {
	l  net.Listener
	to string
	wg sync.WaitGroup

	mu     sync.Mutex
	cut    bool
	closed bool
	conns  map[net.Conn]struct{}
}

func newProxy(t testing.TB, to string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	p := &proxy{l: l, to: to, conns: map[net.Conn]struct{}{}}
	p.wg.Go(p.serve)
	t.Cleanup(p.close)
	return p
}

func (p *proxy) addr() string { return p.l.Addr().String() }

func (p *proxy) serve() {
	for {
		c, err := p.l.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.pass(c) })
	}
}

func (p *proxy) pass(c net.Conn) {
	defer c.Close()
	s, err := net.Dial("tcp", p.to)
	if err != nil {
		return
	}
	defer s.Close()
	if !p.add(c, s) {
		return
	}
	defer p.remove(c, s)
	var both sync.WaitGroup
	for _, pair := range [][2]net.Conn{{c, s}, {s, c}} {
		both.Go(func() {
			io.Copy(gate{pair[1], p}, pair[0])
			c.Close()
			s.Close()
		})
	}
	both.Wait()
}

// A gate swallows what is written while the proxy is cut; a connection that lost something
// is of no use afterwards.
type gate struct {
	net.Conn
	p *proxy
}

func (g gate) Write(b []byte) (int, error) {
	g.p.mu.Lock()
	cut := g.p.cut
	g.p.mu.Unlock()
	if cut {
		return len(b), nil
	}
	return g.Conn.Write(b)
}

func (p *proxy) add(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		p.conns[c] = struct{}{}
	}
	return !p.closed
}

func (p *proxy) remove(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		delete(p.conns, c)
	}
}

// set ends the partition by breaking the connections that lost something.
func (p *proxy) set(cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = cut
	if !cut {
		p.hangUpLocked()
	}
}

func (p *proxy) hangUpLocked() {
	for c := range p.conns {
		c.Close()
	}
}

func (p *proxy) close() {
	p.l.Close()
	p.mu.Lock()
	p.closed = true
	p.hangUpLocked()
	p.mu.Unlock()
	p.wg.Wait()
}

// certificatesIn makes a CA and a server's certificate and returns the CA's file.
func certificatesIn(t testing.TB, dir string) string {
	t.Helper()
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, IsCA: true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(24 * time.Hour)}
	leaf := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "redis"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, NotBefore: ca.NotBefore, NotAfter: ca.NotAfter}
	caKey, leafKey := newKey(t), newKey(t)
	write := func(name, kind string, der []byte, err error) string {
		must(t, err)
		file := filepath.Join(dir, name)
		must(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return file
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, ca, &leafKey.PublicKey, caKey)
	write("server.pem", "CERTIFICATE", der, err)
	der, err = x509.MarshalECPrivateKey(leafKey)
	write("server.key", "EC PRIVATE KEY", der, err)
	der, err = x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	return write("ca.pem", "CERTIFICATE", der, err)
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	return key
}

func bench(b *testing.B, call func(context.Context, pop.Coordinator) error) {
	s := newBed(b, false)
	c := s.Join(b, "a")
	must(b, c.Use(b.Context(), "kkk"))
	for b.Loop() {
		must(b, call(b.Context(), c))
	}
}
