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

// Probe implements checkpoint.Engine. It dumps and restarts sleep(1) and takes
// about two seconds; its result is not kept.
func (e *Engine) Probe(ctx context.Context) (checkpoint.Ability, error) {
	a := checkpoint.Ability{Engine: "dmtcp", PageSize: os.Getpagesize(), Limits: []string{
		"programs that are linked statically, or make system calls without the C library as Go's do: use CRIU",
	}}
	if e.cfg.Prefix == "" {
		return a, fmt.Errorf("%w: DMTCP is not installed: put dmtcp_launch in PATH", checkpoint.ErrUnable)
	}
	var un unix.Utsname
	if err := unix.Uname(&un); err != nil {
		return a, err
	}
	a.Kernel = unix.ByteSliceToString(un.Release[:])
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	out, err := e.tool(ctx, "dmtcp_launch", "--version").Output()
	if err == nil {
		first, _, _ := strings.Cut(string(out), "\n")
		a.Version = strings.TrimPrefix(first, "dmtcp_launch (DMTCP) ")
		err = e.tryOut(ctx)
	}
	if err != nil {
		return a, fmt.Errorf("%w: %w", checkpoint.ErrUnable, err)
	}
	return a, nil
}

func (e *Engine) tool(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(e.cfg.Prefix, "bin", name), args...)
	cmd.WaitDelay = time.Second
	return cmd
}

func (e *Engine) tryOut(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "dmtcp-probe-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := e.underCoordinator(ctx, dir, "dmtcp_launch", []string{"--no-gzip", "--ckptdir", dir, "sleep", "60"}, "--bcheckpoint"); err != nil {
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
func (e *Engine) underCoordinator(ctx context.Context, dir, program string, args []string, command string) error {
	file := filepath.Join(dir, "port")
	_ = os.Remove(file)
	cmd := e.tool(ctx, program, append([]string{"--new-coordinator", "--coord-port", "0", "--port-file", file, "--quiet", "--quiet"}, args...)...)
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
