package containerd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/engine/logfile"
	"dewpoint/internal/engine/metadb"
	"dewpoint/internal/engine/process"
	"dewpoint/internal/engine/tool"
	"dewpoint/internal/sched"
)

const (
	startTimeout   = 30 * time.Second // until a new containerd's socket answers
	minBackoff     = 50 * time.Millisecond
	maxBackoff     = 10 * time.Second
	steadyAfter    = 30 * time.Second // alive for so long, the backoff starts anew
	maxLog         = 8 << 20          // bytes of containerd.log before it is begun anew
	maxSocketPath  = 107 - len(".ttrpc")
	installRemedy  = "install the package containerd (apt-get install containerd runc), or name the program in the configuration"
	containerdProg = "containerd"
)

// collector has containerd's heap collected less often, up to some MiB, unless dewd's own environment says
// otherwise.
var collector = []string{"GOGC=400", "GOMEMLIMIT=48MiB"}

// Private keeps one containerd of the engine's own alive.
type Private struct {
	log     *slog.Logger
	program string
	dir     string // STATE/containerd
	config  string // path of the configuration file
	socket  string
	db      string // of containerd
	synced  bool   // it flushes that

	cancel context.CancelFunc
	work   sync.WaitGroup // the goroutines that cancel ends

	mu   sync.Mutex
	proc *process.Process // guarded by mu
}

// StartPrivate adopts the containerd that a former daemon left running, unless
// its program or configuration differ from what is wanted now, else starts one.
func StartPrivate(ctx context.Context, cfg Config) (*Private, error) {
	program, err := findContainerd(cfg.Program)
	if err != nil {
		return nil, err
	}
	s := &Private{log: cfg.Log, program: program, dir: filepath.Join(cfg.State, "containerd")}
	s.socket = filepath.Join(s.dir, "containerd.sock")
	s.config = filepath.Join(s.dir, "config.toml")
	s.db = filepath.Join(cfg.Root, "containerd", "io.containerd.metadata.v1.bolt", "meta.db")
	if len(s.socket) > maxSocketPath {
		return nil, fmt.Errorf("socket path %s is longer than %d bytes: choose a shorter state directory", s.socket,
			maxSocketPath)
	}
	if err := os.MkdirAll(s.dir, 0o711); err != nil {
		return nil, err
	}
	changed, err := s.configure(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := s.adoptOrLaunch(ctx, changed); err != nil {
		return nil, err
	}
	run, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	s.work.Go(func() { s.supervise(run) })
	if !s.synced {
		s.work.Go(func() { metadb.Keep(run, s.db, s.log) })
	}
	return s, nil
}

// Socket is where it answers; Program what it executes; StateDir its own state directory.
func (s *Private) Socket() string   { return s.socket }
func (s *Private) Program() string  { return s.program }
func (s *Private) StateDir() string { return filepath.Join(s.dir, "state") }

// findContainerd looks beside this program, then in PATH.
func findContainerd(configured string) (string, error) {
	if configured != "" {
		if _, err := exec.LookPath(configured); err != nil {
			return "", fmt.Errorf("%w: containerd: %w; %s", tool.ErrMissing, err, installRemedy)
		}
		return filepath.Abs(configured)
	}
	if self, err := os.Executable(); err == nil {
		if p := filepath.Join(filepath.Dir(self), containerdProg); tool.Executable(p) {
			return p, nil
		}
	}
	p, err := exec.LookPath(containerdProg)
	if err != nil {
		return "", fmt.Errorf("%w: containerd: %w; %s", tool.ErrMissing, err, installRemedy)
	}
	return filepath.Abs(p)
}

// configure writes the configuration file and says whether it differs from
// the one that was there. The program's identity is part of it.
func (s *Private) configure(ctx context.Context, cfg Config) (bool, error) {
	line, v, err := versionOf(ctx, s.program)
	if err != nil {
		return false, err
	}
	if cfg.Program == "" {
		line, v = s.notOlder(ctx, line, v)
	}
	s.synced = synced(v)
	text := fmt.Sprintf("# %s: %s\n", s.program, line) +
		privateConfig(cfg, v, filepath.Join(cfg.Root, "containerd"), s.StateDir(), s.socket)
	old, err := os.ReadFile(s.config)
	if err == nil && string(old) == text {
		return false, nil
	}
	return true, os.WriteFile(s.config, []byte(text), 0o600)
}

// notOlder stays with the program of the last start if that is newer than what
// was found now, as happens to a daemon that is started with another PATH: an
// older containerd takes shims whose protocol it does not know for dead, and
// kills their containers.
func (s *Private) notOlder(ctx context.Context, line string, v containerdVersion) (string,
	containerdVersion) {
	b, _ := os.ReadFile(s.config)
	first, _, _ := strings.Cut(strings.TrimPrefix(string(b), "# "), "\n")
	last, _, _ := strings.Cut(first, ": ")
	if last == s.program || !tool.Executable(last) {
		return line, v
	}
	lastLine, lastVersion, err := versionOf(ctx, last)
	if err != nil || v.atLeast(lastVersion.major, lastVersion.minor, lastVersion.patch) {
		return line, v
	}
	s.log.Warn("containerd stays the newer one of the last start: put another beside dewd to have that", "program", last, "found", s.program)
	s.program = last
	return lastLine, lastVersion
}

func versionOf(ctx context.Context, program string) (string, containerdVersion, error) {
	out, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return "", containerdVersion{}, fmt.Errorf("%s --version: %w", program, err)
	}
	line := strings.TrimSpace(string(out))
	v, err := parseVersion(line)
	return line, v, err
}

