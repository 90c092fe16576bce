package test

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/pack"
	"dewpoint/internal/registry"
	"dewpoint/internal/spec"
	"dewpoint/testkit/packtest"
	"dewpoint/testkit/registrytest"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// pushLiar pushes an image of whose pack the bytes of /etc/motd are others. The
// layers have the digests that the image says.
func pushLiar(t *testing.T, reg *registrytest.Server) *lazyImage {
	t.Helper()
	li := &lazyImage{}
	tars := []registrytest.Layer{{Tar: li.mixed(4 << 20), Compression: image.Gzip}}
	tars = append(tars, appLayers(t, 0)...)
	top := len(tars) - 1
	li.Pushed = reg.PushImage("liar:1", tars, appOptions())
	spoiled := bytes.Replace(tars[top].Tar, []byte("above\n"), []byte("a lie\n"), 1)
	if bytes.Equal(spoiled, tars[top].Tar) {
		t.Fatal("nothing to lie about")
	}
	profile := &pack.Profile{Version: 1, Image: li.Digest,
		Reads: []pack.Range{{Layer: top, Length: int64(len(spoiled))}}}
	in := pack.Input{Image: li.Digest, Dir: t.TempDir(), Profile: profile}
	client := registryClient(t, reg)
	for i, l := range li.Layers {
		il := pack.InputLayer{DiffID: l.DiffID, Blob: l.Digest, BlobSize: l.Size, Size: int64(len(tars[i].Tar)),
			Compression: l.Compression(),
			Data:        bytes.NewReader(tars[i].Tar), Open: func() (io.ReadCloser, error) {
				return client.Open(t.Context(), reference(t, li.Ref), registry.Blob{Digest: l.Digest, Size: l.Size}, 0,
					-1, registry.OpenOptions{})
			}}
		if i == top { // Build compares data and digest; relabel puts the digest right
			il.DiffID, il.Data, il.Open = digest.FromBytes(spoiled), bytes.NewReader(spoiled), nil
		}
		profile.Layers = append(profile.Layers, il.DiffID)
		in.Layers = append(in.Layers, il)
	}
	var b bytes.Buffer
	if _, err := pack.Build(t.Context(), &b, in); err != nil {
		t.Fatal(err)
	}
	lie, header := packtest.Relabel(t, b.Bytes(), li.Layers)
	li.pack = lie
	li.publish(t, client, lie, header)
	return li
}

// A pack that does not match its layers is told of, is not used again, and leaves no trace in what
// the layers are in the end. The container goes on.
func TestLazyPackMismatch(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	b := &lazyBed{reg: reg, li: pushLiar(t, reg), machine: newMachine(t, reg), port: freePort(t)}
	b.config += slowLink + "[lazy]\ndelay = \"1s\"\n" + noLearn
	scrape := b.measured(t)
	b.start()
	b.run()
	if got := get(t, "http://127.0.0.1:"+b.port+"/cat?/etc/motd"); got != "a lie\n" {
		t.Fatalf("before the layer itself is here: %q", got)
	}
	if e := b.event(spec.EventMismatch); e.Image != b.li.Ref || e.Error == "" {
		t.Errorf("the event: %+v", e)
	}
	b.awaitComplete()
	b.checkLayers()
	becomes(t, scrape, map[series]float64{{"lazy_lies_total", ""}: 1})
	get(t, "http://127.0.0.1:"+b.port+"/")
	b.reads(file(9))
	if r := b.dew("run", "--rm", b.li.Ref, "cat", "/etc/motd"); r.out != "above\n" {
		t.Errorf("a container after it: %+v", r)
	}
	b.must("rm", "-f", "web")
	b.must("rmi", b.li.Ref)
	b.eventually("the layers go", func() bool { // they were used a moment ago
		b.must("prune")
		left, _ := filepath.Glob(filepath.Join(b.root, "layers", "*", "*"))
		return len(left) == 0
	})
	checkNothingLeft(t, b.machine)

	b.kill() // the next dewd knows it too
	b.start()
	rec := b.runAfterRestart("web", b.port)
	if rec.Way.Pull != "whole" || !strings.Contains(strings.Join(rec.Way.Why, " "), "quarantined") {
		t.Errorf("the way after quarantine: %+v", rec.Way)
	}
	b.must("rm", "-f", "web")
}

