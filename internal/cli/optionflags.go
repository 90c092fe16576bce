package cli

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"dewpoint/internal/config"
	"dewpoint/internal/spec"
)

// given are the values of flags that become spec.Options, as they were given.
type given struct {
	shmSize                                                  string
	envFiles, hosts, tmpfs, ulimits, sysctls, devices, secur []string
	health                                                   spec.Health
	healthCmd                                                string
	noHealth                                                 bool
}

// optionFlags are those of spec.Options.
func optionFlags(c *call) {
	f, g, o := c.flags, &c.opt.given, &c.opt.request.Options
	f.BoolVarP(&o.Stdin, "interactive", "i", false, "keep its standard input open, and in the foreground pass it on")
	f.BoolVarP(&o.TTY, "tty", "t", false, "give it a terminal")
	f.StringVarP(&o.User, "user", "u", "", "run as `USER[:GROUP]`, names of the image or numbers")
	f.StringVarP(&o.WorkingDir, "workdir", "w", "", "run in this `directory`")
	f.StringArrayVar(&g.envFiles, "env-file", nil, "set the variables of a `file`, KEY=VALUE or KEY on a line")
	f.StringVar(&o.Hostname, "hostname", "", "host `name` of the container")
	f.StringArrayVar(&o.DNS, "dns", nil, "`address` of a name server, in place of the host's")
	f.StringArrayVar(&o.DNSSearch, "dns-search", nil, "search this `domain`, in place of the host's")
	f.StringArrayVar(&o.DNSOptions, "dns-option", nil, "`option` of the resolver, in place of the host's")
	f.StringArrayVar(&g.hosts, "add-host", nil, "name an address in /etc/hosts: `NAME:ADDRESS`")
	f.BoolVar(&o.ReadOnly, "read-only", false, "let nothing be written to the root file system")
	f.StringArrayVar(&g.tmpfs, "tmpfs", nil, "mount a file system in memory: `PATH[:OPTIONS]`, such as /run:size=64m")
	f.StringVar(&g.shmSize, "shm-size", "", "`size` of /dev/shm; 64m if not given")
	f.StringArrayVar(&g.ulimits, "ulimit", nil, "set a limit of processes: `NAME=SOFT[:HARD]`, such as nofile=1024")
	f.StringArrayVar(&g.sysctls, "sysctl", nil, "set `NAME=VALUE` in the container's own namespaces")
	f.StringSliceVar(&o.CapAdd, "cap-add", nil, "add a `capability`, such as NET_ADMIN, or ALL")
	f.StringSliceVar(&o.CapDrop, "cap-drop", nil, "drop a `capability`, or ALL")
	f.BoolVar(&o.Privileged, "privileged", false, "give it all capabilities and devices, and hide nothing")
	f.StringArrayVar(&g.devices, "device", nil, "give it a device of the host: `SOURCE[:TARGET][:rwm]`")
	f.StringArrayVar(&g.secur, "security-opt", nil, "`option` of security: no-new-privileges")
	f.BoolVar(&o.Init, "init", false, "run an init of the node as first process, which passes signals on and reaps")
	f.StringVar(&g.healthCmd, "health-cmd", "", "check its health by this `command`, instead of the image's check")
	f.DurationVar(&g.health.Interval, "health-interval", 0, "`time` between checks; 30s if neither given nor the image's")
	f.DurationVar(&g.health.Timeout, "health-timeout", 0, "longest `time` of a check; else the image's, or 30s")
	f.IntVar(&g.health.Retries, "health-retries", 0, "`number` of failures in a row that count; else the image's, or 3")
	f.DurationVar(&g.health.StartPeriod, "health-start-period", 0, "`time` from its start in which failures do not count")
	f.DurationVar(&g.health.StartInterval, "health-start-interval", 0, "`time` between checks in the start period; else 5s")
	f.BoolVar(&g.noHealth, "no-healthcheck", false, "do not check its health, though the image has a check")
	f.StringVar(&o.PullPolicy, "pull", "", "`whether` to ask the registry: always, missing (default) or never")
}

