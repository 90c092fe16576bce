package datafs

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"dewpoint/internal/layer/bdi"
	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/presence"
	"dewpoint/internal/layer/toc"
)

// ProbeConfig says what Probe tries.
type ProbeConfig struct {
	Dir  string   // existing directory on the file system where layers lie
	Exec []string // as in Config
	Tree bool     // try the tree instead of EROFS over the file
	Log  *slog.Logger
}

const (
	probePrefix = ".datafs-probe-"
	// probeStep bounds each step of a trial.
	probeStep = 5 * time.Second
)

// Probe tries whether layers can be read lazily here: it mounts a small layer of
// which nothing is there, has one read fail and one reader killed, then brings
// the bytes and looks whether every one of them is read as it should be. Some
// kernels would keep zeros for what failed. An error wraps ErrUnusable if lazy
// reading does not work, and leaves nothing behind.
func Probe(ctx context.Context, cfg ProbeConfig) error {
	runtime.LockOSThread() // what is started here is killed when its thread ends, and others end threads
	defer runtime.UnlockOSThread()
	sweepProbes(cfg.Dir)
	dir, err := os.MkdirTemp(cfg.Dir, probePrefix)
	if err != nil {
		return err
	}
	p := &probe{cfg: cfg, dir: dir, wants: make(chan span, 64)}
	if p.dir, err = filepath.Abs(dir); err == nil {
		err = p.run(ctx)
	}
	if p.client != nil {
		p.client.Abort(p.id)
	}
	err = errors.Join(err, p.end())
	if err != nil && !errors.Is(err, ErrUnusable) {
		err = fmt.Errorf("%w: %w", ErrUnusable, err)
	}
	return err
}

// sweepProbes takes away what killed processes have left.
func sweepProbes(dir string) {
	old, _ := filepath.Glob(filepath.Join(dir, probePrefix+"*"))
	for _, path := range old {
		detach(filepath.Join(path, "layer"))
		detach(filepath.Join(path, "datafs"))
		os.RemoveAll(path)
	}
}

// probe is one trial: a layer with two files.
type probe struct {
	cfg     ProbeConfig
	dir     string
	tar     []byte
	body    []byte // of both files
	id      digest.Digest
	data    *os.File
	present *presence.Map
	client  *Client
	wants   chan span
	layer   string // where the files are to be seen
}

func (p *probe) run(ctx context.Context) error {
	if err := p.build(); err != nil {
		return err
	}
	c, err := Start(ctx,
		Config{State: p.dir, Exec: p.cfg.Exec, Log: p.cfg.Log, mortal: true,
			Want: func(_ digest.Digest, from, to int64) {
				select {
				case p.wants <- span{from, to}:
				default:
				}
			}})
	if err != nil {
		return err
	}
	p.client = c
	if err := p.show(); err != nil {
		return err
	}
	if err := p.failOne(ctx); err != nil {
		return err
	}
	if err := p.killOne(ctx); err != nil {
		return err
	}
	return p.compare(ctx)
}

// build makes the layer, its data a hole.
func (p *probe) build() error {
	p.body = bytes.Repeat([]byte("these bytes are not zeros "), 1500)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range []string{"fails", "killed"} {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(p.body))}); err != nil {
			return err
		}
		if _, err := w.Write(p.body); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	p.tar, p.id = b.Bytes(), digest.FromBytes(b.Bytes())
	var err error
	if p.data, err = os.Create(filepath.Join(p.dir, "data")); err != nil {
		return err
	}
	if err := p.data.Truncate(int64(len(p.tar))); err != nil {
		return err
	}
	p.present, err = presence.Create(filepath.Join(p.dir, "present"), int64(len(p.tar)))
	return err
}

