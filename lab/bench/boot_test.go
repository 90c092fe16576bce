package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"dewpoint/testkit/demo"
)

// Every image that the experiment starts can be built, and is asked something.
func TestBootImagesAreKnown(t *testing.T) {
	built := demo.Names()
	for _, image := range append(demo.BootNames(), memoryImage, loadImage) {
		if !slices.Contains(built, image) {
			t.Errorf("%s is not built", image)
		}
		if _, err := applicationOf(image); err != nil {
			t.Error(err)
		}
	}
}

func TestLoadCountsAnswers(t *testing.T) {
	var served atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if served.Add(1)%10 == 0 {
			w.Header().Set("Connection", "close") // as nginx does after some requests
		}
		w.Write(bytes.Repeat([]byte("x"), 5000))
	}))
	defer server.Close()
	var out bytes.Buffer
	if err := generateLoad(t.Context(),
		[]string{"-connections", "8", "-time", "300ms", server.Listener.Addr().String()}, &out,
		io.Discard); err != nil {
		t.Fatal(err)
	}
	var said loadResult
	if err := json.Unmarshal(out.Bytes(), &said); err != nil {
		t.Fatal(err)
	}
	if n := served.Load(); said.Errors != 0 || said.Requests < 8 || said.Requests > n || said.Requests < n-8 {
		t.Errorf("%d requests served: %+v", n, said)
	}
}

func TestLoadCountsErrors(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusTeapot)
	}))
	defer server.Close()
	if r := httpLoad(t.Context(), server.Listener.Addr().String(), 3, 200*time.Millisecond); r.Errors != 3 ||
		r.Requests != 0 {
		t.Errorf("three connections to a server that refuses: %+v", r)
	}
}

// The load goes to this machine alone, and ends by itself.
func TestLoadIsBounded(t *testing.T) {
	for _, args := range [][]string{{"192.0.2.1:80"}, {"-time", "2m", "127.0.0.1:80"},
		{"-connections", "2001", "127.0.0.1:80"}, {}} {
		if err := generateLoad(t.Context(), args, io.Discard, io.Discard); err == nil {
			t.Errorf("load %v was accepted", args)
		}
	}
}

func TestListIndexes(t *testing.T) {
	for answer, ok := range map[string]bool{"a header and " + indexAnswer: true, "a header and _id_": false} {
		client, server := net.Pipe()
		go func() {
			defer server.Close()
			io.ReadFull(server, make([]byte, len(indexMessage)))
			server.Write(append([]byte{byte(len(answer) + 4), 0, 0, 0}, answer...))
		}()
		err := listIndexes(t.Context(), func(context.Context, string, string) (net.Conn, error) {
			return client, nil
		})
		if ok != (err == nil) {
			t.Errorf("answer %q: %v", answer, err)
		}
	}
}

func TestLongestSilence(t *testing.T) {
	var asked atomic.Int64
	silence := longestSilence(t.Context(), func(ctx context.Context) error {
		if n := asked.Add(1); n > 3 && n < 10 {
			time.Sleep(20 * time.Millisecond)
			return errors.New("no answer")
		}
		return nil
	})
	for asked.Load() < 20 {
		time.Sleep(time.Millisecond)
	}
	if got := silence(); got < 120*time.Millisecond {
		t.Errorf("six failures of 20 ms each were a silence of %s", got)
	}
}

func TestBootVerdicts(t *testing.T) {
	b := &bootBench{o: &options{images: []string{"web:boot"}, rounds: 1}, clones: []int{1, 8},
		refused: map[string]string{}}
	for _, c := range []struct {
		image         string
		boot, restore float64
		want          string
	}{
		{"redis:1", 0.1, 0.3, "at most 0.35 s: met"},
		{"mariadb:boot", 1, 0.45, "at most 0.50 s: met"},
		{"chat:boot", 3, 0.4, "at most 0.35 s: not met; 5 times faster: met"},
		{"web:boot", 6, 0.7, "at most 0.35 s: not met; 10 times faster: not met"},
	} {
		if got := b.startVerdict(c.image, warmStart, c.boot, c.restore); got != c.want {
			t.Errorf("%s: %q, want %q", c.image, got, c.want)
		}
	}
	if got := b.startVerdict("web:boot", coldStart, 6, 0.5); got != "10 times faster: met" {
		t.Errorf("cold: %q", got)
	}
	b.report = newReport(io.Discard, io.Discard, "test", "")
	for _, s := range []Sample{{Engine: "boot", What: clonesOf(1), Seconds: 2, CPU: 2},
		{Engine: "restore", What: clonesOf(1), Seconds: 0.5, CPU: 0.4},
		{Engine: "boot", What: clonesOf(8), Seconds: 9, CPU: 16},
		{Engine: "restore", What: clonesOf(8), Seconds: 2.5, CPU: 4}} {
		s.Image = "web:boot"
		b.report.add(s)
	}
	for _, s := range []Sample{{Engine: "boot", Seconds: 4.6, Attached: 0.6},
		{Engine: "restore", Seconds: 1.3, Attached: 0.6}} {
		s.Image, s.What = "web:boot", storeStart // of a boot of 4 s and a restore of 0.7
		b.report.add(s)
		s.Image, s.Attached = "redis:1", 3.4 // of boots that are no longer than the image's attaching lets them be
		b.report.add(s)
	}
	for image, want := range map[string]string{"web:boot": "at most 0.7 s: not met; once the image is attached (boot 4.00 s, restore 0.70 s) 5 times faster: met", "redis:1": "at most 0.7 s: not met"} {
		if got := b.popVerdict(image, storeStart, 4.6, 1.3); got != want {
			t.Errorf("%s from the PoP's store: %q, want %q", image, got, want)
		}
	}
	if got := b.cloneVerdict("web:boot", clonesOf(8), 9, 2.5); !strings.Contains(got, "(0.25): met") ||
		!strings.Contains(got, "(5.0): not met") {
		t.Errorf("8 clones: %q", got)
	}
	if err := b.verdict(); err == nil || err.Error() != "targets that are not met: 6" {
		t.Errorf("six are not: %v", err)
	}
}

// The benchmark fails if an image had to be left out, and not if all went well.
func TestBootFails(t *testing.T) {
	b := &bootBench{refused: map[string]string{}, stdout: io.Discard}
	if b.met(true) != "met" || b.verdict() != nil {
		t.Errorf("nothing went wrong: %v", b.verdict())
	}
	b.refuse("web:boot", errors.New("no CRIU"))
	if err := b.verdict(); err == nil || err.Error() != "left out: web:boot: no CRIU" {
		t.Errorf("an image was left out: %v", err)
	}
}

// A median has an interval once there are enough rounds for one.
func TestPercent(t *testing.T) {
	var all []float64
	for i := range 20 {
		all = append(all, float64((i*7)%20))
	}
	for want, of := range map[string][]float64{"9.5 % (5.0 to 14.0)": all, "2.0 %": {1, 2, 3}} {
		if got := percent(of); got != want {
			t.Errorf("%v: %q, not %q", of, got, want)
		}
	}
	if got := gained([]float64{97, 50}, []float64{100, 100, 7}); len(got) != 2 || got[0] < 2.99 ||
		got[0] > 3.01 || got[1] != 50 {
		t.Errorf("%v", got)
	}
}
