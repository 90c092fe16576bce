package config

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Tests and the laboratory may set what dewd chooses by itself.
func TestMain(m *testing.M) {
	os.Setenv(tuningVar, "1")
	os.Exit(m.Run())
}

func TestParse(t *testing.T) {
	c, err := Parse([]byte(`
[registry."10.77.255.1:5000"]
plain_http = true
[registries]
stall_timeout = "5s"
[cache]
max_bytes = "10GB"
[limits]
memory = "64MiB"
[link]
limit = "20Mbit"
[node]
name = "n1"
mount = "loop"
`))
	if err != nil {
		t.Fatal(err)
	}
	if !c.Registry["10.77.255.1:5000"].PlainHTTP || c.Cache.MaxBytes != 10e9 || c.Limits.Memory != 64<<20 ||
		c.Link.Limit != 2_500_000 || time.Duration(c.Registries.StallTimeout) != 5*time.Second ||
		c.Node.Mount != "loop" {
		t.Fatalf("read as %+v", c)
	}
}

func TestWhatIsWrongIsNamed(t *testing.T) {
	for text, want := range map[string]string{
		"[cache]\nmax_byte = \"1GB\"":                         "line 2: no such key: cache.max_byte",
		"[cache]\nmax_bytes = \"many\"":                       "is not a size",
		"[link]\nlimit = \"20\"":                              "is not a rate",
		"[node]\nmount = \"btrfs\"":                           "erofs, loop or tree",
		"[registry.\"http://h\"]\nplain_http=true":            "give the host",
		"[registries]\nstall_timeout = \"-3s\"":               "at least 1s",
		"[limits]\nmemory = \"1KiB\"":                         "at least 16MiB",
		"[engine]\nnamespace = \"a/b\"":                       "engine.namespace",
		"[engine]\nsubnet = \"10.0.0.0/30\"":                  "/28 or larger",
		"[engine]\nruntime = \"kata\"":                        "auto, crun or runc",
		"[checkpoint]\nmode = \"auto\"":                       "asked, measured, manual or off",
		"[lazy]\nmode = \"off\"":                              "auto, never or on-demand",
		"[checkpoint]\nengine = \"docker\"":                   "auto, criu or dmtcp",
		"[checkpoint]\ndmtcp = \"/nope\"":                     "checkpoint.dmtcp",
		"[node":                                               "line 1",
		"[pop]\nnode = \"a/b\"":                               "pop.node",
		"[pop]\nnode = \"a:b\\n\"":                            "pop.node",
		"[pop]\nnode = \"..\"":                                "pop.node",
		"[pop]\nstore = \"mnt/pop\"":                          "an absolute path",
		"[pop]\nlisten = \":7070\"":                           "pop.redis is missing",
		"[pop]\nredis = \"x\"\nlisten = \":70\"":              "pop.key is missing",
		"[pop]\nredis = \"x\"\nkey = \"/\"\nlisten = \":70\"": "the other nodes reach",
		"[pop]\nlow = 0.97":                                   "low below high",
		"[pop]\nhigh = 1.5":                                   "low below high",
		"[pop]\nhigh = 0.03":                                  "low below high",
		"[pop]\nlease = 5":                                    "pop.lease = \"5ns\": at least 1s",
		"[pop]\nlease = \"2m\"":                               "is not longer than pop.lease",
		"[pop]\ngrace = \"-1s\"":                              "at least 1s",
		"[pop]\ngrace = \"5s\"":                               "is not longer than pop.lease",
		"[pop]\npatience = \"1us\"":                           "at least 100ms",
	} {
		if _, err := Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q in it", text, err, want)
		}
	}
}

func TestParseSize(t *testing.T) {
	for s, want := range map[string]int64{"0": 0, "64m": 64 << 20, "1.5GiB": 3 << 29, "10 GB": 10e9, "7b": 7} {
		if n, err := ParseSize(s); err != nil || n != want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", s, n, err, want)
		}
	}
	for _, s := range []string{"", "-1", "1xb", "1e40TB", "GB"} {
		if n, err := ParseSize(s); err == nil {
			t.Errorf("ParseSize(%q) = %d, want an error", s, n)
		}
	}
}