// options completes r.Options by what needs parsing, and r.Env by the files of variables.
func (c *call) options(r *spec.Request) error {
	g, o := &c.opt.given, &r.Options
	var file []string
	for _, name := range g.envFiles {
		lines, err := envFile(name)
		if err != nil {
			return misuse(c, "--env-file: %v", err)
		}
		file = append(file, lines...)
	}
	r.Env = slices.Concat(environment(file), r.Env)
	if g.shmSize != "" {
		var err error
		if o.ShmSize, err = config.ParseSize(g.shmSize); err != nil {
			return misuse(c, "--shm-size: %v", err)
		}
	}
	for _, h := range g.hosts {
		if name, addr, ok := strings.Cut(h, "="); ok { // Docker has both
			h = name + ":" + addr
		}
		o.Hosts = append(o.Hosts, strings.NewReplacer("[", "", "]", "").Replace(h))
	}
	for _, s := range g.tmpfs {
		o.Tmpfs = append(o.Tmpfs, parseTmpfs(s))
	}
	for _, s := range g.ulimits {
		u, err := parseUlimit(s)
		if err != nil {
			return misuse(c, "--ulimit %s: %v", s, err)
		}
		o.Ulimits = append(o.Ulimits, u)
	}
	for _, s := range g.sysctls {
		k, v, ok := strings.Cut(s, "=")
		if !ok {
			return misuse(c, "--sysctl %s: want NAME=VALUE", s)
		}
		if o.Sysctls == nil {
			o.Sysctls = map[string]string{}
		}
		o.Sysctls[k] = v
	}
	for _, s := range g.devices {
		o.Devices = append(o.Devices, parseDevice(s))
	}
	for _, s := range g.secur {
		switch s {
		case "no-new-privileges", "no-new-privileges:true", "no-new-privileges=true":
			o.NoNewPrivileges = true
		case "no-new-privileges:false", "no-new-privileges=false":
			o.NoNewPrivileges = false
		default:
			return misuse(c, "--security-opt %s: dewd has no-new-privileges alone; its seccomp profile is the same for all but privileged containers, and it sets no AppArmor profile and no label of SELinux", s)
		}
	}
	return nil
}

// health is the check that flags have changed; nil is the image's.
func (c *call) health() (*spec.Health, error) {
	g := &c.opt.given
	changed := false
	c.flags.Visit(func(f *pflag.Flag) { changed = changed || strings.HasPrefix(f.Name, "health-") })
	switch {
	case changed && g.noHealth:
		return nil, misuse(c, "--no-healthcheck is given, and what a health check is to be")
	case g.noHealth:
		return &spec.Health{Test: []string{"NONE"}}, nil
	case !changed:
		return nil, nil
	}
	h := g.health
	if g.healthCmd != "" {
		h.Test = []string{"CMD-SHELL", g.healthCmd}
		var args []string // for images without a shell
		if json.Unmarshal([]byte(g.healthCmd), &args) == nil && len(args) > 0 {
			h.Test = append([]string{"CMD"}, args...)
		}
	}
	return &h, nil
}

// envFile reads a file of variables: KEY=VALUE or KEY on a line, # begins a comment. Quotes have no meaning.
func envFile(name string) ([]string, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var lines []string
	in := bufio.NewScanner(f)
	for n := 1; in.Scan(); n++ {
		line := strings.TrimLeft(in.Text(), " \t\ufeff")
		if line == "" || line[0] == '#' {
			continue
		}
		if key, _, _ := strings.Cut(line, "="); key == "" || strings.ContainsAny(key, " \t") {
			return nil, fmt.Errorf("%s:%d: %q is not the name of a variable", name, n, key)
		}
		lines = append(lines, line)
	}
	return lines, in.Err()
}

// parseTmpfs reads PATH[:OPTION,…].
func parseTmpfs(s string) spec.Tmpfs {
	target, options, ok := strings.Cut(s, ":")
	t := spec.Tmpfs{Target: target}
	if ok {
		t.Options = strings.Split(options, ",")
	}
	return t
}

