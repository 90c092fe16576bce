package server

import (
	"dewpoint/internal/checkpoint"
	"dewpoint/internal/deploy/admit"
	"dewpoint/internal/fetch"
	"dewpoint/internal/layer"
	"dewpoint/internal/pop"
	"dewpoint/internal/pop/member"
	"dewpoint/internal/registry"
	"dewpoint/internal/server/metrics"
	"dewpoint/internal/trace"

	"github.com/prometheus/client_golang/prometheus"
)

// meters is what the metrics are read from.
type meters struct {
	set         *metrics.Set
	registry    *registry.Client
	layers      *layer.Store
	traces      *trace.Exporter
	puller      *fetch.Puller
	member      *member.Member      // nil: this node is by itself
	checkpoints *checkpoint.Manager // nil if there are none
}

// measure registers what the parts that there are count.
func (m *meters) measure(admission func() admit.Stats) {
	m.measureNode()
	m.set.Queue(admission)
	m.measureLazy()
	if m.member != nil {
		m.measurePoP()
	}
	if m.checkpoints != nil {
		m.measureCheckpoints()
	}
}

func (m *meters) measureNode() {
	m.set.Counter("registry_bytes_total", "Bytes of payload from registries.", nil, func() int64 {
		return m.registry.Stats().Bytes
	})
	m.set.Gauge("layers", "Layers in the store.", nil, func() float64 {
		return float64(len(m.layers.Layers()))
	})
	for outcome, value := range map[string]func() int64{
		"sent": func() int64 { n, _ := m.traces.Sent(); return n },
		"lost": func() int64 { _, n := m.traces.Sent(); return n },
	} {
		m.set.Counter("trace_spans_total", "Spans for the trace collector.",
			prometheus.Labels{"outcome": outcome}, value)
	}
}

// measureLazy registers what is counted of images that run before they are whole.
func (m *meters) measureLazy() {
	for _, c := range []struct {
		name, help string
		value      func(fetch.LazyStats) int64
	}{
		{"starts_total", "Images that ran before they were whole.", func(s fetch.LazyStats) int64 {
			return s.Starts
		}},
		{"pack_bytes_total", "Bytes of startup packs from registries.", func(s fetch.LazyStats) int64 {
			return s.PackBytes
		}},
		{"demand_bytes_total", "Bytes fetched because something waited for them.", func(s fetch.LazyStats) int64 {
			return s.DemandBytes
		}},
		{"failed_waits_total", "Waits that ended in an I/O error.", func(s fetch.LazyStats) int64 {
			return s.Failed
		}},
		{"lies_total", "Layers of which a startup pack had wrong bytes.", func(s fetch.LazyStats) int64 {
			return s.Mismatches
		}},
	} {
		m.set.Counter("lazy_"+c.name, c.help, nil, func() int64 { return c.value(m.puller.Stats()) })
	}
}

// measurePoP registers what is counted of the PoP.
func (m *meters) measurePoP() {
	state := m.member.State
	for source, get := range map[string]func(pop.Hits) (layers, bytes int64){
		"local":    func(h pop.Hits) (int64, int64) { return h.Local, h.LocalBytes },
		"store":    func(h pop.Hits) (int64, int64) { return h.Store, h.StoreBytes },
		"peer":     func(h pop.Hits) (int64, int64) { return h.Peer, h.PeerBytes },
		"registry": func(h pop.Hits) (int64, int64) { return h.Registry, h.RegistryBytes },
	} {
		from := prometheus.Labels{"source": source}
		m.set.Counter("pop_hits_total", "Layers that deployments wanted, by where they came from.", from,
			func() int64 { n, _ := get(state().Hits); return n })
		m.set.Counter("pop_hit_bytes_total", "Compressed bytes of these layers.", from, func() int64 {
			_, n := get(state().Hits)
			return n
		})
	}
	m.set.Flag("pop_store_away", "1 while the PoP's store does not answer.", func() bool {
		return state().StoreAway
	})
	m.set.Flag("pop_coordinator_away", "1 while the PoP's coordinator does not answer.", func() bool {
		return state().CoordAway
	})
	for _, c := range []struct {
		name, help string
		value      func(member.Stats) int64
	}{
		{"evicted_layers_total", "Layers that this node evicted from the PoP's store.", func(s member.Stats) int64 {
			return s.Evicted
		}},
		{"evicted_bytes_total", "Bytes that this node evicted there; they are deleted a minute later unless they come back.",
			func(s member.Stats) int64 { return s.EvictedSize }},
		{"verified_layers_total", "Layers of the PoP's store that this node has read and compared.",
			func(s member.Stats) int64 { return s.Verified }},
		{"damaged_layers_total", "Layers of the PoP's store that were not what was published.",
			func(s member.Stats) int64 { return s.Damaged }},
		{"replaced_layers_total", "Damaged layers that are in the store anew.", func(s member.Stats) int64 {
			return s.Replaced
		}},
	} {
		m.set.Counter("pop_"+c.name, c.help, nil, func() int64 { return c.value(m.member.Stats()) })
	}
}

// measureCheckpoints registers what became of starts.
func (m *meters) measureCheckpoints() {
	for _, c := range []struct {
		outcome, reason string
		value           func(checkpoint.Stats) int64
	}{
		{"restored", "", func(s checkpoint.Stats) int64 { return s.Restored }},
		{"failed", "", func(s checkpoint.Stats) int64 { return s.Failed }},
		{"booted", "unfit", func(s checkpoint.Stats) int64 { return s.Unfit }},
		{"booted", "slower", func(s checkpoint.Stats) int64 { return s.Slower }},
	} {
		m.set.Counter("restores_total", "Starts of containers whose image has checkpoints.",
			prometheus.Labels{"outcome": c.outcome, "reason": c.reason},
			func() int64 { return c.value(m.checkpoints.Stats()) })
	}
}
