package dmtcp

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dewpoint/internal/checkpoint"
)

// limits are what of containers cannot be dumped by DMTCP.
var limits = []string{
	"DMTCP saves only containers that were started for it (--checkpoint, or the image's label), on a network of their own, as root, and with a C library like this node's",
	"DMTCP cannot save programs that are linked statically, or make system calls without the C library as Go's do: use CRIU",
}

const remedy = "no suite of Debian has it: build DMTCP 4 or newer, and have its dmtcp_launch in PATH"

// Probe implements checkpoint.Engine. It dumps and restarts sleep(1), which takes
// about two seconds. What it could do is remembered until the version changes;
// what it could not is tried again.
func (e *Engine) Probe(ctx context.Context) (checkpoint.Ability, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	a := checkpoint.Ability{Engine: e.Name(), PageSize: os.Getpagesize(), CPU: checkpoint.CPUFeatures(),
		Limits: limits}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	var err error
	if a.Version, err = e.version(ctx); err != nil {
		return checkpoint.Ability{}, fmt.Errorf("%w: %w", checkpoint.ErrUnable, err)
	}
	var un unix.Utsname
	if err := unix.Uname(&un); err != nil {
		return checkpoint.Ability{}, err
	}
	a.Kernel = unix.ByteSliceToString(un.Release[:])
	if e.ability != nil && e.ability.Version == a.Version {
		return *e.ability, nil
	}
	e.ability = nil
	if err := e.tryOut(ctx); err != nil {
		return checkpoint.Ability{}, fmt.Errorf("%w: DMTCP %s: %w", checkpoint.ErrUnable, a.Version, err)
	}
	e.ability = &a
	return a, nil
}

const probeTimeout = 20 * time.Second

// programs are those that are needed.
var programs = []string{"dmtcp_launch", "dmtcp_coordinator", "dmtcp_command", "dmtcp_restart"}

// version looks whether the programs are there.
func (e *Engine) version(ctx context.Context) (string, error) {
	if e.cfg.Prefix == "" {
		return "", fmt.Errorf("DMTCP is not installed: %s", remedy)
	}
	for _, p := range programs {
		if _, err := os.Stat(e.program(p)); err != nil {
			return "", fmt.Errorf("DMTCP is not whole: %w: %s", err, remedy)
		}
	}
	out, err := e.tool(ctx, "dmtcp_launch", "--version").Output()
	if err != nil {
		return "", fmt.Errorf("dmtcp_launch --version: %w: %s", err, remedy)
	}
	line, _, _ := strings.Cut(string(out), "\n")
	v, ok := strings.CutPrefix(line, "dmtcp_launch (DMTCP) ")
	if !ok {
		return "", fmt.Errorf("%s --version says %q: is it DMTCP? %s", e.program("dmtcp_launch"), line, remedy)
	}
	return v, nil
}

func (e *Engine) program(name string) string { return filepath.Join(e.cfg.Prefix, "bin", name) }

func (e *Engine) tool(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, e.program(name), args...)
	cmd.WaitDelay = time.Second
	return cmd
}

func (e *Engine) tryOut(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "dmtcp-probe-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := e.underCoordinator(ctx, dir, "dmtcp_launch",
		[]string{"--no-gzip", "--ckptdir", dir, "sleep", "60"}, "--bcheckpoint"); err != nil {
		return fmt.Errorf("dump a process: %w", err)
	}
	images, err := filepath.Glob(filepath.Join(dir, "*.dmtcp"))
	if err != nil || len(images) != 1 {
		return fmt.Errorf("a dump gave %d images (%v)", len(images), err)
	}
	if err := e.underCoordinator(ctx, dir, "dmtcp_restart", images, "--list"); err != nil {
		return fmt.Errorf("restart a process: %w", err)
	}
	return nil
}

// underCoordinator starts something with a coordinator of its own, gives that a
// command once it knows a process, and ends both.
func (e *Engine) underCoordinator(ctx context.Context, dir, program string, args []string,
	command string) error {
	file := filepath.Join(dir, "port")
	_ = os.Remove(file)
	cmd := e.tool(ctx, program,
		append([]string{"--new-coordinator", "--coord-port", "0", "--port-file", file, "--quiet", "--quiet"},
			args...)...)
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	port, err := e.awaitProcess(ctx, file)
	if err == nil {
		var out []byte
		if out, err = e.tool(ctx, "dmtcp_command", "--coord-port", port, command).CombinedOutput(); err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
	}
	if port != "" {
		_ = e.tool(context.WithoutCancel(ctx), "dmtcp_command", "--coord-port", port, "--quit").Run()
	}
	select {
	case <-done:
	case <-ctx.Done():
		_ = cmd.Process.Kill()
		<-done
	}
	return err
}

// awaitProcess waits until the coordinator whose port is in file has a process that runs.
func (e *Engine) awaitProcess(ctx context.Context, file string) (port string, err error) {
	for {
		text, _ := os.ReadFile(file)
		if port = strings.TrimSpace(string(text)); port != "" {
			out, err := e.tool(ctx, "dmtcp_command", "--coord-port", port, "--list").Output()
			if err == nil && strings.Contains(string(out), "RUNNING") {
				return port, nil
			}
		}
		select {
		case <-ctx.Done():
			return port, fmt.Errorf("no process has come up under DMTCP: %w", ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}
