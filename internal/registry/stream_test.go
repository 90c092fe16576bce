package registry

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"dewpoint/internal/image"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"
)

// bed is a registry with one blob.
type bed struct {
	reg  *registrytest.Server
	ref  image.Reference
	data []byte
	blob Blob
}

func newBed(t *testing.T, size int) bed {
	b := bed{reg: registrytest.New(t), data: make([]byte, size)}
	for n := range b.data {
		b.data[n] = byte(n*7 + n>>8*13 + n>>16*29)
	}
	b.ref = parse(t, b.reg.Host()+"/a/b:1")
	b.blob = Blob{b.reg.PushBlob(b.data), int64(size)}
	return b
}

func (b bed) read(t *testing.T, c *Client, off, length int64) ([]byte, StreamStats, error) {
	t.Helper()
	s, err := c.Open(t.Context(), b.ref, b.blob, off, length, OpenOptions{})
	if err != nil {
		return nil, StreamStats{}, err
	}
	defer s.Close()
	got, err := io.ReadAll(s)
	return got, s.Stats(), err
}

func TestOpenRanges(t *testing.T) {
	b := newBed(t, 300_000)
	c := client(t, Config{}, b.reg)
	for _, r := range [][2]int64{{0, -1}, {0, 300_000}, {1, -1}, {0, 1}, {299_999, -1}, {100, 70_000},
		{300_000, -1}, {5, 0}, {0, 0}} {
		got, st, err := b.read(t, c, r[0], r[1])
		if err != nil {
			t.Fatal(r, err)
		}
		want := b.data[r[0]:]
		if r[1] >= 0 {
			want = want[:r[1]]
		}
		if !bytes.Equal(got, want) || st.Bytes != int64(len(want)) {
			t.Fatalf("%v: %d bytes, %d over the wire, want %d", r, len(got), st.Bytes, len(want))
		}
	}
	for _, r := range [][2]int64{{-1, -1}, {0, 300_001}, {300_001, -1}, {1, 1 << 62}} {
		if _, _, err := b.read(t, c, r[0], r[1]); err == nil {
			t.Fatalf("%v: no error", r)
		}
	}
	if got := c.Stats().Bytes; got != b.reg.Served(b.blob.Digest) {
		t.Errorf("client counts %d bytes, the registry %d", got, b.reg.Served(b.blob.Digest))
	}
}

func TestStreamMends(t *testing.T) {
	const size = 1_000_000
	for name, tc := range map[string]struct {
		faults    []registrytest.Fault
		off       int64
		retries   int64
		discarded int64
	}{
		"cut twice":   {[]registrytest.Fault{{Do: registrytest.Cut, At: 300_000, Times: 2}}, 0, 2, 0},
		"cut at once": {[]registrytest.Fault{{Do: registrytest.Cut, At: 0, Times: 2}}, 10, 2, 0},
		"many cuts":   {[]registrytest.Fault{{Do: registrytest.Cut, At: 70_000}}, 0, 14, 0},
		"stall":       {[]registrytest.Fault{{Do: registrytest.Stall, At: 400_000, Times: 1}}, 0, 1, 0},
		"hang":        {[]registrytest.Fault{{Do: registrytest.Hang, Times: 1}}, 7, 1, 0},
		"500, 503": {[]registrytest.Fault{{Do: registrytest.Status, Status: 500, Times: 1},
			{Do: registrytest.Status, Status: 503, Times: 1}}, 0, 2, 0},
		"429":           {[]registrytest.Fault{{Do: registrytest.Status, Status: 429, Times: 2}}, 0, 2, 0},
		"ignores range": {[]registrytest.Fault{{Do: registrytest.IgnoreRange}}, 600_000, 0, 600_000},
		"ignores and cuts": {[]registrytest.Fault{{Do: registrytest.IgnoreRange},
			{Do: registrytest.Cut, At: 700_000, Times: 1}}, 600_000, 1, 1_300_000},
		"no length": {[]registrytest.Fault{{Do: registrytest.Chunked}}, 3, 0, 0},
		"no length and cut": {[]registrytest.Fault{{Do: registrytest.Chunked},
			{Do: registrytest.Cut, At: 500_000, Times: 1}}, 0, 1, 0},
		"no length, short": {[]registrytest.Fault{{Do: registrytest.Chunked, Times: 1},
			{Do: registrytest.Short, At: 500_000, Times: 1}}, 0, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, size)
			c := client(t, Config{StallTimeout: 300 * time.Millisecond}, b.reg)
			for _, f := range tc.faults {
				b.reg.Fail(f)
			}
			got, st, err := b.read(t, c, tc.off, -1)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, b.data[tc.off:]) {
				t.Fatal("wrong bytes")
			}
			if st.Retries != tc.retries || st.Discarded != tc.discarded {
				t.Errorf("%d retries, %d discarded; want %d, %d", st.Retries, st.Discarded, tc.retries, tc.discarded)
			}
			if c.Stats().Discarded != tc.discarded {
				t.Errorf("client counts %d discarded", c.Stats().Discarded)
			}
		})
	}
}

