package cli

import (
	"context"
	"fmt"
	"strings"

	"dewpoint/internal/spec"
)

func checkpointFlags(c *call) {
	r := &c.opt.checkpoint
	c.flags.BoolVar(&r.Share, "share", false,
		"for all callers: without it only containers of who has deployed this one start from it")
	c.flags.BoolVar(&r.Stateful, "stateful", false,
		"though the container keeps state: what starts from it has the same")
	c.flags.StringVar(&r.TCP, "tcp", "",
		"what to do with `clients` that are connected: close (in what starts from it; the default) or refuse")
}

// checkpoint makes one, and prints its ID.
func checkpoint(ctx context.Context, c *call) error {
	name, err := c.one("container")
	if err != nil {
		return err
	}
	req := c.opt.checkpoint
	req.Name = name
	if err := req.Validate(); err != nil {
		return misuse(c, "%v", err)
	}
	ctx, stop := interruptible(ctx)
	defer stop()
	cp, err := c.client.Checkpoint(ctx, req)
	if err != nil {
		return err
	}
	if c.json {
		return c.print(cp)
	}
	fmt.Fprintf(c.cfg.Stderr, "%s of memory in %s, %s of files; paused for %.2f s\n", size(cp.Pages),
		size(cp.Size), size(cp.Upper), cp.Paused)
	fmt.Fprintln(c.cfg.Stdout, cp.ID)
	return nil
}

// checkpoints lists them or, with rm, removes some.
func checkpoints(ctx context.Context, c *call) error {
	if len(c.args) > 0 && c.args[0] == "rm" {
		c.args = c.args[1:]
		return c.names("checkpoint", func(id string) error { return c.client.RemoveCheckpoint(ctx, id) })
	}
	image := ""
	if len(c.args) > 0 {
		var err error
		if image, err = c.one("image"); err != nil {
			return err
		}
	}
	all, err := c.client.ListCheckpoints(ctx, image)
	if err != nil {
		return err
	}
	if c.json {
		return list(c, all)
	}
	var rows [][]string
	for _, p := range all {
		rows = append(rows, []string{short(p.ID), p.Image, dash(strings.Join(p.Args, " ")), p.Node, owner(p.Owner),
			size(p.Pages), size(p.Size + p.Upper),
			seconds(p.Boot), seconds(p.Restore), p.Where, age(p.Created), fits(p),
			dash(strings.Join(p.Differs, "; "))})
	}
	return table(c.cfg.Stdout, "ID IMAGE COMMAND NODE OWNER MEMORY STORED BOOT RESTORE WHERE AGE FITS DIFFERS",
		rows)
}

func fits(p spec.Checkpoint) string {
	if p.Unfit == "" {
		return "yes"
	}
	return "no: " + p.Unfit
}

// owner is who starts containers from a checkpoint.
func owner(name string) string {
	switch name {
	case "":
		return "admin"
	case "*":
		return "anyone"
	}
	return name
}

// seconds is a time that may not have been measured.
func seconds(s float64) string {
	if s == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2fs", s)
}
