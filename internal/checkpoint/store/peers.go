package store

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

// peers are the checkpoints that other nodes give while the PoP has no store.
type peers struct {
	*place
	taking chan struct{} // has one of those that take from another node

	mu     sync.Mutex
	offers map[string]offers // by manifest
}

// Peers are the other nodes of a PoP that has no store which all share, or whose store is away.
// Its methods are called concurrently.
type Peers interface {
	// Records gives what OfferRecords gives on other nodes of the checkpoints of a manifest, by whom to ask for
	// them. It returns soon, with nothing while there is a store to look in.
	Records(ctx context.Context, manifest digest.Digest) map[string][]byte
	// Data gives the data file of a checkpoint from one of them, which is to have so many bytes.
	Data(ctx context.Context, from string, id digest.Digest, size int64) (io.ReadCloser, error)
}

// offers are the checkpoints that other nodes give of one manifest, by ID.
type offers struct {
	at  time.Time
	all map[string]*offer
}

type offer struct {
	Record
	from []string
}

const (
	maxOffered = 64  // manifests whose offers are remembered
	maxOffers  = 256 // of one node and manifest
)

// offered looks at what other nodes give of a manifest, unless somebody has just looked.
func (ps *peers) offered(ctx context.Context, manifest string) map[string]*offer {
	if ps.cfg.Peers == nil || ps.pop() != nil || digest.Digest(manifest).Validate() != nil {
		return nil
	}
	ps.mu.Lock()
	o, ok := ps.offers[manifest]
	ps.mu.Unlock()
	if ok && time.Since(o.at) < lookEvery {
		return o.all
	}
	o = offers{time.Now(), map[string]*offer{}}
	given := ps.cfg.Peers.Records(ctx, digest.Digest(manifest))
	for _, from := range slices.Sorted(maps.Keys(given)) {
		if err := o.add(manifest, from, given[from]); err != nil {
			ps.cfg.Log.Debug("checkpoints of another node cannot be understood", "node", from, "err", err)
		}
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if len(ps.offers) >= maxOffered {
		clear(ps.offers)
	}
	ps.offers[manifest] = o
	return o.all
}

// add takes what one node gives.
func (o *offers) add(manifest, from string, b []byte) error {
	var all []json.RawMessage
	if err := json.Unmarshal(b, &all); err != nil || len(all) > maxOffers {
		return fmt.Errorf("%w: %d records: %w", ErrDamaged, len(all), err)
	}
	var errs error
	for _, b := range all {
		r, err := parse(b)
		if err == nil && r.Manifest != manifest {
			err = fmt.Errorf("%w: it is of %s", ErrDamaged, r.Manifest)
		}
		if err != nil {
			errs = errors.Join(errs, err)
			continue
		}
		if o.all[r.ID] == nil {
			o.all[r.ID] = &offer{Record: r}
		}
		o.all[r.ID].from = append(o.all[r.ID].from, from)
	}
	return errs
}

// turn has one caller at a time take from another node.
func (ps *peers) turn(ctx context.Context) (end func(), err error) {
	select {
	case ps.taking <- struct{}{}:
		return func() { <-ps.taking }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// who are the nodes that give a checkpoint.
func (ps *peers) who(r Record) []string {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if o := ps.offers[r.Manifest].all[r.ID]; o != nil {
		return slices.Clone(o.from)
	}
	return nil
}

// bring copies the data file of a checkpoint from another node into the directory, verified.
func (ps *peers) bring(ctx context.Context, from string, r Record) (file string, err error) {
	body, err := ps.cfg.Peers.Data(ctx, from, digestOf(r.ID), r.Data.Size)
	if err != nil {
		return "", err
	}
	defer body.Close()
	f, err := os.CreateTemp(ps.cfg.Dir, "peer-*"+tmpEnd) // of mode 0600
	if err != nil {
		return "", err
	}
	h := sha256.New()
	n, err := io.CopyBuffer(io.MultiWriter(f, h), cancelled{ctx, io.LimitReader(body, r.Data.Size+1)},
		make([]byte, 256<<10))
	if err == nil && (n != r.Data.Size || digest.NewDigest(digest.SHA256, h) != r.Data.Digest) {
		err = fmt.Errorf("%w: its bytes have another digest", ErrDamaged)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return "", errors.Join(err, removed(os.Remove(f.Name())))
	}
	return f.Name(), nil
}
