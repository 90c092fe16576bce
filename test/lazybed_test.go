package test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// backends are the ways to mount layers.
var backends = []string{"erofs", "loop", "tree"}

// lazyBed is a node that runs an image before it is whole.
type lazyBed struct {
	*machine
	reg     *registrytest.Server
	li      *lazyImage
	backend string // "" is erofs
	port    string // of the container web
}

// off leaves layers as they are, so that only what is read comes.
const off = "[lazy]\nmode = \"on-demand\"\n"

// noLearn keeps the node from recording starts, and from making packs of its own.
const noLearn = "[pack]\nlearn = \"never\"\n"

// slowLink is slow enough for a lazy start of the image to be worth it.
const slowLink = "[link]\nlimit = \"200Mbit\"\n"

// newLazyBed starts a node with the mount backend and the configuration, and a
// registry with an image of 64 files.
func newLazyBed(t *testing.T, backend, config string) *lazyBed {
	t.Helper()
	b := newStillBed(t, backend, config)
	b.start()
	return b
}

// newStillBed is newLazyBed with a node that is not started.
func newStillBed(t *testing.T, backend, config string) *lazyBed {
	t.Helper()
	reg := registrytest.New(t)
	b := &lazyBed{reg: reg, li: pushLazy(t, reg, "app:1", 16<<20, image.Gzip), machine: newMachine(t, reg),
		backend: backend, port: freePort(t)}
	b.config = strings.Replace(b.config, "[node]\n", "[node]\nmount = \""+backend+"\"\n", 1) + slowLink + config
	return b
}

// run starts the container web, which has to be lazy.
func (b *lazyBed) run() {
	b.t.Helper()
	rec := b.record("run", "-d", "--name", "web", "--ready", "http:"+b.port+"/", b.li.Ref, "serve", b.port)
	if rec.Way.Pull != "lazy" {
		b.t.Fatalf("way: %+v", rec.Way)
	}
}

// file is the path of a file of the image's big layer.
func file(n int) string { return fmt.Sprintf("/data/f%d", n) }

// answer is what a read of a file gave: its sha256 in hexadecimal, or an error.
type answer struct {
	said string
	took time.Duration
}

// ask begins to read a file in the container on port, which may take a while.
func ask(port, path string) <-chan answer {
	out := make(chan answer, 1)
	go func() {
		began := time.Now()
		c := http.Client{Timeout: time.Minute}
		r, err := c.Get("http://127.0.0.1:" + port + "/sum?" + path)
		if err != nil {
			out <- answer{err.Error(), time.Since(began)}
			return
		}
		defer r.Body.Close()
		said, _ := io.ReadAll(r.Body)
		out <- answer{strings.TrimSpace(string(said)), time.Since(began)}
	}()
	return out
}

// ask is ask in the container web.
func (b *lazyBed) ask(path string) <-chan answer { return ask(b.port, path) }

// right asserts that a read gave the file's bytes.
func (b *lazyBed) right(path string, got <-chan answer) {
	b.t.Helper()
	if a := <-got; a.said != b.li.files[path] {
		b.t.Errorf("%s after %s: %q, not %s", path, a.took, a.said, b.li.files[path])
	}
}

// reads reads files in the container web, one after the other.
func (b *lazyBed) reads(paths ...string) {
	b.t.Helper()
	for _, path := range paths {
		b.right(path, b.ask(path))
	}
}

// readsAll reads every file in the container on port.
func (b *lazyBed) readsAll(port string) {
	b.t.Helper()
	for path := range b.li.files {
		b.right(path, ask(port, path))
	}
}

// errs asserts that a read ended with an I/O error.
func (b *lazyBed) errs(path string, got <-chan answer) time.Duration {
	b.t.Helper()
	a := <-got
	if !strings.Contains(a.said, "input/output error") {
		b.t.Errorf("%s after %s: %q, not an I/O error", path, a.took, a.said)
	}
	return a.took
}

// recovers reads a file whose reads have failed until it can be read.
func (b *lazyBed) recovers(path string) {
	b.t.Helper()
	b.eventually(path+" can be read again", func() bool {
		a := <-b.ask(path)
		if a.said != b.li.files[path] && !strings.Contains(a.said, "input/output error") {
			b.t.Fatalf("%s reads %q", path, a.said)
		}
		return a.said == b.li.files[path]
	})
}

// waits asserts that a read has not ended.
func (b *lazyBed) waits(path string, got <-chan answer) {
	b.t.Helper()
	select {
	case a := <-got:
		b.t.Fatalf("%s was not waited for: %q after %s", path, a.said, a.took)
	default:
	}
}