// parseUlimit reads NAME=SOFT[:HARD]; the hard limit is the soft one if it is not given.
func parseUlimit(s string) (spec.Ulimit, error) {
	name, limits, ok := strings.Cut(s, "=")
	soft, hard, two := strings.Cut(limits, ":")
	if !two {
		hard = soft
	}
	u := spec.Ulimit{Name: name}
	var err error
	for _, l := range []struct {
		text string
		to   *int64
	}{{soft, &u.Soft}, {hard, &u.Hard}} {
		if l.text == "unlimited" {
			l.text = "-1"
		}
		var e error
		*l.to, e = strconv.ParseInt(l.text, 10, 64)
		err = errors.Join(err, e)
	}
	if !ok || err != nil {
		return u, fmt.Errorf("want NAME=SOFT[:HARD] in numbers, or unlimited")
	}
	return u, nil
}

// parseDevice reads SOURCE[:TARGET][:PERMISSIONS].
func parseDevice(s string) spec.Device {
	parts := strings.SplitN(s, ":", 3)
	d := spec.Device{Source: parts[0]}
	switch {
	case len(parts) == 3:
		d.Target, d.Permissions = parts[1], parts[2]
	case len(parts) == 2 && strings.Trim(parts[1], "rwm") == "":
		d.Permissions = parts[1]
	case len(parts) == 2:
		d.Target = parts[1]
	}
	return d
}

// parsePorts reads [IP:]HOST:CONTAINER[/PROTOCOL], where HOST and CONTAINER are ports or ranges FIRST-LAST of
// the same length; PORT alone is PORT:PORT.
func parsePorts(s string) ([]spec.Port, error) {
	s, proto, ok := strings.Cut(s, "/")
	if !ok {
		proto = "tcp"
	}
	if proto != "tcp" && proto != "udp" {
		return nil, fmt.Errorf("the protocol is tcp or udp, not %q", proto)
	}
	host, container, ip := s, s, ""
	if i := strings.LastIndexByte(s, ':'); i >= 0 {
		host, container = s[:i], s[i+1:]
	}
	if i := strings.LastIndexByte(host, ':'); i >= 0 {
		ip, host = strings.Trim(host[:i], "[]"), host[i+1:]
	}
	first, n, err := parseRange(host)
	if err != nil {
		return nil, err
	}
	inside, m, err := parseRange(container)
	if err != nil {
		return nil, err
	}
	if n != m {
		return nil, fmt.Errorf("%d ports of the host are for %d of the container", n, m)
	}
	var all []spec.Port
	for i := range n {
		all = append(all, spec.Port{HostIP: ip, Host: first + i, Container: inside + i, Protocol: proto})
	}
	return all, nil
}

// parseRange reads PORT or FIRST-LAST, and says how many these are.
func parseRange(s string) (first, n uint16, err error) {
	from, to, ok := strings.Cut(s, "-")
	if first, err = parsePortNumber(from); err != nil || !ok {
		return first, 1, err
	}
	last, err := parsePortNumber(to)
	if err == nil && last < first {
		err = fmt.Errorf("%s is not a range of ports", s)
	}
	return first, last - first + 1, err
}

// noting has the container's name written to --cidfile once it exists. There may be no such file before.
func (c *call) noting(w spec.Watch) (spec.Watch, error) {
	name := c.opt.cidfile
	if name == "" {
		return w, nil
	}
	if _, err := os.Lstat(name); !errors.Is(err, fs.ErrNotExist) {
		return w, misuse(c, "--cidfile %s: there is such a file; remove it if its container is gone", name)
	}
	reached := w.Reached
	w.Reached = func(container, stage string, at float64) {
		reached(container, stage, at)
		if stage != spec.Created {
			return
		}
		f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		if err == nil {
			_, err = f.WriteString(container)
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			fmt.Fprintf(c.cfg.Stderr, "dew: --cidfile: %v\n", err)
		}
	}
	return w, nil
}
