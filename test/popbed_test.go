package test

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/testkit/popbed"
	"dewpoint/testkit/registrytest"
)

// pop is a PoP whose nodes run dewd, with a registry behind its WAN.
type pop struct {
	*popbed.Bed
	t     testing.TB
	reg   *registrytest.Server
	seen  int64 // bytes over the WAN that wan has told of
	asked int   // requests that the registry had then
}

// newPop makes a PoP, and starts dewd on all of its nodes. When the test ends
// nothing may be left of it. Its machines are its own, and it mostly waits: such tests run beside each other.
func newPop(t testing.TB, cfg popbed.Config) *pop {
	t.Helper()
	cfg.Dewd = cmp.Or(cfg.Dewd, filepath.Join(programs, "dewd"))
	bed, err := popbed.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	p := &pop{Bed: bed, t: t}
	nodes := bed.Nodes
	t.Cleanup(func() {
		if t.Failed() {
			for _, n := range nodes {
				said, _ := os.ReadFile(n.Log())
				t.Logf("dewd of %s said:\n%s", n.Name, said)
			}
		}
		if err := bed.Close(); err != nil {
			t.Error(err)
		}
		if left := bed.Leftovers(); len(left) > 0 {
			t.Errorf("the PoP left %q", left)
		}
	})
	err = bed.OnWAN(func() error {
		p.reg = registrytest.NewConfig(t, registrytest.Config{Addr: popbed.Registry})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	p.all(func(i int) error { return p.StartDewd(t.Context(), i) })
	return p
}

// all does something on all nodes at once.
func (p *pop) all(do func(i int) error) {
	p.t.Helper()
	var wait sync.WaitGroup
	for i, n := range p.Nodes {
		wait.Go(func() {
			if err := do(i); err != nil {
				p.t.Errorf("%s: %v", n.Name, err)
			}
		})
	}
	wait.Wait()
	if p.t.Failed() {
		p.t.FailNow()
	}
}

// deploy runs the image's server on node i, at port 80 of that node.
func (p *pop) deploy(i int, image, name string) (spec.Record, error) {
	return p.Deploy(p.t.Context(), i,
		spec.Request{Image: image, Name: name, Net: "host", Ready: "http:80/", Cmd: []string{"serve", "80"}})
}

// get asks node i's port 80, from that node.
func (p *pop) get(i int, path string) (string, error) { return p.getAt(i, "127.0.0.1:80", path) }

func (p *pop) getAt(i int, address, path string) (string, error) {
	tr := &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			return p.Dial(ctx, i, address)
		}}
	resp, err := (&http.Client{Transport: tr, Timeout: 5 * time.Second}).Get("http://" + address + path)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return string(body), err
}

// answers asserts that the container on node i serves.
func (p *pop) answers(i int) error {
	got, err := p.get(i, "/cat?/etc/motd")
	if err == nil && got != "above\n" {
		err = fmt.Errorf("/etc/motd reads %q", got)
	}
	return err
}

// Without a PoP's configuration each node fetches for itself, and its faults
// are its own.
func TestNodesOfABedDeploy(t *testing.T) {
	t.Parallel()
	p := newPop(t, popbed.Config{Store: popbed.Gluster, StoreBytes: 256 << 20})
	const noise = 4 << 20
	img := p.reg.PushImage("team/app:1", appLayers(t, noise), appOptions())
	before, err := p.WAN()
	if err != nil {
		t.Fatal(err)
	}
	p.all(func(i int) error {
		rec, err := p.deploy(i, img.Ref, "web")
		if err == nil && (rec.Node != p.Nodes[i].Name || rec.Bytes.Registry < noise) {
			err = fmt.Errorf("record %+v", rec)
		}
		return err
	})
	p.all(p.answers)
	after, err := p.WAN()
	if n := after.In - before.In; err != nil || n < int64(len(p.Nodes))*noise {
		t.Errorf("%d bytes came over the WAN for %d nodes, %v", n, len(p.Nodes), err)
	}

	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(p.KillDewd(t.Context(), 0))
	must(p.answers(0)) // the container does not need dewd
	must(p.StartDewd(t.Context(), 0))
	must(p.StopDewd(t.Context(), 1))
	must(p.StartDewd(t.Context(), 1))
	must(p.Remove(t.Context(), 1, "web"))

	must(p.FreezeNode(2))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := p.Deploy(ctx, 2,
		spec.Request{Image: img.Ref, Name: "late", Net: "none", Cmd: []string{"sleep", "1m"}}); err == nil {
		t.Error("a frozen node deploys")
	}
	must(p.ThawNode(2))
	_, err = p.Deploy(t.Context(), 2,
		spec.Request{Image: img.Ref, Name: "later", Net: "none", Cmd: []string{"sleep", "1m"}})
	must(err)

	if runs := p.of(3); len(runs) < 4 { // dewd, containerd, datafs, the container
		t.Errorf("node 3 runs no more than %q", runs)
	}
	must(p.KillNode(3))
	if err := p.answers(3); err == nil {
		t.Error("a node without power answers")
	}
	if left := p.of(3); len(left) > 0 {
		t.Errorf("a node without power runs %q", left)
	}
	must(p.answers(4))
	must(p.RebootNode(t.Context(), 3))
	_, err = p.deploy(3, img.Ref, "again")
	must(err)
	must(p.answers(3))
}

// of are the programs that run in directories of node i.
func (p *pop) of(i int) (programs []string) {
	all, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range all {
		line, _ := os.ReadFile(d + "/cmdline")
		mounts, _ := os.ReadFile(d + "/mountinfo")
		first, _, _ := bytes.Cut(mounts, []byte("\n"))
		if dir := p.Nodes[i].Dir + "/"; bytes.Contains(line, []byte(dir)) || bytes.Contains(first, []byte(dir)) {
			programs = append(programs, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return programs
}
