// Package simulate answers, without a PoP, what a PoP's cache should keep: it replays a registry's trace
// against caches of many sizes and policies at once, and makes traces where there are none to be had.
//
// # The model
//
// A trace is a stream of requests (Reader): who read which manifest or blob of which image, when, and how
// many bytes that were. It comes in the format that the IBM registry traces have: files of a JSON array whose
// elements have the keys host, http.request.duration, http.request.method, http.request.remoteaddr,
// http.request.uri ("v2/<name>/<repo>/{manifests|blobs}/<id>"), http.request.useragent, http.response.status,
// http.response.written, id and timestamp. What is no successful read of a whole manifest or blob is counted
// and skipped.
//
// A Setup is a policy of package evict with a cache that all nodes share, or with one on each node. Replay
// plays each blob that is read against all setups at once, in one pass. A manifest and the blobs that the
// same client reads after it are a deployment: it goes to one node, in turn or by its client, and takes the
// time that its layers need over the link to the registry, or to the shared cache where they were there.
// Manifests are small and are not cached here.
//
// Generate makes a synthetic trace of one of the availability zones of the traces (Zone), calibrated to what
// was published of them: requests, working set, the sizes of blobs over their reads, the popularity of
// images. It first plays the users without sizes (model), then deals sizes to the layers such that the
// published numbers come out, then plays the same users again and writes.
//
// The command dewlab simulate (Program) does these three things; with --study it does them all and writes
// pop-study.md, or what -o names; docs/research/pop-study.md has its results.
package simulate
