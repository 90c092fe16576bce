// Package cli is the dew command: it reads the command line, asks a daemon
// through package api, and shows what it answers.
//
// # The model
//
// A command is a line in commands: a name, a usage and a function. It gets a
// call, which has the arguments, the standard streams and a client. What is
// asked for goes to standard output, as a table or, with --json, as one JSON
// document; progress and errors go to standard error. A command that fails
// returns an error. It becomes one line and an exit code in Main, and only
// there; docs/use/cli.md lists the codes.
package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/pflag"

	"dewpoint/internal/api"
)

// HostVariable names the environment variable that -H overrides.
const HostVariable = "DEWPOINT_HOST"

// Config of a run of the command.
type Config struct {
	Version string
	Stdin   *os.File
	Stdout  io.Writer
	Stderr  io.Writer
}

// command is one word after dew.
type command struct {
	name    string
	args    string // usage of what follows the flags
	summary string
	before  bool // flags end at the first argument: what follows is another command's
	flags   func(*call)
	run     func(context.Context, *call) error
}

func commands() []command {
	return []command{
		{name: "run", args: "IMAGE [CMD…]", summary: "run a container", before: true, flags: runFlags, run: run},
		{name: "deploy", args: "IMAGE [CMD…]", summary: "run containers in the background, one or many",
			before: true, flags: deployFlags, run: deploy},
		{name: "deployments", summary: "list what is being deployed, and the queue", flags: deploymentsFlags,
			run: deployments},
		{name: "cancel", args: "ID|NAME…", summary: "call deployments off", run: cancel},
		{name: "pull", args: "IMAGE", summary: "bring an image onto the node", flags: pullFlags, run: pull},
		{name: "ps", summary: "list containers", flags: psFlags, run: ps},
		{name: "inspect", args: "NAME", summary: "show how a container was asked for and what became of that",
			flags: inspectFlags, run: inspect},
		{name: "logs", args: "NAME", summary: "show a container's output", flags: logsFlags, run: logs},
		{name: "exec", args: "NAME CMD…", summary: "run a command in a container", before: true, flags: execFlags,
			run: exec},
		{name: "attach", args: "NAME", summary: "show a container's output from now on, and pass input to it",
			flags: attachFlags, run: attach},
		{name: "stop", args: "NAME…", summary: "stop containers", flags: stopFlags, run: stop},
		{name: "start", args: "NAME…", summary: "start containers that have ended", run: start},
		{name: "restart", args: "NAME…", summary: "stop containers and start them", flags: stopFlags, run: restart},
		{name: "kill", args: "NAME…", summary: "send a signal to containers", flags: killFlags, run: kill},
		{name: "top", args: "NAME", summary: "list a container's processes", run: top},
		{name: "update", args: "NAME…", summary: "change the limits and policies of containers, for good and at once",
			flags: updateFlags, run: updateLimits},
		{name: "wait", args: "NAME…", summary: "wait until containers have ended, and print their exit codes",
			run: wait},
		{name: "rm", args: "NAME…", summary: "remove containers", flags: rmFlags, run: rm},
		{name: "images", summary: "list images", flags: imagesFlags, run: images},
		{name: "adopt", args: "[IMAGE…]", summary: "make images that containerd has images of this node; say what it costs",
			flags: adoptFlags, run: adopt},
		{name: "rmi", args: "IMAGE…", summary: "remove images", run: rmi},
		{name: "volume", args: "ls|create|inspect|rm|prune [NAME…]",
			summary: "list, make or remove the volumes that containers have by name", flags: volumeFlags, run: volume},
		{name: "prune", summary: "remove what nothing uses", flags: pruneFlags, run: prune},
		{name: "profile", args: "IMAGE [CMD…]", summary: "record what a start reads, and make a startup pack of it",
			before: true, flags: profileFlags, run: profile},
		{name: "pack", args: "build|push|inspect IMAGE", summary: "build, publish or show an image's startup pack",
			flags: packFlags, run: packs},
		{name: "checkpoint", args: "NAME", summary: "save a container, so that others start from it",
			flags: checkpointFlags, run: checkpoint},
		{name: "checkpoints", args: "[IMAGE] | rm ID…", summary: "list or remove what containers start from",
			run: checkpoints},
		{name: "pop", args: "status|verify|forget|key [ARGUMENTS]",
			summary: "show and look after what this node shares with others", flags: popFlags, run: pops},
		{name: "token", args: "read|deploy|admin", summary: "make a token for the API over TCP", flags: tokenFlags,
			run: makeToken},
		{name: "events", summary: "show what happens on the node", flags: eventsFlags, run: events},
		{name: "doctor", summary: "say what this node can do and what it lacks", run: doctor},
		{name: "login", args: "[REGISTRY]", summary: "check a login with a registry and keep it for dewd",
			flags: loginFlags, run: login},
		{name: "logout", args: "[REGISTRY]", summary: "forget a registry's login", flags: logoutFlags, run: logout},
		{name: "setup", args: "containerd|k3s|docker|nerdctl",
			summary: "have what runs containers here use dewd's layers", flags: setupFlags, run: joinHost},
		{name: "completion", args: "bash|zsh|fish", summary: "print what a shell completes dew by", run: completion},
		{name: "man", summary: "print the manual page dew(1)", run: manual},
		{name: "version", summary: "show the versions of dew and dewd", run: version},
	}
}

// call is one invocation of a command.
type call struct {
	cfg     Config
	command command
	flags   *pflag.FlagSet
	args    []string // after the flags

	host string
	cred api.Credentials
	json bool
	opt  options

	client *api.Client
}