// A pack that a registry spoils on the way, or does not give, keeps no image
// from running: what it lacks comes from the layers.
func TestLazyPackSpoiled(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]registrytest.Fault{
		"flipped": {Do: registrytest.Flip}, "cut": {Do: registrytest.Cut}, "hangs": {Do: registrytest.Hang},
		"gone": {Do: registrytest.Status, Status: 404},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newLazyBed(t, "erofs", "")
			fault.Digest = digest.FromBytes(b.li.pack)
			fault.At = int64(len(b.li.pack)) / 2 // among the chunks
			b.reg.Fail(fault)
			begin := time.Now()
			rec := b.record("run", "-d", "--name", "web", "--ready", "http:"+b.port+"/", "--ready-timeout", "30s",
				b.li.Ref, "serve", b.port)
			if took := time.Since(begin); took > 20*time.Second {
				t.Errorf("ready after %s", took)
			}
			t.Logf("ready after %s: %+v", time.Since(begin), rec.Way)
			b.reads(file(30))
			b.awaitComplete()
			b.readsAll(b.port)
			b.checkLayers()
			b.must("rm", "-f", "web")
		})
	}
}

// event waits for an event of such a kind, also if it has been already.
func (m *machine) event(kind string) spec.Event {
	m.t.Helper()
	cmd := exec.Command(filepath.Join(programs, "dew"), "-H", "unix://"+m.state+"/dewd.sock", "--json", "events",
		"--after", "0")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		m.t.Fatal(err)
	}
	timer := time.AfterFunc(30*time.Second, func() { cmd.Process.Kill() })
	defer timer.Stop()
	defer cmd.Wait()
	defer cmd.Process.Kill()
	for d := json.NewDecoder(out); ; {
		var e spec.Event
		if err := d.Decode(&e); err != nil {
			m.t.Fatalf("no event %q: %v", kind, err)
		}
		if e.Kind == kind {
			return e
		}
	}
}

// On a disk that gets full while layers fill, the filling stops and says so;
// what is read comes or fails, and nothing wrong is shown; with room again all
// becomes whole.
func TestLazyDiskFull(t *testing.T) {
	t.Parallel()
	b := newStillBed(t, "erofs", "[lazy]\nwait = \"2s\"\n")
	b.diskOf(400 << 20)
	b.start()
	b.hang() // nothing fills before the disk is full
	b.run()
	ballast := filepath.Join(b.root, "ballast")
	b.fillDisk(ballast, 6<<20)
	b.reg.Heal()
	b.eventually("dewd's word on it", func() bool {
		return b.says("no space left on device") || b.says("disk full")
	})
	good := 0
	const files = 5
	for n := range files {
		path := file(12 * n)
		switch a := <-b.ask(path); {
		case a.said == b.li.files[path]:
			good++
		case !strings.Contains(a.said, "input/output error"):
			t.Errorf("%s reads %q", path, a.said)
		}
	}
	if good == files {
		t.Error("the disk was not full")
	}
	b.must("ps")
	if out := b.must("exec", "web", "/app", "cat", "/etc/motd"); out != "above\n" {
		t.Errorf("what is here reads %q", out)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	for path := range b.li.files {
		b.recovers(path)
	}
	b.awaitComplete()
	b.checkLayers()
	b.readsAll(b.port)
	b.must("rm", "-f", "web")
}

// diskOf gives the node's root a file system of its own: ext4, for EROFS is not
// mounted from files of a tmpfs.
func (m *machine) diskOf(size int64) {
	m.t.Helper()
	image := m.root + ".ext4"
	err := os.WriteFile(image, nil, 0o600)
	if err == nil {
		err = os.Truncate(image, size)
	}
	if err == nil {
		err = os.MkdirAll(m.root, 0o755)
	}
	if err != nil {
		m.t.Fatal(err)
	}
	for _, args := range [][]string{{"mkfs.ext4", "-q", "-m", "0", image},
		{"mount", "-o", "loop", image, m.root}} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			m.t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
}

// fillDisk writes a file that leaves free bytes of the node's disk.
func (m *machine) fillDisk(path string, free int64) {
	m.t.Helper()
	var s unix.Statfs_t
	if err := unix.Statfs(m.root, &s); err != nil {
		m.t.Fatal(err)
	}
	f, err := os.Create(path)
	if err != nil {
		m.t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(s.Bavail)*s.Bsize-free); err != nil {
		m.t.Fatal(err)
	}
}
