package server

import (
	"context"
	"log/slog"
	"runtime/debug"

	"dewpoint/internal/config"
	"dewpoint/internal/fetch/link"
	"dewpoint/internal/pop/peer"
)

// reloader puts what may change while dewd runs into force: the link's rates, the cache's
// bound, dewd's memory, and which nodes' certificates are revoked.
type reloader struct {
	link    *link.Link
	peers   *peer.Auth // nil: none
	room    *room
	inForce config.Config
	log     *slog.Logger
}

// follow takes configurations until ctx ends.
func (r *reloader) follow(ctx context.Context, from <-chan config.Config) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case c := <-from:
			r.apply(c)
		}
	}
}

// apply puts c into force, and says which of its keys wait for the next start.
func (r *reloader) apply(c config.Config) {
	before := r.inForce
	r.inForce.Link = c.Link
	r.inForce.Cache.MaxBytes = c.Cache.MaxBytes
	r.inForce.Limits.Memory = c.Limits.Memory
	r.link.SetRates(int64(c.Link.Limit), int64(c.Link.Background))
	r.room.maxBytes.Store(int64(c.Cache.MaxBytes))
	debug.SetMemoryLimit(memoryLimit(c))
	r.log.Info("the configuration was read again", "changed", config.Changed(before, r.inForce))
	r.revoke()
	if later := config.Changed(r.inForce, c); len(later) > 0 {
		r.log.Warn("these keys change when dewd starts again", "keys", later)
	}
}

// revoke has the nodes of the PoP refused that the authority has revoked by now.
func (r *reloader) revoke() {
	closed, err := r.peers.Reread()
	if err != nil {
		r.log.Error("the lists of revoked certificates are wrong: those in force stay", "err", err)
	}
	tellRevoked(r.log, r.peers, closed)
}

// tellRevoked says which lists of an authority are in force; without an authority there are none.
func tellRevoked(log *slog.Logger, auth *peer.Auth, closed int) {
	if lists, revoked, ok := auth.Revoked(); ok {
		log.Info("the lists of revoked certificates", "lists", lists, "certificates", revoked, "connections_closed", closed)
	}
}

func memoryLimit(c config.Config) int64 {
	if c.Limits.Memory == 0 {
		return defaultMemory
	}
	return int64(c.Limits.Memory)
}
