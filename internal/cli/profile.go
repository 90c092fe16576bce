package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	program "os/exec"
	"strings"
	"time"
	"unicode"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
)

func profileFlags(c *call) {
	p := &c.opt.profile
	c.flags.StringVar(&p.exercise, "exercise", "",
		"run this `script` here once the container is ready; it fails if the script does")
	c.flags.IntVar(&p.runs, "runs", 1, "`number` of runs; what each reads counts")
	c.flags.DurationVar(&p.settle, "settle", 5*time.Second,
		"go on recording for this `time` after the script, or after it is ready")
	c.flags.BoolVar(&p.merge, "merge", false, "keep what earlier recordings of the image have seen, too")
	c.flags.BoolVar(&p.keep, "keep", false, "leave the container of the last run running")
	containerFlags(c)
}

// profiling are the flags of dew profile.
type profiling struct {
	exercise    string
	runs        int
	settle      time.Duration
	merge, keep bool
}

// profiled is what dew profile prints as JSON.
type profiled struct {
	Container string         `json:"container,omitempty"` // that was left running
	Runs      []spec.Profile `json:"runs"`
	Pack      spec.Pack      `json:"pack"`
}

// profile records runs of an image and makes a pack of them.
func profile(ctx context.Context, c *call) error {
	req, err := c.instruction()
	if err != nil {
		return err
	}
	o := c.opt.profile
	if o.runs < 1 || o.settle < 0 {
		return misuse(c, "--runs is at least 1, and --settle not below 0")
	}
	if req.Lazy == "auto" {
		return misuse(c, "an image is whole when it is profiled: leave out --lazy auto")
	}
	if o.exercise != "" {
		if err := executable(o.exercise); err != nil {
			return misuse(c, "--exercise: %v", err)
		}
	}
	req.Record, req.Lazy = true, "never"
	ctx, stop := interruptible(ctx)
	defer stop()
	var out profiled
	for i := range o.runs {
		p, err := c.profileRun(ctx, req, i)
		if err != nil {
			return err
		}
		out.Runs = append(out.Runs, p)
		out.Container = p.Name
	}
	if !o.keep {
		out.Container = ""
	}
	if out.Pack, err = c.client.PackBuild(ctx, req.Image); err != nil {
		return err
	}
	if c.json {
		return c.print(out)
	}
	return c.showProfile(out)
}

func executable(path string) error {
	fi, err := os.Stat(path)
	switch {
	case err != nil:
		return err
	case fi.IsDir() || fi.Mode()&0o111 == 0:
		return fmt.Errorf("%s cannot be executed", path)
	}
	return nil
}

// profileRun is one run, from its start to what it has read.
func (c *call) profileRun(ctx context.Context, req spec.Request, i int) (p spec.Profile, err error) {
	o := c.opt.profile
	show := c.progress(req.Image)
	record, err := c.client.Deploy(ctx, req, show.watch())
	show.finish(record, err)
	if err != nil {
		return p, notLearned(err)
	}
	defer func() {
		if err == nil && o.keep && i == o.runs-1 {
			return
		}
		err = errors.Join(err, c.cleanUp(record.Name, err != nil))
	}()
	if err := c.exercise(ctx, record); err != nil {
		return p, err
	}
	select {
	case <-time.After(o.settle):
	case <-ctx.Done():
		return p, ctx.Err()
	}
	if err := c.livesOrEnded(ctx, record.Name); err != nil {
		return p, err
	}
	return c.client.ProfileEnd(ctx,
		spec.ProfileEnd{Name: record.Name, Merge: o.merge || i > 0, Exercised: o.exercise != ""})
}

// notLearned is the error of a start that failed. Of its container nothing is
// left to look at.
func notLearned(err error) error {
	var e *api.Error
	if !errors.As(err, &e) || e.Code != api.NotReady && e.Code != api.Exited {
		return err
	}
	told := *e
	told.Remedy = "nothing of this run is kept; see how it starts with \"dew run\", or allow more time with --ready-timeout"
	return &told
}

