package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net"
	"net/http"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	"dewpoint/internal/fetch"
	"dewpoint/internal/pop/evict"
	"dewpoint/internal/server/web"
	"dewpoint/internal/spec"

	"golang.org/x/sys/unix"
)

const (
	houseEvery = time.Minute
	quietAfter = 3 * time.Second
	// keepFree is the share of the disk that unused layers are not to fill.
	keepFree = 0.10
)

// keepHouse removes layers that nothing uses as the cache's bound and the
// disk demand, and gives memory back when a burst of work is over.
func (d *Daemon) keepHouse(ctx context.Context) error {
	collect, quiet := time.NewTicker(houseEvery), time.NewTicker(quietAfter)
	defer collect.Stop()
	defer quiet.Stop()
	var seen, freed, kept int64
	known := false // what was being removed when an earlier process was killed
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-quiet.C:
			d.publishOwed(ctx)
			work := d.work.Load()
			if work != kept && d.cfg.File.Cache.MaxBytes > 0 { // the bound holds also in a burst of work
				if d.excess() > 0 {
					d.collect(ctx)
				}
				if work == seen { // what it used is not fresh any more
					kept = work
				}
			}
			if work == seen && work != freed {
				debug.FreeOSMemory()
				freed = work
			}
			seen = work
		case <-collect.C:
			if !known {
				known = d.engine.Collect(ctx) == nil
			}
			d.collect(ctx)
		}
	}
}

func (d *Daemon) collect(ctx context.Context) {
	d.tidyCheckpoints(ctx)
	freed, err := d.puller.Collect(ctx, d.excess(), d.inUse)
	if err != nil {
		d.log.Error("remove unused layers", "err", err)
	}
	d.metrics.Evicted(len(freed.Layers), freed.Bytes)
	if freed.Bytes > 0 || len(freed.Layers) > 0 {
		d.log.Info("unused layers and what cut pulls left removed", "layers", len(freed.Layers), "bytes",
			freed.Bytes)
	}
}

// cacheConfig says which unused layers go first.
func (d *Daemon) cacheConfig() (fetch.CacheConfig, error) {
	c := fetch.CacheConfig{Policy: cmp.Or(d.cfg.File.Cache.Policy, evict.Default),
		Capacity: int64(d.cfg.File.Cache.MaxBytes), Path: filepath.Join(d.cfg.Root, "cache.policy")}
	if !evict.Known(c.Policy) {
		return c, fmt.Errorf("cache.policy = %q: it is one of %q", c.Policy, evict.Names())
	}
	var s unix.Statfs_t
	if c.Capacity == 0 && unix.Statfs(d.cfg.Root, &s) == nil {
		c.Capacity = int64((1 - keepFree) * float64(s.Blocks) * float64(s.Bsize))
	}
	return c, nil
}

// excess is how many bytes the layers' store takes beyond the cache's bound,
// or lacks of the share of the disk that is to stay free; below 0 is what is left.
func (d *Daemon) excess() int64 {
	want := int64(math.MinInt64)
	if most := int64(d.cfg.File.Cache.MaxBytes); most > 0 {
		want = diskUse(filepath.Join(d.cfg.Root, "layers")) - most
	}
	var s unix.Statfs_t
	if unix.Statfs(d.cfg.Root, &s) == nil {
		want = max(want, shortOf(&s))
	}
	return want
}

// shortOf is how many bytes the file system lacks to have keepFree of its
// size free; not above 0 if it has.
func shortOf(s *unix.Statfs_t) int64 {
	return int64(keepFree*float64(s.Blocks)-float64(s.Bavail)) * s.Bsize
}

// diskUse is the bytes that everything below dir takes, abandoned fills and
// those under way included.
func diskUse(dir string) int64 {
	var sum int64
	filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil // gone meanwhile
		}
		if fi, err := e.Info(); err == nil {
			if st, ok := fi.Sys().(*syscall.Stat_t); ok {
				sum += st.Blocks * 512
			}
		}
		return nil
	})
	return sum
}

// serveHTTP serves Prometheus's text format at /metrics and, on a loopback address, the
// page for people: who reaches others has not said who he is.
func (d *Daemon) serveHTTP(ctx context.Context, addr string) error {
	d.measure()
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", d.metrics.Handler())
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	if at, ok := l.Addr().(*net.TCPAddr); ok && at.IP.IsLoopback() {
		mux.Handle("/", web.Handler(d))
	}
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	context.AfterFunc(ctx, func() { s.Close() })
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Arriving implements web.Node.
func (d *Daemon) Arriving(parts int) []spec.LayerMap { return d.puller.Arriving(parts) }
