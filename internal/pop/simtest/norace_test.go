//go:build !race

package simtest

// usual is how many schedules are run.
const usual = 1000
