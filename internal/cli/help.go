package cli

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/pflag"
)

func overview(cfg Config, global *pflag.FlagSet) {
	w := cfg.Stdout
	fmt.Fprint(w, "dew deploys containers through the node daemon dewd.\n\nUsage: dew [-H SOCKET] [--json] COMMAND …\n\nCommands:\n")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, c := range commands() {
		fmt.Fprintf(t, "  %s\t%s\n", c.name, c.summary)
	}
	t.Flush()
	fmt.Fprintf(w, "\nFlags:\n%s\n\"dew COMMAND --help\" says more of a command.\n", global.FlagUsages())
}

func (c *call) usage(w io.Writer) {
	line := strings.Join([]string{"dew", c.command.name, "[FLAGS]", c.command.args}, " ")
	fmt.Fprintf(w, "Usage: %s\n\n%s.\n\nFlags:\n%s",
		strings.TrimSpace(line), strings.ToUpper(c.command.summary[:1])+c.command.summary[1:], c.flags.FlagUsages())
}

// help answers "dew help [COMMAND]".
func help(cfg Config, global *pflag.FlagSet, args []string) error {
	if len(args) == 0 {
		overview(cfg, global)
		return nil
	}
	for _, cmd := range commands() {
		if cmd.name != args[0] {
			continue
		}
		c := &call{cfg: cfg, command: cmd}
		c.flags = c.newFlags(cmd.name)
		if cmd.flags != nil {
			cmd.flags(c)
		}
		c.usage(cfg.Stdout)
		return nil
	}
	return unknownCommand(args[0])
}
