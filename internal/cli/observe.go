package cli

import (
	"context"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

func eventsFlags(c *call) {
	c.flags.StringVar(&c.opt.after, "after", "",
		"begin with what is still known since event `number`, or epoch.number")
}

func events(ctx context.Context, c *call) error {
	if err := c.none(); err != nil {
		return err
	}
	var after *spec.Mark
	if c.flags.Changed("after") {
		m, err := markOf(c.opt.after)
		if err != nil {
			return err
		}
		after = &m
	}
	ctx, stop := interruptible(ctx)
	defer stop()
	err := c.client.Events(ctx, after, nil, c.event)
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// markOf reads NUMBER or EPOCH.NUMBER.
func markOf(s string) (m spec.Mark, err error) {
	number := s
	if epoch, n, two := strings.Cut(s, "."); two {
		m.Epoch, number = epoch, n
	}
	if m.Seq, err = strconv.ParseUint(number, 10, 64); err != nil {
		return m, api.New(api.BadRequest,
			fmt.Sprintf("--after %s: want the number of an event, or EPOCH.NUMBER, as events --json has them", s))
	}
	return m, nil
}

func (c *call) event(e spec.Event) error {
	if c.json {
		return c.print(e)
	}
	words := []string{e.Time.Local().Format(time.StampMilli), e.Kind}
	for _, s := range []string{e.Name, e.Image, e.Stage, e.Layer, e.Checkpoint, e.Health} {
		if s != "" {
			words = append(words, s)
		}
	}
	if e.At > 0 {
		words = append(words, fmt.Sprintf("%.2f s", e.At))
	}
	if e.ExitCode != nil {
		words = append(words, fmt.Sprintf("status %d", *e.ExitCode))
	}
	if e.Error != "" {
		words = append(words, e.Error)
	}
	if e.Record != nil {
		words = append(words, summary(*e.Record))
	}
	_, err := fmt.Fprintln(c.cfg.Stdout, strings.Join(words, " "))
	return err
}

// doctor fails when something on the node does not work.
func doctor(ctx context.Context, c *call) error {
	if err := c.none(); err != nil {
		return err
	}
	all, err := c.client.Doctor(ctx)
	if err != nil {
		return err
	}
	bad := 0
	var rows [][]string
	for _, f := range all {
		if f.Level == spec.LevelBad {
			bad++
		}
		rows = append(rows, []string{f.Level, f.What, f.Detail})
		if f.Remedy != "" && f.Level != spec.LevelOK {
			rows = append(rows, []string{"", "", "→ " + f.Remedy})
		}
	}
	if c.json {
		err = list(c, all)
	} else {
		err = table(c.cfg.Stdout, "LEVEL WHAT FOUND", rows)
	}
	if err == nil && bad > 0 {
		e := api.New(api.Unsupported, fmt.Sprintf("%d of %d findings are bad", bad, len(all)))
		e.Remedy = "what to do stands beside each"
		return e
	}
	return err
}

// version shows what it knows of dew though there be no daemon.
func version(ctx context.Context, c *call) error {
	if err := c.none(); err != nil {
		return err
	}
	own := spec.Version{Version: c.cfg.Version, Go: runtime.Version()}
	v, err := c.client.Version(ctx)
	if c.json {
		doc := struct {
			Dew  spec.Version  `json:"dew"`
			Dewd *spec.Version `json:"dewd,omitempty"`
		}{Dew: own}
		if err == nil {
			doc.Dewd = &v
		}
		if err := c.print(doc); err != nil {
			return err
		}
		return err
	}
	fmt.Fprintf(c.cfg.Stdout, "dew   %s, %s\n", own.Version, own.Go)
	if err != nil {
		return err
	}
	words := []string{v.Version}
	for _, s := range []string{v.Go, v.Engine, v.Kernel} {
		if s != "" {
			words = append(words, s)
		}
	}
	if v.Mount != "" {
		words = append(words, "layers by "+v.Mount)
	}
	if v.Inflater != "" {
		words = append(words, "inflated by "+v.Inflater)
	}
	fmt.Fprintf(c.cfg.Stdout, "dewd  %s on node %s\n", strings.Join(words, ", "), v.Node)
	return nil
}
