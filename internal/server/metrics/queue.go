package metrics

import (
	"dewpoint/internal/deploy/admit"

	"github.com/prometheus/client_golang/prometheus"
)

// queue shows how admission stands. It looks once a scrape.
type queue struct {
	stats func() admit.Stats

	waiting, running, limit, callers, promised, unused, admitted, refused *prometheus.Desc
}

// Queue registers admission, which stats looks at.
func (s *Set) Queue(stats func() admit.Stats) {
	d := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prefix+"queue_"+name, help, labels, nil)
	}
	s.registry.MustRegister(&queue{stats: stats,
		waiting:  d("waiting", "Deployments that wait, by what for.", "reason"),
		running:  d("running", "Deployments under way."),
		limit:    d("running_limit", "Deployments that may be under way at once, now."),
		callers:  d("callers", "Callers who have deployments waiting or under way."),
		promised: d("promised_bytes", "Memory promised to deployments under way."),
		unused:   d("owed_bytes", "Memory kept for running containers that have not used up their limits."),
		admitted: d("admitted_total", "Deployments that were let in."),
		refused: d("refused_total", "Deployments that were not taken: the queue was full, or they can never fit.",
			"reason"),
	})
}

// Describe implements prometheus.Collector.
func (q *queue) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{q.waiting, q.running, q.limit, q.callers, q.promised, q.unused,
		q.admitted, q.refused} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (q *queue) Collect(ch chan<- prometheus.Metric) {
	s := q.stats()
	send := func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, t, v, labels...)
	}
	for reason, n := range s.Waiting {
		send(q.waiting, prometheus.GaugeValue, float64(n), reason)
	}
	send(q.running, prometheus.GaugeValue, float64(s.Running))
	send(q.limit, prometheus.GaugeValue, float64(s.Limit))
	send(q.callers, prometheus.GaugeValue, float64(s.Callers))
	send(q.promised, prometheus.GaugeValue, float64(s.Promised))
	send(q.unused, prometheus.GaugeValue, float64(s.Unused))
	send(q.admitted, prometheus.CounterValue, float64(s.Admitted))
	send(q.refused, prometheus.CounterValue, float64(s.Busy), "busy")
	send(q.refused, prometheus.CounterValue, float64(s.Refused), "never")
}
