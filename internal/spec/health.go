package spec

import (
	"cmp"
	"fmt"
	"strings"
	"time"
)

// The states of a container's health.
const (
	HealthStarting  = "starting" // no check has succeeded yet, and not enough have failed
	HealthHealthy   = "healthy"
	HealthUnhealthy = "unhealthy"
)

// Health is how it is found out whether a container that runs is well: Docker's HEALTHCHECK. In a Request a
// zero field is the image's, and then its default.
type Health struct {
	// Test is CMD and a command's arguments, CMD-SHELL and a line for /bin/sh, or NONE. In a Request it may be
	// empty.
	Test          []string      `json:",omitempty"`
	Interval      time.Duration `json:",omitempty"` // between checks; default 30 s
	Timeout       time.Duration `json:",omitempty"` // of one; default 30 s
	StartPeriod   time.Duration `json:",omitempty"` // in which failures do not count, until the first success
	StartInterval time.Duration `json:",omitempty"` // between checks in it; default 5 s
	Retries       int           `json:",omitempty"` // failures in a row that make it unhealthy; default 3
}

// maxTest is what of a Test a label of containerd's can hold.
const maxTest = 3000

// None reports whether nothing is checked.
func (h *Health) None() bool { return h == nil || len(h.Test) == 0 || h.Test[0] == "NONE" }

// Over is h with the image's check where h says nothing; nil if both do not. An error says that there is no
// check to which h could belong.
func (h *Health) Over(image *Health) (*Health, error) {
	switch {
	case h == nil:
		return image, nil
	case len(h.Test) > 0 && image != nil:
		timing := *image
		timing.Test = nil
		image = &timing
	case len(h.Test) > 0:
		image = &Health{}
	case image.None():
		return nil, fmt.Errorf("the image has no health check that could be changed: give --health-cmd")
	}
	return &Health{Test: append(h.Test[:len(h.Test):len(h.Test)], image.Test...),
		Interval:      cmp.Or(h.Interval, image.Interval),
		Timeout:       cmp.Or(h.Timeout, image.Timeout),
		StartPeriod:   cmp.Or(h.StartPeriod, image.StartPeriod),
		StartInterval: cmp.Or(h.StartInterval, image.StartInterval),
		Retries:       cmp.Or(h.Retries, image.Retries)}, nil
}

// Args is the command of a check. An error says that Test cannot be read.
func (h *Health) Args() ([]string, error) {
	switch {
	case len(h.Test) > 1 && h.Test[0] == "CMD":
		return h.Test[1:], nil
	case len(h.Test) == 2 && h.Test[0] == "CMD-SHELL":
		return []string{"/bin/sh", "-c", h.Test[1]}, nil
	}
	return nil, fmt.Errorf("health check %q is not understood: want CMD and arguments, CMD-SHELL and a line, or NONE", h.Test)
}

// Defaults is h with no field zero or below, but for StartPeriod, which is not below.
func (h *Health) Defaults() Health {
	or := func(d, otherwise time.Duration) time.Duration { return cmp.Or(max(d, 0), otherwise) }
	return Health{Test: h.Test, Interval: or(h.Interval, 30*time.Second), Timeout: or(h.Timeout, 30*time.Second),
		StartPeriod: max(h.StartPeriod, 0), StartInterval: or(h.StartInterval, 5*time.Second),
		Retries: cmp.Or(max(h.Retries, 0), 3)}
}

// Fits says what is wrong with a check that a container is to have.
func (h *Health) Fits() error {
	if h.None() {
		return nil
	}
	if n := len(strings.Join(h.Test, " ")); n > maxTest {
		return fmt.Errorf("the health check's command has %d bytes, and at most %d can be kept: put it into a script of the image", n, maxTest)
	}
	_, err := h.Args()
	return err
}

// validate says what is wrong with the Health of a Request by itself.
func (h *Health) validate() error {
	if h == nil {
		return nil
	}
	for _, d := range []struct {
		name string
		time time.Duration
	}{{"interval", h.Interval}, {"timeout", h.Timeout}, {"start-period", h.StartPeriod},
		{"start-interval", h.StartInterval}} {
		if d.time < 0 || d.time > 0 && d.time < time.Millisecond {
			return fmt.Errorf("--health-%s %v: want a time of a millisecond or more", d.name, d.time)
		}
	}
	if h.Retries < 0 {
		return fmt.Errorf("--health-retries %d is below zero", h.Retries)
	}
	for _, s := range h.Test {
		if strings.IndexByte(s, 0) >= 0 {
			return fmt.Errorf("the health check's command has a zero byte")
		}
	}
	if len(h.Test) == 0 || len(h.Test) == 1 && h.Test[0] == "NONE" {
		return nil
	}
	return h.Fits()
}
