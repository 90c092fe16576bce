package daemon

import (
	"context"
	"errors"
	"net"
	"net/http"
	"runtime/debug"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
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
	var seen, freed int64
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-quiet.C:
			work := d.work.Load()
			if work == seen && work != freed {
				debug.FreeOSMemory()
				freed = work
			}
			seen = work
		case <-collect.C:
			d.collect(ctx)
		}
	}
}

func (d *Daemon) collect(ctx context.Context) {
	freed, err := d.puller.Collect(ctx, d.budget(), d.inUse)
	if err != nil {
		d.log.Error("remove unused layers", "err", err)
	}
	if len(freed.Layers) > 0 {
		d.log.Info("unused layers removed", "layers", len(freed.Layers), "bytes", freed.Bytes)
	}
}

// budget is how many bytes of layers may stay; negative is any number.
func (d *Daemon) budget() int64 {
	if n := int64(d.cfg.File.Cache.MaxBytes); n > 0 {
		return n
	}
	var s unix.Statfs_t
	if err := unix.Statfs(d.cfg.Root, &s); err != nil || float64(s.Bavail) > keepFree*float64(s.Blocks) {
		return -1
	}
	short := int64(keepFree*float64(s.Blocks)-float64(s.Bavail)) * s.Bsize
	var have int64
	for _, l := range d.layers.Layers() {
		have += l.DiskUse()
	}
	return max(0, have-short)
}

// serveMetrics serves Prometheus's text format at /metrics.
func (d *Daemon) serveMetrics(ctx context.Context, addr string) error {
	r := prometheus.NewRegistry()
	r.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "dewpoint_registry_bytes_total", Help: "Bytes of payload from registries."},
			func() float64 { return float64(d.registry.Stats().Bytes) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "dewpoint_layers", Help: "Layers in the store."},
			func() float64 { return float64(len(d.layers.Layers())) }),
	)
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(r, promhttp.HandlerOpts{}))
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	context.AfterFunc(ctx, func() { s.Close() })
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
