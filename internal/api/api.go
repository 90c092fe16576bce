// Package api is how a node is spoken to: the service of node.proto, as a
// handler around a Node, and as a client.
//
// # The model
//
// A Node is the daemon in terms of package spec. NewHandler speaks Connect,
// gRPC and JSON over HTTP for it; Serve puts the handler on a listener, with
// HTTP/1.1 and HTTP/2 on the same socket; a Client is the other end.
// Whoever may open the Unix socket may do everything: the socket's mode is the
// access control. Over TCP an Access says who calls, by a certificate or a token,
// and what his role lets him do.
//
// Calls are of three kinds. Short ones (List, Images, Version, …) have a
// deadline of the handler's. Deployments and pulls stream what happens; what
// is shown is the newest state, so a slow reader misses intermediate steps of
// a layer but no stage, and never holds the deployment up. Output (Logs, Exec,
// Attach, an attached Deploy) is never dropped: there the reader sets the pace.
//
// # Errors
//
// A Node returns plain errors. They become an Error once, at the edge, by
// Config.Classify: a code that programs test, a line that people read, a
// remedy and an exit code. The Error travels as a detail of the Connect error,
// and Client returns it as it was.
package api

//go:generate ../../api/generate

import (
	"context"
	"time"

	"dewpoint/internal/spec"
)

// Node is what the handler serves. All methods are called concurrently; ctx
// ends when the client goes away or the daemon stops.
type Node interface {
	Deployer
	Deployments
	Containers
	Volumes
	Images
	Packs
	Checkpoints
	PoPs
	Observer
}

// Deployer brings images and containers onto the node.
type Deployer interface {
	// Deploy returns when the container is ready. When ctx ends before, it
	// undoes what it has done. The Record says how far it came, also beside
	// an error; it is empty if nothing was begun. A request whose key is known
	// joins that deployment, or gives its record again.
	Deploy(ctx context.Context, req spec.Request, w spec.Watch) (spec.Record, error)
	// Pull returns when the image's layers are complete, or with Lazy "auto"
	// as soon as a container could be started from them.
	Pull(ctx context.Context, req spec.PullRequest, w spec.Watch) (spec.Record, error)
}

// Deployments are known by their IDs, and by the keys that their callers gave them.
type Deployments interface {
	// DeployMany accepts all deployments or, with an error, none. It returns when the
	// last has ended, detached when all are accepted. What fails is told to w.
	// When ctx ends, those that are not detached are undone.
	DeployMany(ctx context.Context, m spec.Many, w spec.ManyWatch) error
	// ListDeployments gives them in the order in which they were asked for.
	ListDeployments(ctx context.Context, q spec.DeploymentQuery) ([]spec.Deployment, error)
	// WatchDeployment returns when the deployment has ended, with what its Deploy returned.
	WatchDeployment(ctx context.Context, ref spec.DeploymentRef, w spec.Watch) (spec.Record, error)
	// CancelDeployment returns when nothing of the deployment is left, at once if it has
	// ended. Unless ref.Caller is "" the deployment has to be his.
	CancelDeployment(ctx context.Context, ref spec.DeploymentRef) (spec.Deployment, error)
}

// Containers are known by their names, and by the IDs that Inspect gives: a call with an ID acts on that
// container or on none, a call with a name on the one that has it when the call begins.
type Containers interface {
	Inspect(ctx context.Context, name string) (spec.Inspection, error)
	// List gives the containers that run, or all, the oldest first.
	List(ctx context.Context, all bool) ([]spec.Container, error)
	// Logs calls emit with the container's output, one call at a time. An
	// error of emit ends it and is returned. It gives all there was, also
	// when the container is removed while it follows.
	Logs(ctx context.Context, name string, opt spec.LogOptions, emit func(spec.LogChunk) error) error
	// Exec runs a process in a running container and returns its exit status.
	// When ctx ends the process is killed.
	Exec(ctx context.Context, name string, req spec.ExecRequest, io spec.ExecIO) (int, error)
	// Attach passes on input and output of a container that runs, from now on, and returns how its process has
	// ended. An end of io.Stdin ends the process's input unless it has a terminal, an error of it does not. When
	// ctx ends the container goes on.
	Attach(ctx context.Context, name string, size spec.Size, io spec.ExecIO) (int, error)
	// Stop asks the container's process to end, by the image's stop signal,
	// and kills it after the timeout; below 0 is the node's default, 0 kills
	// at once. It returns when the process has ended, with nil if it had
	// before. A second Stop of the container may run beside the first.
	Stop(ctx context.Context, name string, timeout time.Duration) error
	// Start starts a container by its command that has ended, on the files that it has, and returns when its
	// process runs. It does nothing to one that runs.
	Start(ctx context.Context, name string) error
	// Restart is Stop, with its timeout, and Start.
	Restart(ctx context.Context, name string, timeout time.Duration) error
	// Kill sends a signal to the container's process, by name or number; "" and KILL end all that it has. It
	// does not wait for what comes of that.
	Kill(ctx context.Context, name, signal string) error
	// Top gives the processes of a container that runs, in the order of their starts.
	Top(ctx context.Context, name string) ([]spec.Process, error)
	// Update changes a container for good, and at once if it runs. It may end where it takes more than it may.
	Update(ctx context.Context, name string, u spec.Update) error
	// Remove removes a container that does not run or, with force, any.
	Remove(ctx context.Context, name string, force bool) error
	// Wait returns the exit status once the container's process has ended,
	// also when the container is removed meanwhile.
	Wait(ctx context.Context, name string) (int, error)
}

