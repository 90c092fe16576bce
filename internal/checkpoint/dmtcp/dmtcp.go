// Package dmtcp checkpoints containers by DMTCP, which needs no privileges: its library is loaded into every
// process of the container at boot, and writes the process's memory by the process's own means.
//
// # A container that carries DMTCP
//
// A node's installation is mounted read-only at PrefixDir, and a directory for images at ImagesDir. Carry
// puts a first process before the application's command: a shell that runs DMTCP's coordinator, starts the
// application under it, hands on SIGTERM, and ends as the application's first process does. Revive does the
// same with a dump in the place of the command; it ends with the last process, whose status is lost. So the
// image must have /bin/sh and a C library like the node's, and its programs must be linked dynamically. Where
// DMTCP's own programs do not run, the application starts without it.
//
// Any program that reaches the coordinator's port can stop the application. The coordinator listens on all of
// the container's addresses: Carry refuses the host's network.
//
// # A dump
//
// The coordinator lets all processes write their images at one moment, and run on at once. The container is
// paused as soon as the images are written. If a file has changed in between, the dump is made again. If the
// coordinator does not finish within a minute, the processes may be stopped: only that error leaves a
// container other than it was.
//
// docs/design/checkpoints-dmtcp.md says what a dump does not carry over. The image files have the names that
// DMTCP gives them, and are all of a checkpoint.
package dmtcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/engine"
)

// Where a container finds DMTCP and writes images.
const (
	PrefixDir = "/run/dewpoint/dmtcp"
	ImagesDir = "/run/dewpoint/images"
)

// port is the coordinator's, in the container's own network.
const port = "7779"

// Containers is what of a container engine this one needs; engine.Engine has it.
type Containers interface {
	Pause(ctx context.Context, name string) error
	Resume(name string) error
	Exec(ctx context.Context, name string, s engine.ExecSpec) (status int, err error)
	// OwnDir is what is mounted at a container's ImagesDir.
	OwnDir(name string) string
	// Upper is a container's writable layer.
	Upper(ctx context.Context, name string) (dir string, err error)
}

// Config says what to dump with. All of it is needed.
type Config struct {
	Containers Containers
	Prefix     string // of the installation, with bin and lib below it; see Find. "" is one that is missing
}

// Engine is a checkpoint.Carrier.
type Engine struct {
	cfg Config

	mu      sync.Mutex
	ability *checkpoint.Ability // guarded by mu; nil until probed
}

// New makes an engine. It touches nothing until Probe or Dump.
func New(cfg Config) *Engine { return &Engine{cfg: cfg} }

// Find is the prefix of DMTCP: the configured one, else that of the dmtcp_launch in PATH, else "".
func Find(configured string) string {
	if configured != "" {
		return configured
	}
	launch, err := exec.LookPath("dmtcp_launch")
	if err == nil {
		launch, err = filepath.EvalSymlinks(launch)
	}
	if err != nil {
		return ""
	}
	return filepath.Dir(filepath.Dir(launch))
}

// Name is "dmtcp".
func (e *Engine) Name() string { return "dmtcp" }

// first is the container's first process: "sh -c first NAME COORDINATOR OWN COMMAND…".
// OWN is how many words of COMMAND are not the application's; 0 is a restart, which
// ends before the processes that it has made.
const first = `coordinator=$1 own=$2
shift 2
if ! "$coordinator" --version >/dev/null 2>&1; then
	shift $own
	exec "$@"
fi
trap 'kill -TERM -1' TERM INT
await() {
	while
		wait $1
		status=$?
		kill -0 $1 2>/dev/null
	do :; done
}
"$coordinator" --quiet --exit-on-last --coord-port ` + port + ` --ckptdir ` + ImagesDir + ` </dev/null >/dev/null 2>&1 &
coordinator=$!
"$@" &
await $!
[ $own -gt 0 ] || [ $status -ne 0 ] || await $coordinator
exit $status`

func firstProcess(own int, command ...string) []string {
	return append([]string{"/bin/sh", "-c", first, "dewpoint", PrefixDir + "/bin/dmtcp_coordinator",
		strconv.Itoa(own)}, command...)
}

var (
	join   = []string{"--join-coordinator", "--coord-port", port, "--quiet", "--quiet"}
	launch = append(append([]string{PrefixDir + "/bin/dmtcp_launch"}, join...), "--no-gzip", "--ckptdir",
		ImagesDir)
)

