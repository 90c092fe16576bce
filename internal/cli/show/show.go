// Package show prints lists as people want them: by --quiet, --filter and --format, as Docker has these.
//
// A List is rows of named columns, which are Docker's fields where it has them. A template is Go's, with
// Docker's functions; {{.Names}} is a column. "table TEMPLATE" puts a head above it, "json" prints a line of
// JSON for each row.
package show

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"text/tabwriter"
	"text/template"
)

// List is what is to be shown.
type List struct {
	Head    []string // of the columns of the plain table
	Rows    []Row
	Quiet   string // the column that --quiet prints
	Filters map[string]Filter
}

// Filter asks for what a column has.
type Filter struct {
	Column string
	Part   bool // a part of it does
}

// Row is one of a List.
type Row struct {
	Cells []string          // of the plain table
	Names map[string]string // columns by Docker's names
	Doc   any               // what JSON says of it
}

// Flags are how a List is to be shown.
type Flags struct {
	Quiet   bool
	Filters []string // NAME=VALUE; those of one name are alternatives
	Format  string   // "" is the plain table
}

// Print shows the list. An error of what flags say is a Misuse.
func (l List) Print(w io.Writer, f Flags) error {
	rows, err := l.Filtered(f.Filters)
	if err != nil {
		return err
	}
	format, titled := f.Format, false
	if rest, ok := strings.CutPrefix(format, "table"); ok && (rest == "" || rest[0] == ' ') {
		format, titled = strings.TrimSpace(rest), true
	}
	switch {
	case f.Quiet && f.Format == "":
		for _, r := range rows {
			fmt.Fprintln(w, r.Names[l.Quiet])
		}
		return nil
	case format == "":
		return l.table(w, rows)
	case format == "json":
		return lines(w, rows)
	}
	return l.templated(w, rows, format, titled)
}

// Misuse is what is wrong with flags.
type Misuse struct{ error }

func misuse(format string, a ...any) error { return Misuse{fmt.Errorf(format, a...)} }

// Filtered are the rows that match. As in Docker, the * of a pattern stops at a slash. An error of what
// filters say is a Misuse.
func (l List) Filtered(filters []string) ([]Row, error) {
	want := map[Filter][]string{}
	for _, f := range filters {
		name, value, ok := strings.Cut(f, "=")
		if _, known := l.Filters[name]; !ok || !known {
			return nil, misuse("--filter %s: want NAME=VALUE, with a name of %s", f,
				strings.Join(slices.Sorted(maps.Keys(l.Filters)), ", "))
		}
		if _, err := path.Match(value, ""); err != nil {
			return nil, misuse("--filter %s: the pattern is wrong: * is any text without a slash, ? a letter, [ab] one of some; "+
				"write \\[ for [ itself", f)
		}
		want[l.Filters[name]] = append(want[l.Filters[name]], value)
	}
	var rows []Row
	for _, r := range l.Rows {
		all := true
		for f, values := range want {
			all = all && slices.ContainsFunc(values, func(v string) bool { return f.matches(r.Names[f.Column], v) })
		}
		if all {
			rows = append(rows, r)
		}
	}
	return rows, nil
}

// matches reports whether a cell is a value, or of its pattern, or has it as a part.
func (f Filter) matches(cell, value string) bool {
	ok, _ := path.Match(value, cell)
	return ok || f.Part && strings.Contains(cell, value)
}

func (l List) table(w io.Writer, rows []Row) error {
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(t, strings.Join(l.Head, "\t"))
	for _, r := range rows {
		fmt.Fprintln(t, strings.Join(r.Cells, "\t"))
	}
	return t.Flush()
}

func lines(w io.Writer, rows []Row) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	for _, r := range rows {
		if err := e.Encode(r.Doc); err != nil {
			return err
		}
	}
	return nil
}

func (l List) templated(w io.Writer, rows []Row, format string, titled bool) error {
	t, err := parse(format)
	if err != nil {
		return err
	}
	out := w
	if titled {
		tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
		defer tw.Flush()
		out = tw
		head := map[string]string{}
		for _, r := range l.Rows {
			for name := range r.Names {
				head[name] = strings.ToUpper(name)
			}
		}
		if len(head) > 0 {
			if err := execute(out, t, head); err != nil {
				return err
			}
		}
	}
	for _, r := range rows {
		if err := execute(out, t, r.Names); err != nil {
			return err
		}
	}
	return nil
}

// Template prints a JSON document by a template, whose names are the document's own.
func Template(w io.Writer, doc any, format string) error {
	t, err := parse(format)
	if err != nil {
		return err
	}
	b, err := json.Marshal(doc)
	if err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber() // which are printed as they are
	var v any
	if err := d.Decode(&v); err != nil {
		return err
	}
	return execute(w, t, v)
}

var functions = template.FuncMap{
	"json": func(v any) (string, error) {
		b, err := json.Marshal(v)
		return string(b), err
	},
	"join":  func(v []any, sep string) string { return strings.Join(each(v), sep) },
	"lower": strings.ToLower, "upper": strings.ToUpper,
	"split": strings.Split,
}

func each(v []any) (all []string) {
	for _, x := range v {
		all = append(all, fmt.Sprint(x))
	}
	return all
}

// parse reads a template, in which \t and \n are what they are in C.
func parse(format string) (*template.Template, error) {
	format = strings.NewReplacer(`\t`, "\t", `\n`, "\n").Replace(format)
	t, err := template.New("").Option("missingkey=error").Funcs(functions).Parse(format)
	if err != nil {
		return nil, misuse("--format: %s", strings.TrimPrefix(err.Error(), "template: "))
	}
	return t, nil
}

func execute(w io.Writer, t *template.Template, v any) error {
	var b strings.Builder
	if err := t.Execute(&b, v); err != nil {
		return misuse("--format: %s", strings.TrimPrefix(err.Error(), "template: "))
	}
	_, err := fmt.Fprintln(w, b.String())
	return err
}
