package cli

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/config"
	"dewpoint/internal/spec"
)

func stopFlags(c *call) {
	c.flags.StringVarP(&c.opt.timeout, "time", "t", "", "seconds, or a `time` such as 500ms, until it is killed")
}

// patience is what --time says.
func (c *call) patience() (time.Duration, error) {
	s := c.opt.timeout
	if s == "" {
		return api.DefaultTimeout, nil
	}
	if _, err := strconv.Atoi(s); err == nil {
		s += "s"
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return 0, misuse(c, "--time %s: want seconds, or a time such as 500ms", c.opt.timeout)
	}
	return d, nil
}

func stop(ctx context.Context, c *call) error {
	timeout, err := c.patience()
	if err != nil {
		return err
	}
	return c.names("container", func(name string) error { return c.client.Stop(ctx, name, timeout) })
}

func start(ctx context.Context, c *call) error {
	return c.names("container", func(name string) error { return c.client.Start(ctx, name) })
}

func restart(ctx context.Context, c *call) error {
	timeout, err := c.patience()
	if err != nil {
		return err
	}
	return c.names("container", func(name string) error { return c.client.Restart(ctx, name, timeout) })
}

func killFlags(c *call) {
	c.flags.StringVarP(&c.opt.signal, "signal", "s", "KILL", "`signal` to send: a name or a number")
}

func kill(ctx context.Context, c *call) error {
	return c.names("container", func(name string) error { return c.client.Kill(ctx, name, c.opt.signal) })
}

// top lists the processes of a container.
func top(ctx context.Context, c *call) error {
	name, err := c.one("container")
	if err != nil {
		return err
	}
	all, err := c.client.Top(ctx, name)
	if err != nil {
		return err
	}
	if c.json {
		return list(c, all)
	}
	var rows [][]string
	for _, p := range all {
		rows = append(rows, []string{strconv.Itoa(p.PID), strconv.Itoa(p.Parent), strconv.Itoa(p.UID),
			age(p.Started), fmt.Sprintf("%.2f", p.CPU), size(p.Memory), printable(p.Command)})
	}
	return table(c.cfg.Stdout, "PID PARENT UID AGE CPU MEMORY COMMAND", rows)
}

func updateFlags(c *call) {
	limitFlags(c)
	restartFlag(c)
}

// updateLimits changes what flags say.
func updateLimits(ctx context.Context, c *call) error {
	u, r := spec.Update{}, &c.opt.request
	if c.flags.Changed("memory") {
		n, err := config.ParseSize(c.opt.memory)
		if err != nil {
			return misuse(c, "--memory: %v", err)
		}
		u.Memory = &n
	}
	if c.flags.Changed("cpus") {
		u.CPUs = &r.CPUs
	}
	if c.flags.Changed("pids-limit") {
		n := max(0, r.PidsLimit) // Docker's -1 is no limit, too
		u.Pids = &n
	}
	if c.flags.Changed("restart") {
		u.Restart = &r.Restart
	}
	if err := u.Validate(); err != nil {
		return misuse(c, "%v", err)
	}
	return c.names("container", func(name string) error { return c.client.Update(ctx, name, u) })
}

// wait prints how each container has ended, once it has.
func wait(ctx context.Context, c *call) error {
	ctx, end := interruptible(ctx)
	defer end()
	type ended struct {
		Name   string `json:"name"`
		Status int    `json:"exit_code"`
	}
	var all []ended
	err := c.each("container", func(name string) error {
		status, err := c.client.Wait(ctx, name)
		if err != nil {
			return err
		}
		if !c.json {
			fmt.Fprintln(c.cfg.Stdout, status)
		}
		all = append(all, ended{name, status})
		return nil
	})
	if c.json && len(c.args) > 0 {
		if err := list(c, all); err != nil {
			return err
		}
	}
	return err
}

func rmFlags(c *call) {
	c.flags.BoolVarP(&c.opt.force, "force", "f", false, "also if it runs; no error if there is none")
}

func rm(ctx context.Context, c *call) error {
	return c.names("container", func(name string) error {
		err := c.client.Remove(ctx, name, c.opt.force)
		if err != nil && c.opt.force && verdict(err).Code == api.NotFound {
			return nil
		}
		return err
	})
}