// operatorKeys are the keys of the file that are not for tests alone.
func operatorKeys(v reflect.Type, prefix string) (keys []string) {
	for f := range v.Fields() {
		name := prefix + f.Tag.Get("toml")
		switch {
		case f.Type.Kind() == reflect.Struct:
			keys = append(keys, operatorKeys(f.Type, name+".")...)
		case f.Type == reflect.TypeFor[map[string]Registry]():
			keys = append(keys, operatorKeys(f.Type.Elem(), name+".HOST.")...)
		case f.Tag.Get("tuning") == "":
			keys = append(keys, name)
		}
	}
	return keys
}

// An operator can reason about 35 keys. The others are for tests alone.
func TestKeysForOperators(t *testing.T) {
	if keys := operatorKeys(reflect.TypeFor[Config](), ""); len(keys) > 35 {
		t.Errorf("%d keys for operators, more than 35: %q", len(keys), keys)
	}
	t.Setenv(tuningVar, "")
	for _, text := range []string{"[pop]\nlease = \"15s\"", "[deploy]\nmax = 2", "[trace]\nendpoint = \"http://h:1\""} {
		if _, err := Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), "not a key for operators") {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := Parse([]byte("[pop]\nstore = \"/mnt/pop\"\n[lazy]\nmode = \"never\"")); err != nil {
		t.Error(err)
	}
}

var update = flag.Bool("update", false, "write docs/operate/configuration.md")

// docs/operate/configuration.md shows every key of operators with its comment, in a file that dewd takes.
func TestKeysAreDocumented(t *testing.T) {
	t.Setenv(tuningVar, "")
	const path = "../../docs/operate/configuration.md"
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, _ := strings.Cut(string(b), "```toml\n")
	file, after, _ := strings.Cut(rest, "```")
	want := reference(t)
	if *update {
		err = os.WriteFile(path, []byte(before+"```toml\n"+want+"```"+after), 0o644)
	}
	if err != nil || !*update && file != want {
		t.Errorf("%s is not what the keys' comments say: run make generate (%v)", path, err)
	}
	if _, err := Parse([]byte(regexp.MustCompile(`"/etc/[^"]*"`).ReplaceAllString(want, `"/"`))); err != nil {
		t.Error(err)
	}
}

// reference is a file with every key of operators, its example and its comment.
func reference(t *testing.T) string {
	f, err := parser.ParseFile(token.NewFileSet(), "config.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	comments := map[string]string{} // by the fields' tags, each on one line
	ast.Inspect(f, func(n ast.Node) bool {
		if n, ok := n.(*ast.Field); ok && n.Tag != nil {
			comments[n.Tag.Value] = strings.Join(strings.Fields(n.Doc.Text()+n.Comment.Text()), " ")
		}
		return true
	})
	var out strings.Builder
	for s := range reflect.TypeFor[Config]().Fields() {
		section, head := s.Type, "["+s.Tag.Get("toml")+"]\n"
		if section.Kind() == reflect.Map {
			section, head = section.Elem(), "[registry.\"10.77.255.1:5000\"]\n"
		}
		for f := range section.Fields() {
			if f.Tag.Get("tuning") != "" {
				continue
			}
			example := f.Tag.Get("example")
			if example == "" {
				t.Errorf("%s.%s has no example", section.Name(), f.Name)
			}
			if k := f.Type.Kind(); k == reflect.String || k == reflect.Int64 {
				example = strconv.Quote(example)
			}
			line := f.Tag.Get("toml") + " = " + example
			if f.Tag.Get("instead") != "" {
				line = "# " + line
			}
			if c := comments["`"+string(f.Tag)+"`"]; c != "" {
				line = fmt.Sprintf("%-36s # %s", line, c)
			}
			out.WriteString(head + line + "\n")
			head = ""
		}
	}
	return out.String()
}
