package fetch

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/layer/presence"
	"dewpoint/internal/pack"
	"dewpoint/internal/registry"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"
)

// longTar is 48 MB of text, a third of that as gzip.
var longTar = sync.OnceValue(func() []byte {
	r := rand.New(rand.NewPCG(7, 7))
	words := make([][]byte, 4096)
	for i := range words {
		words[i] = fmt.Appendf(nil, "%x ", r.Uint64()>>r.IntN(50))
	}
	var files []registrytest.File
	for i := range 48 {
		var b bytes.Buffer
		for b.Len() < 1<<20-4096 {
			b.Write(words[r.IntN(len(words))])
		}
		files = append(files, registrytest.File{Name: fmt.Sprintf("dir/f%02d", i), Body: b.String()})
	}
	return registrytest.Tar(files...)
})

// newLongBed is a lazyBed with one long layer of which nothing is in the pack but
// a page.
func newLongBed(t testing.TB) *lazyBed {
	lb := newLazyBedOf(t, image.Gzip, []pack.Range{{Layer: 0, Offset: 0, Length: 4096}}, longTar())
	b, stats := lb.build(nil)
	lb.publish(b.Bytes(), stats.Header, false)
	return lb
}

// walk reads [from, to) of a layer page after page, as cat does.
func (lb *lazyBed) walk(n int, from, to int64) {
	lb.t.Helper()
	part := lb.layers.Partial(lb.img.Layers[n].DiffID)
	if part == nil {
		lb.t.Fatal("the layer is not partial")
	}
	for at, _ := part.Absent(from, to); at < to; at, _ = part.Absent(at, to) {
		lb.Want(part.Layer.DiffID, at, at+presence.Page)
		for here := at; here <= at; time.Sleep(time.Millisecond) {
			here, _ = part.Absent(at, to)
		}
	}
}

// far is a client that reaches the registry by a relay.
func (lb *lazyBed) far(rate float64, rtt time.Duration) *registry.Client {
	lb.t.Helper()
	dir := lb.t.TempDir()
	way := newRelay(lb.t, lb.reg.Host(), rate, rtt)
	lb.must(os.Mkdir(filepath.Join(dir, lb.reg.Host()), 0o755))
	lb.must(os.WriteFile(filepath.Join(dir, lb.reg.Host(), "hosts.toml"),
		fmt.Appendf(nil, "[host.\"http://%s\"]\n", way.listener.Addr()), 0o600))
	client, err := registry.New(registry.Config{HostsDirs: []string{dir}})
	lb.must(err)
	lb.t.Cleanup(client.Close)
	return client
}

func (lb *lazyBed) requests(n int) int { return len(lb.reg.Ranges(lb.img.Layers[n].Digest)) }

// A reader that goes through a layer, of which only what is read is fetched,
// makes a fraction of the requests that it has segments, and hardly any of its
// bytes come twice; one that jumps gets what it asks for.
func TestReadAhead(t *testing.T) {
	testkit.Long(t)
	lb := newLongBed(t)
	lb.restart(Config{Lazy: LazyConfig{Off: true}})
	lb.reg.Forget()
	pull := lb.start(lb.img.Ref)
	if pull.Lazy == nil {
		t.Fatalf("not lazy: %s", pull.Why)
	}
	pull.Background()
	size := int64(len(lb.tars[0]))
	segments := int(size / segmentData)
	for i, at := range []int64{30 << 20, 20 << 20, 10 << 20} { // jumps
		lb.read(0, at, at+4096)
		if n := lb.requests(0); n != i+1 {
			t.Errorf("%d requests for %d reads", n, i+1)
		}
	}
	if got, most := lb.reg.Served(lb.img.Layers[0].Digest), 4*lb.img.Layers[0].Size/int64(segments); got > most {
		t.Errorf("three pages cost %d bytes, more than %d", got, most)
	}
	lb.walk(0, 0, size)
	if n := lb.requests(0) - 3; n > segments/2 {
		t.Errorf("%d requests for %d segments in sequence", n, segments)
	}
	// a segment may be asked for by the read and ahead of it
	if got := lb.reg.Served(lb.img.Layers[0].Digest); got > lb.img.Layers[0].Size*5/4 {
		t.Errorf("%d bytes came of a layer of %d", got, lb.img.Layers[0].Size)
	}
	lb.read(0, 0, size)
}

