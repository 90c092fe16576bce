//go:build race

package simtest

// How many schedules are run; the race detector makes each 20 times as long.
const (
	usual   = 60
	unusual = 20
)
