package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/goccy/go-yaml"
	"google.golang.org/protobuf/encoding/protojson"

	"dewpoint/internal/api"
	"dewpoint/internal/cli/show"
	"dewpoint/internal/spec"
)

func deploymentsFlags(c *call) {
	c.flags.BoolVarP(&c.opt.all, "all", "a", false, "also those that have ended")
}

func deployments(ctx context.Context, c *call) error {
	if err := c.none(); err != nil {
		return err
	}
	all, err := c.client.ListDeployments(ctx, spec.DeploymentQuery{All: c.opt.all, Spans: c.json})
	if err != nil {
		return err
	}
	if c.json {
		return list(c, all)
	}
	var rows [][]string
	for _, d := range all {
		place := ""
		if d.Position > 0 {
			place = fmt.Sprint(d.Position)
		}
		rows = append(rows, []string{d.ID, d.Name, d.Image, standing(d), dash(place), dash(d.Waits), dash(d.Caller),
			age(d.Asked)})
	}
	return table(c.cfg.Stdout, "ID NAME IMAGE STATE POSITION WAITS CALLER AGE", rows)
}

func standing(d spec.Deployment) string {
	if d.Failure != nil && d.State == spec.StateFailed {
		return fmt.Sprintf("%s (%s)", d.State, d.Failure.Code)
	}
	return d.State
}

// cancel calls deployments off, by their IDs, keys or containers' names.
func cancel(ctx context.Context, c *call) error {
	return c.names("deployment", func(name string) error {
		id, err := c.deployment(ctx, name)
		if err != nil {
			return err
		}
		d, err := c.client.CancelDeployment(ctx, spec.DeploymentRef{ID: id})
		if err != nil || d.State == spec.StateCanceled {
			return err
		}
		e := api.New(api.NotRunning, fmt.Sprintf("%s has ended before: %s", name, standing(d)))
		e.Remedy = "\"dew rm -f\" removes what it has made"
		return e
	})
}

// deployment is the ID of one that has not ended, or what looks like an ID.
func (c *call) deployment(ctx context.Context, name string) (string, error) {
	all, err := c.client.ListDeployments(ctx, spec.DeploymentQuery{})
	if err != nil {
		return "", err
	}
	var found []string
	for _, d := range all {
		if d.ID == name {
			return d.ID, nil
		}
		if d.Name == name || d.Key == name {
			found = append(found, d.ID)
		}
	}
	switch len(found) {
	case 0:
		return name, nil
	case 1:
		return found[0], nil
	}
	return "", misuse(c, "%s are %d deployments: name one of %s", name, len(found), strings.Join(found, ", "))
}

func inspectFlags(c *call) {
	c.flags.BoolVar(&c.opt.oci, "oci", false, "print what the runtime was given, alone")
	c.flags.StringVar(&c.opt.show.Format, "format", "",
		"print by a `template` of the names that --json has, such as '{{.container.status}}', or json")
}

// inspect shows one container: what it is, what it was asked for by, and how it came.
func inspect(ctx context.Context, c *call) error {
	name, err := c.one("container")
	if err != nil {
		return err
	}
	i, err := c.client.Inspect(ctx, name)
	if err != nil {
		return err
	}
	if c.opt.oci {
		_, err := fmt.Fprintln(c.cfg.Stdout, i.OCI)
		return err
	}
	spec, err := specJSON(i)
	if err != nil {
		return err
	}
	doc := inspection{i.Container, spec, i.Record, json.RawMessage(i.OCI)}
	switch format := c.opt.show.Format; {
	case c.json, format == "json":
		return c.print(doc)
	case format != "":
		return c.shown(show.Template(c.cfg.Stdout, doc, format))
	}
	return describe(c.cfg.Stdout, i, spec)
}

// inspection is what inspect prints as JSON.
type inspection struct {
	Container spec.Container  `json:"container"`
	Spec      json.RawMessage `json:"spec,omitempty"`
	Record    *spec.Record    `json:"record,omitempty"`
	OCI       json.RawMessage `json:"oci,omitempty"`
}

// specJSON is what the container was asked for by, in the API's own names; nil if that is unknown.
func specJSON(i spec.Inspection) (json.RawMessage, error) {
	if i.Request == nil {
		return nil, nil
	}
	return protojson.MarshalOptions{UseProtoNames: true}.Marshal(api.SpecOf(*i.Request))
}

func describe(w io.Writer, i spec.Inspection, spec json.RawMessage) error {
	v := i.Container
	for _, line := range [][2]string{{"name", v.Name}, {"image", v.Image}, {"digest", v.Digest},
		{"status", status(v)}, {"health", v.HealthError}, {"restart", v.Restart}, {"pid", fmt.Sprint(v.PID)},
		{"address", v.IP}, {"ports", ports(v.Ports)},
		{"created", v.Created.Local().Format("2006-01-02 15:04:05")}} {
		if line[1] != "" && line[1] != "0" {
			fmt.Fprintf(w, "%-8s %s\n", line[0], line[1])
		}
	}
	if spec != nil {
		y, err := yaml.JSONToYAML(spec)
		if err != nil {
			return err
		}
		fmt.Fprintf(w, "\nasked for\n%s", indented(string(y)))
	}
	if i.Record != nil {
		fmt.Fprintf(w, "\ndeployed\n  %s\n", summary(*i.Record))
		for _, why := range i.Record.Way.Why {
			fmt.Fprintf(w, "  %s\n", why)
		}
		for _, s := range i.Record.Spans {
			fmt.Fprintf(w, "  %8.3f s  %8.1f ms  %s%s\n", s.From, (s.To-s.From)*1000,
				strings.Repeat("  ", strings.Count(s.Name, "/")), s.Name)
		}
	}
	return nil
}

func indented(s string) string {
	return "  " + strings.ReplaceAll(strings.TrimRight(s, "\n"), "\n", "\n  ") + "\n"
}
