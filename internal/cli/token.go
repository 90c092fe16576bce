package cli

import (
	"context"
	"fmt"

	"dewpoint/internal/api"
)

func tokenFlags(c *call) {
	c.flags.StringVar(&c.opt.tokens, "file", "/etc/dewpoint/tokens",
		"`file` of tokens that the daemon reads ([api] tokens)")
	c.flags.StringVar(&c.opt.owner, "name", "", "who is to have the token")
}

// makeToken needs no daemon: it writes the file that one reads.
func makeToken(_ context.Context, c *call) error {
	name, err := c.one("role")
	if err != nil {
		return err
	}
	role, err := api.ParseRole(name)
	if err != nil {
		return misuse(c, "%v", err)
	}
	if c.opt.owner == "" {
		return misuse(c, "--name is missing: who is to have the token?")
	}
	secret, err := api.AddToken(c.opt.tokens, c.opt.owner, role)
	if err != nil {
		return err
	}
	if c.json {
		return c.print(map[string]string{"name": c.opt.owner, "role": role.String(), "token": secret})
	}
	fmt.Fprintln(c.cfg.Stdout, secret)
	return nil
}
