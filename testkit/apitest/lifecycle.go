package apitest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

// Stop implements api.Containers.
func (n *Node) Stop(ctx context.Context, name string, timeout time.Duration) error {
	now, after := n.fault("Stop")
	if now != nil {
		return now
	}
	unlock := n.lock()
	c, err := n.find(name)
	if err == nil {
		c.stop = "term"
		if timeout == 0 {
			c.stop = "kill"
		}
	}
	unlock()
	if err != nil {
		return err
	}
	patient, cancel := ctx, context.CancelFunc(func() {})
	if timeout > 0 {
		patient, cancel = context.WithTimeout(ctx, timeout)
	}
	defer cancel()
	ended := func() bool { return c.Status == spec.StatusExited }
	if err := n.await(patient, ended); errors.Is(err, context.DeadlineExceeded) {
		unlock := n.lock()
		c.stop = "kill"
		unlock()
	}
	return errors.Join(n.await(ctx, ended), after)
}

// Remove implements api.Containers.
func (n *Node) Remove(ctx context.Context, name string, force bool) error {
	now, after := n.fault("Remove")
	if now != nil {
		return now
	}
	unlock := n.lock()
	c, err := n.find(name)
	running := err == nil && c.Status == spec.StatusRunning
	unlock()
	switch {
	case err != nil:
		return err
	case running && !force:
		return api.New(api.Running, fmt.Sprintf("%s runs", name))
	case running:
		if err := n.Stop(ctx, name, 0); err != nil {
			return err
		}
	}
	defer n.lock()()
	n.drop(c)
	return after
}

// Wait implements api.Containers.
func (n *Node) Wait(ctx context.Context, name string) (int, error) {
	if now, _ := n.fault("Wait"); now != nil {
		return 0, now
	}
	unlock := n.lock()
	c, err := n.find(name)
	unlock()
	if err != nil {
		return 0, err
	}
	status := 0
	err = n.await(ctx, func() bool {
		status = c.ExitCode
		return c.Status == spec.StatusExited
	})
	return status, err
}

// Start implements api.Containers.
func (n *Node) Start(_ context.Context, name string) error {
	now, after := n.fault("Start")
	if now != nil {
		return now
	}
	defer n.lock()()
	c, err := n.find(name)
	switch {
	case err != nil:
		return err
	case n.closed:
		return api.New(api.Stopping, "the node is closed")
	case c.Status == spec.StatusRunning:
		return after
	}
	c.Status, c.ExitCode, c.stop = spec.StatusRunning, 0, ""
	n.processes.Go(func() { n.live(c, nil) })
	return after
}

// Restart implements api.Containers.
func (n *Node) Restart(ctx context.Context, name string, timeout time.Duration) error {
	now, after := n.fault("Restart")
	if now != nil {
		return now
	}
	return errors.Join(n.Stop(ctx, name, timeout), n.Start(ctx, name), after)
}

// Top implements api.Containers. A container has one process, its command.
func (n *Node) Top(_ context.Context, name string) ([]spec.Process, error) {
	if now, _ := n.fault("Top"); now != nil {
		return nil, now
	}
	defer n.lock()()
	c, err := n.find(name)
	switch {
	case err != nil:
		return nil, err
	case c.Status != spec.StatusRunning:
		return nil, api.New(api.NotRunning, fmt.Sprintf("%s does not run", name))
	}
	return []spec.Process{{PID: c.PID, Parent: 1, UID: 33, Started: c.Created, CPU: 1.5, Memory: 2_000_000,
		Command: strings.Join(c.req.Cmd, " ")}}, nil
}

// Update implements api.Containers.
func (n *Node) Update(_ context.Context, name string, u spec.Update) error {
	now, after := n.fault("Update")
	if now != nil {
		return now
	}
	if err := u.Validate(); err != nil {
		return api.New(api.BadRequest, err.Error())
	}
	defer n.lock()()
	c, err := n.find(name)
	if err != nil {
		return err
	}
	u.In(&c.req)
	c.Container.Restart = c.req.Restart
	return after
}

// Kill implements api.Containers. Signals but KILL and TERM do nothing to what runs here.
func (n *Node) Kill(_ context.Context, name, signal string) error {
	now, after := n.fault("Kill")
	if now != nil {
		return now
	}
	defer n.lock()()
	c, err := n.find(name)
	switch {
	case err != nil:
		return err
	case c.Status != spec.StatusRunning:
		return api.New(api.NotRunning, fmt.Sprintf("%s does not run", name))
	}
	switch signal {
	case "", "KILL":
		c.stop = "kill"
	case "TERM":
		c.stop = "term"
	case "HUP":
	default:
		return api.New(api.BadRequest, fmt.Sprintf("signal %q is unknown", signal))
	}
	return after
}