// boot is the command of a container that is to be dumped, for its application's.
func boot(command []string) []string {
	return firstProcess(len(launch), slices.Concat(launch, command)...)
}

// Carry implements checkpoint.Carrier.
func (e *Engine) Carry(s *engine.Spec) error {
	user := s.User
	if user == "" {
		user = s.Image.Spec.Config.User
	}
	user, _, _ = strings.Cut(user, ":")
	switch {
	case s.Net == "" || s.Net == engine.NetHost:
		return &checkpoint.UnfitError{What: "it is on the host's network, where whoever reaches DMTCP's coordinator could stop it", Remedy: "give it a network of its own (--net bridge, or -p)"}
	case user != "" && user != "root" && user != "0":
		return &checkpoint.UnfitError{What: "its user " + user +
			" is not root, which checkpoints by DMTCP were not tried with", Remedy: byCRIU}
	}
	command, err := s.Args()
	if err != nil {
		return err
	}
	e.dress(s, boot(command), "")
	return nil
}

// Revive implements checkpoint.Carrier.
func (e *Engine) Revive(s *engine.Spec, dir string) error {
	command, err := restart(dir)
	if err == nil {
		e.dress(s, command, dir)
	}
	return err
}

// dress gives a container DMTCP, a command, and a directory of its own that begins with images.
func (e *Engine) dress(s *engine.Spec, command []string, images string) {
	s.Entrypoint, s.Cmd = command, nil
	s.Mounts = append(slices.Clone(s.Mounts),
		specs.Mount{Destination: PrefixDir, Type: "bind", Source: e.cfg.Prefix,
			Options: []string{"rbind", "rprivate", "ro"}})
	s.Own = &engine.Own{Target: ImagesDir, From: images}
}

// Bare implements checkpoint.Carrier.
func (e *Engine) Bare(o *specs.Spec) *specs.Spec {
	bare, process := *o, *o.Process
	if dressed := boot(nil); len(process.Args) > len(dressed) &&
		slices.Equal(process.Args[:len(dressed)], dressed) {
		process.Args = process.Args[len(dressed):]
	}
	bare.Process = &process
	bare.Mounts = slices.DeleteFunc(slices.Clone(o.Mounts), func(m specs.Mount) bool {
		return m.Destination == PrefixDir || m.Destination == ImagesDir
	})
	return &bare
}

// restart is the command of a container that starts from the images in dir, which
// are to be at its ImagesDir.
func restart(dir string) ([]string, error) {
	images, err := filepath.Glob(filepath.Join(dir, "*.dmtcp"))
	if err == nil && len(images) == 0 {
		err = fmt.Errorf("no images of DMTCP in %s: %w", dir, fs.ErrNotExist)
	}
	if err != nil {
		return nil, err
	}
	args := append([]string{PrefixDir + "/bin/dmtcp_restart"}, join...)
	args = append(args, "--no-strict-checking", "--ckptdir", ImagesDir)
	for _, i := range images {
		args = append(args, path.Join(ImagesDir, filepath.Base(i)))
	}
	return firstProcess(0, args...), nil
}

