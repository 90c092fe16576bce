package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/testkit/testbed"
)

// learn makes a pack of each image on a dewd of its own, by the commands that
// a build pipeline would use, and pushes it beside the image.
func (l *lazy) learn(ctx context.Context) error {
	d := dewd{bin: l.o.bin, tools: l.tools, variant: "-learn"}
	if why := d.missing(); why != "" {
		return errors.New(why)
	}
	s, err := open(ctx, l.bed, d)
	if err != nil {
		return err
	}
	for _, image := range l.o.images {
		if err = l.learnOne(ctx, s, d, image); err != nil {
			err = fmt.Errorf("%s: %w", image, err)
			break
		}
	}
	return errors.Join(err, s.close(d))
}

func (l *lazy) learnOne(ctx context.Context, s *session, d dewd, image string) error {
	app, err := applicationOf(image)
	if err != nil {
		return err
	}
	ref := reference(d, testbed.Address, image)
	script := s.path("exercise")
	text := fmt.Sprintf("#!/bin/sh\nexec %s ask %s\n", quoted(l.bed.Program()), image)
	if err := os.WriteFile(script, []byte(text), 0o755); err != nil {
		return err
	}
	start := time.Now()
	raw, err := d.dew(ctx, s, "profile", "--net", "host", "--runs", fmt.Sprint(l.runs), "--ready", app.ready,
		"--exercise", script, ref)
	if err != nil {
		return err
	}
	var said struct{ Pack spec.Pack }
	if err := json.Unmarshal(raw, &said); err != nil {
		return fmt.Errorf("what dew profile prints: %w: %s", err, raw)
	}
	if _, err := d.dew(ctx, s, "pack", "push", ref); err != nil {
		return err
	}
	l.packs[image] = said.Pack
	fmt.Fprintf(l.stderr, "%s: a pack of %.1f MB, %.1f MB before it starts, made in %.1f s\n", image,
		float64(said.Pack.Size)/1e6, float64(said.Pack.Start)/1e6, time.Since(start).Seconds())
	return nil
}

func quoted(args []string) string {
	var b strings.Builder
	for _, a := range args {
		fmt.Fprintf(&b, "'%s' ", strings.ReplaceAll(a, "'", `'\''`))
	}
	return strings.TrimSpace(b.String())
}
