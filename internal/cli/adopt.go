package cli

import (
	"context"
	"fmt"
	"strings"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

func adoptFlags(c *call) {
	c.flags.BoolVarP(&c.opt.all, "all", "a", false, "every image that containerd has")
}

// adopt lists what can be adopted if it is told nothing.
func adopt(ctx context.Context, c *call) error {
	ctx, stop := interruptible(ctx)
	defer stop()
	switch {
	case c.opt.all && len(c.args) > 0:
		return misuse(c, "--all is instead of images")
	case !c.opt.all && len(c.args) == 0:
		return adoptable(ctx, c)
	}
	s := c.screen()
	var all, failed int
	err := c.client.Adopt(ctx, c.args, false, func(a spec.Adoption) error {
		if a.State == spec.Adopting {
			if s.term != nil {
				s.draw([]string{fmt.Sprintf("%s: %s of %s", a.Image, size(a.Done), size(a.Store+a.Link))})
			}
			return nil
		}
		if s.term != nil {
			s.draw(nil)
		}
		all++
		if a.State == spec.AdoptFailed {
			failed++
		}
		if c.json {
			return c.print(a)
		}
		if a.State == spec.AdoptFailed {
			_, err := fmt.Fprintf(c.cfg.Stderr, "dew: %s: %s\n", a.Image, printable(a.Error))
			return err
		}
		_, err := fmt.Fprintf(c.cfg.Stdout, "%s: %s from containerd's store, %s over the link, %s of disk\n", a.Image,
			size(a.Store), size(a.Link), size(a.Disk))
		return err
	})
	if err == nil && failed > 0 {
		err = api.New(api.BadImage, fmt.Sprintf("%d of %d images are not adopted", failed, all))
	}
	return err
}

func adoptable(ctx context.Context, c *call) error {
	all := []spec.Adoption{}
	err := c.client.Adopt(ctx, nil, true, func(a spec.Adoption) error {
		all = append(all, a)
		return nil
	})
	if err != nil {
		return err
	}
	if c.json {
		return c.print(all)
	}
	rows := make([][]string, 0, len(all))
	for _, a := range all {
		disk := "?"
		if a.Disk > 0 {
			disk = size(a.Disk)
		}
		rows = append(rows, []string{a.Image, strings.Join(a.Namespaces, ","), a.State, size(a.Here), size(a.Store),
			size(a.Link), disk, dash(printable(a.Error))})
	}
	return table(c.cfg.Stdout, "IMAGE NAMESPACES STATE HERE STORE LINK DISK WHY", rows)
}
