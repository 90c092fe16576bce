package bench

import (
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// popReport gathers the parts' tables and charts and what is held against a target. They are printed, and
// written to one Markdown file if there is to be one.
type popReport struct {
	out      io.Writer
	file     string // "" is none
	prefix   string // of charts, if there is no file
	command  string
	commit   string // before the documents of the tree change
	parts    strings.Builder
	verdicts [][]string
}

// commandLine is a command with its arguments, but for those that name places of this machine.
func commandLine(name string, args []string) string {
	for i := 0; i < len(args); i++ {
		words := args[i : i+1]
		flag, _, whole := strings.Cut(strings.TrimLeft(args[i], "-"), "=")
		if !whole && i+1 < len(args) {
			i++
			words = args[i-1 : i+1]
		}
		if !slices.Contains([]string{"dir", "bin", "tools", "layout", "out", "report"}, flag) {
			name += " " + strings.Join(words, " ")
		}
	}
	return name
}

// section begins what belongs to one part.
func (d *popReport) section(title string) {
	fmt.Fprintf(d.out, "\n== %s\n", title)
	fmt.Fprintf(&d.parts, "\n## %s\n", title)
}

func (d *popReport) note(format string, args ...any) {
	text := fmt.Sprintf("\n"+format+"\n", args...)
	fmt.Fprint(d.out, text)
	d.parts.WriteString(text)
}

func (d *popReport) table(title string, head []string, rows [][]string) {
	text := markdownTable(title, head, rows)
	fmt.Fprint(d.out, text)
	d.parts.WriteString(text)
}

// chart leaves a drawing: in a directory beside the file, or beside the raw results.
func (d *popReport) chart(name, title, svg string) error {
	if d.file == "" {
		return os.WriteFile(d.prefix+"-"+name+".svg", []byte(svg), 0o644)
	}
	dir := strings.TrimSuffix(d.file, filepath.Ext(d.file))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	name = strings.ReplaceAll(strings.ReplaceAll(name, ":", "-"), " ", "-")
	fmt.Fprintf(&d.parts, "\n![%s](%s/%s.svg)\n", title, filepath.Base(dir), name)
	return os.WriteFile(filepath.Join(dir, name+".svg"), []byte(svg), 0o644)
}

// atMost holds a measurement against its bound.
func (d *popReport) atMost(what, unit string, bound, measured float64) {
	said, verdict := fmt.Sprintf("%.3f", measured), met(measured <= bound)
	if math.IsNaN(measured) || math.IsInf(measured, 0) {
		said, verdict = "", "not measured"
	}
	d.verdicts = append(d.verdicts,
		[]string{what, strings.TrimSpace(fmt.Sprintf("at most %g %s", bound, unit)), said, verdict})
}

// write leaves what there is so far.
func (d *popReport) write() error {
	if d.file == "" {
		return nil
	}
	text := fmt.Sprintf("# A PoP's deployments\n\nWritten by `%s`, commit %s, on %s. Traces are synthetic unless a part says otherwise; the terms are those of docs/research/pop-bed.md.\n",
		d.command, d.commit, machine())
	if len(d.verdicts) > 0 {
		text += "\n## Held against the targets\n" + d.held()
	}
	return os.WriteFile(d.file, []byte(text+d.parts.String()), 0o644)
}

func (d *popReport) held() string {
	return markdownTable("", []string{"what", "target", "measured", ""}, d.verdicts)
}

// close prints what was held against targets, and leaves everything.
func (d *popReport) close() error {
	if len(d.verdicts) > 0 {
		fmt.Fprintf(d.out, "\n== targets\n%s", d.held())
	}
	return d.write()
}

// check finds out before hours of measuring whether the file can be written.
func (d *popReport) check() error {
	if d.file == "" {
		return nil
	}
	if filepath.Ext(d.file) != ".md" {
		return fmt.Errorf("report %s: its name ends with .md", d.file)
	}
	f, err := os.OpenFile(d.file, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return f.Close()
}
