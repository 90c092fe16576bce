package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"golang.org/x/term"

	"dewpoint/internal/api"
	"dewpoint/internal/config"
	"dewpoint/internal/registry"
)

const (
	dockerHub     = "docker.io"
	defaultConfig = "/etc/dewpoint/dewd.toml"
)

// loggingIn are the flags of dew login.
type loggingIn struct {
	user  string
	stdin bool   // has the password
	file  string // dewd's configuration, which says how registries are reached
}

func loginFlags(c *call) {
	c.flags.StringVarP(&c.opt.loggingIn.user, "username", "u", "", "`name` of the user; asked for if it is not given")
	c.flags.BoolVar(&c.opt.loggingIn.stdin, "password-stdin", false, "take the password from standard input")
	logoutFlags(c)
}

func logoutFlags(c *call) {
	c.flags.StringVar(&c.opt.loggingIn.file, "config", defaultConfig,
		"dewd's configuration `file`, which says how registries are reached")
}

// login needs no daemon: it asks the registry, and writes the file that dewd of the same user reads.
func login(ctx context.Context, c *call) error {
	host, err := c.registryHost()
	if err != nil {
		return err
	}
	user, password, err := c.credentials(host)
	if err != nil {
		return err
	}
	r, err := c.registry()
	if err != nil {
		return err
	}
	defer r.Close()
	err = r.Login(ctx, host, user, password)
	var refused *registry.Error
	if errors.As(err, &refused) && refused.Kind == registry.Unauthorized {
		return api.Of(api.Unauthorized, err)
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(c.cfg.Stdout, "logged in to %s as %s\n", host, user)
	return nil
}

func logout(_ context.Context, c *call) error {
	host, err := c.registryHost()
	if err != nil {
		return err
	}
	r, err := c.registry()
	if err != nil {
		return err
	}
	defer r.Close()
	return r.Logout(host)
}

// registryHost is the command's argument as references name it; without one it is Docker Hub.
func (c *call) registryHost() (string, error) {
	if len(c.args) == 0 {
		return dockerHub, nil
	}
	host, err := c.one("registry")
	host, _, _ = strings.Cut(strings.TrimPrefix(strings.TrimPrefix(host, "https://"), "http://"), "/")
	switch {
	case err == nil && host == "":
		err = misuse(c, "%q names no registry", c.args[0])
	case host == "index.docker.io" || host == "registry-1.docker.io":
		host = dockerHub
	}
	return host, err
}

// registry is a client that reaches registries as dewd does.
func (c *call) registry() (*registry.Client, error) {
	file, err := config.Load(c.opt.loggingIn.file)
	if errors.Is(err, fs.ErrNotExist) && c.opt.loggingIn.file == defaultConfig {
		file, err = config.Config{}, nil
	}
	if err != nil {
		return nil, err
	}
	hosts := map[string]registry.Host{}
	for name, r := range file.Registry {
		hosts[name] = registry.Host{PlainHTTP: r.PlainHTTP}
	}
	return registry.New(registry.Config{Hosts: hosts, HostsDirs: file.Registries.HostsDirs,
		UserAgent: "dewpoint/" + c.cfg.Version})
}

// credentials are the user and the password: of the flags, standard input, or a terminal.
func (c *call) credentials(host string) (user, password string, err error) {
	user = c.opt.loggingIn.user
	in := bufio.NewReader(c.cfg.Stdin)
	line := func() (string, error) {
		s, err := in.ReadString('\n')
		if s = strings.TrimRight(s, "\r\n"); s != "" {
			err = nil
		}
		return s, err
	}
	onTerminal := isTerminal(c.cfg.Stdin)
	switch {
	case !onTerminal && !c.opt.loggingIn.stdin:
		return "", "", misuse(c, "standard input is no terminal: the password comes by --password-stdin")
	case !onTerminal && user == "":
		return "", "", misuse(c, "no user is named: -u NAME")
	}
	if user == "" {
		fmt.Fprintf(c.cfg.Stderr, "user at %s: ", host)
		if user, err = line(); err != nil {
			return "", "", fmt.Errorf("read the user: %w", err)
		}
	}
	if onTerminal {
		fmt.Fprint(c.cfg.Stderr, "password: ")
		var b []byte
		b, err = term.ReadPassword(int(c.cfg.Stdin.Fd()))
		fmt.Fprintln(c.cfg.Stderr)
		password = string(b)
	} else {
		password, err = line()
	}
	if err == nil && password == "" {
		err = errors.New("it is empty")
	}
	if err != nil {
		return "", "", fmt.Errorf("read the password: %w", err)
	}
	return user, password, nil
}
