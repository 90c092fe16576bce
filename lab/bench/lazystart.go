package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/testkit/testbed"
)

// What else is timed of a lazy start: the time until the image is whole, and
// a start of what is then there and warm, which is the container's own boot.
const (
	wholeImage = "complete"
	warmStart  = "warm"
)

// start compares the times to the first answer, and to the whole image, over
// the bandwidths (figures 9 and 10).
func (l *lazy) start(ctx context.Context) error {
	engines, err := l.engines()
	if err != nil {
		return err
	}
	for _, mbit := range l.o.mbit {
		if err := l.bed.Rate(ctx, mbit); err != nil {
			return err
		}
		err := l.turns(engines, func(e engine, image string, round int) error {
			return l.startOne(ctx, e, testbed.Address, image, func(s Sample) {
				s.Mbit, s.Round = mbit, round
				l.report.add(s)
			})
		})
		if err != nil {
			return errors.Join(err, l.bed.Rate(ctx, 0))
		}
	}
	l.report.table("docker")
	l.startTargets()
	return l.bed.Rate(ctx, 0)
}

// turns calls f for every image and engine, once in each round.
func (l *lazy) turns(engines []engine, f func(e engine, image string, round int) error) error {
	for round := range l.o.rounds {
		for _, image := range l.o.images {
			for i := range engines {
				e := engines[(i+round)%len(engines)]
				if err := f(e, image, round); err != nil {
					return fmt.Errorf("%s, %s: %w", e.name(), image, err)
				}
			}
		}
	}
	return nil
}

// startOne starts an image on a cold engine until it answers; on dewd also
// until it is whole, and then once more.
func (l *lazy) startOne(ctx context.Context, e engine, address, image string, add func(Sample)) error {
	s, err := open(ctx, l.bed, e)
	if err != nil {
		return err
	}
	err = l.startIn(ctx, s, e, address, image, add)
	return errors.Join(err, s.close(e))
}

func (l *lazy) startIn(ctx context.Context, s *session, e engine, address, image string,
	add func(Sample)) error {
	if err := l.bed.Cool(image); err != nil {
		return err
	}
	ref := reference(e, address, image)
	whole, err := timed(ctx, s, e, image, wholeImage, nil, func(ctx context.Context) error {
		first, err := timed(ctx, s, e, image, firstAnswer, nil, func(ctx context.Context) error {
			return answer(ctx, s, e, ref, image)
		})
		if err != nil {
			return err
		}
		first.Way = wayOf(s)
		add(first)
		if !l.toTheEnd(e) {
			return nil
		}
		return awaitComplete(ctx, s)
	})
	if err != nil {
		return err
	}
	if err := e.remove(ctx, s, containerName(e)); err != nil || !l.toTheEnd(e) {
		return err
	}
	add(whole)
	warm, err := timed(ctx, s, e, image, warmStart, nil, func(ctx context.Context) error {
		return answer(ctx, s, e, ref, image)
	})
	if err != nil {
		return err
	}
	warm.Way = wayOf(s)
	add(warm)
	return e.remove(ctx, s, containerName(e))
}

// toTheEnd reports whether a start is followed until the image is whole.
func (l *lazy) toTheEnd(e engine) bool {
	_, ours := e.(dewd)
	return ours && slices.Contains(l.o.what, wholeImage)
}

// boot is the container's own time: the median of the warm starts by dewd,
// whatever the link was then.
func (l *lazy) boot(image string) float64 {
	var all []float64
	for _, s := range slices.Concat(l.report.samples, l.samples["sizes"]) {
		if s.Image == image && s.What == warmStart && s.Engine == "dewd" {
			all = append(all, s.Seconds)
		}
	}
	if len(all) == 0 {
		return math.NaN()
	}
	return median(all)
}

// wayOf says how dewd pulled what it ran last, and why; "" of another engine.
func wayOf(s *session) string {
	var r spec.Record
	if json.Unmarshal(s.said, &r) != nil {
		return ""
	}
	if len(r.Way.Why) == 0 {
		return r.Way.Pull
	}
	return fmt.Sprintf("%s (%s)", r.Way.Pull, strings.Join(r.Way.Why, "; "))
}

// dewdCall asks the API of the session's dewd, from this process: a client
// for each question would be most of the time.
func dewdCall(ctx context.Context, s *session, method, body string, answer any) error {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", s.path("state/dewd.sock"))
	}, DisableKeepAlives: true}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://dewd/dewpoint.v1.Node/"+method,
		bytes.NewReader([]byte(body)))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", method, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(answer)
}

