package engine

import (
	"context"

	"dewpoint/internal/engine/state"
)

// The engine's words for what package state knows.
type (
	Info      = state.Info
	Status    = state.Status
	Exit      = state.Exit
	ImageInfo = state.ImageInfo
	Event     = state.Event
	EventKind = state.EventKind
)

const (
	Created = state.Created
	Running = state.Running
	Paused  = state.Paused
	Stopped = state.Stopped
	Unknown = state.Unknown

	EventCreated = state.EventCreated
	EventStarted = state.EventStarted
	EventExited  = state.EventExited
	EventOOM     = state.EventOOM
	EventPaused  = state.EventPaused
	EventResumed = state.EventResumed
	EventRemoved = state.EventRemoved
	EventLost    = state.EventLost
)

// Name is that of the container which a name or an ID (Info.ID) stands for.
func Name(id string) string { return state.Name(id) }

// List describes all containers, by name: see state.State.List.
func (e *Engine) List(ctx context.Context) ([]*Info, error) { return e.state.List(ctx) }

// Inspect describes one container, as List does.
func (e *Engine) Inspect(ctx context.Context, id string) (*Info, error) {
	return e.state.Inspect(ctx, id)
}

// Images lists the images of the namespace: see state.State.Images.
func (e *Engine) Images(ctx context.Context) ([]ImageInfo, error) { return e.state.Images(ctx) }

// Events tells what happens: see state.State.Events.
func (e *Engine) Events(ctx context.Context, fn func(Event)) error { return e.state.Events(ctx, fn) }

// Settle waits until the above are certain of all they say: see state.State.Settle.
func (e *Engine) Settle(ctx context.Context) error { return e.state.Settle(ctx) }

// Sure waits until Inspect is certain of one container.
func (e *Engine) Sure(ctx context.Context, name string) error { return e.state.Sure(ctx, name) }
