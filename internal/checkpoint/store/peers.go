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
	"time"

	"github.com/opencontainers/go-digest"
)

// Peers are the other nodes of a PoP that has no store which all share, or whose store is away.
// Its methods are called concurrently.
type Peers interface {
	// Records gives what Give gives on other nodes of the checkpoints of a manifest, by whom to ask for
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

// Give is what this node gives of a manifest's checkpoints: the records, as JSON, of those whose
// upper layer has says it can give, too.
func (s *Store) Give(manifest digest.Digest, has func(upper digest.Digest) bool) ([]byte, error) {
	out := []Record{}
	s.mu.Lock()
	for _, e := range s.entries {
		if e.Manifest == manifest.String() {
			out = append(out, e.Record)
		}
	}
	s.mu.Unlock()
	return json.Marshal(slices.DeleteFunc(out, func(r Record) bool {
		return r.Upper != nil && !has(r.Upper.DiffID)
	}))
}

// Manifests are those that this node has checkpoints of.
func (s *Store) Manifests() []digest.Digest {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[digest.Digest]bool{}
	for _, e := range s.entries {
		all[digest.Digest(e.Manifest)] = true
	}
	return slices.Collect(maps.Keys(all))
}

// GiveData opens the data of a checkpoint on this node for another one, or returns an error that wraps
// ErrUnknown.
func (s *Store) GiveData(id digest.Digest) (*Data, error) {
	_, d, err := s.open(id.Encoded())
	return d, err
}

// offered looks at what other nodes give of a manifest, unless somebody has just looked.
func (s *Store) offered(ctx context.Context, manifest string) map[string]*offer {
	if s.cfg.Peers == nil || s.pop() != nil || digest.Digest(manifest).Validate() != nil {
		return nil
	}
	s.mu.Lock()
	o, ok := s.offers[manifest]
	s.mu.Unlock()
	if ok && time.Since(o.at) < lookEvery {
		return o.all
	}
	o = offers{time.Now(), map[string]*offer{}}
	given := s.cfg.Peers.Records(ctx, digest.Digest(manifest))
	for _, from := range slices.Sorted(maps.Keys(given)) {
		if err := o.add(manifest, from, given[from]); err != nil {
			s.cfg.Log.Debug("checkpoints of another node cannot be understood", "node", from, "err", err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.offers) >= maxOffered {
		clear(s.offers)
	}
	s.offers[manifest] = o
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

// take copies a checkpoint that another node gives to this one, verified. One comes after the other.
// An error wraps ErrUnknown if nobody gives what its record says.
func (s *Store) take(ctx context.Context, r Record) error {
	select {
	case s.taking <- struct{}{}:
		defer func() { <-s.taking }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	s.mu.Lock()
	here := s.entries[r.ID] != nil // meanwhile
	o := s.offers[r.Manifest].all[r.ID]
	s.mu.Unlock()
	if here {
		return nil
	}
	err := fmt.Errorf("%.12s: %w", r.ID, ErrUnknown)
	if o == nil {
		return err
	}
	for _, from := range o.from {
		terr := s.takeFrom(ctx, from, r)
		if terr == nil {
			s.cfg.Log.Info("a checkpoint came from another node", "id", r.ID, "node", from, "bytes", r.Data.Size)
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		err = errors.Join(err, fmt.Errorf("from %s: %w", from, terr))
	}
	return err
}

func (s *Store) takeFrom(ctx context.Context, from string, r Record) error {
	body, err := s.cfg.Peers.Data(ctx, from, digestOf(r.ID), r.Data.Size)
	if err != nil {
		return err
	}
	defer body.Close()
	f, err := os.CreateTemp(s.cfg.Dir, "peer-*"+tmpEnd) // of mode 0600
	if err != nil {
		return err
	}
	h := sha256.New()
	n, err := io.CopyBuffer(io.MultiWriter(f, h), cancelled{ctx, io.LimitReader(body, r.Data.Size+1)},
		make([]byte, 256<<10))
	if err == nil && (n != r.Data.Size || digest.NewDigest(digest.SHA256, h) != r.Data.Digest) {
		err = fmt.Errorf("%w: its bytes have another digest", ErrDamaged)
	}
	if err = errors.Join(err, f.Close()); err == nil {
		_, err = s.Put(ctx, r, f.Name())
	}
	if err != nil {
		err = errors.Join(err, removed(os.Remove(f.Name())))
	}
	return err
}
