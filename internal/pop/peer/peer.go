// Package peer is what a node of a PoP asks another one directly: layers that the other is filling, and,
// while the shared store is away, complete ones and checkpoints.
//
// What a node has is its Content, and its Checkpoints. A Server gives them to the other nodes, a Client asks
// them for theirs, with the same methods and an address:
//
//	Follow  a layer's tar from an offset on, as it grows, to its end
//	Range   some bytes of it that are verified
//	Table   what its index is built from before it is whole
//	Pack    an image's startup pack
//	Records what checkpoints of an image there are
//	Data    the memory of one
//
// # Who is let in
//
// Both sides prove who they are in every TLS 1.3 handshake, before a byte of HTTP is read. With a PoP key
// (ReadKey) every node derives the same Ed25519 key pair from one secret: no authority is needed, no name and
// no clock is compared. With certificates (ReadCertificates), both sides must show a valid one of the given
// authority, for the address that they are asked at, and the authority may revoke one: revoke.go. Nothing is
// resumed: each connection is a whole handshake.
//
// A node of the PoP is trusted to ask, not to be right. Its answers are bounded here, and verified by the
// caller: Follow's bytes by the layer's digest when it is whole, the others by their own. No node can verify
// a checkpoint's record. handler.go has the requests.
package peer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/opencontainers/go-digest"
)

var (
	// ErrUnknown says that the node has nothing of what it was asked for. Content's errors wrap it for that.
	ErrUnknown = errors.New("the node does not have it")
	// ErrRefused says that one of the two nodes does not accept the other. Trying again does not help.
	ErrRefused = errors.New("the nodes do not accept each other")
	// ErrAway says that there was no connection, or that nothing came over it in time.
	ErrAway = errors.New("the node is away")
	// ErrBusy says that the node has too much to do. The error is a *Busy.
	ErrBusy = errors.New("the node is busy")
	// ErrProtocol says that the node answered what makes no sense.
	ErrProtocol = errors.New("the node's answer makes no sense")
	// ErrFailed says that the node tried to give it and could not.
	ErrFailed = errors.New("the node could not give it")
	// ErrClosed is what a stream gives after its Close.
	ErrClosed = errors.New("the stream is closed")
)

// Busy is an ErrBusy that knows when to come again.
type Busy struct{ After time.Duration }

func (b *Busy) Error() string { return fmt.Sprintf("%v: come again in %v", ErrBusy, b.After) }

// Is makes a Busy an ErrBusy.
func (b *Busy) Is(target error) bool { return target == ErrBusy }

// Content is what this node gives to others. Its errors wrap ErrUnknown if it does not have
// what was asked for, and may wrap ErrBusy. Its methods are called concurrently; a Read returns soon
// after ctx has ended, and nobody reads any more when Close is called.
type Content interface {
	// Follow gives a layer's tar from off on, and goes on as it grows, to its end; what it gives is not verified
	// until the layer is. size is -1 while unknown.
	Follow(ctx context.Context, id digest.Digest, off int64) (r io.ReadCloser, size int64, err error)
	// Progress gives how far a layer has come that is followed here: a record of the fill (layer.Seed).
	Progress(ctx context.Context, id digest.Digest) ([]byte, error)
	// Range gives verified bytes [from, to) of a layer, fetching them first if the layer is partial here.
	Range(ctx context.Context, id digest.Digest, from, to int64) (io.ReadCloser, error)
	// Table gives a layer's table, as docs/design/formats.md has it.
	Table(ctx context.Context, id digest.Digest) ([]byte, error)
	// Pack gives the startup pack of the image with this manifest.
	Pack(ctx context.Context, manifest digest.Digest) (io.ReadCloser, error)
}

// Checkpoints is what this node gives of the checkpoints that it has, on the terms of Content.
type Checkpoints interface {
	// Records gives the records of an image's checkpoints, as JSON, whose data and layers can be had here.
	Records(ctx context.Context, manifest digest.Digest) ([]byte, error)
	// Data gives the data file of a checkpoint, whose name is its ID as a sha256.
	Data(ctx context.Context, id digest.Digest) (r io.ReadCloser, size int64, err error)
}

// Bounds of what is taken from another node.
const (
	MaxTable    = 128 << 20
	MaxProgress = 256 << 10
	MaxRecords  = 4 << 20
	MaxPack     = 1 << 30
	MaxLayer    = 1 << 40 // and data of a checkpoint
)

// Config is what a Server and a Client need. Both need Auth; 0 stands for the default.
type Config struct {
	Auth        *Auth
	Content     Content      // the server's
	Checkpoints Checkpoints  // the server's; nil: it gives none
	Log         *slog.Logger // nil is none

	// Stall is for how long a stream may stand still, on either side, before it is cut: 30 s.
	Stall time.Duration
	// Quiet is after how long without a byte the server has a follower ask again: a third of Stall. It must be
	// shorter than the clients' Stall.
	Quiet time.Duration
	// Patience is how long a client goes on asking a node that answers and has no byte for it: 5 min.
	Patience time.Duration
	// Connect is how long a client waits for a connection, and once more for its handshake: 2 s.
	Connect time.Duration

	// The server's bounds: requests under way, of one address and of all, and connections, half of which one
	// address may have: 64, 256, 512.
	PerPeer, Requests, Conns int
}

func (c Config) withDefaults() (Config, error) {
	if c.Auth == nil {
		return c, errors.New("peer: neither a key nor certificates")
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	c.Stall = cmp.Or(c.Stall, 30*time.Second)
	c.Quiet = cmp.Or(c.Quiet, c.Stall/3)
	c.Patience = cmp.Or(c.Patience, 5*time.Minute)
	c.Connect = cmp.Or(c.Connect, 2*time.Second)
	c.PerPeer = cmp.Or(c.PerPeer, 64)
	c.Requests = cmp.Or(c.Requests, 256)
	c.Conns = cmp.Or(c.Conns, 512)
	if min(c.Stall, c.Quiet, c.Patience, c.Connect) < 0 || min(c.PerPeer, c.Requests, c.Conns) < 0 {
		return c, errors.New("peer: a time or a bound is negative")
	}
	if c.Quiet >= c.Stall {
		return c, fmt.Errorf("peer: quiet (%v) must be shorter than stall (%v)", c.Quiet, c.Stall)
	}
	return c, nil
}

// Headers and trailers of a followed layer.
const (
	headerFrom  = "Dewpoint-From"
	headerSize  = "Dewpoint-Size"
	trailerMore = "Dewpoint-More"
	trailerEnd  = "Dewpoint-End"
)

// checkDigest accepts what names a layer or a manifest: a sha256.
func checkDigest(id digest.Digest) error {
	if err := id.Validate(); err != nil {
		return fmt.Errorf("%q: %w", id, err)
	}
	if id.Algorithm() != digest.SHA256 {
		return fmt.Errorf("%q: %w", id, digest.ErrDigestUnsupported)
	}
	return nil
}
