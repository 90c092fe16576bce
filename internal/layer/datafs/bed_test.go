package datafs

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/bdi"
	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/presence"
	"dewpoint/internal/layer/toc"
)

// bed is a datafs with its client, and the wants that it told of.
type bed struct {
	t      testing.TB
	dir    string
	cfg    Config
	client *Client

	mu       sync.Mutex
	wants    []wantOf
	released []digest.Digest
	lost     []digest.Digest
	onWant   func(id digest.Digest, from, to int64)
}

type wantOf struct {
	id       digest.Digest
	from, to int64
}

func newBed(t testing.TB) *bed {
	b := &bed{t: t, dir: t.TempDir()}
	b.cfg = Config{
		State: filepath.Join(b.dir, "state"), Exec: []string{"/proc/self/exe", roleServer},
		Want: func(id digest.Digest, from, to int64) {
			b.mu.Lock()
			b.wants = append(b.wants, wantOf{id, from, to})
			f := b.onWant
			b.mu.Unlock()
			if f != nil {
				f(id, from, to)
			}
		},
		Released: func(id digest.Digest) { b.mu.Lock(); defer b.mu.Unlock(); b.released = append(b.released, id) },
		Lost:     func(ids []digest.Digest) { b.mu.Lock(); defer b.mu.Unlock(); b.lost = append(b.lost, ids...) },
	}
	if testing.Verbose() {
		b.cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	t.Cleanup(b.end)
	return b
}

func (b *bed) start() *bed {
	b.t.Helper()
	c, err := Start(context.Background(), b.cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	b.client = c
	return b
}

// end ends datafs, which must then have no users.
func (b *bed) end() {
	if b.client == nil {
		return
	}
	var err error
	for range 200 {
		if err = b.client.Shutdown(); err == nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err != nil {
		b.t.Errorf("datafs stays in use: %v", err)
		b.client.Close()
		unix.Kill(b.serverPID(), unix.SIGKILL)
		detach(filepath.Join(b.cfg.State, "datafs"))
	}
	log, _ := os.ReadFile(filepath.Join(b.cfg.State, logName))
	if len(log) > 0 {
		b.t.Logf("datafs said: %s", log)
	}
	if bytes.Contains(log, []byte("DATA RACE")) {
		b.t.Error("datafs has a data race")
	}
}

// serverPID is the process id of the datafs that runs.
func (b *bed) serverPID() int {
	b.t.Helper()
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range procs {
		line, _ := os.ReadFile(p)
		if bytes.Contains(line, []byte(roleServer)) && bytes.Contains(line, []byte(b.dir+"/")) {
			var pid int
			fmt.Sscanf(p, "/proc/%d/", &pid)
			return pid
		}
	}
	b.t.Fatal("no datafs runs")
	return 0
}

func (b *bed) wanted(id digest.Digest) []span {
	b.mu.Lock()
	defer b.mu.Unlock()
	var out []span
	for _, w := range b.wants {
		if w.id == id {
			out = append(out, span{w.from, w.to})
		}
	}
	return out
}

// testLayer is a layer with its tar in memory and as a data file with holes.
type testLayer struct {
	*bed
	id      digest.Digest
	tar     []byte
	table   *toc.TOC
	dir     string
	data    *os.File
	present *presence.Map
	path    string // of the data file in datafs
	target  string // where it is mounted
}

// layer makes a layer of which nothing is there, and adds it.
func (b *bed) layer(raw []byte) *testLayer {
	b.t.Helper()
	l := &testLayer{bed: b, id: digest.FromBytes(raw), tar: raw}
	l.dir, _ = os.MkdirTemp(b.dir, "layer")
	var err error
	if l.data, err = os.OpenFile(filepath.Join(l.dir, "data"), os.O_CREATE|os.O_RDWR, 0o600); err == nil {
		err = l.data.Truncate(int64(len(raw)))
	}
	if err == nil {
		l.present, err = presence.Create(filepath.Join(l.dir, "present"), int64(len(raw)))
	}
	if err == nil {
		l.table, err = toc.Read(bytes.NewReader(raw))
	}
	if err == nil {
		l.path, err = b.client.Add(l.id, l.data, l.present.File())
	}
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		if b.t.Failed() {
			b.client.Abort(l.id)
		}
		l.data.Close()
		l.present.Close()
	})
	return l
}

func (l *testLayer) writeIndex() string {
	l.t.Helper()
	path := filepath.Join(l.dir, "index")
	f, err := os.Create(path)
	if err == nil {
		err = erofs.Build(f, l.table, erofs.Options{DataSize: int64(len(l.tar)), Data: bytes.NewReader(l.tar)})
	}
	if err = errors.Join(err, f.Close()); err != nil {
		l.t.Fatal(err)
	}
	return path
}

// mount mounts the layer by EROFS over datafs.
func (l *testLayer) mount() *testLayer {
	l.t.Helper()
	index := l.writeIndex()
	l.target = filepath.Join(l.dir, "mnt")
	os.Mkdir(l.target, 0o755)
	_, err := bdi.Without(l.target, func() error {
		return unix.Mount(index, l.target, "erofs", unix.MS_RDONLY, "device="+l.path)
	})
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { unix.Unmount(l.target, unix.MNT_DETACH) })
	return l
}

