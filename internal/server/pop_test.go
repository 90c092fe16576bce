package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/config"
	"dewpoint/internal/fetch/link"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/local"
	"dewpoint/internal/pop/member"
	"dewpoint/internal/pop/peer"
	"dewpoint/internal/spec"
	"dewpoint/testkit"

	"github.com/opencontainers/go-digest"
)

func TestPoPProblems(t *testing.T) {
	for err, want := range map[error]api.Code{
		member.ErrNoPoP:           api.Unsupported,
		pop.ErrStoreAway:          api.Unsupported,
		pop.ErrAway:               api.Unsupported,
		pop.ErrNotStore:           api.Unsupported,
		pop.ErrNotMounted:         api.Unsupported,
		pop.ErrTaken:              api.Unsupported,
		syscall.EROFS:             api.Unsupported,
		pop.ErrLives:              api.InUse,
		pop.ErrUnknown:            api.NotFound,
		errors.New("another one"): api.Internal,
	} {
		got := classify(popProblem(fmt.Errorf("layer 1: %w", err)))
		if got.Code != want || want != api.Internal && got.Remedy == "" {
			t.Errorf("%v: %+v, want %s and a remedy", err, got, want)
		}
	}
	if popProblem(nil) != nil {
		t.Error("a problem of nothing")
	}
}

func TestPeerFinding(t *testing.T) {
	for _, c := range []struct{ listen, level string }{
		{"", spec.LevelNote},
		{":7070", spec.LevelBad},
		{"0.0.0.0:7070", spec.LevelBad},
		{"[::]:7070", spec.LevelBad},
		{"n1.lan", spec.LevelBad},
		{"n1.lan:7070", spec.LevelOK},
		{"10.0.0.1:7070", spec.LevelOK},
	} {
		if f := peerFinding(c.listen); f.Level != c.level ||
			(f.Remedy == "") != (c.level == spec.LevelOK) {
			t.Errorf("%q: %+v", c.listen, f)
		}
	}
}

// What is away is bad and has a remedy; who has been silent for long is named.
func TestPoPFindings(t *testing.T) {
	d := &pops{cfg: config.PoP{Redis: "redis://r"}}
	well := &member.Status{Settled: true, Shared: true, Path: "/mnt/pop",
		Members: []pop.Member{{Node: "a"}, {Node: "b"}}}
	if f := d.coordinatorFinding(well); f.Level != spec.LevelOK || f.Detail != "redis answers, 2 nodes" {
		t.Errorf("%+v", f)
	}
	if f := storeFinding(well); f.Level != spec.LevelOK {
		t.Errorf("%+v", f)
	}
	ill := &member.Status{Lost: pop.ErrAway, Away: pop.ErrStoreAway, Shared: true}
	for _, f := range []spec.Finding{d.coordinatorFinding(ill), storeFinding(ill)} {
		if f.Level != spec.LevelBad || f.Remedy == "" {
			t.Errorf("%+v", f)
		}
	}
	well.Members[1].Twin = "10.0.0.3:7070"
	if got := twinFindings(well); len(got) != 1 || got[0].What != "PoP node b" || got[0].Level != spec.LevelBad {
		t.Errorf("%+v", got)
	}
	for err, want := range map[error]string{pop.ErrTaken: takenRemedy, pop.ErrNotStore: notStoreRemedy,
		errors.New("gone"): storeRemedy} {
		away := &member.Status{Shared: true, Away: errors.Join(pop.ErrStoreAway, err)}
		if f := storeFinding(away); f.Remedy != want {
			t.Errorf("%v: %+v", err, f)
		}
	}
	well.Store, well.Members = "S1",
		[]pop.Member{{Node: "a", Store: "S1"}, {Node: "b", Store: "S2"}, {Node: "c"}}
	if got := apartFindings(well); len(got) != 1 || got[0].What != "PoP node b" ||
		got[0].Level != spec.LevelBad || got[0].Remedy == "" {
		t.Errorf("%+v", got)
	}
	if s := popStore(well); s.State != spec.PoPOK || !strings.HasSuffix(s.Why, "that of b") {
		t.Errorf("%+v", s)
	}
	well.Members = []pop.Member{{Node: "a"}, {Node: "b"}}
	well.Silent = []pop.Silent{{Node: "b", For: time.Hour, References: 3}, {Node: "c", For: time.Hour, References: 2},
		{Node: "d", For: time.Second, References: 1}}
	got := silentFindings(well)
	if len(got) != 1 || got[0].What != "PoP node c" ||
		got[0].Remedy != `if it is gone for good: "dew pop forget c"` {
		t.Errorf("%+v", got)
	}
}