// big is the layer with the files.
func (b *lazyBed) big() digest.Digest { return b.li.Layers[len(b.li.Layers)-1].Digest }

// hang lets the registry be silent on the big layer.
func (b *lazyBed) hang() { b.reg.Fail(registrytest.Fault{Do: registrytest.Hang, Digest: b.big()}) }

// held begins to read an absent file while the registry hangs, and returns when
// the node has asked for it.
func (b *lazyBed) held(path string) <-chan answer {
	b.t.Helper()
	before := len(b.reg.Ranges(b.big()))
	got := b.ask(path)
	b.eventually("a request for "+path, func() bool { return len(b.reg.Ranges(b.big())) > before })
	b.waits(path, got)
	return got
}

func (m *machine) eventually(what string, done func() bool) {
	m.t.Helper()
	testkit.Eventually(m.t, what, done)
}

// runAfterRestart runs the container NAME on port: containerd finds a dewd that was
// started anew only after a while, and dew fails until then.
func (b *lazyBed) runAfterRestart(name, port string) spec.Record {
	b.t.Helper()
	var rec spec.Record
	b.eventually("a container after a restart", func() bool {
		r := b.dew("--json", "run", "-d", "--name", name, "--ready", "http:"+port+"/", b.li.Ref, "serve", port)
		if r.code != 0 && !strings.Contains(r.err, "unavailable") {
			b.t.Fatalf("exit %d: %s", r.code, r.err)
		}
		if r.code == 0 && json.Unmarshal([]byte(r.out), &rec) != nil {
			b.t.Fatalf("no record: %s", r.out)
		}
		return r.code == 0
	})
	return rec
}

// killDatafs ends datafs as a crash does, and returns its pid, or 0 if there is none.
func (m *machine) killDatafs() int {
	m.t.Helper()
	pid := m.datafs()
	if pid == 0 { // which kill(2) takes for the test's own process group
		return 0
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		m.t.Fatal(err)
	}
	return pid
}

// layerDir is where the node keeps the layer with the files.
func (b *lazyBed) layerDir() string {
	hex := b.li.Layers[len(b.li.Layers)-1].DiffID.Encoded()
	dirs, _ := filepath.Glob(filepath.Join(b.root, "layers", hex+"*"))
	if len(dirs) != 1 {
		b.t.Fatalf("the layer's directories: %v", dirs)
	}
	return dirs[0]
}

// here returns the share of a file's pages that are present on the node.
func (b *lazyBed) here(path string) float64 {
	b.t.Helper()
	bits, err := os.ReadFile(filepath.Join(b.layerDir(), "present"))
	if err != nil {
		b.t.Fatal(err)
	}
	var n int
	fmt.Sscanf(path, "/data/f%d", &n)
	const body = 1 << 18
	from := 1024 + n*(512+body) // behind the directory's header and its own
	first, last := from/4096, (from+body-1)/4096
	there := 0
	for page := first; page <= last; page++ {
		if bits[4096+page/8]&(1<<(page%8)) != 0 {
			there++
		}
	}
	return float64(there) / float64(last-first+1)
}

// untouched returns a file that came with others, and was read by nobody yet.
func (b *lazyBed) untouched(read ...string) string {
	b.t.Helper()
	for path := range b.li.files {
		for _, r := range read {
			if path == r {
				path = ""
			}
		}
		if path != "" && b.here(path) == 1 {
			return path
		}
	}
	b.t.Fatal("no file is present that was not read")
	return ""
}

// checkLayers asserts that the data of the image's layers are what they are to
// be. Unpacked layers have none.
func (b *lazyBed) checkLayers() {
	b.t.Helper()
	if b.backend == "tree" {
		return
	}
	for _, l := range b.li.Layers {
		data, err := os.ReadFile(filepath.Join(b.root, "layers", l.DiffID.Encoded(), "data"))
		if err != nil {
			b.t.Error(err)
		} else if got := fmt.Sprintf("%x", sha256.Sum256(data)); got != l.DiffID.Encoded() {
			b.t.Errorf("layer %s hashes to %s", l.DiffID, got)
		}
	}
}

// says reports whether dewd's log has all of the parts in one line.
func (m *machine) says(parts ...string) bool {
	log, _ := os.ReadFile(m.log)
	for line := range strings.Lines(string(log)) {
		all := true
		for _, part := range parts {
			all = all && strings.Contains(line, part)
		}
		if all {
			return true
		}
	}
	return false
}