// show mounts the layer in the way that is tried.
func (p *probe) show() error {
	path, err := p.client.Add(p.id, p.data, p.present.File())
	if err != nil {
		return err
	}
	table, err := toc.Read(bytes.NewReader(p.tar))
	if err != nil {
		return err
	}
	index, err := os.Create(filepath.Join(p.dir, "index"))
	if err != nil {
		return err
	}
	defer index.Close()
	if err := erofs.Build(index, table, erofs.Options{DataSize: int64(len(p.tar))}); err != nil {
		return err
	}
	if p.cfg.Tree {
		p.layer, err = p.client.Tree(p.id, index)
		return err
	}
	p.layer = filepath.Join(p.dir, "layer")
	if err := os.Mkdir(p.layer, 0o755); err != nil {
		return err
	}
	_, err = bdi.Without(p.layer, func() error {
		const flags = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV
		return os.NewSyscallError("mount erofs", unix.Mount(index.Name(), p.layer, "erofs", flags, "device="+path))
	})
	return err
}

// reader starts a process that reads a file of the layer, and waits until its
// read waits.
func (p *probe) reader(ctx context.Context, name string) (*exec.Cmd, span, error) {
	args := append(p.cfg.Exec[1:len(p.cfg.Exec):len(p.cfg.Exec)], "-read", filepath.Join(p.layer, name))
	cmd := exec.Command(p.cfg.Exec[0], args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, span{}, err
	}
	select {
	case w := <-p.wants:
		return cmd, w, nil
	case <-time.After(probeStep):
	case <-ctx.Done():
	}
	p.stop(cmd)
	return nil, span{}, errors.Join(ctx.Err(), errors.New("a read of absent bytes is not told of"))
}

// stop ends a reader, even one that only an error can wake.
func (p *probe) stop(cmd *exec.Cmd) error {
	cmd.Process.Kill()
	late := time.AfterFunc(probeStep, func() { p.client.Abort(p.id) })
	defer late.Stop()
	start := time.Now()
	cmd.Wait()
	if time.Since(start) >= probeStep {
		return errors.New("a reader that waits for absent bytes cannot be killed")
	}
	return nil
}

func (p *probe) failOne(ctx context.Context) error {
	cmd, _, err := p.reader(ctx, "fails")
	if err != nil {
		return err
	}
	p.client.Abort(p.id)
	late := time.AfterFunc(probeStep, func() { cmd.Process.Kill() })
	defer late.Stop()
	if cmd.Wait() == nil {
		return errors.New("a read that failed gave no error")
	}
	time.Sleep(failsFor)
	for len(p.wants) > 0 {
		<-p.wants
	}
	return nil
}

func (p *probe) killOne(ctx context.Context) error {
	cmd, _, err := p.reader(ctx, "killed")
	if err != nil {
		return err
	}
	return p.stop(cmd)
}

// compare brings the bytes and reads them.
func (p *probe) compare(ctx context.Context) error {
	if _, err := p.data.WriteAt(p.tar, 0); err != nil {
		return err
	}
	p.present.Add(0, int64(len(p.tar)))
	p.client.Present(p.id, 0, int64(len(p.tar)))
	late := time.AfterFunc(probeStep, func() { p.client.Abort(p.id) })
	defer late.Stop()
	for _, name := range []string{"fails", "killed"} {
		got, err := os.ReadFile(filepath.Join(p.layer, name))
		if err != nil {
			return fmt.Errorf("read what has come: %w", err)
		}
		if !bytes.Equal(got, p.body) {
			return fmt.Errorf("%w: the kernel keeps wrong bytes after a read that %s", ErrUnusable, name)
		}
	}
	return ctx.Err()
}

// end takes everything away.
func (p *probe) end() error {
	var err error
	if p.client != nil {
		err = detach(filepath.Join(p.dir, "layer"))
		p.client.Remove(p.id)
		var busy error
		for range 100 {
			if busy = p.client.Shutdown(); busy == nil {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
		if busy != nil {
			err = errors.Join(err, p.client.Close(), detach(filepath.Join(p.dir, "datafs")))
		}
	}
	if p.data != nil {
		p.data.Close()
	}
	if p.present != nil {
		p.present.Close()
	}
	return errors.Join(err, os.RemoveAll(p.dir))
}
