package pop

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// room is how much the store has, may have and is to have.
type room struct {
	*layout
	records *records
	trash   *trash
	packs   *packs
}

// ErrFull says that the store has no room for something.
var ErrFull = errors.New("the PoP's store has no room for it")

// Room returns an error that wraps ErrFull if a layer of so many bytes does not fit into what is free now,
// or would be evicted at once.
func (rm *room) Room(ctx context.Context, size int64) error {
	total, free, err := rm.cfg.FS.Space(ctx)
	if err != nil {
		return err
	}
	capacity := rm.Capacity(total)
	// its table and records too
	if need := size + size/64 + 1<<20; free < need || float64(size) > rm.cfg.High*float64(capacity) {
		return fmt.Errorf("%d bytes, %d are free: %w", size, free, ErrFull)
	}
	return nil
}

// Spare is how many bytes more fit into the store so that nothing has to go for them; it may be negative.
func (rm *room) Spare(ctx context.Context) (int64, error) {
	layers, err := rm.records.Objects(ctx)
	if err != nil {
		return 0, err
	}
	packs, err := rm.packs.all(ctx)
	if err != nil {
		return 0, err
	}
	used, capacity, err := rm.filled(ctx, append(layers, slices.Collect(maps.Values(packs))...))
	return int64(rm.cfg.High*float64(capacity)) - used, err
}

// Capacity is how many bytes of layers the store is to hold on a file system of total bytes.
func (rm *room) Capacity(total int64) int64 {
	if rm.cfg.Capacity == 0 || rm.cfg.Capacity > total {
		return total
	}
	return rm.cfg.Capacity
}

// Space is the bytes of the store's file system, and those that are free.
func (rm *room) Space(ctx context.Context) (total, free int64, err error) {
	return rm.cfg.FS.Space(ctx)
}

// filled is how many bytes are in the store, and how many it is to hold at most.
func (rm *room) filled(ctx context.Context, layers []*Layer) (used, capacity int64, err error) {
	total, free, err := rm.cfg.FS.Space(ctx)
	if err != nil {
		return 0, 0, err
	}
	for _, l := range layers {
		used += l.Size
	}
	if capacity = rm.Capacity(total); capacity == total {
		used = total - free - rm.trash.Trashed(ctx) // what is going already is as good as free
	}
	return used, capacity, nil
}

// excess is how many bytes have to go.
func (rm *room) excess(ctx context.Context, layers []*Layer, want int64) (int64, error) {
	used, capacity, err := rm.filled(ctx, layers)
	if err != nil {
		return 0, err
	}
	if float64(used+want) <= rm.cfg.High*float64(capacity) {
		return 0, nil
	}
	return used + want - int64(rm.cfg.Low*float64(capacity)), nil
}

// Quota is what layers of images whose references begin so have of the store, and may have, in bytes. A layer
// counts for the image that it was fetched for first.
type Quota struct {
	Prefix      string
	Bytes, Most int64
}

// Quotas are the configured ones, by prefix.
func (rm *room) Quotas(layers []*Layer) (all []Quota) {
	for _, prefix := range slices.Sorted(maps.Keys(rm.cfg.Quota)) {
		q := Quota{Prefix: prefix, Most: rm.cfg.Quota[prefix]}
		for _, l := range layers {
			if strings.HasPrefix(l.Image, prefix) {
				q.Bytes += l.Size
			}
		}
		all = append(all, q)
	}
	return all
}

// overQuota is by how many bytes the layers of each quota exceed it.
func (rm *room) overQuota(layers []*Layer) map[string]int64 {
	over := map[string]int64{}
	for _, q := range rm.Quotas(layers) {
		if q.Bytes > q.Most {
			over[q.Prefix] = q.Bytes - q.Most
		}
	}
	return over
}

func lessen(over map[string]int64, l *Layer) {
	for prefix := range over {
		if strings.HasPrefix(l.Image, prefix) {
			if over[prefix] -= l.Size; over[prefix] <= 0 {
				delete(over, prefix)
			}
		}
	}
}