func TestStreamFails(t *testing.T) {
	const size = 200_000
	for name, tc := range map[string]struct {
		faults []registrytest.Fault
		off    int64
		kind   Kind
		tries  int
	}{
		"401":              {[]registrytest.Fault{{Do: registrytest.Status, Status: 401}}, 0, Unauthorized, 1},
		"403":              {[]registrytest.Fault{{Do: registrytest.Status, Status: 403}}, 0, Forbidden, 1},
		"404":              {[]registrytest.Fault{{Do: registrytest.Status, Status: 404}}, 0, NotFound, 1},
		"500":              {[]registrytest.Fault{{Do: registrytest.Status, Status: 500}}, 0, ServerFault, 4},
		"lies about range": {[]registrytest.Fault{{Do: registrytest.LieRange, At: 5}}, 10, Protocol, 1},
		"extra":            {[]registrytest.Fault{{Do: registrytest.Extra, At: 5}}, 0, Protocol, 1},
		"extra in a range": {[]registrytest.Fault{{Do: registrytest.Extra, At: 5}}, 10, Protocol, 1},
		"short":            {[]registrytest.Fault{{Do: registrytest.Short, At: 5}}, 0, Protocol, 1},
		"extra, no length": {[]registrytest.Fault{{Do: registrytest.Chunked}, {Do: registrytest.Extra, At: 5}}, 0,
			Protocol, 1},
		"cut":   {[]registrytest.Fault{{Do: registrytest.Cut, At: 1}}, 0, Unreachable, 4},
		"stall": {[]registrytest.Fault{{Do: registrytest.Stall, At: 1}}, 0, Stalled, 4},
		"short every time": {[]registrytest.Fault{{Do: registrytest.Chunked}, {Do: registrytest.Short, At: size}},
			0, Unreachable, 4},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, size)
			c := client(t, Config{StallTimeout: 100 * time.Millisecond, Retries: 3}, b.reg)
			for _, f := range tc.faults {
				b.reg.Fail(f)
			}
			_, _, err := b.read(t, c, tc.off, -1)
			wantKind(t, err, tc.kind, b.blob.Digest.String())
			c.Close()
			b.reg.Close()
			if n := b.reg.Count("/blobs/"); n != tc.tries {
				t.Errorf("%d requests, want %d", n, tc.tries)
			}
		})
	}
}

// A registry that says one size where the manifest says another is found out
// before any byte is given.
func TestStreamWrongSize(t *testing.T) {
	b := newBed(t, 1000)
	c := client(t, Config{}, b.reg)
	for _, size := range []int64{999, 1001} {
		for _, off := range []int64{0, 10} {
			_, err := c.Open(t.Context(), b.ref, Blob{b.blob.Digest, size}, off, -1, OpenOptions{})
			wantKind(t, err, Protocol)
		}
	}
}

