package pulltrace

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"math"
	"strconv"
	"time"
)

// epoch is when a synthetic trace begins.
var epoch = time.Date(2017, 6, 20, 0, 0, 0, 0, time.UTC)

// Generate writes a synthetic trace of a zone, in the format of the IBM traces: scale 0.01 has a hundredth of
// the zone's pulls, of the bytes of its distinct blobs, and of its clients. The same arguments give the same
// bytes. All records name a host and a user agent that begin with "synthetic".
func Generate(w io.Writer, z Zone, scale float64, seed uint64) error {
	return generate(w, z, scale, seed, 0)
}

// GenerateFirst is the beginning of what Generate writes: so many pulls.
func GenerateFirst(w io.Writer, z Zone, scale float64, seed uint64, pulls int) error {
	return generate(w, z, scale, seed, pulls)
}

// generate ends the trace after so many pulls, if limit is not 0.
func generate(w io.Writer, z Zone, scale float64, seed uint64, limit int) error {
	if !(scale > 0) || scale > 10 {
		return fmt.Errorf("scale %g is not between 0 and 10", scale)
	}
	z = z.scaled(scale)
	repos, sizes := fit(z, seed)
	g := &generator{w: bufio.NewWriterSize(w, 64<<10), zone: z, seed: seed, sizes: sizes, limit: limit}
	g.w.WriteString("[")
	newModel(z, repos, seed).run(events{pull: g.pull, release: g.release})
	g.w.WriteString("\n]\n")
	return g.w.Flush()
}

type generator struct {
	w     *bufio.Writer // its first error is Flush's
	zone  Zone
	seed  uint64
	sizes []int64
	n     uint64
	last  float64 // second of the last record
	line  []byte
	limit int // of pulls that are written
	pulls int
}

func (g *generator) pull(second float64, client, repo, version int, fetch []int32) {
	if g.pulls++; g.over() {
		return
	}
	image := fmt.Sprintf("v2/%s/%s/", g.id('n', repo/4)[:8], g.id('r', repo)[:8])
	manifest := image + "manifests/" + g.id('m', repo<<16|version)
	if g.n%50 == 0 { // a token has expired
		g.write(second, client, "GET", manifest, 401, 0)
	}
	g.write(second, client, "GET", manifest, 200, int64(1500+200*len(fetch)))
	for _, l := range fetch {
		blob := image + "blobs/" + g.id('b', int(l))
		if g.n%200 == 0 {
			g.write(second, client, "HEAD", blob, 200, 0)
		}
		g.write(second, client, "GET", blob, 200, g.sizes[l])
	}
}

func (g *generator) release(second float64, repo, version int) {
	if g.over() {
		return
	}
	uri := fmt.Sprintf("v2/%s/%s/manifests/%s", g.id('n', repo/4)[:8], g.id('r', repo)[:8],
		g.id('m', repo<<16|version))
	g.write(second, 0, "PUT", uri, 201, 0)
}

func (g *generator) over() bool { return g.limit > 0 && g.pulls > g.limit }

// id is a name as anonymised as those of the real traces.
func (g *generator) id(kind byte, n int) string {
	x := g.seed ^ uint64(kind)<<56 ^ uint64(n)
	for _, c := range g.zone.Name {
		x = x*31 + uint64(c)
	}
	x ^= x >> 31
	x *= 0x9e3779b97f4a7c15
	x ^= x >> 29
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 32
	return hex.EncodeToString(binary.BigEndian.AppendUint64(nil, x))
}

// write appends a record. Its fields are of characters that JSON need not escape.
func (g *generator) write(second float64, client int, method, uri string, status int, written int64) {
	g.last = max(g.last+0.001, second)
	at := epoch.Add(time.Duration(math.Round(g.last*1000)) * time.Millisecond)
	b := g.line[:0]
	if g.n > 0 {
		b = append(b, ',')
	}
	b = append(b, "\n{\"host\":\""+syntheticHost...)
	b = append(b, g.zone.Name...)
	b = append(b, `","http.request.duration":`...)
	b = strconv.AppendFloat(b, 0.01+float64(written)/100e6, 'f', 4, 64)
	b = append(b, `,"http.request.method":"`+method+`","http.request.remoteaddr":"`...)
	b = append(b, g.id('c', client)[:8]...)
	b = append(b, `","http.request.uri":"`+uri+`","http.request.useragent":"`+syntheticAgent+
		`","http.response.status":`...)
	b = strconv.AppendInt(b, int64(status), 10)
	b = append(b, `,"http.response.written":`...)
	b = strconv.AppendInt(b, written, 10)
	b = append(b, `,"id":"`+g.id('i', int(g.n))[:10]+`","timestamp":"`...)
	b = at.AppendFormat(b, "2006-01-02T15:04:05.000Z07:00")
	b = append(b, `"}`...)
	g.w.Write(b)
	g.line = b
	g.n++
}
