package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"dewpoint/testkit/popbed"

	"golang.org/x/sync/errgroup"
)

const loadImage = "nginx:boot" // a page of 5 kB, as the thesis served

// overhead compares a booted and a restored server under load (table 6.3). Both
// are there all the time, and the load goes to one after the other.
func (b *bootBench) overhead(ctx context.Context) (err error) {
	b.o.images = []string{loadImage}
	if err := b.o.build(ctx, b.stderr); err != nil {
		return err
	}
	l, err := b.lineup(ctx, "", loadImage)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	like := instance{image: loadImage, name: bootName}
	if _, err := b.prepare(ctx, l.dewd, like); err != nil || b.refused[loadImage] != "" {
		return err
	}
	ways := l.ways()
	addresses := map[string]string{}
	for _, w := range ways {
		like.name = bootName + "-" + w.name()
		if _, err := bring(ctx, b.bed, w, like); err != nil {
			return err
		}
		address, err := w.address(ctx, like.name)
		if err != nil {
			return err
		}
		addresses[w.name()] = net.JoinHostPort(address, "80")
		defer w.remove(context.WithoutCancel(ctx), like.name)
	}
	for round := range b.o.rounds {
		for _, n := range b.connections {
			for i := range ways {
				name := ways[(i+round)%len(ways)].name()
				cgroup := filepath.Join(popbed.ParentCgroup(l.dewd.session.path("state")), bootName+"-"+name)
				before := containersCPU(cgroup)
				said, err := b.loaded(ctx, l, addresses[name], n)
				if err != nil {
					return fmt.Errorf("%s, %d connections: %w", name, n, err)
				}
				b.figure(loadImage, name, loadOf(n), "requests/s", said.Rate)
				if used := containersCPU(cgroup) - before; used > 0 { // Docker's is not looked for
					b.figure(loadImage, name, cpuOf(n), "us", 1e6*used/float64(said.Requests))
				}
			}
		}
	}
	b.loadTable()
	return nil
}

func loadOf(n int) string { return fmt.Sprintf("%d connections", n) }

func cpuOf(n int) string { return fmt.Sprintf("%d connections, server's CPU of a request", n) }

// loaded runs the load as another process on the node.
func (b *bootBench) loaded(ctx context.Context, l *lineup, address string, n int) (said loadResult,
	err error) {
	cmd := b.bed.Self(ctx, "load", "-connections", strconv.Itoa(n), "-time", b.load.String(), address)
	out, err := l.dewd.session.group.Run(cmd)
	if err != nil {
		return said, err
	}
	err = json.Unmarshal(out, &said)
	if err == nil && said.Errors > 0 {
		err = fmt.Errorf("%d requests went wrong", said.Errors)
	}
	if err == nil && said.Requests == 0 {
		err = errors.New("no request was answered")
	}
	return said, err
}

func (b *bootBench) loadTable() {
	var rows [][]string
	for _, n := range b.connections {
		of := func(engine string) *figure { return find(b.figures, loadImage, engine, loadOf(n)) }
		boot, restore := of("boot"), of("restore")
		if boot == nil || restore == nil {
			continue
		}
		docker := ""
		if d := of("docker"); d != nil {
			docker = fmt.Sprintf("%.0f", d.median())
		}
		lost := gained(restore.Values, boot.Values)
		cpu := []string{"", "", ""}
		if one, other := find(b.figures, loadImage, "boot", cpuOf(n)),
			find(b.figures, loadImage, "restore", cpuOf(n)); one != nil && other != nil {
			cpu = []string{fmt.Sprintf("%.1f", one.median()), fmt.Sprintf("%.1f", other.median()),
				percent(gained(one.Values, other.Values))}
		}
		rows = append(rows, append([]string{strconv.Itoa(n), docker, fmt.Sprintf("%.0f", boot.median()),
			fmt.Sprintf("%.0f", restore.median()),
			percent(lost), "under 3 %: " + b.met(median(lost) < 3)}, cpu...))
	}
	b.markdown("requests per second under load; in brackets where the median lies in 95 of 100 such runs",
		[]string{"connections", "docker", "boot", "restore", "overhead of restore", "target",
			"CPU of a request, us: boot", "restore", "more of restore"}, rows)
}

// gained is by how many per cent of the second those of the second are more than the first. Rounds are
// compared with themselves: the machine is not the same in all.
func gained(first, second []float64) (all []float64) {
	for i := range min(len(first), len(second)) {
		all = append(all, 100*(1-first[i]/second[i]))
	}
	return all
}

// percent is a median with its interval of 95 %: by the sign test, of order statistics, which supposes
// nothing of how the values are spread.
func percent(all []float64) string {
	text := fmt.Sprintf("%.1f %%", median(all))
	sorted := slices.Sorted(slices.Values(all))
	n := len(sorted)
	if k := int(math.Round((float64(n) - 1.96*math.Sqrt(float64(n))) / 2)); k >= 1 {
		text += fmt.Sprintf(" (%.1f to %.1f)", sorted[k-1], sorted[n-k])
	}
	return text
}

// --- the load ----------------------------------------------------------------------

type loadResult struct {
	Requests int64   `json:"requests"`
	Errors   int64   `json:"errors"`
	Rate     float64 `json:"rate"` // of requests that were answered, each second
}

// generateLoad asks for / over so many connections, each of which waits for an
// answer before it asks again, for a bounded time. It prints a loadResult.
func generateLoad(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	f := flags("load", stderr)
	n := f.Int("connections", 10, "`number` of connections, at most 2000")
	limit := f.Duration("time", 5*time.Second, "`time` that it lasts, at most a minute")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() != 1 || *n < 1 || *n > 2000 || *limit <= 0 || *limit > time.Minute {
		return errors.New("usage: bench load [-connections N] [-time T] ADDRESS")
	}
	addr, err := net.ResolveTCPAddr("tcp", f.Arg(0))
	if err != nil {
		return err
	}
	if !addr.IP.IsLoopback() && !addr.IP.IsPrivate() {
		return fmt.Errorf("%s is not on this machine", addr)
	}
	return json.NewEncoder(stdout).Encode(httpLoad(ctx, addr.String(), *n, *limit))
}

func httpLoad(ctx context.Context, address string, n int, limit time.Duration) (r loadResult) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer time.AfterFunc(limit, cancel).Stop() // a deadline would end a connect before ctx says so
	var requests, failed atomic.Int64
	var all errgroup.Group
	start := time.Now()
	for range n {
		all.Go(func() error {
			if err := askOver(ctx, address, &requests); err != nil && ctx.Err() == nil {
				failed.Add(1)
			}
			return nil
		})
	}
	all.Wait()
	r.Requests, r.Errors = requests.Load(), failed.Load()
	r.Rate = float64(r.Requests) / time.Since(start).Seconds()
	return r
}

// askOver asks over one connection until ctx ends.
func askOver(ctx context.Context, address string, requests *atomic.Int64) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	r := bufio.NewReaderSize(conn, 8<<10)
	for ctx.Err() == nil {
		if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: bench\r\n\r\n"); err != nil {
			return err
		}
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			return err
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK {
			return errors.New(resp.Status)
		}
		requests.Add(1)
		if resp.Close { // nginx ends a connection after some requests
			return askOver(ctx, address, requests)
		}
	}
	return nil
}
