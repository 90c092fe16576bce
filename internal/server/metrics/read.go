package metrics

import "github.com/prometheus/client_golang/prometheus"

// Counter registers a counter that a part of the node keeps; labels may be nil.
func (s *Set) Counter(name, help string, labels prometheus.Labels, value func() int64) {
	s.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: prefix + name, Help: help,
		ConstLabels: labels},
		func() float64 { return float64(value()) }))
}

// Gauge registers what a part of the node knows; labels may be nil.
func (s *Set) Gauge(name, help string, labels prometheus.Labels, value func() float64) {
	s.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: prefix + name, Help: help,
		ConstLabels: labels}, value))
}

// Flag registers a gauge that is 1 or 0.
func (s *Set) Flag(name, help string, value func() bool) {
	s.Gauge(name, help, nil, func() float64 {
		if value() {
			return 1
		}
		return 0
	})
}
