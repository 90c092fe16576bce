// Package criu checkpoints containers by CRIU, through containerd and runc.
//
// # A dump
//
// Nothing of the container may change between its memory and its files, so the
// container's cgroup is frozen first. CRIU, which runc starts, finds it frozen,
// seizes every thread, has each process tell what only it knows by a piece of
// code that is lent to it for that, writes all into a directory, and leaves the
// cgroup as frozen as it was. Then the writable layer is copied, and the
// container runs on. It sees a jump of its clock, and no more.
//
// What belongs not to the container alone cannot be dumped: a connection to a
// client (closed in what is restored), an io_uring, a device, a terminal,
// a command that exec has started. Unfit finds what it can before anything is
// stopped, the rest is read from CRIU's log.
//
// # A restore
//
// The container engine does that, with a container of its own (engine.Restore),
// and RestoreConfig's lines. CRIU joins the new container's network namespace
// and cgroup, mounts as the new container's mounts are, and makes the processes
// with the numbers that they had, inside a new process namespace.
//
// # What a node needs
//
// CRIU 4.2 or newer: older ones fail with newer kernels in ways that their own
// check does not see, so Probe dumps and restores a process. CAP_SYS_ADMIN, and
// to dump processes that are not root's CAP_SYS_RESOURCE too.
package criu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/engine"
)

// Containers stops, dumps and resumes containers; engine.Engine does.
type Containers interface {
	PrepareDump(ctx context.Context, name string) error
	Pause(ctx context.Context, name string) error
	Resume(name string) error
	Dump(ctx context.Context, name string, d engine.DumpSpec) error
}

// Config says what to dump with.
type Config struct {
	Containers Containers
	Program    string // CRIU; see Find. "" is one that is missing
	Runc       string // default "runc" in PATH
	State      string // directory for what is gone after a reboot
	Log        *slog.Logger
}

// Engine is a checkpoint.Engine.
type Engine struct {
	cfg Config
	log *slog.Logger

	mu      sync.Mutex
	ability *checkpoint.Ability // guarded by mu; nil until probed
	of      versions            // guarded by mu; what it was found with
}

// New makes an engine, and removes what one that crashed has left in State, and CRIU in /tmp.
func New(cfg Config) *Engine {
	for _, pattern := range []string{dumpDir, probeDir} {
		left, _ := filepath.Glob(filepath.Join(cfg.State, pattern))
		for _, d := range left {
			_ = os.RemoveAll(d)
		}
	}
	sweepYards()
	cfg.Runc = cmp.Or(cfg.Runc, "runc")
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Engine{cfg: cfg, log: cfg.Log}
}

// Directories in State, while they are used.
const dumpDir, probeDir = "criu-dump-*", "criu-probe-*"

// Name is "criu".
func (e *Engine) Name() string { return "criu" }

// ghostLimit is up to what size files are dumped that have no name any more.
const ghostLimit = "256M"

// dumpConfig is CRIU's configuration for a dump. Cgroups are the container
// engine's business. Nothing is to be kept from the network, since no
// connection is kept. watched are paths that CRIU would not find.
func dumpConfig(o checkpoint.DumpOptions, watched []string) []string {
	c := []string{"manage-cgroups ignore", "network-lock skip", "ghost-limit " + ghostLimit}
	if !o.RefuseTCP {
		c = append(c, "tcp-close", "skip-in-flight")
	}
	for _, p := range watched {
		if !strings.ContainsAny(p, "\"\\\n") {
			c = append(c, `irmap-scan-path "`+p+`"`)
		}
	}
	return c
}

// RestoreConfig is CRIU's configuration for a restore, for engine.Restore. With
// lazy, memory comes from the server at the socket in the engine's WorkDir.
func RestoreConfig(lazy bool) []string {
	c := []string{"manage-cgroups ignore", "tcp-close", "file-locks", "verbosity 2"}
	if lazy {
		c = append(c, "lazy-pages")
	}
	return c
}

// Dump keeps the contract of checkpoint.Engine.
func (e *Engine) Dump(ctx context.Context, c checkpoint.Container, dir string,
	frozen func(ctx context.Context) error) (checkpoint.Dumped, error) {
	d, err := e.dump(ctx, c, dir, frozen)
	if err != nil {
		return d, fmt.Errorf("checkpoint %s: %w", c.Name, err)
	}
	return d, nil
}

func (e *Engine) dump(ctx context.Context, c checkpoint.Container, dir string,
	frozen func(ctx context.Context) error) (d checkpoint.Dumped, err error) {
	found, err := examine(c)
	if err != nil {
		return d, err
	}
	d.Processes, d.Threads = found.processes, found.threads
	work, err := os.MkdirTemp(e.cfg.State, dumpDir)
	if err != nil {
		return d, err
	}
	defer os.RemoveAll(work)
	sweepYards()
	if err := e.cfg.Containers.PrepareDump(ctx, c.Name); err != nil {
		return d, err
	}
	to := engine.DumpSpec{Dir: dir, Work: work, Config: dumpConfig(c.Options, found.watched)}
	if d.Paused, err = e.still(ctx, c.Name, to, frozen); err != nil {
		return d, err
	}
	if err := rearmTimers(filepath.Join(dir, "files.img")); err != nil {
		d.Warnings = append(d.Warnings, err.Error())
	}
	if d.Pages, err = pagesWritten(filepath.Join(work, "stats-dump")); err != nil {
		d.Warnings = append(d.Warnings, err.Error())
	}
	return d, nil
}

// still does what has to be done while nothing runs, and says how long that took.
func (e *Engine) still(ctx context.Context, name string, to engine.DumpSpec,
	frozen func(ctx context.Context) error) (paused time.Duration, err error) {
	began := time.Now()
	if err := e.cfg.Containers.Pause(ctx, name); err != nil {
		return 0, err
	}
	defer func() {
		err = errors.Join(err, e.cfg.Containers.Resume(name))
		paused = time.Since(began)
	}()
	if err := e.cfg.Containers.Dump(ctx, name, to); err != nil {
		return 0, explain(filepath.Join(to.Work, "dump.log"), err)
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	return 0, frozen(ctx)
}
