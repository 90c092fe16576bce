package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"dewpoint/internal/cli/show"
	"dewpoint/internal/spec"
)

// print writes one JSON document on one line.
func (c *call) print(v any) error {
	e := json.NewEncoder(c.cfg.Stdout)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// list prints an array, also if there is nothing in it.
func list[T any](c *call, items []T) error {
	if items == nil {
		items = []T{}
	}
	return c.print(items)
}

// table prints rows under a head, in columns.
func table(w io.Writer, head string, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(t, strings.ReplaceAll(head, " ", "\t"))
	for _, r := range rows {
		fmt.Fprintln(t, strings.Join(r, "\t"))
	}
	return t.Flush()
}

func psFlags(c *call) {
	c.flags.BoolVarP(&c.opt.all, "all", "a", false, "also those that do not run")
	listFlags(c, "name, status, health, image")
}

// listFlags are those of a list, which has the filters.
func listFlags(c *call, filters string) {
	s := &c.opt.show
	c.flags.BoolVarP(&s.Quiet, "quiet", "q", false, "print names alone")
	c.flags.StringArrayVarP(&s.Filters, "filter", "f", nil,
		"list those that match, `NAME=VALUE`, with a name of "+filters)
	c.flags.StringVar(&s.Format, "format", "", "print by a `template` such as '{{.Names}}', table TEMPLATE, or json")
}

// shows prints a list as flags say.
func (c *call) shows(l show.List) error {
	if !c.json {
		return c.shown(l.Print(c.cfg.Stdout, c.opt.show))
	}
	rows, err := l.Filtered(c.opt.show.Filters)
	if err != nil {
		return c.shown(err)
	}
	docs := []any{}
	for _, r := range rows {
		docs = append(docs, r.Doc)
	}
	return c.print(docs)
}

// shown is the error of what was to be shown.
func (c *call) shown(err error) error {
	var m show.Misuse
	if errors.As(err, &m) {
		return misuse(c, "%v", m)
	}
	return err
}

func ps(ctx context.Context, c *call) error {
	if err := c.none(); err != nil {
		return err
	}
	ended := slices.ContainsFunc(c.opt.show.Filters, func(f string) bool { return strings.HasPrefix(f, "status=") })
	all, err := c.client.List(ctx, c.opt.all || ended)
	if err != nil {
		return err
	}
	l := show.List{Head: []string{"NAME", "IMAGE", "STATUS", "ADDRESS", "PORTS", "AGE"}, Quiet: "Names",
		Filters: map[string]show.Filter{"name": {Column: "Names", Part: true}, "status": {Column: "State"},
			"health": {Column: "Health"}, "image": {Column: "Image", Part: true}}}
	for _, v := range all {
		l.Rows = append(l.Rows, show.Row{Doc: v,
			Cells: []string{v.Name, v.Image, status(v), dash(v.IP), dash(ports(v.Ports)), age(v.Created)},
			Names: map[string]string{"ID": v.Name, "Names": v.Name, "Image": v.Image, "Digest": v.Digest,
				"State": v.Status, "Status": status(v), "Health": v.Health, "Ports": ports(v.Ports), "Address": v.IP,
				"CreatedAt": v.Created.Format(time.RFC3339), "RunningFor": age(v.Created),
				"Restarts": strconv.Itoa(v.Restarts)}})
	}
	return c.shows(l)
}

func status(v spec.Container) string {
	s := v.Status
	switch {
	case s == spec.StatusExited:
		s = fmt.Sprintf("%s (%d)", s, v.ExitCode)
	case s == spec.StatusRestarting:
		s = fmt.Sprintf("%s (%d) in %.0fs", s, v.ExitCode, max(0, time.Until(v.NextStart).Seconds()))
	case v.ReadError != "":
		s += " (reads fail)"
	}
	if v.Health != "" {
		s += ", " + v.Health
	}
	if v.CrashLoop {
		s += ", crash loop"
	}
	switch {
	case v.Restarts == 1:
		s += ", 1 restart"
	case v.Restarts > 1:
		s += fmt.Sprintf(", %d restarts", v.Restarts)
	}
	return s
}

func ports(list []spec.Port) string {
	var s []string
	for _, p := range list {
		one := fmt.Sprintf("%d→%d/%s", p.Host, p.Container, p.Protocol)
		if p.HostIP != "" {
			one = p.HostIP + ":" + one
		}
		s = append(s, one)
	}
	return strings.Join(s, ",")
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func logsFlags(c *call) {
	c.flags.BoolVarP(&c.opt.follow, "follow", "f", false, "go on until the container exits")
	c.flags.StringVarP(&c.opt.tail, "tail", "n", "all", "begin with the last `lines`")
}

func logs(ctx context.Context, c *call) error {
	name, err := c.one("container")
	if err != nil {
		return err
	}
	opt := spec.LogOptions{Follow: c.opt.follow}
	if c.opt.tail != "all" {
		n, err := strconv.ParseInt(c.opt.tail, 10, 31)
		if err != nil || n < 0 {
			return misuse(c, "--tail %s: want a number of lines, or all", c.opt.tail)
		}
		if opt.Tail = int(n); n == 0 {
			opt.Tail = -1
		}
	}
	ctx, stop := interruptible(ctx)
	defer stop()
	err = c.client.Logs(ctx, name, opt, c.chunk)
	if c.opt.follow && ctx.Err() != nil {
		return nil
	}
	return err
}

// chunk prints a container's output, each part on its own stream.
func (c *call) chunk(l spec.LogChunk) error {
	if c.json {
		return c.print(struct {
			Stream string `json:"stream"`
			Data   string `json:"data"`
		}{l.Stream, string(l.Data)})
	}
	w := c.cfg.Stdout
	if l.Stream == spec.Stderr {
		w = c.cfg.Stderr
	}
	_, err := w.Write(l.Data)
	return err
}

// names does f to every argument and prints those that it was done to.
func (c *call) names(what string, f func(string) error) error {
	done := []string{}
	err := c.each(what, func(name string) error {
		if err := f(name); err != nil {
			return err
		}
		if !c.json {
			fmt.Fprintln(c.cfg.Stdout, name)
		}
		done = append(done, name)
		return nil
	})
	if c.json && len(c.args) > 0 {
		if err := list(c, done); err != nil {
			return err
		}
	}
	return err
}

// age is how long ago something was, roughly.
func age(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	switch d := max(0, time.Since(t)); {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	default:
		return fmt.Sprintf("%dd", int(d.Hours()/24))
	}
}