// A configuration that cannot be is an error that says so, and dewd ends by it.
func TestWrongPoPIsAnError(t *testing.T) {
	for want, c := range map[string]config.PoP{
		"address of the PoP's Redis": {Redis: "http://10.0.0.9"},
		"too short":                  {Redis: "redis://10.0.0.9:6379", Lease: config.Duration(time.Millisecond)},
		"lease period":               {Store: "/mnt/pop", Lease: config.Duration(time.Millisecond)},
		"node.name":                  {Store: "/mnt/pop", Node: "a/b"},
		"pop key":                    {Redis: "redis://10.0.0.9:6379", Key: "/dev/null"},
		"policy":                     {Store: "/mnt/pop", Policy: "best"},
	} {
		d := &popParts{node: "n1", cfg: Config{File: config.Config{PoP: c}}, usage: &usage{},
			log: slog.New(slog.DiscardHandler)}
		if _, err := d.join(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q in it", c, err, want)
		}
		d.leave()
	}
}

// A store that answers and takes nothing is bad, and so is a node that does not accept this one.
func TestFindingsTry(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "nodes"), 0o700); err != nil {
		t.Fatal(err)
	}
	d := &pops{log: slog.New(slog.DiscardHandler), dir: pop.NewDir(dir, 0)}
	ok := spec.Finding{Level: spec.LevelOK}
	if f := d.writable(t.Context(), ok); f != ok {
		t.Errorf("%+v", f)
	}
	if left, err := os.ReadDir(filepath.Join(dir, "nodes")); err != nil || len(left) > 0 {
		t.Errorf("%v stay, %v", left, err)
	}
	d.dir = pop.NewDir(filepath.Join(dir, "nothing"), 0)
	if f := d.writable(t.Context(), ok); f.Level != spec.LevelBad || f.Remedy == "" {
		t.Errorf("%+v", f)
	}
	var err error
	if d.peers, err = peer.NewClient(peer.Config{Auth: secret(t)}); err != nil {
		t.Fatal(err)
	}
	defer d.peers.Close()
	p := &member.Status{Node: "a",
		Members: []pop.Member{{Node: "a", Address: "127.0.0.1:1"}, {Node: "b"},
			{Node: "c", Address: "127.0.0.1:1"}}}
	if got := d.refusals(t.Context(), p); len(got) != 1 || got[0].What != "PoP node c" ||
		got[0].Level != spec.LevelBad || got[0].Remedy == "" {
		t.Errorf("%+v", got)
	}
}

func secret(t *testing.T) *peer.Auth {
	t.Helper()
	path := filepath.Join(t.TempDir(), "key")
	err := peer.NewKey(path)
	if err != nil {
		t.Fatal(err)
	}
	auth, err := peer.ReadKey(path)
	if err != nil {
		t.Fatal(err)
	}
	return auth
}

// Another machine with the name of a node is kept from the store, until the name is free; the same one comes
// back.
func TestStoreOfOneMachineOfAName(t *testing.T) {
	dir := t.TempDir()
	open := func(root string) error {
		coord, err := local.New(pop.Config{Node: "n1"})
		if err != nil {
			t.Fatal(err)
		}
		defer coord.Close()
		d := &popParts{cfg: Config{Root: root}, log: slog.New(slog.DiscardHandler)}
		_, err = d.openStore(t.Context(), member.Config{Node: "n1", Coord: coord, Dir: pop.NewDir(dir, 0)})
		return err
	}
	first, second := t.TempDir(), t.TempDir()
	for range 2 {
		if err := open(first); err != nil {
			t.Fatal(err)
		}
		err := open(second)
		if !errors.Is(err, pop.ErrTaken) ||
			!strings.Contains(err.Error(), filepath.Join(dir, "nodes", "n1.owner")) {
			t.Fatalf("another machine: %v", err)
		}
	}
	if err := os.Remove(filepath.Join(dir, "nodes", "n1.owner")); err != nil {
		t.Fatal(err)
	}
	if err := open(second); err != nil {
		t.Error(err)
	}
	if err := open(first); !errors.Is(err, pop.ErrTaken) {
		t.Errorf("the name is another machine's now: %v", err)
	}
}