// tree shows the layer as a tree.
func (l *testLayer) tree() *testLayer {
	l.t.Helper()
	f, err := os.Open(l.writeIndex())
	if err != nil {
		l.t.Fatal(err)
	}
	defer f.Close()
	if l.target, err = l.client.Tree(l.id, f); err != nil {
		l.t.Fatal(err)
	}
	return l
}

// put makes [from, to) present and says so.
func (l *testLayer) put(from, to int64) {
	from, to = from/page*page, min((to+page-1)/page*page, int64(len(l.tar)))
	if _, err := l.data.WriteAt(l.tar[from:to], from); err != nil {
		l.t.Error(err)
	}
	l.present.Add(from, to)
	l.client.Present(l.id, from, to)
}

func (l *testLayer) putAll() { l.put(0, int64(len(l.tar))) }

// at is where a file's contents lie in the tar.
func (l *testLayer) at(name string) span {
	for _, e := range l.table.Entries {
		if e.Name == name && len(e.Ranges) > 0 {
			return span{e.Ranges[0].Data, e.Ranges[0].Data + e.Ranges[0].Length}
		}
	}
	l.t.Fatalf("no file %s", name)
	return span{}
}

func (l *testLayer) file(name string) string { return filepath.Join(l.target, name) }

func (l *testLayer) content(name string) []byte { s := l.at(name); return l.tar[s.from:s.to] }

// takesDirect reports whether files can be opened with O_DIRECT.
func (l *testLayer) takesDirect(name string) bool {
	f, err := os.OpenFile(l.file(name), os.O_RDONLY|unix.O_DIRECT, 0)
	if err == nil {
		f.Close()
	} else if !errors.Is(err, unix.EINVAL) {
		l.t.Error(err)
	}
	return err == nil
}

// tarOf makes a tar of files of random bytes; names are f0, f1, …
func tarOf(seed uint64, sizes ...int) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	for i, n := range sizes {
		body := make([]byte, n)
		r.Read(body)
		w.WriteHeader(&tar.Header{Name: fmt.Sprintf("f%d", i), Mode: 0o755, Size: int64(n),
			ModTime: time.Unix(1, 5)})
		w.Write(body)
	}
	w.Close()
	return b.Bytes()
}

func repeat(n, size int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = size
	}
	return out
}

// reader is a process that reads.
type reader struct {
	cmd  *exec.Cmd
	out  bytes.Buffer
	done chan error
}

// read starts a process that reads n bytes at off of a file in the given way
// and prints their sum.
func startReader(t testing.TB, how, path string, off, n int64) *reader {
	t.Helper()
	r := &reader{done: make(chan error, 1)}
	r.cmd = exec.Command("/proc/self/exe", roleRead, how, path, fmt.Sprint(off), fmt.Sprint(n))
	r.cmd.Stdout, r.cmd.Stderr = &r.out, os.Stderr
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { r.done <- r.cmd.Wait() }()
	return r
}

// ends waits for the process's end.
func (r *reader) ends(t testing.TB, in time.Duration) error {
	t.Helper()
	select {
	case err := <-r.done:
		return err
	case <-time.After(in):
		t.Fatalf("reader %d goes on after %v", r.cmd.Process.Pid, in)
		return nil
	}
}

func (r *reader) right(t testing.TB, want []byte) {
	t.Helper()
	if err := r.ends(t, 20*time.Second); err != nil {
		t.Errorf("reader: %v: %s", err, r.out.String())
	} else if got := r.out.String(); got != fmt.Sprintf("%x\n", sha256.Sum256(want)) {
		t.Errorf("reader got wrong bytes: %s", got)
	}
}

// readProcess is what startReader starts.
func readProcess(args []string) int {
	var off, n int64
	fmt.Sscan(args[2], &off)
	fmt.Sscan(args[3], &n)
	b := make([]byte, n)
	if err := readAs(args[0], args[1], b, off); err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Printf("%x\n", sha256.Sum256(b))
	return 0
}

func readAs(how, path string, b []byte, off int64) error {
	flags := os.O_RDONLY
	if how == "direct" {
		flags |= unix.O_DIRECT
	}
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	switch how {
	case "mmap":
		m, err := unix.Mmap(int(f.Fd()), 0, int(off)+len(b), unix.PROT_READ, unix.MAP_PRIVATE)
		if err != nil {
			return err
		}
		copy(b, m[off:])
		return nil
	case "exec":
		return unix.Exec(path, []string{path}, nil)
	case "direct":
		m, err := unix.Mmap(-1, 0, (len(b)+4095)&^4095, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			return err
		}
		if _, err := f.ReadAt(m, off); err != nil && err != io.EOF {
			return err
		}
		copy(b, m)
		return nil
	}
	_, err = f.ReadAt(b, off)
	return err
}

// memoryOf is the most memory in KiB that a process has had.
func memoryOf(t testing.TB, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := bytes.Cut(b, []byte("VmHWM:"))
	n := 0
	fmt.Sscan(string(rest), &n)
	return n
}
