package bench

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"dewpoint/testkit/testbed"
)

// Latency is what the users of a web server saw.
type Latency struct {
	Requests int     `json:"requests"`
	Failed   int     `json:"failed"`
	P50      float64 `json:"p50"` // seconds
	P99      float64 `json:"p99"`
}

const webAddress = "127.0.0.1:8090"

// serveWeb answers every request with a page for which it works a little,
// about half a millisecond.
func serveWeb(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	page := make([]byte, 256<<10)
	server := &http.Server{Addr: webAddress,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			sum := sha256.Sum256(page)
			w.Write(append(sum[:], page[:16<<10]...))
		})}
	defer context.AfterFunc(ctx, func() { server.Close() })()
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// startWeb runs the web server beside an engine on the node.
func startWeb(ctx context.Context, bed *testbed.Bed) (*testbed.Group, error) {
	g, err := testbed.NewGroup("web")
	if err != nil {
		return nil, err
	}
	err = g.Start(bed.Self(ctx, "web"))
	if err == nil {
		err = bed.Wait(ctx, 10*time.Second, func(ctx context.Context) error {
			return bed.Get(ctx, "http://"+webAddress)
		})
	}
	if err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

// load asks the web server 200 times a second over four connections, until
// the function that it returns is called.
func load(ctx context.Context, bed *testbed.Bed) (stop func() *Latency) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Minute)
	transport := &http.Transport{MaxIdleConnsPerHost: 4,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return bed.Dial(ctx, network, addr)
		}}
	client := &http.Client{Transport: transport, Timeout: 10 * time.Second}
	var (
		mu    sync.Mutex
		times []float64
		out   Latency
		wait  sync.WaitGroup
	)
	for range 4 {
		wait.Go(func() {
			ticker := time.NewTicker(20 * time.Millisecond)
			defer ticker.Stop()
			for due := time.Now(); ; due = <-ticker.C {
				err := ask(ctx, client)
				if ctx.Err() != nil {
					return
				}
				mu.Lock()
				times = append(times, time.Since(due).Seconds())
				if err != nil {
					out.Failed++
				}
				mu.Unlock()
			}
		})
	}
	return func() *Latency {
		cancel()
		wait.Wait()
		transport.CloseIdleConnections()
		out.Requests, out.P50, out.P99 = len(times), quantile(times, 0.5), quantile(times, 0.99)
		return &out
	}
}

func ask(ctx context.Context, client *http.Client) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+webAddress, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	v = slices.Sorted(slices.Values(v))
	return v[int(q*float64(len(v)-1))]
}