// Main runs the command line args, without the program's name, and returns its
// exit code.
func Main(ctx context.Context, args []string, cfg Config) int {
	err := dispatch(ctx, args, cfg)
	var status exitStatus
	if errors.As(err, &status) {
		return int(status)
	}
	if err == nil || errors.Is(err, pflag.ErrHelp) {
		return 0
	}
	e := verdict(err)
	fmt.Fprintf(cfg.Stderr, "dew: %s\n", e.Error())
	return e.Exit
}

// exitStatus is the error of a command that has said all and exits with a
// status that is not its own.
type exitStatus int

func (s exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// verdict is what is wrong, for people. Errors that are of this program's own
// making, say a file that cannot be read, carry no more than their text.
func verdict(err error) *api.Error {
	var e *api.Error
	if errors.As(err, &e) {
		return e
	}
	e = api.Classify(err)
	switch e.Code {
	case api.Permission, api.DiskFull, api.Internal, api.Canceled: // their remedies are of a node's
		e.Remedy = ""
	}
	return e
}

// misuse is a command line that cannot be understood.
func misuse(c *call, format string, a ...any) error {
	e := api.New(api.BadRequest, fmt.Sprintf(format, a...))
	e.Remedy = "see \"dew --help\""
	if c != nil {
		e.Remedy = fmt.Sprintf("see \"dew %s --help\"", c.command.name)
	}
	return e
}

func dispatch(ctx context.Context, args []string, cfg Config) error {
	c := &call{cfg: cfg}
	global := c.newFlags("dew")
	global.SetInterspersed(false)
	show := global.Bool("version", false, "show the versions of dew and dewd")
	if err := global.Parse(args); err != nil {
		return c.parsed(err, func() { overview(cfg, global) })
	}
	args = global.Args()
	if *show {
		args = []string{"version"}
	}
	if len(args) == 0 {
		overview(cfg, global)
		return misuse(nil, "no command is given")
	}
	if args[0] == "help" {
		return help(cfg, global, args[1:])
	}
	for _, cmd := range commands() {
		if cmd.name == args[0] {
			c.command = cmd
			return c.do(ctx, args[1:])
		}
	}
	return unknownCommand(args[0])
}

// newFlags has the flags that stand before and after the command. What is set
// before holds after.
func (c *call) newFlags(name string) *pflag.FlagSet {
	f := pflag.NewFlagSet(name, pflag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.Usage = func() {}
	f.SortFlags = false
	host := cmp.Or(c.host, os.Getenv(HostVariable), api.DefaultHost)
	f.StringVarP(&c.host, "host", "H", host,
		"where the daemon is, unix:///`PATH` or https://HOST:PORT; also $"+HostVariable)
	for _, v := range []struct {
		to                    *string
		flag, variable, usage string
	}{
		{&c.cred.CA, "tls-ca", "DEWPOINT_TLS_CA", "`file` of who signs the daemon's certificate"},
		{&c.cred.Cert, "tls-cert", "DEWPOINT_TLS_CERT", "`file` of this client's certificate"},
		{&c.cred.Key, "tls-key", "DEWPOINT_TLS_KEY", "`file` of its key"},
		{&c.cred.Token, "token-file", "DEWPOINT_TOKEN_FILE", "`file` with this client's token"},
	} {
		f.StringVar(v.to, v.flag, cmp.Or(*v.to, os.Getenv(v.variable)), v.usage+"; also $"+v.variable)
	}
	f.BoolVar(&c.json, "json", c.json, "print JSON")
	return f
}

// parsed tells a request for help, which usage answers, from a mistake.
func (c *call) parsed(err error, usage func()) error {
	if errors.Is(err, pflag.ErrHelp) {
		usage()
		return err
	}
	cc := c
	if c.command.name == "" {
		cc = nil
	}
	if cc == nil {
		return misuse(nil, "%v", err)
	}
	return cmp.Or(c.unknownFlag(err), misuse(c, "%v", err))
}

func (c *call) do(ctx context.Context, args []string) error {
	c.flags = c.newFlags(c.command.name)
	c.flags.SetInterspersed(!c.command.before)
	if c.command.flags != nil {
		c.command.flags(c)
	}
	if err := c.flags.Parse(args); err != nil {
		return c.parsed(err, func() { c.usage(c.cfg.Stdout) })
	}
	c.args = c.flags.Args()
	c.cred.Trace = os.Getenv("TRACEPARENT")
	client, err := api.DialWith(c.host, c.cred)
	if err != nil {
		return err
	}
	defer client.Close()
	c.client = client
	return c.command.run(ctx, c)
}

// one is the single argument that the command wants.
func (c *call) one(what string) (string, error) {
	switch len(c.args) {
	case 0:
		return "", misuse(c, "no %s is named", what)
	case 1:
		return c.args[0], nil
	}
	return "", misuse(c, "one %s is wanted, not %d: %q", what, len(c.args), c.args)
}

// none makes sure that there are no arguments.
func (c *call) none() error {
	if len(c.args) > 0 {
		return misuse(c, "%q is not wanted here", c.args[0])
	}
	return nil
}

// each does f to every argument, though some fail. It says what went wrong with
// all but the last that failed, and returns that.
func (c *call) each(what string, f func(name string) error) error {
	if len(c.args) == 0 {
		return misuse(c, "no %s is named", what)
	}
	var failed error
	for _, name := range c.args {
		err := f(name)
		if err == nil {
			continue
		}
		if failed != nil {
			fmt.Fprintf(c.cfg.Stderr, "dew: %s\n", verdict(failed).Error())
		}
		failed = err
	}
	return failed
}

// interruptible ends the context on the signals that end a program.
func interruptible(ctx context.Context) (context.Context, context.CancelFunc) {
	return signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
}
