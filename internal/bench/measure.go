package bench

import (
	"context"
	"fmt"
	"net"
	"strings"
	"time"

	"dewpoint/internal/bench/testbed"
)

// Sample is one measurement, as it is written to the results.
type Sample struct {
	Experiment string           `json:"experiment"`
	Engine     string           `json:"engine"`
	Image      string           `json:"image"`
	Mbit       float64          `json:"mbit"` // 0 is the whole link
	Round      int              `json:"round"`
	What       string           `json:"what"`    // pull or answer
	Seconds    float64          `json:"seconds"` // from the instruction
	CPU        float64          `json:"cpu"`     // seconds of all the engine's processes
	Peak       int64            `json:"peak"`    // bytes, resident at one moment, all processes
	Idle       int64            `json:"idle"`    // bytes, resident before the instruction
	PerProgram map[string]int64 `json:"per_program"`
	Wire       int64            `json:"wire"` // bytes that came over the link, frames included
	Web        *Latency         `json:"web,omitempty"`
}

// The two instructions that are timed.
const (
	pullImage   = "pull"
	firstAnswer = "answer"
)

// probes ask an image's application for its first answer.
var probes = map[string]func(*testbed.Bed, context.Context) error{
	"nginx":  get("http://127.0.0.1:80/"),
	"python": get("http://127.0.0.1:8000/"),
	"redis":  ping,
}

func get(url string) func(*testbed.Bed, context.Context) error {
	return func(bed *testbed.Bed, ctx context.Context) error { return bed.Get(ctx, url) }
}

func ping(bed *testbed.Bed, ctx context.Context) error {
	conn, err := bed.Dial(ctx, "tcp", "127.0.0.1:6379")
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(time.Second))
	return pong(conn)
}

func pong(conn net.Conn) error {
	if _, err := conn.Write([]byte("PING\r\n")); err != nil {
		return err
	}
	answer := make([]byte, 7)
	n, err := conn.Read(answer)
	if err != nil {
		return err
	}
	if string(answer[:n]) != "+PONG\r\n" {
		return fmt.Errorf("redis answered %q", answer[:n])
	}
	return nil
}

// watcher looks on while an instruction is carried out, until the function
// that it returns is called.
type watcher func(*session) (stop func())

// measure gives one instruction to a cold engine.
func measure(ctx context.Context, bed *testbed.Bed, e engine, image, what string, watch watcher) (Sample, error) {
	s, err := open(ctx, bed, e)
	if err != nil {
		return Sample{}, err
	}
	sample, err := measureIn(ctx, s, e, image, what, watch)
	if closeErr := s.close(e); err == nil {
		err = closeErr
	}
	return sample, err
}

func measureIn(ctx context.Context, s *session, e engine, image, what string, watch watcher) (Sample, error) {
	sample := Sample{Engine: e.name(), Image: image, What: what}
	if err := s.bed.Cool(image); err != nil {
		return sample, err
	}
	wire, err := s.bed.Received()
	if err != nil {
		return sample, err
	}
	cpu, err := s.group.CPU()
	if err != nil {
		return sample, err
	}
	sample.Idle = s.group.Resident()
	memory := s.group.Watch()
	if watch != nil {
		defer watch(s)()
	}
	start := time.Now()
	err = instruct(ctx, s, e, image, what)
	sample.Seconds = time.Since(start).Seconds()
	memory.Stop()
	if err != nil {
		return sample, fmt.Errorf("%s %s %s: %w", e.name(), what, image, err)
	}
	used, err := s.group.CPU()
	sample.CPU, sample.Peak, sample.PerProgram = (used - cpu).Seconds(), memory.Peak, memory.PerOf
	received, _ := s.bed.Received()
	sample.Wire = received - wire
	if what == firstAnswer {
		return sample, e.remove(ctx, s, containerName(e))
	}
	return sample, err
}

func containerName(e engine) string { return "bench-" + e.name() }

// instruct gives the instruction and returns once it is carried out.
func instruct(ctx context.Context, s *session, e engine, image, what string) error {
	ref := testbed.Address + "/" + image
	if what == pullImage {
		return e.pull(ctx, s, ref)
	}
	name, _, _ := strings.Cut(image, ":")
	probe := probes[name]
	if probe == nil {
		return fmt.Errorf("image %s has no probe", image)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ran := make(chan error, 1)
	go func() {
		err := e.run(ctx, s, ref, containerName(e))
		if err != nil {
			cancel()
		}
		ran <- err
	}()
	err := s.bed.Wait(ctx, 20*time.Minute, func(ctx context.Context) error { return probe(s.bed, ctx) })
	if runErr := <-ran; runErr != nil {
		return runErr
	}
	return err
}