// awaitComplete returns when every layer of the node is verified and on disk.
func awaitComplete(ctx context.Context, s *session) error {
	for {
		var said struct {
			Images []struct{ Layers []struct{ State string } }
		}
		if err := dewdCall(ctx, s, "Images", "{}", &said); err != nil {
			return err
		}
		complete := len(said.Images) > 0
		for _, img := range said.Images {
			for _, l := range img.Layers {
				complete = complete && l.State == spec.StateComplete
			}
		}
		if complete {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// startTargets holds what was measured against the targets: the link's time
// for the pack's beginning and the container's own boot, and Docker's time.
func (l *lazy) startTargets() {
	w := tabwriter.NewWriter(l.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "\nimage\tMbit/s\tdewd answers, s\tpack MB before ready\tpack/link + boot, s\tof that\tof docker\tof containerd-overlayfs\twire MB at answer\tway\n")
	for _, mbit := range l.o.mbit {
		var bounds, dockers []float64
		for _, image := range l.o.images {
			mine := l.report.of(key{image, mbit, firstAnswer}, "dewd")
			if len(mine) == 0 {
				continue
			}
			took := median(values(mine, seconds))
			ideal := l.boot(image)
			if mbit > 0 {
				ideal += float64(l.packs[image].Start) * 8 / 1e6 / mbit
			}
			bounds = append(bounds, took/ideal)
			theirs := values(l.report.of(key{image, mbit, firstAnswer}, "docker"), seconds)
			if len(theirs) > 0 {
				dockers = append(dockers, took/median(theirs))
			}
			fmt.Fprintf(w, "%s\t%s\t%.2f\t%.2f\t%.2f\t%.2f\t%s\t%s\t%.2f\t%s\n", image, rate(mbit), took,
				float64(l.packs[image].Start)/1e6,
				ideal, took/ideal, ratio(took, theirs),
				ratio(took, values(l.report.of(key{image, mbit, firstAnswer}, "containerd-overlayfs"), seconds)),
				median(values(mine, func(s Sample) float64 { return float64(s.Wire) }))/1e6, ways(mine))
		}
		if len(bounds) > 0 {
			fmt.Fprintf(w, "median\t%s\t\t\t\t%.2f\t%s\n", rate(mbit), median(bounds), medianOr(dockers))
		}
	}
	w.Flush()
}

func seconds(s Sample) float64 { return s.Seconds }

func medianOr(v []float64) string {
	if len(v) == 0 {
		return "-"
	}
	return fmt.Sprintf("%.3f", median(v))
}

// ways lists how the samples were pulled, each way once.
func ways(rows []Sample) string {
	var all []string
	for _, s := range rows {
		if !slices.Contains(all, s.Way) {
			all = append(all, s.Way)
		}
	}
	return fmt.Sprint(all)
}

// roundTrips compares the time to the first answer over distances, with a
// pack, without one, and whole.
func (l *lazy) roundTrips(ctx context.Context) error {
	engines, err := l.engines()
	if err != nil {
		return err
	}
	if err := l.bed.Rate(ctx, rttMbit); err != nil {
		return err
	}
	for _, rtt := range l.rtts {
		l.bed.Delay(rtt)
		err := l.turns(engines, func(e engine, image string, round int) error {
			return l.startOne(ctx, e, testbed.FarAddress, image, func(s Sample) {
				if s.What == firstAnswer {
					s.Mbit, s.Round, s.What = rttMbit, round, distant(rtt)
					l.report.add(s)
				}
			})
		})
		if err != nil {
			return errors.Join(err, l.bed.Rate(ctx, 0))
		}
	}
	l.report.table("dewd-whole")
	l.distances()
	return l.bed.Rate(ctx, 0)
}

func distant(rtt time.Duration) string { return fmt.Sprintf("answer at %s", rtt) }

// distances says for each distance where the lazy starts were slower than whole ones.
func (l *lazy) distances() {
	for _, rtt := range l.rtts {
		for _, name := range []string{"dewd", "dewd-nopack"} {
			var ratios []float64
			worst, image := 0.0, ""
			for _, i := range l.o.images {
				k := key{i, rttMbit, distant(rtt)}
				mine, whole := l.report.of(k, name), l.report.of(k, "dewd-whole")
				if len(mine) == 0 || len(whole) == 0 {
					continue
				}
				r := median(values(mine, seconds)) / median(values(whole, seconds))
				ratios = append(ratios, r)
				if r > worst {
					worst, image = r, i
				}
			}
			if len(ratios) > 0 {
				fmt.Fprintf(l.stdout,
					"round trips of %s: %s takes %.2f of a whole pull's time in the median, at most %.2f (%s)\n",
					rtt, name, median(ratios), worst, image)
			}
		}
	}
}
