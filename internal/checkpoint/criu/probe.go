package criu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/checkpoint"
)

// versions are what a probe's result depends on.
type versions struct{ program, criu, runc, kernel string }

// Probe keeps the contract of checkpoint.Engine. What it could do is remembered
// until a version changes; what it could not is tried again.
func (e *Engine) Probe(ctx context.Context) (checkpoint.Ability, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if missing := missingCapabilities(); len(missing) > 0 {
		return checkpoint.Ability{},
			fmt.Errorf("%w: dewd lacks %s: run it as root of the machine, with these", checkpoint.ErrUnable,
				strings.Join(missing, ", "))
	}
	v, err := e.versions(ctx)
	if err != nil {
		return checkpoint.Ability{}, err
	}
	if e.ability != nil && e.of == v {
		return *e.ability, nil
	}
	e.ability = nil
	a := checkpoint.Ability{
		Engine: e.Name(), Version: v.criu, Runc: v.runc, Kernel: v.kernel,
		PageSize: os.Getpagesize(), CPU: checkpoint.CPUFeatures(), CgroupMode: cgroupMode(),
	}
	if err := learnFeatures(ctx, v.program); err != nil {
		e.log.Warn("restores will be slower", "err", err)
	}
	if err := e.dumpAndRestore(ctx); err != nil {
		return checkpoint.Ability{},
			fmt.Errorf("%w: CRIU %s cannot dump and restore a small process here: %w", checkpoint.ErrUnable, v.criu,
				err)
	}
	a.Lazy = exec.CommandContext(ctx, e.cfg.Program, "check", "--feature", "uffd-noncoop").Run() == nil
	if !hasCapability(unix.CAP_SYS_RESOURCE) {
		a.Limits = append(a.Limits, "only processes of root can be dumped: for others dewd needs CAP_SYS_RESOURCE")
	}
	e.ability, e.of = &a, v
	return a, nil
}

func (e *Engine) versions(ctx context.Context) (v versions, err error) {
	v.program = e.cfg.Program
	if v.criu, err = version(ctx, v.program); err != nil {
		return v, err
	}
	if !newEnough(v.criu) {
		return v, fmt.Errorf("%w: CRIU %s at %s is too old: %s", checkpoint.ErrUnable, v.criu, v.program, remedy)
	}
	if v.runc, err = runcVersion(ctx, e.cfg.Runc); err != nil {
		return v, err
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return v, err
	}
	v.kernel = unix.ByteSliceToString(u.Release[:])
	return v, nil
}

// needed are the capabilities without which CRIU or runc cannot work.
var needed = map[string]int{
	"CAP_SYS_ADMIN": unix.CAP_SYS_ADMIN, "CAP_SYS_PTRACE": unix.CAP_SYS_PTRACE,
	"CAP_NET_ADMIN": unix.CAP_NET_ADMIN,
}

func missingCapabilities() []string {
	var missing []string
	for _, name := range []string{"CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_NET_ADMIN"} {
		if !hasCapability(needed[name]) {
			missing = append(missing, name)
		}
	}
	return missing
}

const probeTimeout = 20 * time.Second

// probe is what a shell does as the first process of a PID namespace, whose end is that of all it has
// started, what CRIU has forked and restored among it. Its arguments are CRIU, a directory and how many
// seconds to sleep; the socket that listens is descriptor 3.
const probe = `
mount --make-rslave / && mount -t proc proc /proc || exit 1
setsid sleep "$3" </dev/null >/dev/null 2>&1 &
exec 3<&-
until read -r name <"/proc/$!/comm" && [ "$name" = sleep ]; do [ -e "/proc/$!" ] || exit 1; done
"$1" dump -t "$!" -D "$2" -o dump.log -v3 --manage-cgroups=ignore || exit 1
wait "$!"
: >"$2/dumped"
"$1" restore -D "$2" -o restore.log -v3 --manage-cgroups=ignore
`

// dumpAndRestore does so with a process that sleeps and holds a listening socket. All of it ends with
// the daemon, even if that is killed.
func (e *Engine) dumpAndRestore(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	dir, err := os.MkdirTemp(e.cfg.State, probeDir)
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	p := exec.CommandContext(ctx, "sh", "-c", probe, "probe", e.cfg.Program, dir,
		strconv.Itoa(int(probeTimeout/time.Second)))
	var out bytes.Buffer
	p.Dir, p.Stdout, p.Stderr = "/", &out, &out
	p.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL,
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS}
	runtime.LockOSThread() // whose end would be the signal
	defer runtime.UnlockOSThread()
	if err := startListening(ctx, p); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- p.Wait() }()
	for {
		select {
		case err := <-ended:
			return explainProbe(dir, err, out.Bytes())
		case <-time.After(2 * time.Millisecond):
		}
		if b, err := os.ReadFile(filepath.Join(dir, restoreLog)); err == nil &&
			bytes.Contains(b, []byte("Tasks resumed")) {
			_ = p.Process.Kill()
			<-ended
			return nil
		}
	}
}

// startListening starts a program that alone has a listening socket, as descriptor 3.
func startListening(ctx context.Context, p *exec.Cmd) error {
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	l, err := c.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer l.Close()
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	defer f.Close()
	// What the daemon has inherited is not to be dumped with it; older kernels lack the call.
	_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	p.ExtraFiles = []*os.File{f}
	return p.Start()
}

// Of CRIU, in the probe's directory.
const dumpLog, restoreLog = "dump.log", "restore.log"

func explainProbe(dir string, err error, out []byte) error {
	if err == nil {
		err = errors.New("the process ended")
	}
	verb, log := "restore", filepath.Join(dir, restoreLog)
	if _, serr := os.Stat(filepath.Join(dir, "dumped")); serr != nil {
		verb, log = "dump", filepath.Join(dir, dumpLog)
	}
	said := errorLines(log)
	if len(said) == 0 {
		said = []string{strings.TrimSpace(string(out))}
	}
	return fmt.Errorf("%s: %w: %s", verb, err, strings.Join(said, "; "))
}
