package member

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop/peer"
)

// route is the way of one layer into this node, for one fill.
type route struct {
	s     *routes
	image string // the reference that it is fetched for
	l     image.Layer

	mu     sync.Mutex
	from   func(context.Context, int64) (io.ReadCloser, error) // unless nil, gives the layer's tar
	failed map[string]int                                      // attempts, by node of the PoP or its store
	// since when the node that is to fetch it has not begun
	unbegun time.Time
	records [][]byte // of how far nodes had come from which the layer was followed, the newest last
}

// Prepare implements layer.Preparer: it finds out who brings the layer.
func (r *route) Prepare(ctx context.Context, f *layer.Fill) (layer.Way, error) {
	r.mu.Lock()
	r.from = nil
	r.mu.Unlock()
	return r.s.way(ctx, r, f)
}

// Open implements layer.Source: it gives the tar that Prepare has found.
func (r *route) Open(ctx context.Context, _ *layer.Fill, offset int64) (io.ReadCloser, error) {
	r.mu.Lock()
	from := r.from
	r.mu.Unlock()
	if from == nil {
		return nil, fmt.Errorf("layer %s has no way out of the PoP: %w", r.l.DiffID, layer.ErrAgain)
	}
	return from(ctx, offset)
}

// useSource has Open give what open gives, which who has.
func (r *route) useSource(who string, open func(context.Context, int64) (io.ReadCloser, error)) layer.Way {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.from = func(ctx context.Context, off int64) (io.ReadCloser, error) {
		body, err := open(ctx, off)
		if err != nil {
			return nil, r.fail(who, err)
		}
		r.begun()
		return &elsewhere{body, func(err error) error { return r.fail(who, err) }}, nil
	}
	return layer.Way{Tar: true, Wrong: func(err error) { _ = r.fail(who, err) }}
}

// fail counts a failure and has the fill look for another way.
func (r *route) fail(who string, err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failed == nil {
		r.failed = map[string]int{}
	}
	switch {
	case errors.Is(err, errNotWhole):
		r.failed[who] = peerFailures
	case !errors.Is(err, peer.ErrUnknown): // else it has it soon, or loses its lease
		r.failed[who]++
	case r.unbegun.IsZero():
		r.unbegun = time.Now()
	}
	return fmt.Errorf("from %s: %w: %w", who, err, layer.ErrAgain)
}

// waitsSince is since when a node that holds the layer's lease has not begun to fetch it; zero if none is
// known. It may run the image lazily, and fetch the rest much later.
func (r *route) waitsSince() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.unbegun
}

// mostRecords bounds what is kept: with the newest the follower may not be there yet.
const mostRecords = 4

// remember keeps how far a node has come from which the layer is followed.
func (r *route) remember(record []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.records = append(r.records, record)
	r.records = r.records[max(0, len(r.records)-mostRecords):]
}

// goOn has the fill go on with what it followed, which may be nothing.
func (r *route) goOn(f *layer.Fill) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, record := range slices.Backward(r.records) {
		if err := f.Seed(layer.Seed{Record: record}); err == nil {
			r.s.log.Info("a layer goes on from where a dead node had come", "layer", r.l.DiffID)
			break
		}
	}
	r.records = nil
}

// begun ends such a wait.
func (r *route) begun() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.unbegun = time.Time{}
}

func (r *route) failures(who string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failed[who]
}

// elsewhere is a stream of the PoP.
type elsewhere struct {
	io.ReadCloser
	fail func(error) error
}

func (e *elsewhere) Read(b []byte) (int, error) {
	n, err := e.ReadCloser.Read(b)
	if err != nil && err != io.EOF {
		err = e.fail(err)
	}
	return n, err
}