// Wrong bytes pass: they are the reader's to find out, by the digest.
func TestStreamDoesNotVerify(t *testing.T) {
	b := newBed(t, 1000)
	b.reg.Fail(registrytest.Fault{Do: registrytest.Flip, At: 500})
	got, _, err := b.read(t, client(t, Config{}, b.reg), 0, -1)
	if err != nil || digest.FromBytes(got) == b.blob.Digest {
		t.Fatal("flipped bit was not served", err)
	}
}

// While nobody waits, nothing is cut.
func TestStallCountsOnlyWhileReading(t *testing.T) {
	b := newBed(t, 8<<20)
	c := client(t, Config{StallTimeout: 100 * time.Millisecond}, b.reg)
	s, err := c.Open(t.Context(), b.ref, b.blob, 0, -1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := io.ReadFull(s, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond)
	got, err := io.ReadAll(s)
	if err != nil || !bytes.Equal(got, b.data[1000:]) {
		t.Fatal("wrong bytes", err)
	}
	if st := s.Stats(); st.Retries != 0 {
		t.Errorf("%d retries", st.Retries)
	}
}

func TestCloseEndsRead(t *testing.T) {
	b := newBed(t, 1000)
	b.reg.Fail(registrytest.Fault{Do: registrytest.Stall, At: 10})
	s, err := client(t, Config{}, b.reg).Open(t.Context(), b.ref, b.blob, 0, -1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(50*time.Millisecond, func() { s.Close() })
	start := time.Now()
	if _, err := io.ReadAll(s); !errors.Is(err, errClosed) || time.Since(start) > testkit.Limit {
		t.Fatal(err, time.Since(start))
	}
}

func TestContextEndsRead(t *testing.T) {
	b := newBed(t, 1000)
	b.reg.Fail(registrytest.Fault{Do: registrytest.Stall, At: 10})
	ctx, cancel := context.WithCancel(t.Context())
	s, err := client(t, Config{}, b.reg).Open(ctx, b.ref, b.blob, 0, -1, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, err := io.ReadAll(s); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

func TestHooks(t *testing.T) {
	b := newBed(t, 100_000)
	var all, one, waited int
	stop := errors.New("enough")
	c := client(t, Config{
		Observe: func(n int) { all += n },
		Wait: func(_ context.Context, n int) error {
			if waited += n; waited > 150_000 {
				return stop
			}
			return nil
		},
	}, b.reg)
	s, err := c.Open(t.Context(), b.ref, b.blob, 0, -1, OpenOptions{Observe: func(n int) { one += n }})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(s); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if all != 100_000 || one != 100_000 || waited != 100_000 {
		t.Fatal(all, one, waited)
	}
	if _, _, err := b.read(t, c, 0, -1); !errors.Is(err, stop) {
		t.Fatal(err)
	}
}

// One connection serves many requests.
func TestConnectionsAreReused(t *testing.T) {
	b := newBed(t, 300_000)
	c := client(t, Config{}, b.reg)
	for range 20 {
		if _, _, err := b.read(t, c, 100, -1); err != nil {
			t.Fatal(err)
		}
	}
	if n := b.reg.Connections(); n != 1 {
		t.Errorf("%d connections", n)
	}
}

func FuzzContentRange(f *testing.F) {
	for _, s := range []string{"bytes 0-9/10", "bytes 5-9/*", "bytes */10", "bytes 9-5/10", "bytes 0-9/5", "",
		"bytes -1--1/0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		from, to, total, err := parseContentRange(s)
		if err == nil && (from < 0 || to <= from || total >= 0 && total < to) {
			t.Fatal(s, from, to, total)
		}
	})
}

// readHash reads r to its end and compares.
func readHash(r io.Reader, want digest.Digest) (int64, error) {
	v := want.Verifier()
	n, err := io.Copy(v, r)
	if err == nil && !v.Verified() {
		err = errors.New("wrong bytes")
	}
	return n, err
}
