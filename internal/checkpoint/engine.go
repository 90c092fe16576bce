// Package checkpoint lets a container start from the memory of one that has
// become ready, instead of booting.
//
// An Engine dumps the processes of a running container into a directory and
// lets them run on; what it wrote, together with the writable layer as it was
// at that moment, is a checkpoint. Any number of containers start from it,
// each with a name, a network and a writable layer of its own.
//
// This file is what engines and their users agree on. Engines live in packages
// below this one; the daemon hands them to those who use them.
package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Engine dumps the processes of containers. How they are started again is the
// business of the container engine, which is given the directory. Engines are
// safe for concurrent use.
type Engine interface {
	// Name tells engines apart: "criu", "dmtcp".
	Name() string

	// Probe dumps and restores a small process. What it finds is kept until a
	// version of what it needs changes. An error says what to do about it.
	Probe(ctx context.Context) (Ability, error)

	// Dump writes the processes of c into dir, which exists, is empty and has
	// mode 0700, and lets them run on. It calls frozen once the processes are
	// in dir and while nothing of the container runs: frozen copies the
	// writable layer, and its error fails the dump.
	//
	// On any error the container runs as before, and what lies in dir is of no
	// use. What can never be dumped gives an *UnfitError.
	Dump(ctx context.Context, c Container, dir string, frozen func(ctx context.Context) error) (Dumped, error)
}

// Explainer is an Engine that finds out more about an error of a container that was to be restored in a
// directory and is not removed yet.
type Explainer interface {
	Explain(dir string, err error) error
}

// Ability is what a node can dump and restore, and what images of it depend on.
type Ability struct {
	Engine, Version string
	Runc            string // version; empty if the engine does without
	Kernel          string // release
	PageSize        int
	CPU             []string // features that images may depend on, sorted
	CgroupMode      string   // "v1", "hybrid", "v2"
	Lazy            bool     // memory can come after the start
	// Limits are what of a container this node cannot dump, in plain words,
	// each with its remedy.
	Limits []string
}

// Container is what is dumped.
type Container struct {
	Name    string
	PID     int // of its first process, in the host's numbering
	TTY     bool
	Options DumpOptions
}

// DumpOptions say what to do with what is not only the container's. The zero
// value is the safe default.
type DumpOptions struct {
	// RefuseTCP fails the dump when clients are connected. Otherwise these
	// connections are closed in what is restored; the dumped one keeps them.
	RefuseTCP bool
}

// Dumped says what a dump was.
type Dumped struct {
	Processes, Threads int
	Pages              int64         // bytes of memory
	Paused             time.Duration // how long nothing of the container ran
	Warnings           []string
}

// UnfitError says that a container cannot be dumped on this node, and what to
// do about it. The container runs on.
type UnfitError struct{ What, Remedy string }

func (e *UnfitError) Error() string { return fmt.Sprintf("%s: %s", e.What, e.Remedy) }

// ErrUnable is what Probe's errors wrap: this node cannot dump or restore.
var ErrUnable = errors.New("containers cannot be checkpointed on this node")
