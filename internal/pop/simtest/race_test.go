//go:build race

package simtest

// usual is how many schedules are run; the race detector makes each 20 times as long.
const usual = 60
