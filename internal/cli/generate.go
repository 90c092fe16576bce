package cli

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"
)

// What shells and man need to know of the command is generated from its own table.

// completion needs no daemon: it prints what a shell completes dew by.
func completion(_ context.Context, c *call) error {
	shell, err := c.one("shell")
	if err != nil {
		return err
	}
	write, ok := map[string]func(io.Writer){"bash": completeBash, "zsh": completeZsh, "fish": completeFish}[shell]
	if !ok {
		return misuse(c, "%q: bash, zsh or fish", shell)
	}
	write(c.cfg.Stdout)
	return nil
}

// flagsOf is a command's flags, without those that all commands have; of no command, these.
func flagsOf(cmd command) []*pflag.Flag {
	c := &call{command: cmd}
	c.flags = c.newFlags("dew")
	common := map[string]bool{}
	if cmd.name != "" {
		c.flags.VisitAll(func(f *pflag.Flag) { common[f.Name] = true })
		if cmd.flags != nil {
			cmd.flags(c)
		}
	}
	var flags []*pflag.Flag
	c.flags.VisitAll(func(f *pflag.Flag) {
		if !common[f.Name] && !f.Hidden {
			flags = append(flags, f)
		}
	})
	return flags
}

// choices are a command's words of its own, of which it takes one: "read|deploy|admin".
func choices(cmd command) []string {
	first, _, _ := strings.Cut(cmd.args, " ")
	if !strings.Contains(first, "|") || strings.ToLower(first) != first {
		return nil
	}
	return strings.Split(first, "|")
}

func words(cmd command) []string {
	w := choices(cmd)
	for _, f := range flagsOf(cmd) {
		w = append(w, "--"+f.Name)
	}
	return w
}

// usageOf is what a flag does, and the name of its value; "" if it takes none.
func usageOf(f *pflag.Flag) (what, value string) {
	value, what = pflag.UnquoteUsage(f)
	return what, value
}

func completeBash(w io.Writer) {
	var names, cases strings.Builder
	for _, cmd := range commands() {
		names.WriteString(cmd.name + " ")
		fmt.Fprintf(&cases, "\t%s) words=%q ;;\n", cmd.name, strings.Join(words(cmd), " "))
	}
	var valued []string // flags before the command that take a value
	for _, f := range flagsOf(command{}) {
		if _, v := usageOf(f); v != "" {
			valued = append(valued, "--"+f.Name)
			if f.Shorthand != "" {
				valued = append(valued, "-"+f.Shorthand)
			}
		}
	}
	fmt.Fprintf(w, `# bash completion of dew: "dew completion bash" writes it.
_dew() {
	local cur=${COMP_WORDS[COMP_CWORD]} common=%q name= words= i
	for ((i = 1; i < COMP_CWORD; i++)); do
		case ${COMP_WORDS[i]} in
		%s) ((i++)) ;;
		-*) ;;
		*) name=${COMP_WORDS[i]} && break ;;
		esac
	done
	case $name in
	'') words=%q ;;
%s	esac
	COMPREPLY=($(compgen -W "$words $common" -- "$cur"))
}
complete -o default -F _dew dew
`, strings.Join(words(command{}), " "), strings.Join(valued, " | "), names.String()+"help", cases.String())
}

// zshText quotes what stands in zsh's specifications of flags.
var zshText = strings.NewReplacer("'", "'\\''", "[", "(", "]", ")", ":", ";")

