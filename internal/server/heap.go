package server

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// How far dewd's Go heap may grow before it is collected: to half as much again as is in use,
// as is good for a small node while layers are filled, but always to smallHeap bytes. While many
// containers are made a few MiB are in use, and half of that is filled every few calls.
const (
	heapGrowth = 50 // percent
	smallHeap  = 16 << 20
)

// paceHeap has the heap collected by these rules from the next collection on.
func paceHeap() {
	type sentinel struct{ _ *byte } // nobody refers to one: it is gone with the next collection
	runtime.AddCleanup(new(sentinel), func(struct{}) {
		live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
		metrics.Read(live)
		debug.SetGCPercent(growth(live[0].Value.Uint64()))
		paceHeap()
	}, struct{}{})
}

// growth is the percentage by which a heap may grow of which so many bytes are in use.
func growth(live uint64) int {
	if live == 0 || live >= smallHeap {
		return heapGrowth
	}
	return max(heapGrowth, int((smallHeap-live)*100/live))
}
