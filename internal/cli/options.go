package cli

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"dewpoint/internal/cli/show"
	"dewpoint/internal/config"
	"dewpoint/internal/spec"
)

// options are the values of all commands' flags.
type options struct {
	joining                          joining // of setup
	loggingIn                        loggingIn
	tokens, owner                    string // of a token: the file, and who is to have it
	detach, remove, quiet            bool
	entrypoint, memory               string
	publish, env, volumes, labels    []string
	mounts                           []string
	request                          spec.Request // what needs no parsing of ours
	pull                             spec.PullRequest
	count, parallel                  int
	all, force, follow, interactive  bool
	tty, noStdin                     bool
	tail, user, dir, timeout, signal string
	after                            string
	profile                          profiling
	key                              string
	layers, pop, oci                 bool
	spec                             string
	terms                            spec.Terms
	checkpoint                       spec.CheckpointRequest
	given                            given
	cidfile                          string
	show                             show.Flags
}

// containerFlags are those of an instruction to deploy.
func containerFlags(c *call) {
	f, o, r := c.flags, &c.opt, &c.opt.request
	f.StringVar(&r.Name, "name", "", "`name` of the container; made up if not given")
	f.StringVar(&o.entrypoint, "entrypoint", "", "`program` to run instead of the image's")
	f.StringVar(&r.Net, "net", "", "`network`: host (default; bridge with -p), bridge, or none")
	f.StringVar(&r.Net, "network", "", "the same as --net")
	_ = f.MarkHidden("network")
	f.StringArrayVarP(&o.publish, "publish", "p", nil,
		"publish a `port` or range on the host: [IP:]HOST:CONTAINER[/udp]; the network is then bridge")
	f.StringArrayVarP(&o.env, "env", "e", nil,
		"set a `variable`: KEY=VALUE, or KEY to pass on this environment's")
	f.StringArrayVarP(&o.labels, "label", "l", nil,
		"set a `label` of the container: KEY=VALUE; it goes before the image's")
	f.StringArrayVarP(&o.volumes, "volume", "v", nil,
		"mount a `path` of the host, or a volume by its name: SOURCE:TARGET[:ro]")
	f.StringArrayVar(&o.mounts, "mount", nil,
		"mount by `keys`: type=bind|volume|tmpfs,source=…,target=…[,readonly]")
	limitFlags(c)
	f.StringVar(&r.Ready, "ready", "",
		"it is ready when this `check` succeeds: tcp:PORT, http:PORT/PATH, cmd:COMMAND, log:REGEXP or none")
	f.DurationVar(&r.ReadyTimeout, "ready-timeout", 0, "longest `time` to become ready; the node's default if 0")
	restartFlag(c)
	f.StringVar(&r.Restore, "restore", "", "`whether` to start from a checkpoint: auto, never or always")
	f.BoolVar(&r.Checkpoint, "checkpoint", false, "make a checkpoint once it is ready, if none fits")
	optionFlags(c)
	f.BoolVarP(&o.quiet, "quiet", "q", false, "show no progress")
	imageFlags(f, &r.Lazy, &r.Order, &r.Inflaters)
	f.StringVar(&r.Mount, "layer-mount", "", "mount layers by `backend`: erofs, loop or tree")
	_ = f.MarkHidden("layer-mount")
}

// limitFlags are those of what a container may take.
func limitFlags(c *call) {
	f, r := c.flags, &c.opt.request
	f.StringVarP(&c.opt.memory, "memory", "m", "", "memory limit, a `size` such as 256m or 1GiB; 0 is none")
	f.Float64Var(&r.CPUs, "cpus", 0, "CPU limit, a `number` such as 0.5; 0 is none")
	f.Int64Var(&r.PidsLimit, "pids-limit", 0, "limit of processes and threads, a `number`; 0 is none")
}

func restartFlag(c *call) {
	c.flags.StringVar(&c.opt.request.Restart, "restart", "",
		"`when` to start it again once it has ended: no, on-failure[:N], always or unless-stopped")
}

// imageFlags are those of everything that fetches an image.
func imageFlags(f *pflag.FlagSet, lazy *string, order *string, inflaters *int) {
	f.StringVar(lazy, "lazy", "", "`whether` to start before the image is here: auto or never")
	f.StringVar(order, "order", "", "fill layers by `order`: layers or parallel")
	f.IntVar(inflaters, "inflaters", 0, "inflate this `number` of layers at once")
	_ = f.MarkHidden("order")
	_ = f.MarkHidden("inflaters")
}

// instruction is the request that the flags and arguments make.
func (c *call) instruction() (spec.Request, error) {
	r := c.opt.request
	if len(c.args) == 0 {
		return r, misuse(c, "no image is named")
	}
	r.Image = c.args[0]
	if len(c.args) > 1 {
		r.Cmd = c.args[1:]
	}
	if c.flags.Changed("entrypoint") {
		r.Entrypoint = []string{c.opt.entrypoint}
	}
	if c.opt.memory != "" {
		n, err := config.ParseSize(c.opt.memory)
		if err != nil {
			return r, misuse(c, "--memory: %v", err)
		}
		r.Memory = n
	}
	for _, s := range c.opt.publish {
		p, err := parsePorts(s)
		if err != nil {
			return r, misuse(c, "-p %s: %v", s, err)
		}
		r.Ports = append(r.Ports, p...)
	}
	for _, s := range c.opt.volumes {
		v, err := parseVolume(s)
		if err != nil {
			return r, misuse(c, "-v %s: %v", s, err)
		}
		r.Volumes = append(r.Volumes, v)
	}
	for _, s := range c.opt.mounts {
		if err := parseMount(&r, s); err != nil {
			return r, misuse(c, "--mount %s: %v", s, err)
		}
	}
	r.Env = environment(c.opt.env)
	if err := c.options(&r); err != nil {
		return r, err
	}
	var err error
	if r.Health, err = c.health(); err != nil {
		return r, err
	}
	r.PidsLimit = max(0, r.PidsLimit) // Docker's -1 is no limit, too
	r.Labels = labels(c.opt.labels)
	r.Remove = c.opt.remove
	if err := r.Validate(); err != nil {
		return r, misuse(c, "%v", err)
	}
	return r, nil
}

// environment completes KEY from this process; a KEY that is not set here is
// left out.
func environment(list []string) []string {
	var env []string
	for _, e := range list {
		if !strings.Contains(e, "=") {
			v, ok := os.LookupEnv(e)
			if !ok && e != "" {
				continue
			}
			e += "=" + v
		}
		env = append(env, e)
	}
	return env
}

// labels reads KEY=VALUE; KEY alone has an empty value. The last of a key counts.
func labels(list []string) map[string]string {
	if len(list) == 0 {
		return nil
	}
	all := map[string]string{}
	for _, l := range list {
		k, v, _ := strings.Cut(l, "=")
		all[k] = v
	}
	return all
}

func parsePortNumber(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is not a port; want [IP:]HOST:CONTAINER[/tcp|udp]", s)
	}
	return uint16(n), nil
}
