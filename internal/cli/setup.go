package cli

import (
	"context"
	"fmt"
	programs "os/exec"
	"slices"
	"strings"

	join "dewpoint/internal/setup"
)

// joining are the flags of dew setup.
type joining struct {
	join.Config
	dry, undo, restart bool
	image              string
}

func setupFlags(c *call) {
	j := &c.opt.joining
	c.flags.BoolVar(&j.dry, "dry-run", false, "show the difference and change nothing")
	c.flags.BoolVar(&j.undo, "undo", false, "take dewd out again; of all that it was joined to, if none is named")
	c.flags.BoolVar(&j.restart, "restart", false, "restart the services that read the files when they start")
	c.flags.StringVar(&j.image, "image", "", "then start this `image` with containerd's ctr, as a check")
	c.flags.StringVar(&j.File, "config", "", "containerd's configuration `file` (default /etc/containerd/config.toml)")
	c.flags.StringVar(&j.Containerd, "containerd", "", "containerd's `program`, asked for its version (default: that in PATH)")
	c.flags.StringVar(&j.Socket, "socket", "", "the snapshotter's `socket` (default /run/dewpoint/snapshotter.sock)")
	c.flags.StringVar(&j.Root, "root", "", "`directory` before all paths but the socket's")
}

// joinHost needs no daemon: it writes files that others read.
func joinHost(ctx context.Context, c *call) error {
	j := c.opt.joining
	targets := c.args
	if len(targets) == 0 && j.undo {
		targets = join.Joined(j.Root)
		if j.File != "" && !slices.Contains(targets, "containerd") {
			targets = append(targets, "containerd") // whose file lies elsewhere
		}
	} else if len(targets) != 1 {
		return misuse(c, "name one of %s", strings.Join(join.Targets, ", "))
	}
	for _, t := range targets {
		j.Target = t
		if err := c.joinOne(ctx, j); err != nil {
			return err
		}
	}
	return nil
}

func (c *call) joinOne(ctx context.Context, j joining) error {
	plan := join.Join
	if j.undo {
		plan = join.Leave
	}
	p, err := plan(ctx, j.Config)
	if err != nil {
		return err
	}
	for _, ch := range p.Changes {
		diff, err := ch.Diff(ctx)
		if err != nil {
			return err
		}
		fmt.Fprint(c.cfg.Stdout, diff)
	}
	say := func(format string, a ...any) { fmt.Fprintf(c.cfg.Stderr, format+"\n", a...) }
	if len(p.Changes) == 0 {
		say("%s: nothing is to be changed", j.Target)
	} else if j.dry {
		say("%s: nothing was changed; without --dry-run it is", j.Target)
		return nil
	}
	if err := p.Make(!j.undo); err != nil {
		return err
	}
	for _, h := range p.Hints {
		say("%s", h)
	}
	switch {
	case len(p.Restart) == 0:
	case j.restart:
		if err := p.RestartServices(ctx); err != nil {
			return err
		}
	default:
		say("it holds from the next start on: systemctl restart %s", strings.Join(p.Restart, " "))
	}
	if j.image == "" || j.undo {
		return nil
	}
	return c.tryImage(ctx, j.image)
}

// tryImage starts an image by containerd's own client, with the snapshotter, and removes the container.
func (c *call) tryImage(ctx context.Context, image string) error {
	name := "dew-setup-check"
	for _, args := range [][]string{{"images", "pull", "--snapshotter", "dewpoint", image},
		{"run", "--rm", "--snapshotter", "dewpoint", image, name, "true"}} {
		cmd := programs.CommandContext(ctx, "ctr", append([]string{"--namespace", "default"}, args...)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("ctr %s %s: %w: %s", args[0], args[1], err, strings.TrimSpace(string(out)))
		}
	}
	fmt.Fprintf(c.cfg.Stderr, "%s starts from dewd's layers\n", image)
	return nil
}
