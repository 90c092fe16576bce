package spec

import (
	"fmt"
	"strconv"
	"strings"
)

// The kinds of a RestartPolicy.
const (
	RestartNo            = "no"
	RestartOnFailure     = "on-failure"
	RestartAlways        = "always"
	RestartUnlessStopped = "unless-stopped"
)

// RestartPolicy says when a container that has ended is started again.
type RestartPolicy struct {
	Kind string
	Most int // of RestartOnFailure: how often; 0 is without end
}

// ParseRestart reads no, on-failure[:N], always or unless-stopped; "" is no.
func ParseRestart(s string) (RestartPolicy, error) {
	kind, number, counted := strings.Cut(s, ":")
	switch kind {
	case "":
		kind = RestartNo
	case RestartNo, RestartOnFailure, RestartAlways, RestartUnlessStopped:
	default:
		return RestartPolicy{}, fmt.Errorf("--restart %s: want no, on-failure[:N], always or unless-stopped", s)
	}
	p := RestartPolicy{Kind: kind}
	if !counted {
		return p, nil
	}
	n, err := strconv.Atoi(number)
	if err != nil || n < 1 || kind != RestartOnFailure {
		return RestartPolicy{}, fmt.Errorf("--restart %s: a number from 1 on is for on-failure alone, as on-failure:3", s)
	}
	p.Most = n
	return p, nil
}

// restarts says what is wrong with Restart.
func (r Request) restarts() error {
	p, err := ParseRestart(r.Restart)
	switch {
	case err != nil || p.Kind == RestartNo:
		return err
	case r.Remove:
		return fmt.Errorf("--restart and --rm are given: a container that is removed when it exits does not start again")
	case r.Record:
		return fmt.Errorf("a start that is recorded is not one of a container that starts again")
	}
	return nil
}