func completeZsh(w io.Writer) {
	flags := func(cmd command) {
		for _, f := range flagsOf(cmd) {
			what, value := usageOf(f)
			if value != "" {
				value = ":" + zshText.Replace(value) + ":_files"
			}
			fmt.Fprintf(w, " \\\n\t\t'--%s[%s]%s'", f.Name, zshText.Replace(what), value)
		}
	}
	fmt.Fprint(w, "#compdef dew\n# zsh completion of dew: \"dew completion zsh\" writes it.\n"+
		"_dew() {\n\tlocal -a commands\n\tlocal curcontext=$curcontext state line\n\tcommands=(\n")
	for _, cmd := range commands() {
		fmt.Fprintf(w, "\t\t'%s:%s'\n", cmd.name, zshText.Replace(cmd.summary))
	}
	fmt.Fprint(w, "\t)\n\t_arguments -C")
	flags(command{})
	fmt.Fprint(w, " \\\n\t\t'1:command:->command' '*::argument:->argument'\n\tcase $state in\n"+
		"\tcommand) _describe command commands ;;\n\targument)\n\t\tcase $line[1] in\n")
	for _, cmd := range commands() {
		fmt.Fprintf(w, "\t\t%s) _arguments", cmd.name)
		flags(cmd)
		if of := choices(cmd); of != nil {
			fmt.Fprintf(w, " '1:what:(%s)'", strings.Join(of, " "))
		}
		fmt.Fprint(w, " '*:argument:_files' ;;\n")
	}
	fmt.Fprint(w, "\t\tesac ;;\n\tesac\n}\n_dew \"$@\"\n")
}

func completeFish(w io.Writer) {
	text := func(s string) string { return "'" + strings.NewReplacer(`\`, `\\`, "'", `\'`).Replace(s) + "'" }
	flags := func(cmd command, when string) {
		for _, f := range flagsOf(cmd) {
			what, value := usageOf(f)
			fmt.Fprintf(w, "complete -c dew%s -l %s", when, f.Name)
			if f.Shorthand != "" {
				fmt.Fprintf(w, " -s %s", f.Shorthand)
			}
			if value != "" {
				fmt.Fprint(w, " -r")
			}
			fmt.Fprintf(w, " -d %s\n", text(what))
		}
	}
	fmt.Fprintln(w, `# fish completion of dew: "dew completion fish" writes it.`)
	flags(command{}, "")
	for _, cmd := range commands() {
		fmt.Fprintf(w, "complete -c dew -n __fish_use_subcommand -f -a %s -d %s\n", cmd.name, text(cmd.summary))
		when := fmt.Sprintf(" -n '__fish_seen_subcommand_from %s'", cmd.name)
		for _, word := range choices(cmd) {
			fmt.Fprintf(w, "complete -c dew%s -f -a %s\n", when, word)
		}
		flags(cmd, when)
	}
}

// manual prints dew(1). It needs no daemon.
func manual(_ context.Context, c *call) error {
	w := c.cfg.Stdout
	text := strings.NewReplacer(`\`, `\e`, "-", `\-`, "…", "...").Replace
	flags := func(cmd command) {
		for _, f := range flagsOf(cmd) {
			what, value := usageOf(f)
			fmt.Fprint(w, ".TP\n")
			if f.Shorthand != "" {
				fmt.Fprintf(w, "\\fB\\-%s\\fR, ", f.Shorthand)
			}
			fmt.Fprintf(w, "\\fB\\-\\-%s\\fR", text(f.Name))
			if value != "" {
				fmt.Fprintf(w, " \\fI%s\\fR", text(value))
			}
			fmt.Fprintf(w, "\n%s\n", text(what))
		}
	}
	fmt.Fprintf(w, ".TH DEW 1 \"\" \"dewpoint %s\"\n.SH NAME\ndew \\- deploy containers through the node daemon dewd\n"+
		".SH SYNOPSIS\n\\fBdew\\fR [\\fIFLAGS\\fR] \\fICOMMAND\\fR [\\fIFLAGS\\fR] [\\fIARGUMENTS\\fR]\n"+
		".SH FLAGS OF ALL COMMANDS\n", text(c.cfg.Version))
	flags(command{})
	fmt.Fprint(w, ".SH COMMANDS\n")
	for _, cmd := range commands() {
		usage := strings.TrimSpace(cmd.name + " " + cmd.args)
		fmt.Fprintf(w, ".SS %s\n%s%s.\n", text(usage), strings.ToUpper(cmd.summary[:1]), text(cmd.summary[1:]))
		flags(cmd)
	}
	fmt.Fprint(w, ".SH SEE ALSO\n\\fBdewd\\fR(8), \\fBdewd.toml\\fR(5)\n")
	return nil
}