// livesOrEnded is an error if a container has failed: what it read is no start.
func (c *call) livesOrEnded(ctx context.Context, name string) error {
	all, err := c.client.List(ctx, true)
	if err != nil {
		return err
	}
	for _, one := range all {
		if one.Name == name && one.Status == spec.StatusExited && one.ExitCode != 0 {
			return api.New(api.Exited,
				fmt.Sprintf("container %s exited with status %d: nothing is learned from that", name, one.ExitCode))
		}
	}
	return nil
}

// cleanUp removes a container, and throws its recording away if it failed. It
// does so though the command was interrupted.
func (c *call) cleanUp(name string, failed bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if failed {
		_, _ = c.client.ProfileEnd(ctx, spec.ProfileEnd{Name: name, Discard: true}) // there may be none
	}
	var e *api.Error
	if err := c.client.Remove(ctx, name, true); !errors.As(err, &e) || e.Code != api.NotFound {
		return err
	}
	return nil
}

// exercise runs the script beside this program; its output goes to standard
// error, since what is asked for goes to standard output.
func (c *call) exercise(ctx context.Context, record spec.Record) error {
	if c.opt.profile.exercise == "" {
		return nil
	}
	env, err := c.environ(ctx, record.Name)
	if err != nil {
		return err
	}
	path := c.opt.profile.exercise
	if !strings.Contains(path, "/") {
		path = "./" + path
	}
	cmd := program.CommandContext(ctx, path)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = c.cfg.Stderr, c.cfg.Stderr
	cmd.WaitDelay = 2 * time.Second
	if err := cmd.Run(); err != nil {
		e := api.New(api.NotReady, fmt.Sprintf("the exercise script failed: %v; nothing of this run is kept", err))
		e.Remedy = "see what it wrote above"
		return e
	}
	return nil
}

// environ is what a script is told of the container.
func (c *call) environ(ctx context.Context, name string) ([]string, error) {
	all, err := c.client.List(ctx, true)
	if err != nil {
		return nil, err
	}
	for _, k := range all {
		if k.Name != name {
			continue
		}
		ip := k.IP
		if ip == "" {
			ip = "127.0.0.1"
		}
		var ports, env []string
		for _, p := range k.Ports {
			ports = append(ports, fmt.Sprintf("%d:%d/%s", p.Host, p.Container, p.Protocol))
			env = append(env, fmt.Sprintf("DEW_PORT_%d=%d", p.Container, p.Host))
		}
		return append(env, "DEW_NAME="+k.Name, "DEW_IMAGE="+k.Image, "DEW_IP="+ip, fmt.Sprint("DEW_PID=", k.PID),
			"DEW_PORTS="+strings.Join(ports, " "), HostVariable+"="+c.host), nil
	}
	return nil, api.New(api.NotFound, fmt.Sprintf("the container %s is gone", name))
}

func (c *call) showProfile(out profiled) error {
	w := c.cfg.Stdout
	for i, p := range out.Runs {
		fmt.Fprintf(w, "run %d: %s of %d files read\n", i+1, size(p.Read), p.Files)
		if p.Lost > 0 {
			fmt.Fprintf(c.cfg.Stderr, "dew: run %d read more than the node could note: %d events are missing\n", i+1,
				p.Lost)
		}
	}
	if err := c.showPack(out.Pack); err != nil {
		return err
	}
	if out.Container != "" {
		fmt.Fprintf(w, "container %s runs\n", out.Container)
	}
	return nil
}

