package registry

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/docker/cli/cli/config/configfile"
	"github.com/docker/cli/cli/config/types"
	helpers "github.com/docker/docker-credential-helpers/client"
	"github.com/docker/docker-credential-helpers/credentials"
	"github.com/google/go-containerregistry/pkg/authn"
)

const helperTime = 15 * time.Second

// dockerConfig is where docker keeps the logins of the user who runs us.
func dockerConfig() string {
	if d := os.Getenv("DOCKER_CONFIG"); d != "" {
		return filepath.Join(d, "config.json")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "" // no home, no logins
	}
	return filepath.Join(home, ".docker", "config.json")
}

// login looks up the credentials for a host, asking a credential helper if
// one is configured: one at a time for each host, for all who wait. No
// credentials are the zero AuthConfig. Who waits goes when ctx ends.
func (c *Client) login(ctx context.Context, host string) (authn.AuthConfig, error) {
	if c.given != nil {
		return *c.given, nil
	}
	done := c.logins.DoChan(host, func() (any, error) {
		ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), c.helperTime, errHelper)
		defer cancel()
		return readLogin(ctx, c.cfg.DockerConfig, host)
	})
	select {
	case r := <-done:
		return r.Val.(authn.AuthConfig), r.Err
	case <-ctx.Done():
		return authn.AuthConfig{}, context.Cause(ctx)
	}
}

func readLogin(ctx context.Context, file, host string) (none authn.AuthConfig, err error) {
	b, err := os.ReadFile(file)
	if file == "" || os.IsNotExist(err) || err == nil && len(b) == 0 {
		return none, nil
	}
	if err != nil {
		return none, fmt.Errorf("read logins: %w", err)
	}
	cf, err := parseLogins(file, b)
	if err != nil {
		return none, fmt.Errorf("read logins of %s: %w", file, err)
	}
	key := loginKey(host)
	if name := cmp.Or(cf.CredentialHelpers[key], cf.CredentialsStore); name != "" {
		a, err := askHelper(ctx, name, key)
		if err != nil {
			return none, fmt.Errorf("login for %s by docker-credential-%s, which %s names: %w", host, name, file, err)
		}
		return a, nil
	}
	a, err := cf.GetAuthConfig(key)
	if err != nil {
		return none, fmt.Errorf("login for %s in %s: %w", host, file, err)
	}
	return authn.AuthConfig{Username: a.Username, Password: a.Password, IdentityToken: a.IdentityToken,
		RegistryToken: a.RegistryToken}, nil
}

// Login checks a user's password with a host's registry and keeps it as Docker does: with the credential
// helper that Docker's file names for the host, else in the file. Where the registry gives an identity token,
// that is kept in place of the password. A wrong login is an *Error of Kind Unauthorized and changes nothing.
func (c *Client) Login(ctx context.Context, host, user, password string) error {
	try := &Client{cfg: c.cfg, transport: c.transport, hosts: map[string]*hostEntry{},
		given: &authn.AuthConfig{Username: user, Password: password}}
	ep, err := try.origin(host)
	if err != nil {
		return err
	}
	identity, err := ep.check(ctx, c.cfg)
	var e *Error
	if errors.As(err, &e) && e.Kind == Unauthorized && !errors.Is(err, errInClear) {
		return &Error{Kind: Unauthorized, Host: host, Op: opLogin, Err: errWrongLogin}
	}
	if err != nil {
		return err
	}
	login := types.AuthConfig{ServerAddress: loginKey(host), Username: user, Password: password}
	if identity != "" {
		login.IdentityToken, login.Password = identity, ""
	}
	return c.edit(func(f *configfile.ConfigFile) error {
		return f.GetCredentialsStore(login.ServerAddress).Store(login)
	})
}

// check asks for the API's root with the client's login, and gives the identity token that came with that.
func (e *endpoint) check(ctx context.Context, cfg Config) (identity string, err error) {
	w := newWatch(ctx, cfg.StallTimeout)
	defer w.End()
	res, err := e.do(w.Ctx, cfg.UserAgent, ask{op: opLogin, path: "/", accept: acceptAny})
	if err != nil {
		return "", err
	}
	drain(res)
	e.authority.mu.Lock()
	defer e.authority.mu.Unlock()
	return e.authority.identity, nil
}

// Logout forgets a host's login.
func (c *Client) Logout(host string) error {
	return c.edit(func(f *configfile.ConfigFile) error {
		return f.GetCredentialsStore(loginKey(host)).Erase(loginKey(host))
	})
}

// edit changes Docker's file, which it makes if there is none.
func (c *Client) edit(change func(*configfile.ConfigFile) error) error {
	file := c.cfg.DockerConfig
	if file == "" {
		return errors.New("no home directory, and DOCKER_CONFIG is not set: logins have no place")
	}
	b, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("read logins: %w", err)
	}
	f := configfile.New(file)
	if len(b) > 0 {
		if f, err = parseLogins(file, b); err != nil {
			return fmt.Errorf("read logins of %s: %w", file, err)
		}
	}
	if err := change(f); err != nil {
		return fmt.Errorf("keep the login in %s: %w", file, err)
	}
	return nil
}

func parseLogins(file string, b []byte) (*configfile.ConfigFile, error) {
	cf := configfile.New(file)
	return cf, cf.LoadFromReader(bytes.NewReader(b))
}

// loginKey is under which key docker keeps the login of a host.
func loginKey(host string) string {
	if host == dockerHubEndpoint || host == dockerHub {
		return authn.DefaultAuthKey
	}
	return host
}

// identity is the user whose password a credential helper means as an identity token.
const identity = "<token>"

var (
	errHelper     = errors.New("it has not answered in time")
	errWrongLogin = errors.New("the user or the password is wrong")
)

// askHelper asks a credential helper for the login of key; it has none is no error.
func askHelper(ctx context.Context, name, key string) (none authn.AuthConfig, err error) {
	got, err := helpers.Get(func(args ...string) helpers.Program {
		return &helper{ctx: ctx, name: "docker-credential-" + name, args: args}
	}, key)
	switch {
	case ctx.Err() != nil:
		return none, context.Cause(ctx)
	case credentials.IsErrCredentialsNotFound(err):
		return none, nil
	case err != nil:
		return none, err
	case got.Username == identity:
		return authn.AuthConfig{IdentityToken: got.Secret}, nil
	}
	return authn.AuthConfig{Username: got.Username, Password: got.Secret}, nil
}

// helper is one run of a credential helper. When ctx ends it is killed, with what it has started.
type helper struct {
	ctx  context.Context
	name string
	args []string
	in   io.Reader
}

func (h *helper) Input(in io.Reader) { h.in = in }

func (h *helper) Output() ([]byte, error) {
	cmd := exec.CommandContext(h.ctx, h.name, h.args...)
	cmd.Stdin = h.in
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	return cmd.Output()
}
