// Package pulltrace reads traces of registries, and makes synthetic ones where there are none to be had.
//
// # The model
//
// A trace is a stream of requests (Reader): who read which manifest or blob of which image, when, and how
// many bytes that were. It comes in the format of the IBM registry traces: files of a JSON array. A Reader
// counts and skips what is no successful read of a whole manifest or blob (Skipped).
//
// Generate makes a synthetic trace of one availability zone of these traces (Zone). The model plays the
// users without sizes, deals sizes to the layers such that the published numbers come out, plays the same
// users again, and writes.
package pulltrace
