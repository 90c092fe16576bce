package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"dewpoint/internal/cli/docker"
)

// unknownCommand is the error of a command that dew has not.
func unknownCommand(name string) error {
	if why := docker.Commands[name]; why != "" {
		return misuse(nil, "dew has no %s: %s", name, why)
	}
	var names []string
	for _, c := range commands() {
		names = append(names, c.name)
	}
	return misuse(nil, "%q is not a command%s", name, didYouMean(name, "dew ", names))
}

// unknownFlag is the error of an option that the command has not; nil of other errors.
func (c *call) unknownFlag(err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) {
		return nil
	}
	name := unknown.GetSpecifiedName()
	long := name
	if unknown.GetSpecifiedShortnames() != "" {
		long = docker.Short[name]
	}
	if c.flags.Lookup("publish") != nil { // run and its like
		for _, o := range docker.Run {
			if o.Name == long && runFlag(long) == nil {
				return misuse(c, "dew has no --%s: %s", o.Name, o.Why)
			}
		}
	}
	var names []string
	c.flags.VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, f.Name)
		}
	})
	return misuse(c, "%v%s", err, didYouMean(long, "--", names))
}

// runFlag is a flag of dew run; nil if it has none of that name.
func runFlag(name string) *pflag.Flag {
	c := &call{flags: pflag.NewFlagSet("run", pflag.ContinueOnError)}
	runFlags(c)
	return c.flags.Lookup(name)
}

// didYouMean asks for the nearest of the names, if one is near.
func didYouMean(name, prefix string, names []string) string {
	best, least := "", 1+len(name)/3
	for _, n := range names {
		d := distance(name, n)
		if strings.HasPrefix(n, name) && len(name) > 2 {
			d = 1
		}
		if d <= least && (best == "" || d < least) {
			best, least = n, d
		}
	}
	if best == "" || name == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %s%s?", prefix, best)
}

// distance is how many letters have to be added, removed, changed or exchanged with the next.
func distance(a, b string) int {
	var rows [3][]int
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
	}
	before, last, now := rows[0], rows[1], rows[2]
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		now[0] = i
		for j := 1; j <= len(b); j++ {
			change := 1
			if a[i-1] == b[j-1] {
				change = 0
			}
			now[j] = min(last[j]+1, now[j-1]+1, last[j-1]+change)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				now[j] = min(now[j], before[j-2]+1)
			}
		}
		before, last, now = last, now, before
	}
	return last[len(b)]
}