// A node that comes new to a PoP whose nodes share a store makes no other one where that is
// not mounted, and takes no other one for it.
func TestNoStoreBesideThatOfOthers(t *testing.T) {
	hub, shared, unmounted := local.NewHub(), t.TempDir(), t.TempDir()
	coord, err := hub.Join(pop.Config{Node: "old", TTL: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer coord.Close()
	open := func(root, dir string) (*pop.Store, error) {
		c, err := hub.Join(pop.Config{Node: "new", TTL: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		d := &popParts{cfg: Config{Root: root}, log: slog.New(slog.DiscardHandler)}
		return d.openStore(t.Context(), member.Config{Node: "new", Coord: c, Dir: pop.NewDir(dir, 0)})
	}
	theirs, err := pop.OpenStore(t.Context(),
		pop.StoreConfig{FS: pop.NewDir(shared, 0), Coord: coord, Node: "old"})
	if err == nil {
		err = coord.Announce(t.Context(), pop.Member{Store: theirs.ID()})
	}
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	for range 2 {
		if _, err := open(root, unmounted); !errors.Is(err, pop.ErrNotMounted) ||
			!strings.Contains(err.Error(), theirs.ID()) || !strings.Contains(err.Error(), unmounted) {
			t.Fatalf("an empty directory: %v", err)
		}
	}
	if left, err := os.ReadDir(unmounted); err != nil || len(left) > 0 {
		t.Errorf("made there: %v, %v", left, err)
	}
	st, err := open(root, shared)
	if err != nil || st.ID() != theirs.ID() {
		t.Fatalf("the store of the others: %v", err)
	}
	if b, err := os.ReadFile(filepath.Join(root, "pop.store")); err != nil || string(b) != theirs.ID() {
		t.Errorf("%q is remembered, %v", b, err)
	}
	if err := coord.Announce(t.Context(), pop.Member{}); err != nil {
		t.Fatal(err)
	}
	if _, err := open(t.TempDir(), unmounted); err != nil {
		t.Errorf("nobody has a store: %v", err)
	}
	if err := coord.Announce(t.Context(), pop.Member{Store: theirs.ID()}); err != nil {
		t.Fatal(err)
	}
	if _, err := open(t.TempDir(), unmounted); !errors.Is(err, pop.ErrNotMounted) {
		t.Errorf("another store than that of the others: %v", err)
	}
}

// tables is a node that has a table of any layer, and nothing else.
type tables struct{ peer.Content }

func (tables) Table(context.Context, digest.Digest) ([]byte, error) { return []byte("table"), nil }

// A node that is connected when its certificate is revoked is cut off when the configuration is read again,
// and is not let in any more. A wrong list lets nobody in.
func TestReloadRevokes(t *testing.T) {
	dir := t.TempDir()
	run := func(script string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "bash", "-euc", script)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	run(`printf '[ca]\ndefault_ca=p\n[p]\ndatabase=db\ncrlnumber=number\ncertificate=ca.crt\nprivate_key=ca.key
new_certs_dir=.\nrand_serial=yes\ndefault_md=default\ndefault_days=9\ndefault_crl_days=9\npolicy=n
copy_extensions=copy\n[n]\ncommonName=supplied\n' > cnf
touch db; echo 01 > number
openssl req -x509 -newkey ed25519 -nodes -subj /CN=pop -keyout ca.key -out ca.crt
cp ca.crt ca.pem
for n in a b; do
openssl req -newkey ed25519 -nodes -subj /CN=$n -addext subjectAltName=IP:127.0.0.1 -keyout $n.key -out $n.csr
openssl ca -config cnf -batch -notext -in $n.csr -out $n.crt
done`)
	auth := func(name string) *peer.Auth {
		in := func(file string) string { return filepath.Join(dir, file) }
		a, err := popAuth(config.PoP{CA: in("ca.pem"), Cert: in(name + ".crt"), TLSKey: in(name + ".key")})
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	var said bytes.Buffer
	log := slog.New(slog.NewTextHandler(&said, nil))
	own := auth("a")
	ctx, cancel := context.WithCancel(t.Context())
	served, addr := make(chan error, 1), testkit.FreeAddress(t)
	go func() {
		served <- (&popParts{}).servePeers(ctx, addr, peer.Config{Auth: own, Content: tables{}})
	}()
	defer func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	other, err := peer.NewClient(peer.Config{Auth: auth("b")})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	ask := func() error {
		_, err := other.Table(t.Context(), addr, digest.FromString("x"))
		return err
	}
	testkit.Retry(t, "the node answers", ask)

	r := &reloader{link: link.New(link.Config{}), peers: own, room: &room{}, log: log}
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(-1))
	run(`openssl ca -config cnf -revoke b.crt; openssl ca -config cnf -gencrl -out crl; cat ca.crt crl > ca.pem`)
	r.apply(config.Config{})
	if want := "certificates=1 connections_closed=1"; !strings.Contains(said.String(), want) {
		t.Errorf("no %q in %s", want, &said)
	}
	run(`cp ca.crt ca.pem`)
	r.apply(config.Config{})
	if want := "those in force stay"; !strings.Contains(said.String(), want) {
		t.Errorf("no %q in %s", want, &said)
	}
	if err := ask(); !errors.Is(err, peer.ErrRefused) {
		t.Errorf("a revoked node was answered: %v", err)
	}
}