func (s *Private) adoptOrLaunch(ctx context.Context, changed bool) error {
	if p := s.running(); p != nil {
		if !changed && s.awaitSocket(ctx, p) == nil {
			s.log.Info("adopted containerd", "pid", p.PID)
			s.proc = p
			return nil
		}
		s.log.Info("restarting containerd", "pid", p.PID, "changed", changed)
		if err := p.Terminate(ctx); err != nil {
			return err
		}
	}
	if err := metadb.Prepare(s.db, s.synced, s.log); err != nil {
		return err
	}
	return s.launch(ctx)
}

// running finds the process that the pid file names, nil if it is gone.
func (s *Private) running() *process.Process {
	b, err := os.ReadFile(s.pidFile())
	if err != nil {
		return nil
	}
	var pid int
	var start uint64
	if _, err := fmt.Sscanf(string(b), "%d %d", &pid, &start); err != nil {
		return nil
	}
	p, err := process.Open(pid, nil)
	if err != nil {
		return nil
	}
	if got, err := process.Started(pid); err != nil || got != start {
		p.Close()
		return nil
	}
	return p
}

func (s *Private) pidFile() string { return filepath.Join(s.dir, "containerd.pid") }
func (s *Private) logFile() string { return filepath.Join(s.dir, "containerd.log") }

// launch starts containerd in a session of its own and returns once its
// socket answers.
func (s *Private) launch(ctx context.Context) error {
	logf, err := s.openLog()
	if err != nil {
		return err
	}
	defer logf.Close()
	cmd := exec.Command(s.program, "--config", s.config)
	cmd.Stdout, cmd.Stderr = logf, logf
	cmd.Dir = "/"
	cmd.Env = slices.Concat(collector, os.Environ(), []string{"PATH=" + searchPath(filepath.Dir(s.program))})
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := sched.Start(cmd); err != nil {
		return fmt.Errorf("start containerd: %w", err)
	}
	p, err := process.Open(cmd.Process.Pid, cmd)
	if err != nil {
		return err
	}
	start, err := process.Started(p.PID)
	if err == nil {
		err = os.WriteFile(s.pidFile(), fmt.Appendf(nil, "%d %d\n", p.PID, start), 0o600)
	}
	if err == nil {
		err = s.awaitSocket(ctx, p)
	}
	if err != nil {
		_ = p.Terminate(context.WithoutCancel(ctx))
		return fmt.Errorf("start containerd: %w; the end of %s:\n%s", err, s.logFile(),
			logfile.Tail(s.logFile(), 5))
	}
	s.mu.Lock()
	s.proc = p
	s.mu.Unlock()
	s.log.Info("started containerd", "pid", p.PID, "program", s.program)
	return nil
}

func (s *Private) openLog() (*os.File, error) {
	flags := os.O_CREATE | os.O_APPEND | os.O_WRONLY
	if st, err := os.Stat(s.logFile()); err == nil && st.Size() > maxLog {
		flags |= os.O_TRUNC
	}
	return os.OpenFile(s.logFile(), flags, 0o640)
}

// searchPath puts containerd's directory first, so that it finds the shim of
// its own version, and makes sure that runc and iptables are found.
func searchPath(dir string) string {
	return strings.Join([]string{dir, os.Getenv("PATH"),
		"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, ":")
}

// awaitSocket returns nil once the socket accepts, an error if p dies before.
func (s *Private) awaitSocket(ctx context.Context, p *process.Process) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for {
		c, err := net.Dial("unix", s.socket)
		if err == nil {
			return c.Close()
		}
		if p.Exited(2 * time.Millisecond) {
			return errors.New("containerd exited")
		}
		if ctx.Err() != nil {
			return fmt.Errorf("containerd's socket: %w", err)
		}
	}
}

// supervise restarts containerd until ctx ends.
func (s *Private) supervise(ctx context.Context) {
	delay := minBackoff
	for {
		began := time.Now()
		gctx, stop := context.WithCancel(ctx)
		guarded := make(chan struct{})
		go func() { defer close(guarded); s.guard(gctx, s.proc) }()
		died := s.proc.Wait(ctx)
		stop()
		<-guarded
		if !died {
			return
		}
		s.log.Error("containerd died", "pid", s.proc.PID, "log", logfile.Tail(s.logFile(), 1))
		if time.Since(began) > steadyAfter {
			delay = minBackoff
		}
		for {
			if !sched.Sleep(ctx, delay) {
				return
			}
			delay = min(2*delay, maxBackoff)
			err := s.launch(ctx)
			if err == nil {
				break
			}
			s.log.Error("restart containerd", "err", err)
		}
	}
}

const (
	guardEvery = 5 * time.Second
	deafAfter  = 3 // refused connections in a row
)

// guard ends a containerd that lives but cannot be reached, as when its socket
// was removed, so that it is started anew.
func (s *Private) guard(ctx context.Context, p *process.Process) {
	for refused := 0; sched.Sleep(ctx, guardEvery); {
		c, err := net.DialTimeout("unix", s.socket, guardEvery)
		if err == nil {
			c.Close()
			refused = 0
			continue
		}
		if refused++; refused < deafAfter {
			continue
		}
		s.log.Error("containerd cannot be reached, ending it", "pid", p.PID, "err", err)
		_ = p.Signal(unix.SIGTERM)
		if sched.Sleep(ctx, process.StopTimeout) { // ctx ends when it is gone
			_ = p.Signal(unix.SIGKILL)
		}
		return
	}
}

// Release ends the supervision, not containerd.
func (s *Private) Release() {
	s.cancel()
	s.work.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.proc.Detach()
}

// Stop ends containerd, not its containers.
func (s *Private) Stop(ctx context.Context) error {
	s.cancel()
	s.work.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.proc.Terminate(ctx); err != nil {
		return err
	}
	return errors.Join(os.Remove(s.pidFile()), metadb.Settle(s.db))
}