// Where the layer is being completed anyway, a reader that goes through it is
// served by its stream, so that little comes twice.
func TestReadByStream(t *testing.T) {
	testkit.Long(t)
	lb := newLongBed(t)
	lb.restart(Config{Link: link.New(link.Config{Limit: 8e6})})
	pull := lb.start(lb.img.Ref)
	if pull.Lazy == nil {
		t.Fatalf("not lazy: %s", pull.Why)
	}
	before := lb.reg.Served(lb.img.Layers[0].Digest)
	pull.Background()
	<-pull.Lazy.background
	lb.walk(0, 0, int64(len(lb.tars[0])))
	lb.must(pull.WaitComplete(t.Context()))
	if got := lb.reg.Served(lb.img.Layers[0].Digest) - before; got > lb.img.Layers[0].Size*3/2 {
		t.Errorf("%d bytes came of a layer of %d", got, lb.img.Layers[0].Size)
	}
}

// A stream that hangs does not keep a reader that goes through the layer: ranges do.
func TestReadBesideHangingStream(t *testing.T) {
	testkit.Long(t)
	lb := newLongBed(t)
	hosts := map[string]registry.Host{lb.reg.Host(): {PlainHTTP: true}}
	client, err := registry.New(registry.Config{Hosts: hosts, StallTimeout: time.Hour})
	lb.must(err)
	t.Cleanup(client.Close)
	lb.restartAs(client, Config{})
	pull := lb.start(lb.img.Ref)
	if pull.Lazy == nil {
		t.Fatalf("not lazy: %s", pull.Why)
	}
	lb.reg.Forget()
	lb.reg.Fail(registrytest.Fault{Do: registrytest.Stall, Digest: lb.img.Layers[0].Digest, Times: 1})
	pull.Background()
	lb.eventually("the stream's request", func() bool { return lb.requests(0) == 1 })
	part := lb.layers.Partial(lb.img.Layers[0].DiffID)
	lb.walk(0, 0, 12<<20)
	if n := part.Passed(); n != 0 {
		t.Errorf("the stream has moved to %d", n)
	}
}

// Passes are found again also where some of what lies between is there.
func TestPasses(t *testing.T) {
	var ps passes
	there := map[int]bool{5: true, 6: true}
	here := func(k int) bool { return there[k] }
	miss := func(i int) pass {
		p := ps.at(i, here)
		p.missed()
		p.next = i + p.window
		return *p
	}
	miss(1)
	if p := miss(2); p.misses != 2 || p.window != 2 {
		t.Errorf("the second miss in sequence: %+v", p)
	}
	if p := miss(40); p.misses != 1 || p.window != 1 {
		t.Errorf("a jump: %+v", p)
	}
	if p := miss(4); p.misses != 3 || p.window != 4 {
		t.Errorf("back at the first reader: %+v", p)
	}
	there[8] = true
	if p := miss(9); p.misses != 4 || p.window != 8 {
		t.Errorf("behind what is there: %+v", p)
	}
	if p := miss(41); p.misses != 2 {
		t.Errorf("back at the second reader: %+v", p)
	}
	for i := range 4 {
		miss(100 + 10*i)
	}
	if p := miss(17); p.misses != 1 {
		t.Errorf("a reader that was forgotten: %+v", p)
	}
	for range 8 {
		p := ps.list[0]
		miss(p.next)
	}
	if w := ps.list[0].window; w != farthest {
		t.Errorf("the window has grown to %d", w)
	}
}

// BenchmarkReadAll reads a layer of 48 MB (as gzip in the metric MB) from the
// first byte to the last, over a link of 20 Mbit/s.
func BenchmarkReadAll(b *testing.B) {
	for _, rtt := range []time.Duration{0, 150 * time.Millisecond} {
		for _, off := range []bool{true, false} {
			b.Run(fmt.Sprintf("rtt=%v/off=%v", rtt, off), func(b *testing.B) {
				for range b.N {
					b.StopTimer()
					lb := newLongBed(b)
					far := lb.far(20e6/8, rtt)
					lb.restartAs(far, Config{Lazy: LazyConfig{Off: off, Wait: time.Minute},
						Link: link.New(link.Config{Limit: 20e6 / 8})})
					pull := lb.start(lb.img.Ref)
					if pull.Lazy == nil {
						b.Fatalf("not lazy: %s", pull.Why)
					}
					<-pull.Lazy.done
					lb.reg.Forget()
					before := lb.reg.Served(lb.img.Layers[0].Digest)
					pull.Background()
					b.StartTimer()
					begun := time.Now()
					lb.walk(0, 0, int64(len(lb.tars[0])))
					b.ReportMetric(time.Since(begun).Seconds(), "s/all")
					b.ReportMetric(float64(lb.reg.Served(lb.img.Layers[0].Digest)-before)/1e6, "MB")
					b.ReportMetric(float64(lb.requests(0)), "requests")
					if !off {
						lb.must(pull.WaitComplete(b.Context()))
						b.ReportMetric(time.Since(begun).Seconds(), "s/complete")
						b.ReportMetric(float64(lb.reg.Served(lb.img.Layers[0].Digest)-before)/1e6, "MB/complete")
					}
				}
			})
		}
	}
}