// Volumes are directories of the node that containers have by name.
type Volumes interface {
	Volumes(ctx context.Context) ([]spec.VolumeInfo, error)
	MakeVolume(ctx context.Context, name string) error
	RemoveVolume(ctx context.Context, name string) error
}

// Images are known by their references.
type Images interface {
	Images(ctx context.Context) ([]spec.Image, error)
	// RemoveImage forgets an image and, once no other image and no container
	// needs them, its layers.
	RemoveImage(ctx context.Context, name string) error
	// Prune removes what nothing uses.
	Prune(ctx context.Context, opt spec.PruneOptions) (spec.PruneReport, error)
	// Adopt makes images of containerd's other clients (no names are all) images of this node, and calls emit
	// with what each costs, one call at a time; with dry it only says what it would cost. An error of emit ends
	// it and is returned. An image that cannot be adopted is told to emit, and is no error.
	Adopt(ctx context.Context, images []string, dry bool, emit func(spec.Adoption) error) error
}

// Packs are the startup packs of the node's images.
type Packs interface {
	// ProfileEnd ends the recording of a container that was deployed with
	// Request.Record. The container goes on.
	ProfileEnd(ctx context.Context, e spec.ProfileEnd) (spec.Profile, error)
	// PackBuild makes the pack of an image's profile and layers, which are here.
	PackBuild(ctx context.Context, image string) (spec.Pack, error)
	PackPush(ctx context.Context, p spec.PackPush) (spec.PackPushed, error)
	PackInspect(ctx context.Context, image string) (spec.Pack, error)
}

// Checkpoints are what containers start from instead of booting. A node that
// cannot make any answers Checkpoint with an error of code Unsupported.
type Checkpoints interface {
	// Checkpoint returns when the checkpoint can be used here. The container
	// runs on, and was stopped for a moment.
	Checkpoint(ctx context.Context, req spec.CheckpointRequest) (spec.Checkpoint, error)
	// ListCheckpoints gives those of an image, or all, the newest first.
	ListCheckpoints(ctx context.Context, image string) ([]spec.Checkpoint, error)
	RemoveCheckpoint(ctx context.Context, id string) error
}

// PoPs is what a node that shares a store with others can be asked of it. A node
// that does not answers with an error of code Unsupported.
type PoPs interface {
	PoPStatus(ctx context.Context) (spec.PoP, error)
	// PoPVerify compares layers of the store (diffIDs; none is all) with what was
	// published, and calls emit for each, one call at a time. An error of emit ends it
	// and is returned. What is damaged is no error.
	PoPVerify(ctx context.Context, layers []string, emit func(spec.PoPVerified) error) error
	// PoPForget removes what a node that is gone for good says it uses. The node must
	// have been silent for a minute since the first time it was asked for.
	PoPForget(ctx context.Context, name string) error
}

// Observer says what the node is and what happens on it.
type Observer interface {
	Doctor(ctx context.Context) ([]spec.Finding, error)
	Version(ctx context.Context) (spec.Version, error)
	// Events calls emit with what happens until ctx ends, one call at a time: first what is still known of the
	// events behind a mark, unless it is nil, and before these one of kind EventResync if some that came behind
	// it are not known any more. An error of emit ends it and is returned. Unless it is nil, begun is called
	// before all of these, once nothing that happens can be missed; its error ends it, too.
	Events(ctx context.Context, after *spec.Mark, begun func() error, emit func(spec.Event) error) error
}