// Awake implements checkpoint.Carrier: it asks the coordinator again and again.
func (e *Engine) Awake(ctx context.Context, name string) error {
	for {
		said, status, err := e.ask(ctx, name, "--status")
		switch {
		case errors.Is(err, engine.ErrNotRunning), errors.Is(err, engine.ErrNotFound):
			return fmt.Errorf("it has ended before its processes ran on; \"dew logs\" of a container that is kept may say why: %w", err)
		case ctx.Err() != nil:
			return fmt.Errorf("its processes do not run on: %w: %s", context.Cause(ctx), said)
		case err == nil && status == 0 && strings.Contains(said, "RUNNING=yes"):
			return nil
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// ask gives a container's coordinator a command.
func (e *Engine) ask(ctx context.Context, name, command string) (said string, status int, err error) {
	var out bytes.Buffer
	status, err = e.cfg.Containers.Exec(ctx, name,
		engine.ExecSpec{Args: []string{PrefixDir + "/bin/dmtcp_command", "--coord-port", port, command},
			Stdout: &out, Stderr: &out})
	return strings.TrimSpace(out.String()), status, err
}

// limit bounds the writing of images. A container that is not done by then may be
// stopped for good: it is to be removed.
const limit = time.Minute

// tries bounds how often a dump is made again because a file has changed.
const tries = 3

// Dump implements checkpoint.Engine.
func (e *Engine) Dump(ctx context.Context, c checkpoint.Container, dir string,
	frozen func(ctx context.Context) error) (checkpoint.Dumped, error) {
	d, err := examine(c)
	if err != nil {
		return d, err
	}
	if _, err := os.Stat(dir); err != nil {
		return d, err
	}
	resume, err := e.write(ctx, c.Name, &d)
	if err != nil {
		return d, err
	}
	began := time.Now()
	err = moveImages(e.images(c.Name), dir, &d)
	if err == nil {
		err = frozen(ctx)
	}
	d.Paused += time.Since(began)
	return d, errors.Join(err, resume())
}

func (e *Engine) images(name string) string { return e.cfg.Containers.OwnDir(name) }

// write has the images written and leaves the container paused, with nothing
// changed in its files since.
func (e *Engine) write(ctx context.Context, name string, d *checkpoint.Dumped) (resume func() error,
	err error) {
	resume = func() error { return e.cfg.Containers.Resume(name) }
	for range tries {
		began := time.Now()
		at, err := e.command(ctx, name)
		if err != nil {
			return nil, err
		}
		if err := e.cfg.Containers.Pause(ctx, name); err != nil {
			return nil, err
		}
		d.Paused = time.Since(began)
		same, err := e.unchanged(ctx, name, at)
		if err == nil && same {
			return resume, nil
		}
		if err := errors.Join(err, resume()); err != nil {
			return nil, err
		}
	}
	return nil, &checkpoint.UnfitError{What: "the container changes files all the time",
		Remedy: "checkpoint it when it is idle, or by CRIU"}
}

// command has all processes write their images, and says when the last was written.
func (e *Engine) command(ctx context.Context, name string) (at time.Time, err error) {
	if err := clear(e.images(name)); err != nil {
		return at, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done after %v", limit))
	defer cancel()
	said, status, err := e.ask(ctx, name, "--bcheckpoint")
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err == nil && status != 0 {
		err = fmt.Errorf("status %d: %s", status, said)
	}
	if err != nil {
		return at, fmt.Errorf("dmtcp_command in container %s: %w", name, err)
	}
	images, err := filepath.Glob(filepath.Join(e.images(name), "*.dmtcp"))
	for _, image := range images {
		if i, err := os.Stat(image); err == nil && i.ModTime().After(at) {
			at = i.ModTime()
		}
	}
	if err == nil && at.IsZero() {
		err = &checkpoint.UnfitError{What: "no process of the container carries DMTCP",
			Remedy: "start it for checkpoints by DMTCP; programs that are linked statically need CRIU"}
	}
	return at, err
}

// unchanged reports whether nothing in the writable layer has changed since then.
func (e *Engine) unchanged(ctx context.Context, name string, since time.Time) (bool, error) {
	upper, err := e.cfg.Containers.Upper(ctx, name)
	if err != nil {
		return false, err
	}
	same := true
	err = filepath.WalkDir(upper, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		changed, err := changeTime(file)
		if err == nil && !changed.Before(since) {
			same = false
			return fs.SkipAll
		}
		return err
	})
	return same, err
}

// clear makes dir an empty directory.
func clear(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, f := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, f.Name())))
	}
	return err
}

// moveImages takes what was written to where it is kept; the scripts that DMTCP
// leaves beside the images are of no use here.
func moveImages(from, to string, d *checkpoint.Dumped) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, f := range entries {
		if strings.HasPrefix(f.Name(), "dmtcp_restart_script") {
			continue
		}
		if i, err := f.Info(); err == nil && strings.HasSuffix(f.Name(), ".dmtcp") {
			d.Pages += i.Size()
		}
		if err := move(filepath.Join(from, f.Name()), filepath.Join(to, f.Name())); err != nil {
			return err
		}
	}
	return clear(from)
}

// move renames, or copies where the file systems differ.
func move(from, to string) error {
	if os.Rename(from, to) == nil {
		return nil
	}
	i, err := os.Stat(from)
	if err != nil {
		return err
	}
	if i.IsDir() {
		return os.CopyFS(to, os.DirFS(from))
	}
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Close())
}

func pidDir(pid int) string { return "/proc/" + strconv.Itoa(pid) }