// showPack prints a pack: what a start needs, what that takes, and the largest
// files.
func (c *call) showPack(p spec.Pack) error {
	w := c.cfg.Stdout
	how := fmt.Sprintf("%d run", p.Runs)
	if p.Runs != 1 {
		how += "s"
	}
	if p.Exercised {
		how += ", exercised"
	}
	if p.Node != "" {
		how += ", on " + p.Node
	}
	fmt.Fprintf(w, "%s\n", p.Image)
	rows := [][]string{
		{"learned from", how + ", " + p.Created.Local().Format(time.DateTime)},
		{"from", map[string]string{spec.FromNode: "this node, which has made it",
			spec.FromRepository: "the image's repository"}[p.From]},
		{"trust", p.Trust},
		{"a start reads", fmt.Sprintf("%s of %d files, %s of %s", size(p.Needed), p.Files,
			percent(p.Needed, p.Total), size(p.Total))},
		{"and waits for", fmt.Sprintf("%s, %s of the image's %s", size(p.Start), percent(p.Start, p.ImageSize),
			size(p.ImageSize))},
		{"pack", fmt.Sprintf("%s: header %s, tables %s, %d chunks %s, points %s, windows %s",
			size(p.Size), size(p.Parts.Header),
			size(p.Parts.Tables), p.Chunks, size(p.Parts.Chunks), size(p.Parts.Points), size(p.Parts.Windows))},
		{"digest", p.Pack},
	}
	for _, l := range p.Unlazy {
		rows = append(rows, []string{"never lazy", l})
	}
	for _, r := range rows {
		fmt.Fprintf(w, "  %-14s %s\n", r[0], r[1])
	}
	return largestFiles(w, p.Largest)
}

func largestFiles(w io.Writer, all []spec.FileRead) error {
	if len(all) == 0 {
		return nil
	}
	var rows [][]string
	for _, f := range all {
		rows = append(rows, []string{size(f.Read), size(f.Size), short(f.Layer), printable(f.Path)})
	}
	return table(w, "READ SIZE LAYER FILE", rows)
}

// printable keeps what others have named from steering a terminal.
func printable(name string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return '?'
		}
		return r
	}, name)
}

func percent(part, whole int64) string {
	if whole <= 0 {
		return "all"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(whole))
}

func packFlags(c *call) {
	c.flags.StringVar(&c.opt.key, "key", "", "push: sign with the Ed25519 private key in this `file` (PEM)")
}

// packs does dew pack build, push and inspect.
func packs(ctx context.Context, c *call) error {
	verbs := map[string]func(context.Context, *call, string) error{"build": packBuild, "push": packPush,
		"inspect": packInspect}
	if len(c.args) == 0 || verbs[c.args[0]] == nil {
		return misuse(c, "say what to do with the pack: build, push or inspect")
	}
	verb := c.args[0]
	c.args = c.args[1:]
	image, err := c.one("image")
	if err != nil {
		return err
	}
	if verb != "push" && c.opt.key != "" {
		return misuse(c, "--key is for pack push")
	}
	ctx, stop := interruptible(ctx)
	defer stop()
	return verbs[verb](ctx, c, image)
}

func packBuild(ctx context.Context, c *call, image string) error {
	p, err := c.client.PackBuild(ctx, image)
	if err != nil {
		return err
	}
	if c.json {
		return c.print(p)
	}
	fmt.Fprintln(c.cfg.Stdout, p.Pack)
	return nil
}

func packInspect(ctx context.Context, c *call, image string) error {
	p, err := c.client.PackInspect(ctx, image)
	if err != nil {
		return err
	}
	if c.json {
		return c.print(p)
	}
	return c.showPack(p)
}

// maxKey is more than any key takes.
const maxKey = 64 << 10

func packPush(ctx context.Context, c *call, image string) error {
	req := spec.PackPush{Image: image}
	if c.opt.key != "" {
		f, err := os.Open(c.opt.key)
		if err != nil {
			return misuse(c, "--key: %v", err)
		}
		defer f.Close()
		if req.Key, err = io.ReadAll(io.LimitReader(f, maxKey)); err != nil {
			return misuse(c, "--key: %v", err)
		}
		if len(req.Key) == 0 {
			return misuse(c, "--key: %s is empty", c.opt.key)
		}
	}
	p, err := c.client.PackPush(ctx, req)
	if err != nil {
		return err
	}
	if c.json {
		return c.print(p)
	}
	fmt.Fprintln(c.cfg.Stdout, p.Manifest)
	return nil
}
