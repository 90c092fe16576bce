package show

import (
	"errors"
	"strings"
	"testing"
)

func someList() List {
	row := func(name, state string) Row {
		return Row{Cells: []string{name, state, "x"}, Names: map[string]string{"Names": name, "State": state},
			Doc: map[string]string{"name": name}}
	}
	return List{Head: []string{"NAME", "STATUS", "X"}, Quiet: "Names",
		Filters: map[string]Filter{"name": {"Names", true}, "status": {"State", false}},
		Rows:    []Row{row("web-1", "running"), row("web-2", "exited"), row("db", "running")}}
}

func TestPrint(t *testing.T) {
	for _, c := range []struct {
		flags Flags
		want  string
	}{
		{Flags{}, "NAME    STATUS    X\nweb-1   running   x\nweb-2   exited    x\ndb      running   x\n"},
		{Flags{Quiet: true}, "web-1\nweb-2\ndb\n"},
		{Flags{Quiet: true, Filters: []string{"status=running", "name=web"}}, "web-1\n"},
		{Flags{Quiet: true, Filters: []string{"name=web-2", "name=d?"}}, "web-2\ndb\n"},
		{Flags{Quiet: true, Filters: []string{"name=none"}}, ""},
		{Flags{Quiet: true, Filters: []string{"status=run"}}, ""},
		{Flags{Quiet: true, Filters: []string{"status=e*"}}, "web-2\n"},
		{Flags{Format: "json", Filters: []string{"name=db"}}, `{"name":"db"}` + "\n"},
		{Flags{Format: "table", Filters: []string{"name=db"}}, "NAME   STATUS    X\ndb     running   x\n"},
		{Flags{Format: `{{.Names}}\t{{upper .State}}`, Filters: []string{"name=db"}}, "db\tRUNNING\n"},
		{Flags{Format: `table {{.Names}}\t{{.State}}`, Filters: []string{"name=db"}},
			"NAMES   STATE\ndb      running\n"},
		{Flags{Format: `{{json .Names}}`, Quiet: true, Filters: []string{"name=db"}}, `"db"` + "\n"},
	} {
		var b strings.Builder
		if err := someList().Print(&b, c.flags); err != nil || b.String() != c.want {
			t.Errorf("%+v: %q, %v; want %q", c.flags, b.String(), err, c.want)
		}
	}
	for want, f := range map[string]Flags{
		"with a name of name, status": {Filters: []string{"color=red"}},
		"want NAME=VALUE":             {Filters: []string{"name"}},
		"the pattern is wrong":        {Filters: []string{"name=w[eb"}},
		"no entry for key":            {Format: "{{.Color}}"},
		"unclosed action":             {Format: "{{.Names"},
		"not defined":                 {Format: "{{shout .Names}}"},
	} {
		var b strings.Builder
		if err := someList().Print(&b, f); !errors.As(err, new(Misuse)) || !strings.Contains(err.Error(), want) ||
			b.Len() > 0 {
			t.Errorf("%+v: %v, %q; want %s", f, err, b.String(), want)
		}
	}
}

func TestTemplate(t *testing.T) {
	doc := struct {
		Name  string   `json:"name"`
		Ports []int    `json:"ports"`
		Words []string `json:"words"`
	}{"web", []int{80, 443}, []string{"a", "b"}}
	for format, want := range map[string]string{
		"{{.name}}": "web\n", "{{json .ports}}": "[80,443]\n", `{{join .words ", "}}`: "a, b\n",
		"{{range .ports}}{{.}};{{end}}": "80;443;\n", `{{with index . "health"}}{{.}}{{end}}`: "\n",
	} {
		var b strings.Builder
		if err := Template(&b, doc, format); err != nil || b.String() != want {
			t.Errorf("%s: %q, %v", format, b.String(), err)
		}
	}
	if err := Template(&strings.Builder{}, doc, "{{.Name}}"); !errors.As(err, new(Misuse)) {
		t.Errorf("a name that there is not: %v", err)
	}
}
