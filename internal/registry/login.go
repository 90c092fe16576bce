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

var errHelper = errors.New("it has not answered in time")

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
