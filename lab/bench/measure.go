package bench

import (
	"context"
	"fmt"
	"time"

	"dewpoint/testkit/testbed"
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
	Wire       int64            `json:"wire"`          // bytes that came over the link, frames included
	Way        string           `json:"way,omitempty"` // of a start by dewd: how it pulled
	// seconds of these until the image could be read, in part pop of boot
	Attached float64  `json:"attached,omitempty"`
	Web      *Latency `json:"web,omitempty"`
}

// The two instructions that are timed.
const (
	pullImage   = "pull"
	firstAnswer = "answer"
)

// watcher looks on while an instruction is carried out, until the function
// that it returns is called.
type watcher func(*session) (stop func())

// measure gives one instruction to a cold engine.
func measure(ctx context.Context, bed *testbed.Bed, e engine, image, what string, watch watcher) (Sample,
	error) {
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
	if err := s.bed.Cool(image); err != nil {
		return Sample{}, err
	}
	sample, err := timed(ctx, s, e, image, what, watch, func(ctx context.Context) error {
		return instruct(ctx, s, e, image, what)
	})
	if err == nil && what == firstAnswer {
		err = e.remove(ctx, s, containerName(e))
	}
	return sample, err
}

// timed measures one instruction, which has been carried out when give returns.
func timed(ctx context.Context, s *session, e engine, image, what string, watch watcher,
	give func(context.Context) error) (Sample, error) {
	sample := Sample{Engine: e.name(), Image: image, What: what}
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
	err = give(ctx)
	sample.Seconds = time.Since(start).Seconds()
	memory.Stop()
	if err != nil {
		return sample, fmt.Errorf("%s %s %s: %w", e.name(), what, image, err)
	}
	used, err := s.group.CPU()
	sample.CPU, sample.Peak, sample.PerProgram = (used - cpu).Seconds(), memory.Peak, memory.PerOf
	received, _ := s.bed.Received()
	sample.Wire = received - wire
	return sample, err
}

func containerName(e engine) string { return "bench-" + e.name() }

// instruct gives the instruction and returns once it is carried out.
func instruct(ctx context.Context, s *session, e engine, image, what string) error {
	ref := testbed.Address + "/" + image
	if what == pullImage {
		return e.pull(ctx, s, ref)
	}
	return answer(ctx, s, e, ref, image)
}

// answer runs an image and returns once it answers.
func answer(ctx context.Context, s *session, e engine, ref, image string) error {
	app, err := applicationOf(image)
	if err != nil {
		return err
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
	err = s.bed.Wait(ctx, 20*time.Minute, func(ctx context.Context) error { return app.ask(ctx, s.bed.Dial) })
	if runErr := <-ran; runErr != nil {
		return runErr
	}
	return err
}
